"""Names that are no text, and tensors that have no numbers: one line that names them, in every command."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moetrt import cli
from moetrt.capture import export
from moetrt.errors import InputError
from moetrt.files import as_path
from moetrt.onnx_files import load_model
from moetrt.parity import compare
from moetrt.source import Source, as_source, load_source
from tests.conftest import BLOCK

MARK = "QZQZ"
HALF = "\udcff"
"""How Python has a byte that is no UTF-8."""


def renamed(proto: onnx.ModelProto, old: str) -> None:
    """Gives a value another name wherever it stands."""
    for value in (*proto.graph.input, *proto.graph.initializer):
        value.name = MARK if value.name == old else value.name
    for node in proto.graph.node:
        for names in (node.input, node.output):
            names[:] = [MARK if name == old else name for name in names]


def external(proto: onnx.ModelProto) -> None:
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=MARK)


PLACES: dict[str, tuple[Callable[[onnx.ModelProto], object], str]] = {
    "graph": (lambda p: setattr(p.graph, "name", MARK), "graph.name"),
    "node": (lambda p: setattr(p.graph.node[0], "name", MARK), "graph.node[0].name"),
    "operator": (lambda p: setattr(p.graph.node[0], "op_type", MARK), "graph.node[0].op_type"),
    "domain": (lambda p: setattr(p.graph.node[0], "domain", MARK), "graph.node[0].domain"),
    "value": (lambda p: renamed(p, p.graph.node[0].output[0]), "graph.node[0].output[0]"),
    "input": (lambda p: renamed(p, "x"), "input"),
    "weight": (lambda p: renamed(p, p.graph.initializer[0].name), "graph."),
    "attribute": (lambda p: p.graph.node[0].attribute.add(name=MARK, type=2), "graph.node[0].attribute["),
    "dimension": (
        lambda p: setattr(p.graph.input[0].type.tensor_type.shape.dim[0], "dim_param", MARK),
        "graph.input[0].type.tensor_type.shape.dim[0].dim_param",
    ),
    "description": (lambda p: setattr(p, "doc_string", MARK), "doc_string"),
    "key": (lambda p: p.metadata_props.add(key=MARK, value="x"), "].key"),
    "entry": (lambda p: p.metadata_props.add(key="x", value=MARK), "].value"),
    "producer": (lambda p: setattr(p, "producer_name", MARK), "producer_name"),
    "opset": (lambda p: p.opset_import.add(domain=MARK, version=1), "].domain"),
    "function": (lambda p: setattr(p.functions[0], "name", MARK), "functions[0].name"),
    "body": (lambda p: setattr(p.functions[0].node[0], "name", MARK), "functions[0].node[0].name"),
    "data file": (external, "graph.initializer[0].external_data[0].value"),
}


def odd(path: Path, change: Callable[[onnx.ModelProto], object], folder: Path) -> Path:
    """A copy of a file in which ``change`` put MARK, which then is no UTF-8."""
    proto = onnx.load(path)
    change(proto)
    data = proto.SerializeToString()
    assert MARK.encode() in data
    target = folder / "odd.onnx"
    target.write_bytes(data.replace(MARK.encode(), b"Q\xffZQ"))
    return target


@pytest.mark.parametrize(("change", "place"), PLACES.values(), ids=PLACES.keys())
def test_case_41_text_of_a_file_that_is_no_utf8_is_named(
    mapped_block: Path, tmp_path: Path, change: Callable[[onnx.ModelProto], object], place: str
) -> None:
    path = odd(mapped_block, change, tmp_path)
    with pytest.raises(InputError) as error:
        load_model(path)
    assert str(error.value).startswith(f"ONNX model '{path}': ")
    assert place in str(error.value)
    assert str(error.value).endswith(r" was b'Q\xffZQ'; text in UTF-8 is taken")


def test_case_41_every_command_refuses_it(
    mapped_block: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = odd(mapped_block, PLACES["node"][0], tmp_path)
    out = tmp_path / "out"
    for words in (
        ["map", path, "-o", out],
        ["inspect", path],
        ["compare", path, "--against", BLOCK],
        ["compare", mapped_block, "--against", BLOCK, "--unmapped", path],
        ["build", path, "-o", out],
        ["bench", path, "-o", out, "--script"],
    ):
        assert cli.run([str(word) for word in words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "graph.node[0].name was b'Q\\xffZQ'; text in UTF-8 is taken" in line.replace("\\\\", "\\")
        assert not out.exists()


def test_case_41_a_path_that_is_no_utf8_is_refused_by_every_command(
    mapped_block: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No JSON, no script and not TensorRT could name it."""
    bad = tmp_path / f"a{HALF}"
    for words in (
        ["export", BLOCK, "-o", bad],
        ["export", bad, "-o", tmp_path / "out"],
        ["map", mapped_block, "-o", bad],
        ["map", bad, "-o", tmp_path / "out"],
        ["map", mapped_block, "-o", tmp_path / "out", "--report", bad],
        ["inspect", bad],
        ["compare", bad, "--against", BLOCK],
        ["compare", mapped_block, "--against", BLOCK, "--json", bad],
        ["compare", mapped_block, "--against", BLOCK, "--report", bad],
        ["compare", mapped_block, "--against", bad],
        ["compare", mapped_block, "--against", BLOCK, "--load-inputs", bad],
        ["compare", mapped_block, "--against", BLOCK, "--save-inputs", bad],
        ["compare", mapped_block, "--against", BLOCK, "--save-inputs-raw", bad],
        ["build", bad, "-o", tmp_path / "out"],
        ["build", mapped_block, "-o", bad],
        ["build", mapped_block, "-o", tmp_path / "out", "--plugin", bad],
        ["bench", mapped_block, "-o", bad, "--script", "--tool", "tensorrt-rtx"],
        ["bench", bad, "-o", tmp_path / "out", "--script", "--tool", "tensorrt-rtx"],
        ["report", bad],
        ["demo", "-o", bad],
        ["families", "mixtral", "--json", bad],
    ):
        assert cli.run([str(word) for word in words]) == 2, words
        *_, line = capsys.readouterr().err.splitlines()
        assert line.startswith("moetrt: error: ")
        assert "in UTF-8 is taken" in line, words
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match="a path in UTF-8 is taken"):
        as_path(bad, "file")
    with pytest.raises(InputError, match="in UTF-8 is taken"):
        load_source(str(bad))


