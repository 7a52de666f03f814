"""The bounds that a file carries: written, read back, kept by every copy, and held against sizes."""

import onnx_ir as ir
import pytest

from moetrt.bounds import DIMENSION_BOUNDS, Bound, bounds_of, check_sizes, write_bounds
from moetrt.errors import InputError
from moetrt.onnx_files import load_model, save_model

SEQ = Bound("seq", 1, 15, "model.py:9 'if n // 16 > 0'")
ROWS = Bound("rows", 16, None, "model.py:10 'max(n, 16)'")


def _model() -> ir.Model:
    value = ir.val("x", ir.DataType.FLOAT, ["seq", 4])
    node = ir.Node("", "Relu", [value])
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "y", value.type, value.shape
    return ir.Model(ir.Graph([value], [node.outputs[0]], nodes=[node], opset_imports={"": 20}, name="g"), ir_version=10)


def test_case_55_bounds_go_through_a_file(tmp_path):
    model = _model()
    assert bounds_of(model) == {}
    write_bounds(model, {"seq": SEQ, "rows": ROWS})
    save_model(model, tmp_path / "model.onnx")
    loaded = load_model(tmp_path / "model.onnx")
    assert bounds_of(loaded) == {"seq": SEQ, "rows": ROWS}
    write_bounds(loaded, {})
    assert DIMENSION_BOUNDS not in loaded.metadata_props


@pytest.mark.parametrize(
    ("size", "bound", "taken"), [(16, SEQ, "1 to 15"), (0, SEQ, "1 to 15"), (15, ROWS, "at least 16")]
)
def test_a_size_beyond_a_bound_is_refused_with_the_reason(size, bound, taken):
    with pytest.raises(InputError) as caught:
        check_sizes({bound.symbol: bound}, {"other": 1, bound.symbol: size})
    assert str(caught.value) == f"dimension '{bound.symbol}' was {size}; {taken} is taken: {bound.reason}"


def test_sizes_within_the_bounds_are_taken():
    check_sizes({"seq": SEQ, "rows": ROWS}, {"seq": 15, "rows": 16, "other": 99})
    check_sizes({"seq": SEQ, "rows": ROWS}, {"seq": 1, "rows": 10**9})


@pytest.mark.parametrize("text", ["", "[]", '{"seq": 3}', '{"seq": {"minimum": "1", "maximum": 2, "reason": "x"}}'])
def test_metadata_that_are_none_of_ours_are_refused_in_one_line(text):
    model = _model()
    model.metadata_props[DIMENSION_BOUNDS] = text
    with pytest.raises(InputError, match=f"the metadata '{DIMENSION_BOUNDS}' of the model were '.*'; a minimum"):
        bounds_of(model)
