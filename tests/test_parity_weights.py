"""A file and a source of other weights: that is said, and the map is not blamed."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from moetrt.capture import export
from moetrt.errors import InputError
from moetrt.mapping import map_file
from moetrt.onnx_files import load_model, save_model
from moetrt.parity import compare
from moetrt.parity.weights import other_weights
from moetrt.source import Source
from tests.test_parity import TwoTails, draw

TOKENS, COUNT = 6, 6


def unseeded(seed: int) -> Source:
    """What a factory gives whose weights are drawn from whatever the generator's state is."""
    torch.manual_seed(seed)
    dynamic = {name: {0: "tokens"} for name in ("hidden", "weights", "index")}
    example = draw(0, {"tokens": TOKENS})
    return Source(TwoTails(), example, dynamic, ("norm", "residual"), description="TwoTails", random_inputs=draw)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    map_file(export(unseeded(0), folder).model_path, folder / "mapped.onnx")
    return folder / "mapped.onnx"


@pytest.mark.parametrize("beside", [True, False])
def test_case_44_an_unseeded_factory_is_said_to_be_one(made: Path, tmp_path: Path, beside: bool) -> None:
    """With the file before mapping beside the mapped one, and alone."""
    path = made if beside else save_model(load_model(made), tmp_path / "alone.onnx")
    said: list[str] = []
    report = compare(path, unseeded(1), progress=said.append)
    assert report.result == "DIFFERS"
    assert report.cause.startswith(
        "the weights are not the source's: 6 of 6 of TwoTails are not in the file, 'experts.0.weight' first"
    )
    assert "a factory that draws its weights has to seed them" in report.cause
    assert report.verdict == report.cause
    # The tails are as they were mapped, and nothing is exported to say the wrong thing.
    assert all(tail.passed for tail in report.tails)
    assert not any("anew" in line for line in said)
    assert compare(path, unseeded(0)).passed


def foreign(path: Path, folder: Path) -> Path:
    """The file as another exporter writes it: weights under names of its own, some of them turned."""
    model = load_model(path)
    for place, (name, value) in enumerate(list(model.graph.initializers.items())):
        if value.const_value is None or "." not in name:
            continue
        value.name = f"onnx::MatMul_{place}"
        if len(value.const_value.shape) == 2:
            numbers = value.const_value.numpy()
            value.const_value = ir.tensor(np.ascontiguousarray(numbers.T), name=value.name)
            value.shape = ir.Shape(numbers.T.shape)
            turned = ir.node("Transpose", [value], {"perm": [1, 0]})
            for use in tuple(value.uses()):
                if use.node is not turned:
                    use.node.replace_input_with(use.idx, turned.outputs[0])
            turned.outputs[0].dtype, turned.outputs[0].shape = value.dtype, ir.Shape(numbers.shape)
            model.graph.insert_before(next(iter(model.graph)), turned)
    return save_model(model, folder / "foreign.onnx")


def test_case_44_of_a_foreign_file_it_is_said_too(made: Path, tmp_path: Path) -> None:
    before = foreign(made.with_name("model.onnx"), tmp_path)
    path = tmp_path / "mapped" / "mapped.onnx"
    path.parent.mkdir()
    map_file(before, path)
    model = load_model(before)
    assert other_weights(model, unseeded(0).module) == ([], False)
    lost, named = other_weights(model, unseeded(1).module)
    assert (len(lost), named) == (COUNT, False)
    assert compare(path, unseeded(0), unmapped_path=before).passed
    report = compare(path, unseeded(1), unmapped_path=before)
    assert report.cause.startswith("the weights are not the source's: 6 of 6 of TwoTails")


def test_case_44_one_other_weight_is_named(made: Path) -> None:
    source = unseeded(0)
    with torch.no_grad():
        source.module.gammas[1].mul_(1.01)  # type: ignore[union-attr, index, operator]
    report = compare(made, source)
    assert "1 of 6 of TwoTails are not in the file, 'gammas.1' first" in report.cause


def test_case_44_another_models_file_is_refused_by_its_weights(made: Path) -> None:
    """In one line of ours, before ONNX Runtime meets an index that its tables have not."""
    source = unseeded(0)
    source.module.shared[1] = torch.nn.Linear(32, 32, bias=False)  # type: ignore[index, operator]
    source.module.shared[1].weight = torch.nn.Parameter(torch.zeros(40, 32))  # type: ignore[index, union-attr]
    says = r"weight 'shared.1.weight' of '.*mapped.onnx' is 32x32, of TwoTails 40x32: is it this model's file\?"
    with pytest.raises(InputError, match=says):
        compare(made, source)
