"""NVIDIA's own command line takes the mapped file as it stands, and the plugin library as any plugin library."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moetrt.backends import choose

POLYGRAPHY = str(Path(sys.executable).with_name("polygraphy"))
SHAPES = ["x:[1,64]", "residual:[1,64]"], ["x:[4,64]", "residual:[4,64]"], ["x:[9,64]", "residual:[9,64]"]


def polygraphy(*words: object, rtx: bool = False, path: Path | None = None) -> str:
    """Runs polygraphy in a process of its own and returns what it printed; it must exit 0."""
    if rtx:
        choose("tensorrt-rtx")  # makes the unversioned name that TensorRT-RTX's parser opens
    environment = os.environ | {"POLYGRAPHY_USE_TENSORRT_RTX": str(int(rtx))}
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path), environment.get("PYTHONPATH")]))
    command = [sys.executable, POLYGRAPHY, *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def profile(*flags: str) -> list[str]:
    return [word for flag, shapes in zip(flags, SHAPES, strict=True) for word in (flag, *shapes)]


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_polygraphy_run_with_onnx_runtime(dtype: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue("mapped_block" if dtype == "fp32" else "mapped_block_fp16")
    said = polygraphy("run", model, "--onnxrt", "--validate", "--input-shapes", *SHAPES[1])
    assert "norm_out" in said
    assert "PASSED" in said


CREATED = "Successfully created plugin: MoEFinalizeAddRMSNorm"  # TensorRT's parser, at Polygraphy's level -v


def test_polygraphy_convert_builds_an_engine_with_the_plugin(
    mapped_block: Path, plugin_library: Path, tmp_path: Path
) -> None:
    bounds = profile("--trt-min-shapes", "--trt-opt-shapes", "--trt-max-shapes")
    words = ["convert", mapped_block, "--convert-to", "trt", "-v", *bounds]
    engine, baseline = tmp_path / "plugin.engine", tmp_path / "baseline.engine"
    assert polygraphy(*words, "--plugins", plugin_library, "-o", engine, rtx=True).count(CREATED) == 1
    # The same command without the library: the function's own layers.
    assert CREATED not in polygraphy(*words, "-o", baseline, rtx=True)
    # TensorRT finds a serialised plugin's creator by name when it loads the engine.
    assert b"MoEFinalizeAddRMSNorm" in engine.read_bytes()
    assert b"moetrt" in engine.read_bytes()
    assert b"moetrt" not in baseline.read_bytes()


def test_polygraphy_inspect_shows_the_plugin_layer(mapped_block: Path, plugin_library: Path, tmp_path: Path) -> None:
    # Polygraphy 0.53 follows its TensorRT-RTX switch everywhere but in this subcommand's printer, which imports
    # `tensorrt` by that name: where only TensorRT-RTX is installed, it gets it under that name.
    (tmp_path / "tensorrt.py").write_text("import sys, tensorrt_rtx\nsys.modules['tensorrt'] = tensorrt_rtx\n")
    words = ["inspect", "model", mapped_block, "--display-as=trt", "--show", "layers"]
    said = polygraphy(*words, "--plugins", plugin_library, rtx=True, path=tmp_path)
    assert said.count("PLUGIN_V3") == 1
    assert "PLUGIN_V3" not in polygraphy(*words, rtx=True, path=tmp_path)