class Twice(torch.nn.Module):
    """A weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.offset


def source_of(module: torch.nn.Module, x: torch.Tensor | None = None) -> Source:
    return Source(module, {"x": torch.ones(2, 4) if x is None else x}, description="Twice")


def part_on_meta(name: str) -> torch.nn.Module:
    module = Twice()
    tensor = getattr(module, name).detach().to("meta")
    setattr(module, name, torch.nn.Parameter(tensor) if name == "weight" else tensor)
    return module


def fake() -> torch.nn.Module:
    with FakeTensorMode():
        return Twice()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: source_of(Twice().to("meta")), "weight 'weight' of Twice is on the meta device, without numbers; "),
        (lambda: source_of(part_on_meta("weight")), "weight 'weight' of Twice is on the meta device"),
        (lambda: source_of(part_on_meta("offset")), "weight 'offset' of Twice is on the meta device"),
        (lambda: source_of(fake()), "weight 'weight' of Twice is a FakeTensor, without numbers; "),
        (lambda: source_of(Twice(), torch.ones(2, 4, device="meta")), "example input 'x' of Twice is on the meta"),
        (lambda: as_source((part_on_meta("weight"), torch.ones(2, 4))), "weight 'weight' of the model is on the meta"),
    ],
)
def test_case_41_a_tensor_without_numbers_is_named(
    mapped_block: Path, tmp_path: Path, make: Callable[[], Source], says: str
) -> None:
    for use in (lambda source: compare(mapped_block, source), lambda source: export(source, tmp_path / "out")):
        with pytest.raises(InputError) as error:
            use(make())
        assert str(error.value).startswith(says)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_case_41_names_of_a_source_are_text() -> None:
    source = source_of(Twice())
    with pytest.raises(InputError, match=r"the name of an example input was 'x\\udcff'; text in UTF-8 is taken"):
        dataclasses.replace(source, example_inputs={f"x{HALF}": torch.ones(2, 4)})
    with pytest.raises(InputError, match=r"the name of an output was 'y\\udcff'; text in UTF-8 is taken"):
        dataclasses.replace(source, output_names=(f"y{HALF}",))
