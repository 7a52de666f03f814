"""docs/versions.md says what pyproject.toml, constraints.txt and the code say."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement

from moetrt import backends, capture, onnx_files, onnx_op
from tests.documents import ROOT

PAGE = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
PACKAGES = re.findall(r"^\| `([\w-]+)` \| (\S+) \| (.+) \|$", PAGE, re.MULTILINE)


def specifiers() -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    words = [*project["dependencies"], *(word for extra in project["optional-dependencies"].values() for word in extra)]
    return {requirement.name: requirement for requirement in map(Requirement, words)}


@pytest.mark.parametrize(("name", "taken", "tested"), PACKAGES, ids=[name for name, *_ in PACKAGES])
def test_package(name: str, taken: str, tested: str) -> None:
    assert set(str(specifiers()[name].specifier).split(",")) == set(taken.split(","))
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    assert pins.get(name, "not without a GPU") == tested


def test_what_data_goes_through_is_in_the_table() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    # What only prints takes no part in the numbers.
    run = {Requirement(word).name for word in project["dependencies"]} - {"click", "rich", "jinja2"}
    assert run | {"transformers", "tensorrt", "tensorrt-rtx"} <= {name for name, *_ in PACKAGES}


def test_oldest_tensorrts_are_the_codes() -> None:
    rows = dict(re.findall(r"^\| (TensorRT[\w -]*) \| ([\d.]+)", PAGE, re.MULTILINE))
    oldest = {name: ".".join(map(str, version)) for name, version in backends._OLDEST.items()}
    assert (rows["TensorRT 10"], rows["TensorRT-RTX"]) == (oldest["tensorrt"], oldest["tensorrt-rtx"])


def test_opsets_are_the_codes() -> None:
    opsets = capture.OPSETS
    assert f"| {opsets.start} to {opsets.stop - 1}, {capture.DEFAULT_OPSET} by default |" in PAGE
    assert f"| {onnx_files.OLDEST_OPSET} to the newest of the installed onnx |" in PAGE
    assert f"the domain `moetrt`, version {onnx_op.OPSET_VERSION}" in " ".join(PAGE.split())


def test_oldest_cuda_is_the_toolchains() -> None:
    text = (ROOT / "plugins/cmake/toolchain.py").read_text(encoding="utf-8")
    oldest = re.search(r"^OLDEST_CUDA = \((\d+), (\d+)\)", text, re.MULTILINE)
    default = re.search(r'^DEFAULT_CUDA_VERSION = "([\d.]+)"', text, re.MULTILINE)
    assert oldest
    assert default
    assert re.search(
        rf"^\| nvcc for the library \| {oldest[1]}\.{oldest[2]} and later[^|]*\| {default[1]} \|", PAGE, re.MULTILINE
    )
