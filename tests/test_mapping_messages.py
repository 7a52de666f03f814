"""What `map`, `inspect` and `build` say of a tail that is not taken whole is its cause, and what to do (case 44)."""

from pathlib import Path

import pytest
from onnx import TensorProto, helper

from moetrt.errors import InputError
from moetrt.inspection import inspect_file
from moetrt.mapping import map_model
from moetrt.onnx_files import save_model
from moetrt.profiles import make_profile
from tests.mapping_checks import declined
from tests.mapping_graphs import FLOAT, HIDDEN, TOP_K, Graph, NormForm


def of_symbolic_width(square: str = "Pow", up: bool = False) -> Graph:
    """A whole tail whose H is a name in every input."""
    g = Graph("float16" if up else "float32")
    g.input("rows", ["R", "H"])
    g.input("weights", ["T", TOP_K], TensorProto.FLOAT)
    g.input("map", ["T", TOP_K], TensorProto.INT32)
    flag = {"has_expanded_idx_to_permuted_idx": 1}
    routed = g.op("MoEFinalizeAdd", "rows", "weights", "map", domain="moetrt", **flag)
    g.values.append(helper.make_tensor_value_info(routed, FLOAT[g.dtype], ["T", "H"]))
    hidden = g.add(routed, g.input("residual", ["T", "H"]))
    g.output(NormForm(square=square, up=up, down="before" if up else "none").write(g, hidden, rank=2), hidden)
    return g


@pytest.mark.parametrize("square", ["Pow", "Mul"])
@pytest.mark.parametrize("up", [False, True])
def test_case44_a_symbolic_width_is_named_as_the_cause(square: str, up: bool, tmp_path: Path) -> None:
    model = of_symbolic_width(square, up).model()
    save_model(model, tmp_path / "model.onnx")
    words = "the last dimension of 'add_1', H, is 'H': export with H as a number, and only tokens dynamic"
    assert words in "\n".join(inspect_file(tmp_path / "model.onnx").warnings)
    (site,) = map_model(model).sites
    assert words in (site.reason or "")


def test_case44_build_asks_for_a_symbolic_width() -> None:
    model = of_symbolic_width().model()
    map_model(model)
    with pytest.raises(InputError) as error:
        make_profile(model)
    assert str(error.value) == (
        "the last dimension of input 'rows', 'H', is the H of tail 'node_moefinalizeadd_0/MoEFinalizeAdd', and no "
        "shape gives it; give it one size by --min, --opt and --max, or export it as a number"
    )
    same = {"rows": (4, HIDDEN)}
    assert make_profile(model, same, same, same)["residual"] == ((1, HIDDEN), (32, HIDDEN), (256, HIDDEN))


@pytest.mark.parametrize("how", ["Relu", "MatMul", "two readers"])
def test_case44_a_model_without_a_last_norm_is_told_that_nothing_is_missing(how: str) -> None:
    g = Graph()
    hidden = g.add(g.routed(), g.input("residual", ["T", HIDDEN]))
    if how == "MatMul":
        g.output(g.op("MatMul", hidden, g.vector(1, shape=[HIDDEN])))
    else:
        g.output(g.op("Relu", hidden))
    if how == "two readers":
        g.output(hidden)
    declined(g, "; where the model has no norm after its experts, the sum alone is all there is to map")
