"""enqueue: which operand goes where, and what is refused."""

import ctypes

import pytest
import torch

from moetrt.library import MoEFinalizeParams, PluginLibrary
from moetrt.spec import FINALIZE_ADD, FINALIZE_ADD_RMS_NORM, OperatorSpec
from tests.plugins.driver import Driver, Plugin
from tests.plugins.node_cases import ALL_COMBINATIONS, Node, combination_id, make_node

SIZES = {"T": 6, "R": 24, "B": 2, "S": 3}
LABEL = "MoEFinalizeAddRMSNorm 'layers.3/tail': "
MOETRT_DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}


def plugin_of(driver: Driver, node: Node) -> Plugin:
    plugin = driver.create(node.spec.name, {**node.flags, **node.attributes}, node=node.name)  # type: ignore[arg-type]
    assert plugin is not None
    return plugin


def addresses(count: int, first: int = 1) -> list[int]:
    """Addresses that lie 1 MiB apart; nothing reads them."""
    return [(first + i) << 20 for i in range(count)]


def functions_of(driver: Driver) -> ctypes.CDLL:
    return ctypes.CDLL(None, handle=driver.library.value)


def recorded(driver: Driver) -> tuple[MoEFinalizeParams, int | None]:
    """What the last launch was given: the parameters and the stream."""
    params, stream = MoEFinalizeParams(), ctypes.c_void_p()
    functions_of(driver).moetrt_recorded(ctypes.byref(params), ctypes.byref(stream))
    return params, stream.value


@pytest.mark.parametrize("side", ["bfloat16", "float32"])
@pytest.mark.parametrize(("spec", "optional"), ALL_COMBINATIONS, ids=combination_id)
def test_every_operand_goes_where_it_belongs(
    recording: Driver, spec: OperatorSpec, optional: tuple[str, ...], side: str
) -> None:
    stride = None if spec is FINALIZE_ADD and "shared_output" not in optional else 80
    node = make_node(spec, optional=optional, side=side, leading=("B", "S"), stride=stride)
    inputs = addresses(len(node.inputs))
    outputs = addresses(len(spec.outputs), first=100)
    assert plugin_of(recording, node).enqueue(node.shape_list(SIZES), node.type_list(), inputs, outputs)
    params, _ = recorded(recording)
    sizes = (params.num_tokens, params.top_k, params.num_rows, params.row_stride, params.hidden_size)
    assert sizes == (6, 4, 24, stride or 64, 64)
    given = dict(zip(node.inputs, inputs, strict=True))
    for entry in FINALIZE_ADD_RMS_NORM.inputs:
        assert getattr(params, entry.name) == given.get(entry.name), entry.name
    assert params.residual_out == outputs[-1]
    assert params.norm_out == (outputs[0] if spec is FINALIZE_ADD_RMS_NORM else None)
    assert params.dtype == MOETRT_DTYPES["bfloat16"]
    assert params.weights_dtype == MOETRT_DTYPES[side]
    if "shared_gate" in optional:
        assert params.gate_dtype == MOETRT_DTYPES[side]
    if spec is FINALIZE_ADD_RMS_NORM:
        assert params.gamma_dtype == MOETRT_DTYPES[side]


@pytest.mark.parametrize("data", ["float32", "float16", "bfloat16"])
def test_the_rows_dtype_is_passed_on(recording: Driver, data: str) -> None:
    node = make_node(data=data)
    assert plugin_of(recording, node).enqueue(
        node.shape_list(SIZES), node.type_list(), addresses(5), addresses(2, first=100)
    )
    assert recorded(recording)[0].dtype == MOETRT_DTYPES[data]


def test_case04_05_14_15_attributes_are_passed_on(recording: Driver) -> None:
    attributes = {
        "eps": 0.25,
        "residual_scale": 0.5,
        "combine_scale": 0.75,
        "routed_scaling_factor": 2.5,
        "weight_bias": 1.0,
        "weight_before_cast": 0,
        "apply_expert_weights": 0,
        "programmatic_dependent_launch": 0,
    }
    defaults = {entry.name: entry.default for entry in FINALIZE_ADD_RMS_NORM.attributes}
    for wanted in (defaults, attributes):
        node = make_node().with_attributes(**wanted)
        plugin = plugin_of(recording, node)
        # A clone of a context runs as the original does.
        for runner in (plugin, plugin.clone(), plugin.attach()):
            assert runner.enqueue(
                node.shape_list(SIZES), node.type_list(), addresses(5), addresses(2, first=100), stream=0x5EED0
            )
            params, stream = recorded(recording)
            assert {name: getattr(params, name) for name in wanted} == pytest.approx(wanted)
            assert stream == 0x5EED0


def test_case07_sizes_beyond_32_bits_are_passed_on(recording: Driver) -> None:
    node = make_node(hidden=7168)
    shapes = node.shape_list({"T": 4, "R": 3_000_000_000})
    inputs = [1 << 50, 1 << 40, 2 << 40, 3 << 40, 4 << 40]
    assert plugin_of(recording, node).enqueue(shapes, node.type_list(), inputs, [5 << 40, 6 << 40])
    assert recorded(recording)[0].num_rows == 3_000_000_000


def test_without_a_usable_gpu_it_says_so(driver: Driver, library: PluginLibrary) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: tests/gpu runs enqueue on it")
    node = make_node()
    shapes, types = node.shape_list({"T": 2, "R": 8}), node.type_list()
    assert not plugin_of(driver, node).enqueue(shapes, types, addresses(5), addresses(2, first=100))
    assert library.last_error().startswith(LABEL + "the kernel was not started: cudaError")


def test_case10_no_tokens_start_nothing(driver: Driver, library: PluginLibrary) -> None:
    node = make_node()
    shapes = node.shape_list({"T": 0, "R": 0})
    assert plugin_of(driver, node).enqueue(shapes, node.type_list(), [0] * 5, [0] * 2)
    assert library.last_error() == ""


def test_outputs_that_overlap_inputs_are_refused(driver: Driver, library: PluginLibrary) -> None:
    node = make_node()
    inputs = addresses(5)
    shapes = node.shape_list({"T": 2, "R": 8})
    assert not plugin_of(driver, node).enqueue(shapes, node.type_list(), inputs, [inputs[3], 9 << 20])
    assert library.last_error() == f"{LABEL}norm_out overlaps residual, taken are outputs that lie apart"
