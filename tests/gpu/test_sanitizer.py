"""compute-sanitizer finds nothing in the kernel, on the GPU itself."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.sanitized import SECONDS

ROOT = Path(__file__).parents[2]
FOUND = 99
"""compute-sanitizer's exit code where it found something."""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(plugin_library: Path, tool: str) -> None:
    program = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}{os.pathsep}/usr/local/cuda/bin")
    if program is None:
        pytest.skip("compute-sanitizer is not on PATH")
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND)]
    command += [sys.executable, "-m", "tests.gpu.sanitized", str(plugin_library)]
    environment = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
    }
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"compute-sanitizer's {tool} was not at its end after {SECONDS} s")
    said = done.stdout + done.stderr
    if "Device not supported" in said:
        pytest.skip("compute-sanitizer does not support this device here")
    assert done.returncode == 0, said[-4000:]
    assert said.count(": right") >= 8, said[-4000:]
