"""What TensorRT asks of the plugin, asked directly: dtypes, shapes, formats, ranges, serialisation, clones."""

from pathlib import Path

import pytest

from moetrt.errors import InputError, InputTypeError
from moetrt.library import PluginLibrary
from moetrt.spec import (
    FINALIZE_ADD,
    FINALIZE_ADD_RMS_NORM,
    OPERATORS,
    Operand,
    OperatorSpec,
    check_operands,
)
from tests.plugins.driver import Driver, FieldValue, Plugin
from tests.plugins.node_cases import ALL_COMBINATIONS, Node, combination_id, concrete, make_node

MAP = "expanded_idx_to_permuted_idx"
SYMBOLS = {"T": -1, "R": -2, "B": -3, "S": -4}
SIZES = {"T": 6, "R": 24, "B": 2, "S": 3}
LABEL = "MoEFinalizeAddRMSNorm 'layers.3/tail': "


def plugin_of(driver: Driver, node: Node) -> Plugin:
    plugin = driver.create(node.spec.name, {**node.flags, **node.attributes}, node=node.name)  # type: ignore[arg-type]
    assert plugin is not None
    return plugin


@pytest.mark.parametrize("data", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("side", ["as the rows", "float32"])
@pytest.mark.parametrize(("spec", "optional"), ALL_COMBINATIONS, ids=combination_id)
def test_case03_13_every_combination_is_taken(
    driver: Driver, library: PluginLibrary, spec: OperatorSpec, optional: tuple[str, ...], side: str, data: str
) -> None:
    node = make_node(spec, optional=optional, data=data, side=None if side == "as the rows" else side)
    plugin = plugin_of(driver, node)
    types, outputs = node.type_list(), [data] * len(spec.outputs)
    assert plugin.outputs == len(spec.outputs)
    assert plugin.output_types(types) == outputs
    assert plugin.output_shapes(node.shape_list(SYMBOLS)) == [concrete(node.output_shape, SYMBOLS)] * plugin.outputs
    exact = node.shape_list(SIZES)
    assert plugin.output_shapes(exact) == [concrete(node.output_shape, SIZES)] * plugin.outputs
    assert plugin.configure(node.shape_list({"T": 1, "R": 4}), exact, types)
    assert plugin.on_shape_change(exact, types)
    for position in range(len(types) + len(outputs)):
        assert plugin.supports(position, types + outputs, [0] * 10, len(types))
    assert library.last_error() == ""


def test_case20_leading_dimensions_stay_symbolic(driver: Driver) -> None:
    node = make_node(leading=("B", "S"))
    assert plugin_of(driver, node).output_shapes(node.shape_list(SYMBOLS)) == [(-3, -4, 64)] * 2


def test_output_shape_is_that_of_residual_then_of_shared_output(driver: Driver) -> None:
    both = make_node(optional=(MAP, "shared_output", "residual")).with_input("residual", shape=(2, 3, 64))
    assert plugin_of(driver, both).output_shapes(both.shape_list(SIZES)) == [(2, 3, 64)] * 2
    shared = make_node(FINALIZE_ADD, optional=(MAP, "shared_output"), leading=("B", "S"))
    assert plugin_of(driver, shared).output_shapes(shared.shape_list(SIZES)) == [(2, 3, 64)]
    neither = make_node(FINALIZE_ADD, optional=(MAP,), stride=80)
    assert plugin_of(driver, neither).output_shapes(neither.shape_list(SIZES)) == [(6, 80)]


WRONG_DTYPES = [
    (MAP, "int64", f"input {MAP} was int64; int32 is taken"),
    (MAP, "float32", f"input {MAP} was float32; int32 is taken"),
    ("gemm2_permuted", "int32", "input gemm2_permuted was int32; bfloat16 or float16 or float32 is taken"),
    ("gemm2_permuted", "int8", "input gemm2_permuted was int8; bfloat16 or float16 or float32 is taken"),
    (
        "expert_weights",
        "float16",
        "input expert_weights was float16; bfloat16 or float32 is taken (gemm2_permuted is bfloat16)",
    ),
    ("residual", "float32", "input residual was float32; bfloat16 is taken (gemm2_permuted is bfloat16)"),
    ("shared_output", "float16", "input shared_output was float16; bfloat16 is taken (gemm2_permuted is bfloat16)"),
    ("shared_gate", "int32", "input shared_gate was int32; bfloat16 or float32 is taken (gemm2_permuted is bfloat16)"),
    ("gamma", "float16", "input gamma was float16; bfloat16 or float32 is taken (gemm2_permuted is bfloat16)"),
]


@pytest.mark.parametrize(("name", "dtype", "line"), WRONG_DTYPES)
def test_wrong_dtype_is_refused_by_name(
    driver: Driver, library: PluginLibrary, capfd: pytest.CaptureFixture[str], name: str, dtype: str, line: str
) -> None:
    node = make_node(optional=(MAP, "shared_output", "shared_gate", "residual")).with_input(name, dtype=dtype)
    assert plugin_of(driver, node).output_types(node.type_list()) is None
    assert library.last_error() == LABEL + line
    assert capfd.readouterr().err == f"[moetrt] {LABEL}{line}\n"


WRONG_SHAPES = [
    ("gemm2_permuted", (24,), "[24]; rank 2, [R, Hp], Hp >= H, is taken"),
    ("gemm2_permuted", (24, 32), "[24, 32]; Hp >= H = 64 in [R, Hp] is taken"),
    ("expert_weights", (24,), "[24]; rank 2, [T, K], is taken"),
    ("expert_weights", (6, 0), "[6, 0]; K >= 1 in [T, K] is taken"),
    (MAP, (24,), "[24]; rank 2, [T, K], is taken"),  # case 2: a flat map
    (MAP, (6, 3), "[6, 3]; [T, K] = [6, 4], the shape of expert_weights, is taken"),
    (MAP, (5, 4), "[5, 4]; [T, K] = [6, 4], the shape of expert_weights, is taken"),
    ("shared_output", (64,), "[64]; rank 2 or more, [..., H], is taken"),
    ("shared_output", (6, 63), "[6, 63]; a last dimension of H = 64 is taken"),
    ("shared_output", (2, 2, 64), "[2, 2, 64]; leading dimensions that multiply to T = 6 is taken"),
    ("shared_gate", (6,), "[6]; rank 2, [T, 1], is taken"),
    ("shared_gate", (6, 64), "[6, 64]; [T, 1] = [6, 1] is taken"),
    ("residual", (6, 65), "[6, 65]; a last dimension of H = 64 is taken"),
    ("residual", (7, 64), "[7, 64]; leading dimensions that multiply to T = 6 is taken"),
    ("gamma", (1, 64), "[1, 64]; rank 1, [H], is taken"),
]


@pytest.mark.parametrize(("name", "shape", "rest"), WRONG_SHAPES)
def test_case02_wrong_shape_is_refused_by_name(
    driver: Driver, library: PluginLibrary, name: str, shape: tuple[int, ...], rest: str
) -> None:
    node = make_node(optional=(MAP, "shared_output", "shared_gate", "residual")).with_input(name, shape=shape)
    plugin = plugin_of(driver, node)
    line = f"{LABEL}input {name} was {rest}"
    shapes, types = node.shape_list(SIZES), node.type_list()
    assert plugin.output_shapes(shapes) is None
    assert library.last_error() == line
    library.clear_last_error()
    assert not plugin.on_shape_change(shapes, types)
    assert library.last_error() == line
    library.clear_last_error()
    assert not plugin.configure(shapes, shapes, types)
    assert library.last_error() == line


def python_words(node: Node) -> str:
    """What moetrt.spec says of the node, with its symbols' sizes known."""
    operands = {name: Operand(node.dtypes[name], concrete(node.shapes[name], SIZES)) for name in node.inputs}
    with pytest.raises((InputError, InputTypeError)) as caught:
        check_operands(node.spec, operands, where=LABEL.removesuffix(": "))
    return str(caught.value)


@pytest.mark.parametrize(("name", "dtype", "line"), WRONG_DTYPES)
def test_python_refuses_a_dtype_in_the_same_words(name: str, dtype: str, line: str) -> None:
    node = make_node(optional=(MAP, "shared_output", "shared_gate", "residual")).with_input(name, dtype=dtype)
    assert python_words(node) == LABEL + line


@pytest.mark.parametrize(("name", "shape", "rest"), WRONG_SHAPES)
def test_python_refuses_a_shape_in_the_same_words(name: str, shape: tuple[int, ...], rest: str) -> None:
    node = make_node(optional=(MAP, "shared_output", "shared_gate", "residual")).with_input(name, shape=shape)
    line = f"{LABEL}input {name} was {rest}"
    assert python_words(node) == line


def test_rows_without_a_map_are_one_a_route(driver: Driver, library: PluginLibrary) -> None:
    node = make_node(optional=("residual",))
    plugin = plugin_of(driver, node)
    assert plugin.output_shapes(node.shape_list({"T": 6, "R": 25})) is None
    assert library.last_error().endswith(
        "input gemm2_permuted was [25, 64]; R = T*K = 24 rows where the map is absent is taken"
    )
    mapped = make_node()
    assert plugin_of(driver, mapped).output_shapes(mapped.shape_list({"T": 6, "R": 25})) is not None


def test_a_hidden_size_of_nothing_is_refused(driver: Driver, library: PluginLibrary) -> None:
    for spec, name, was in ((FINALIZE_ADD_RMS_NORM, "gamma", "[0]"), (FINALIZE_ADD, "shared_output", "[6, 0]")):
        node = make_node(spec, optional=(MAP, "shared_output"), hidden=0)
        library.clear_last_error()
        assert plugin_of(driver, node).output_shapes(node.shape_list(SIZES)) is None
        assert library.last_error() == f"{spec.name} '{node.name}': input {name} was {was}; H >= 1 is taken"


def test_case10_no_tokens_and_rows_apart_from_routes_are_taken(driver: Driver) -> None:
    node = make_node()
    plugin = plugin_of(driver, node)
    for sizes in ({"T": 0, "R": 0}, {"T": 1, "R": 1}, {"T": 6, "R": 3}, {"T": 6, "R": 4096}):
        assert plugin.on_shape_change(node.shape_list(sizes), node.type_list())


def test_ranges_are_refused_only_where_no_size_fits(driver: Driver, library: PluginLibrary) -> None:
    node = make_node(leading=("B", "S"))
    plugin, types = plugin_of(driver, node), node.type_list()

    def ranges(low: dict[str, int], high: dict[str, int]) -> bool:
        return plugin.configure(node.shape_list(low), node.shape_list(high), types)

    assert ranges({"T": 1, "R": 1, "B": 1, "S": 1}, {"T": 64, "R": 512, "B": 8, "S": 64})
    assert not ranges({"T": 1, "R": 1, "B": 2, "S": 40}, {"T": 64, "R": 512, "B": 8, "S": 64})
    assert library.last_error() == (
        f"{LABEL}input residual was [2..8, 40..64, 64]; leading dimensions that multiply to T = 1..64 is taken"
    )


@pytest.mark.parametrize("given", [2, 4, 6, 7])
def test_wrong_number_of_inputs_names_those_there_are(driver: Driver, library: PluginLibrary, given: int) -> None:
    node = make_node()
    plugin = plugin_of(driver, node)
    names = ", ".join(node.inputs)
    line = (
        f"{LABEL}{given} inputs were given; its has_* attributes name 5 ({names}), "
        "and an absent input is left out, not empty"
    )
    assert plugin.output_types(["float32"] * given) is None
    assert library.last_error() == line
    library.clear_last_error()
    assert plugin.output_shapes([(4, 4)] * given) is None
    assert library.last_error() == line
    assert not plugin.supports(0, ["float32"] * 10, [0] * 10, given)


def test_formats_other_than_linear_are_not_supported(driver: Driver) -> None:
    node = make_node(data="float16")
    plugin, types = plugin_of(driver, node), node.type_list()
    everything = [*types, "float16", "float16"]
    for position in range(len(everything)):
        for other in (1, 2, 4, 8, 12):
            formats = [0] * position + [other]
            assert not plugin.supports(position, everything, formats, len(types))
    # An output of another dtype than the rows.
    assert not plugin.supports(len(types), [*types, "float32"], [0] * 10, len(types))
    assert not plugin.supports(0, ["int32"], [0], len(types))


@pytest.mark.parametrize("spec", OPERATORS.values(), ids=combination_id)
def test_serialisation_brings_back_every_attribute(driver: Driver, spec: OperatorSpec) -> None:
    other: dict[str, int | float] = {}
    for entry in spec.all_attributes:
        other[entry.name] = 1 - int(entry.default) if entry.kind == "FLAG" else (1.0 if entry.taken else 0.3125)
    if other["has_shared_output"] == 0:
        other["has_shared_gate"] = 0
    plugin = driver.create(spec.name, other, node="a")
    assert plugin is not None
    written = plugin.serialize()
    assert written == other
    again = driver.create(spec.name, written, node="b", runtime=True)
    assert again is not None
    assert again.serialize() == other
    assert again.clone().serialize() == other
    assert again.attach().serialize() == other


@pytest.mark.parametrize("spec", OPERATORS.values(), ids=combination_id)
def test_a_node_without_attributes_has_the_defaults_of_the_table(driver: Driver, spec: OperatorSpec) -> None:
    plugin = driver.create(spec.name)
    assert plugin is not None
    assert plugin.serialize() == pytest.approx({entry.name: entry.default for entry in spec.all_attributes})
    assert plugin.identity == f"{spec.name} 1 moetrt"


def test_clones_keep_the_node_and_outlive_the_original(driver: Driver, library: PluginLibrary) -> None:
    node = make_node()
    plugin = plugin_of(driver, node)
    copies = [plugin.clone(), plugin.attach()]
    del plugin
    for copy in copies:
        assert copy.identity == "MoEFinalizeAddRMSNorm 1 moetrt"
        library.clear_last_error()
        assert copy.output_types([*node.type_list()[:2], "int64", *node.type_list()[3:]]) is None
        assert library.last_error().startswith(LABEL)


WRONG_ATTRIBUTES: list[tuple[str, FieldValue | int | float, str]] = [
    ("eps", FieldValue("int32", 1), "attribute eps was int32; float32 is taken"),
    ("eps", FieldValue("float64", 1e-6), "attribute eps was float64; float32 is taken"),
    ("eps", FieldValue("float16", 1e-3), "attribute eps was float16; float32 is taken"),
    ("eps", -1e-6, "attribute eps was -1e-06; a finite float of at least 0 is taken"),
    ("eps", float("nan"), "attribute eps was nan; a finite float of at least 0 is taken"),
    ("eps", FieldValue("float32", 1e-6, 1e-6), "attribute eps was 2 values; one is taken"),
    ("eps", FieldValue("float32"), "attribute eps was 0 values; one is taken"),
    ("residual_scale", float("inf"), "attribute residual_scale was inf; a finite float is taken"),
    ("combine_scale", float("-inf"), "attribute combine_scale was -inf; a finite float is taken"),
    ("routed_scaling_factor", float("nan"), "attribute routed_scaling_factor was nan; a finite float is taken"),
    ("weight_bias", 0.5, "attribute weight_bias was 0.5; 0 or 1 is taken"),
    ("weight_before_cast", 2, "attribute weight_before_cast was 2; 0 or 1 is taken"),
    ("weight_before_cast", 1.0, "attribute weight_before_cast was float32; int32 is taken"),
    ("apply_expert_weights", FieldValue("int64", 1), "attribute apply_expert_weights was int64; int32 is taken"),
    ("has_residual", -1, "attribute has_residual was -1; 0 or 1 is taken"),
    ("has_shared_output", FieldValue("int8", 1), "attribute has_shared_output was int8; int32 is taken"),
    (
        "has_shared_gate",
        1,
        "attribute has_shared_gate was 1 with has_shared_output 0; the gate is taken only with what it gates",
    ),
    ("epsilon", 1e-6, "attribute epsilon is unknown; taken are has_expanded_idx_to_permuted_idx, "),
    ("", 1e-6, "attribute  is unknown; taken are "),
]


@pytest.mark.parametrize(("name", "value", "line"), WRONG_ATTRIBUTES)
def test_wrong_attribute_is_refused_by_name(
    driver: Driver, library: PluginLibrary, name: str, value: FieldValue | int | float, line: str
) -> None:
    assert driver.create(FINALIZE_ADD_RMS_NORM.name, {name: value}, node="layers.3/tail") is None
    assert library.last_error().startswith(LABEL + line)


def test_an_attribute_given_twice_is_refused(driver: Driver, library: PluginLibrary) -> None:
    assert driver.create("MoEFinalizeAdd", [("combine_scale", 1.0), ("combine_scale", 2.0)]) is None
    assert library.last_error() == "MoEFinalizeAdd 'node': attribute combine_scale was given twice; once is taken"


def test_the_smaller_operator_takes_none_of_the_norms_attributes(driver: Driver, library: PluginLibrary) -> None:
    assert driver.create("MoEFinalizeAdd", {"eps": 1e-6}, node="") is None
    assert library.last_error().startswith("MoEFinalizeAdd: attribute eps is unknown; taken are ")


def test_refusals_go_to_the_logger_of_the_headers_tensorrt_only(
    driver: Driver, library: PluginLibrary, capfd: pytest.CaptureFixture[str]
) -> None:
    line = "[moetrt] MoEFinalizeAdd 'node': attribute combine_scale was int32; float32 is taken\n"
    try:
        for major, logged, shown in (
            (driver.headers_major, line, ""),
            (driver.headers_major + 1, "", line),
            (1, "", line),
            (0, "", line),
        ):
            driver.set_logger(major)
            assert driver.create("MoEFinalizeAdd", {"combine_scale": 1}) is None
            assert driver.log() == logged
            assert capfd.readouterr().err == shown
            assert library.last_error() == line.removeprefix("[moetrt] ").rstrip("\n")
    finally:
        driver.set_logger(0)


def test_the_driver_is_no_part_of_the_package(plugin_library: Path) -> None:
    assert not list(plugin_library.parent.glob("*driver*"))
