"""Builds the kernel's own source for the host: a library for ctypes, and a case runner per sanitizer.

Objects lie under build/host, named by a hash of all they are made from, so that nothing is compiled twice.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
KERNEL = ROOT / "plugins" / "kernel"
INCLUDE = ROOT / "plugins" / "include"
HOST = ROOT / "plugins" / "host"
SIMULATOR = HOST / "sim"
BUILD = ROOT / "build" / "host"

COMMON_FLAGS = ("-std=c++20", "-g1", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")


@dataclass(frozen=True)
class Variant:
    """Flags of one build. The simulator takes ``defines`` alone: it must not be instrumented."""

    name: str
    optimisation: str
    instrumentation: tuple[str, ...] = ()
    defines: tuple[str, ...] = ()


PLAIN = Variant("plain", "-O1")
ADDRESS = Variant(
    "address",
    "-O0",
    ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
    ("-DGPUSIM_ASAN",),
)
THREAD = Variant("thread", "-O0", ("-fsanitize=thread",), ("-DGPUSIM_TSAN",))


def build_library(kernel: Path = KERNEL) -> Path:
    """The library with the C interface of moetrt/moe_finalize.h, with moe_finalize.cu and .cuh from ``kernel``."""
    return _link(PLAIN, [HERE / "host_probes.cpp"], kernel, "-shared", ".so")


def build_runner(variant: Variant, kernel: Path = KERNEL) -> Path:
    """The executable that runs files of cases (case_runner.cpp), with moe_finalize.cu and .cuh from ``kernel``."""
    return _link(variant, [HERE / "host_probes.cpp", HERE / "case_runner.cpp"], kernel, "-pie", "")


def changed_kernel(old: str, new: str) -> Path:
    """A folder with moe_finalize.cu, and moe_finalize.cuh in which ``old``, which it must hold once, is ``new``."""
    text = (KERNEL / "moe_finalize.cuh").read_text()
    assert text.count(old) == 1, f"moe_finalize.cuh holds {old!r} {text.count(old)} times: this test needs a new place"
    changed = text.replace(old, new)
    folder = BUILD / f"changed-{hashlib.sha256(changed.encode()).hexdigest()[:24]}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "moe_finalize.cuh").write_text(changed)
    shutil.copy(KERNEL / "moe_finalize.cu", folder)
    return folder


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _link(variant: Variant, sources: list[Path], kernel: Path, kind: str, suffix: str) -> Path:
    core = [KERNEL / "moe_finalize_check.cpp", KERNEL / "moe_finalize_tactics.cpp"]
    core += [HOST / "host_library.cpp", SIMULATOR / "simulator.cpp"]
    objects = [_compile(variant, source, KERNEL) for source in [*core, *sources]]
    objects.append(_compile(variant, kernel / "moe_finalize.cu", kernel))
    return _cached([_compiler(), kind, *variant.instrumentation, *map(str, objects)], [], suffix)


def _compile(variant: Variant, source: Path, kernel: Path) -> Path:
    flags = [*COMMON_FLAGS, variant.optimisation, *variant.defines]
    if source.parent != SIMULATOR:
        flags += variant.instrumentation
    folders = [SIMULATOR, INCLUDE, kernel, KERNEL]
    inputs = {path for folder in folders for path in folder.rglob("*") if path.is_file()} | {source}
    includes = [f"-I{folder}" for folder in folders]
    return _cached([_compiler(), *flags, *includes, "-x", "c++", "-c", str(source)], sorted(inputs), ".o")


def _cached(command: list[str], inputs: list[Path], suffix: str) -> Path:
    """Runs ``command`` with ``-o`` to a file that is named by the command and its inputs, unless the file is there."""
    key = hashlib.sha256("\0".join(command).encode())
    for path in inputs:
        key.update(f"\0{path.name}\0".encode() + path.read_bytes())
    BUILD.mkdir(parents=True, exist_ok=True)
    target = BUILD / (key.hexdigest()[:24] + suffix)
    if not target.exists():
        handle, unfinished = tempfile.mkstemp(dir=BUILD, suffix=".unfinished")
        os.close(handle)
        try:
            done = subprocess.run([*command, "-o", unfinished], capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
            os.replace(unfinished, target)
        finally:
            Path(unfinished).unlink(missing_ok=True)
    return target
