"""Engines built by TensorRT-RTX on this machine: with the plugin, without it, and everything that is refused."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from moetrt.engine import _interrupts_kept, build_engine, read_sidecar
from moetrt.errors import InputError, InputTypeError, MoetrtError
from moetrt.onnx_op import attach_functions, make_model, make_node, operator_of, remove_functions
from moetrt.profiles import DEFAULT_RANGE, make_profile, parse_shapes, split_profiles
from moetrt.registry import check_functions, check_registry, run_as_functions
from moetrt.spec import FINALIZE_ADD, FINALIZE_ADD_RMS_NORM, Operand

HIDDEN, TOP_K = 8, 2
OURS = [(spec.name, "1", "moetrt") for spec in (FINALIZE_ADD_RMS_NORM, FINALIZE_ADD)]


def one_tail(tokens: int | None = 4, dtype: str = "float32") -> ir.Model:
    """One node with its function; every operand is a graph input."""
    operands = {
        "gemm2_permuted": Operand(dtype, (16, HIDDEN)),
        "expert_weights": Operand("float32", (tokens, TOP_K)),
        "expanded_idx_to_permuted_idx": Operand("int32", (tokens, TOP_K)),
        "residual": Operand(dtype, (tokens, HIDDEN)),
        "gamma": Operand(dtype, (HIDDEN,)),
    }
    return make_model(FINALIZE_ADD_RMS_NORM, operands, {"routed_scaling_factor": 2.5})


def node_of(model: ir.Model) -> ir.Node:
    return next(node for node in model.graph if operator_of(node))


def two_tails() -> ir.Model:
    """Two nodes of one op whose optional inputs differ: with and without shared_output."""
    model = one_tail()
    first = node_of(model)
    inputs = dict(zip([value.name or "" for value in first.inputs], first.inputs, strict=True))
    shared = first.outputs[1]
    second = make_node(FINALIZE_ADD_RMS_NORM, {**inputs, "shared_output": shared}, {}, name="second")
    for position, output in enumerate(second.outputs):
        output.name = f"second_{position}"
        model.graph.outputs.append(output)
    model.graph.append(second)
    attach_functions(model)
    return model


def save(model: ir.Model, path: Path) -> Path:
    ir.save(model, path)
    return path


def refused(path: Path, engine: Path, **options: object) -> str:
    """The one line with which the build is refused; nothing may be left of it."""
    before = sorted(engine.parent.iterdir()) if engine.parent.is_dir() else []
    with pytest.raises(MoetrtError) as caught:
        build_engine(path, engine, **options)  # type: ignore[arg-type]
    after = sorted(engine.parent.iterdir()) if engine.parent.is_dir() else []
    assert after == before
    line = str(caught.value)
    assert "\n" not in line
    return line


# ---------------------------------------------------------------------------------------------------- shapes, profiles


def test_shapes_are_read_as_the_command_line_takes_them() -> None:
    shapes = parse_shapes(["input_ids:1x16", "a:b:2,3", "length:5"])
    assert shapes == {"input_ids": (1, 16), "a:b": (2, 3), "length": (5,)}


@pytest.mark.parametrize("text", ["x", "x:", ":1x2", "x:1x", "x:1x-2", "x:ax2", "x:1 x 2", "x:1.5"])
def test_a_text_that_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^shape was '.*'; NAME:DIMS is taken, such as hidden:4x2048$"):
        parse_shapes([text])


def test_a_size_far_too_large_is_refused() -> None:
    # Python itself reads no more than 4300 digits.
    for size in ("99999999999999999999", "9" * 5000):
        with pytest.raises(InputError, match=f"^shape of x has the size {size[:20]}9*; at most 2147483647 is taken$"):
            parse_shapes([f"x:{size}x4"])


def test_a_shape_given_twice_is_refused() -> None:
    with pytest.raises(InputError, match="shape of x is given twice: 1x2 and 1x3"):
        parse_shapes(["x:1x2", "x:1x3"])


def with_inputs(*shapes: tuple[str, tuple[int | str | None, ...]]) -> ir.Model:
    values = [ir.Value(name=name, shape=ir.Shape(dims), type=ir.TensorType(ir.DataType.FLOAT)) for name, dims in shapes]
    return ir.Model(ir.Graph(values, [], nodes=[], opset_imports={"": 20}), ir_version=10)


IDS_AND_MASK = with_inputs(("ids", ("batch", "seq")), ("mask", ("batch", "seq")), ("scale", (1, None)))


def test_dynamic_dimensions_have_the_default_range_and_static_ones_their_size() -> None:
    low, best, high = DEFAULT_RANGE
    profile = make_profile(IDS_AND_MASK)
    assert profile["ids"] == ((low, low), (best, best), (high, high))
    assert profile["scale"] == ((1, low), (1, best), (1, high))
    assert list(profile) == ["ids", "mask", "scale"]


def test_a_named_dimension_has_the_same_range_in_every_input() -> None:
    profile = make_profile(IDS_AND_MASK, {"ids": (1, 2)}, {"ids": (2, 8)}, {"ids": (4, 16)})
    assert profile["mask"] == profile["ids"] == ((1, 2), (2, 8), (4, 16))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"maximum": (4, 64)}, ((1, 1), (4, 32), (4, 64))),
        ({"optimum": (2, 8)}, ((1, 1), (2, 8), (256, 256))),
        ({"optimum": (2, 512)}, ((1, 1), (2, 512), (256, 512))),
        ({"minimum": (1, 64)}, ((1, 64), (32, 64), (256, 256))),
        ({"minimum": (1, 300)}, ((1, 300), (32, 300), (256, 300))),
        ({"minimum": (1, 1), "maximum": (4, 16)}, ((1, 1), (4, 16), (4, 16))),
        ({"optimum": (2, 8), "maximum": (4, 16)}, ((1, 1), (2, 8), (4, 16))),
    ],
)
def test_an_end_that_is_left_out_takes_its_default(given: dict[str, tuple[int, int]], expected: object) -> None:
    profile = make_profile(IDS_AND_MASK, **{which: {"ids": shape} for which, shape in given.items()})
    assert profile["ids"] == profile["mask"] == expected
    assert profile["scale"] == ((1, 1), (1, 32), (1, 256))


def test_ends_that_different_inputs_give_are_one_range() -> None:
    profile = make_profile(IDS_AND_MASK, {"scale": (1, 4)}, {"mask": (2, 8)}, {"ids": (4, 16)})
    assert profile["ids"] == profile["mask"] == ((1, 1), (2, 8), (4, 16))
    assert profile["scale"] == ((1, 4), (1, 32), (1, 256))
    with pytest.raises(InputError) as caught:
        make_profile(IDS_AND_MASK, {"ids": (1, 32)}, {}, {"mask": (4, 16)})
    assert str(caught.value) == "dimension seq has the min 32 in ids, above its max, 16 in mask"


def test_the_rows_of_a_tail_are_as_many_as_its_routes_unless_they_are_given() -> None:
    model = one_tail()
    symbols = {"gemm2_permuted": "rows", "expert_weights": "tokens", "expanded_idx_to_permuted_idx": "tokens"}
    for value in model.graph.inputs:
        if value.name in symbols and value.shape is not None:
            value.shape = ir.Shape((symbols[value.name], *value.shape[1:]))
    profile = make_profile(model, {}, {}, {"expert_weights": (64, 2)})
    assert profile["expanded_idx_to_permuted_idx"] == profile["expert_weights"] == ((1, 2), (32, 2), (64, 2))
    assert profile["gemm2_permuted"] == ((1, 8), (64, 8), (128, 8))
    assert make_profile(model)["gemm2_permuted"] == ((1, 8), (64, 8), (512, 8))
    padded = make_profile(model, {}, {}, {"expert_weights": (64, 2), "gemm2_permuted": (192, 8)})
    assert padded["gemm2_permuted"] == ((1, 8), (32, 8), (192, 8))


@pytest.mark.parametrize(
    ("minimum", "optimum", "maximum", "message"),
    [
        ({"idz": (1, 1)}, {}, {}, "shape of 'idz': the model has no such input; its inputs are ids, mask, scale"),
        ({"ids": (4, 4)}, {"ids": (2, 8)}, {}, "min shape of 'ids', 4x4, is above its opt shape, 2x8"),
        ({}, {"ids": (2, 8)}, {"ids": (4, 4)}, "opt shape of 'ids', 2x8, is above its max shape, 4x4"),
        ({}, {"ids": (8,)}, {}, "opt shape of 'ids' was 8, rank 1; rank 2, [batchxseq], is taken"),
        (
            {},
            {"scale": (2, 3)},
            {},
            "opt shape of 'scale' was 2x3; [1x?] is taken: the model fixes 1 where 2 was given",
        ),
        (
            {},
            {"ids": (2, 8), "mask": (2, 9)},
            {},
            "opt of dimension seq was 8 in ids and 9 in mask; one dimension has one range",
        ),
        ({"ids": (0, 0)}, {}, {"ids": (4, 0)}, "max shape of 'ids' is 4x0, of no element; expected sizes of 1 or more"),
        ({}, {}, {"scale": (1, 0)}, "max shape of 'scale' is 1x0, of no element; expected sizes of 1 or more"),
    ],
    ids=["name", "min-opt", "opt-max", "rank", "static", "symbol", "nothing", "nothing of no name"],
)
def test_case32_shapes_that_contradict_the_model_are_refused(
    minimum: dict[str, tuple[int, ...]],
    optimum: dict[str, tuple[int, ...]],
    maximum: dict[str, tuple[int, ...]],
    message: str,
) -> None:
    with pytest.raises(InputError) as caught:
        make_profile(IDS_AND_MASK, minimum, optimum, maximum)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("profiles", "kind", "line"),
    [
        (
            "x",
            InputTypeError,
            "the profiles were of type str; a dict of (min, opt, max), each a shape or None, is taken",
        ),
        ([("ids", (1, 1))], InputTypeError, "the profiles were of type list; a dict of (min, opt, max), "),
        (
            {"ids": ((1, 1),)},
            InputError,
            "the profile of 'ids' has 1 entries; (min, opt, max), each a shape or None, is",
        ),
        ({"ids": "1x1"}, InputTypeError, "the profile of 'ids' was of type str; (min, opt, max), each a shape or None"),
        ({"ids": 3}, InputTypeError, "the profile of 'ids' was of type int; (min, opt, max), each a shape or None"),
        ({"ids": (1, 2, 3)}, InputTypeError, "min shape of 'ids' was of type int; a tuple of whole numbers is taken"),
        ({"ids": (None, "1x1", None)}, InputTypeError, "opt shape of 'ids' was of type str; a tuple of whole numbers"),
        ({"ids": (None, None, (1.5, 1))}, InputTypeError, "max shape of 'ids' has the size 1.5; whole numbers are"),
        ({"ids": ((-1, 1), None, None)}, InputError, "min shape of 'ids' has the size -1; 0 to 2147483647 is taken"),
        ({"ids": (None, None, (2**31, 1))}, InputError, "max shape of 'ids' has the size 2147483648; 0 to 2147483647"),
    ],
)
def test_case32_profiles_of_another_form_are_refused(profiles: Any, kind: type[MoetrtError], line: str) -> None:
    with pytest.raises(kind) as caught:
        split_profiles(profiles)
    assert str(caught.value).startswith(line)


def test_profiles_are_split_by_bound() -> None:
    assert split_profiles(None) == ({}, {}, {})
    profiles = {"ids": ((1, np.int64(2)), None, [4, 8]), "mask": (None, (2, 2), None)}
    assert split_profiles(profiles) == ({"ids": (1, 2)}, {"mask": (2, 2)}, {"ids": (4, 8)})


def test_case32_what_tensorrt_alone_refuses_of_a_profile_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT's Python has an exception of its own for a shape that it does not take."""
    monkeypatch.setattr("moetrt.profiles._MAX_SIZE", 2**40)
    model = save(one_tail(tokens=None), tmp_path / "model.onnx")
    line = refused(
        model,
        tmp_path / "out.engine",
        plugin_library=None,
        profiles={"residual": ((1, HIDDEN), (1, HIDDEN), (2**31, HIDDEN))},
    )
    assert line.startswith("tensorrt-rtx 1.")
    assert f"does not take '{model}': " in line


def test_case32_the_build_refuses_them_before_tensorrt_starts(tmp_path: Path) -> None:
    model = save(one_tail(tokens=None), tmp_path / "model.onnx")
    line = refused(model, tmp_path / "out.engine", profiles={"residul": (None, (4, 8), None)})
    assert line.startswith("shape of 'residul': the model has no such input; its inputs are gemm2_permuted,")


# -------------------------------------------------------------------------------------------------------------- engines


def test_one_file_with_the_plugin_and_without_it_in_one_process(tmp_path: Path, plugin_library: Path) -> None:
    model = save(one_tail(), tmp_path / "model.onnx")
    said: list[str] = []
    with_plugin = build_engine(model, tmp_path / "a.engine", plugin_library=plugin_library, progress=said.append)
    without = build_engine(model, tmp_path / "b.engine", plugin_library=None)
    again = build_engine(model, tmp_path / "c.engine", plugin_library=plugin_library)
    assert with_plugin.plugin_layers == again.plugin_layers == ("MoEFinalizeAddRMSNorm",)
    assert with_plugin.layer_count == again.layer_count == 1
    assert without.plugin_layers == ()
    assert without.layer_count > 20
    assert without.plugin_library is None
    # The function's many kernels take more room than one plugin's parameters.
    assert without.path.stat().st_size > 5 * with_plugin.path.stat().st_size
    assert any("building 1 layers, 1 of them plugin layers" in line for line in said)
    assert said[-1] == f"wrote {tmp_path / 'a.engine'}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_engines(tmp_path: Path, plugin_library: Path, dtype: str) -> None:
    model = save(one_tail(dtype=dtype), tmp_path / "model.onnx")
    assert build_engine(model, tmp_path / "a.engine", plugin_library=plugin_library).plugin_layers
    assert not build_engine(model, tmp_path / "b.engine", plugin_library=None).plugin_layers


def test_the_sidecar_describes_the_engine(tmp_path: Path, plugin_library: Path) -> None:
    (tmp_path / "in").mkdir()
    model = save(one_tail(tokens=None), tmp_path / "in" / "model.onnx")
    engine = tmp_path / "out" / "tail.engine"
    tokens = {"expert_weights": (1, TOP_K), "expanded_idx_to_permuted_idx": (1, TOP_K), "residual": (1, HIDDEN)}
    profiles = {name: (low, (4, low[1]), (8, low[1])) for name, low in tokens.items()}
    info = build_engine(model, engine, plugin_library=plugin_library, profiles=profiles, targets=["8.9", "SM120"])
    content = json.loads(info.sidecar.read_text())
    assert info.sidecar == Path(f"{engine}.json")
    assert content == read_sidecar(engine)
    assert content["backend"] == "tensorrt-rtx"
    assert content["version"].startswith("1.")
    assert content["targets"] == ["SM89", "SM120"]
    assert content["plugin_library"] == plugin_library.name
    assert content["plugin_library_sha256"] == hashlib.sha256(plugin_library.read_bytes()).hexdigest()
    assert content["plugin_layers"] == ["MoEFinalizeAddRMSNorm"]
    assert content["profile"]["residual"] == {"min": [1, 8], "opt": [4, 8], "max": [8, 8]}
    assert content["profile"]["gamma"] == {"min": [8], "opt": [8], "max": [8]}
    assert content["onnx_path"] == "../in/model.onnx"
    assert content["onnx_sha256"] == hashlib.sha256(model.read_bytes()).hexdigest()
    assert content["engine_sha256"] == hashlib.sha256(engine.read_bytes()).hexdigest()

    for edited, says in (
        ({"engine_sha256": None}, "engine_sha256 was null; a SHA-256 sum of 64 hex digits is taken"),
        ({"format": 7}, 'format was 7; "moetrt.engine/1" is taken'),
    ):
        info.sidecar.write_text(json.dumps(content | edited))
        with pytest.raises(InputError) as caught:
            read_sidecar(engine)
        assert str(caught.value).startswith(f"'{info.sidecar}' is no whole moetrt.engine/1 file ({says})")
    info.sidecar.write_text(json.dumps(content))
    engine.write_bytes(engine.read_bytes() + b"\0")
    with pytest.raises(InputError, match="describes another engine"):
        read_sidecar(engine)


def test_targets_name_gpus_that_there_are(tmp_path: Path) -> None:
    model = save(one_tail(), tmp_path / "model.onnx")
    line = refused(model, tmp_path / "a.engine", plugin_library=None, targets=["SM90"])
    assert line.startswith("target was 'SM90'; TensorRT-RTX 1.")
    assert "SM89" in line
    for targets in ("SM89", 89, [89]):
        line = refused(model, tmp_path / "a.engine", plugin_library=None, targets=targets)
        assert line == f"targets were {targets!r}; a sequence of names such as 'SM89' is taken"


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_stops_the_build(tmp_path: Path) -> None:
    """TensorRT swallows a KeyboardInterrupt that is raised while it calls back, and builds to the end."""
    model = save(one_tail(), tmp_path / "model.onnx")
    before = signal.getsignal(signal.SIGINT)
    said: list[str] = []

    def interrupt(line: str) -> None:
        said.append(line)
        if ": step " in line and len(said) < 100:
            said.extend([""] * 100)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        build_engine(model, tmp_path / "a.engine", plugin_library=None, progress=interrupt)
    assert len(said) >= 100
    assert signal.getsignal(signal.SIGINT) is before
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    # The next one is not disturbed.
    assert build_engine(model, tmp_path / "a.engine", plugin_library=None).path.is_file()


def test_a_second_interrupt_acts_as_it_did_before() -> None:
    seen: list[int] = []

    def twice() -> None:
        with _interrupts_kept() as interrupted:
            assert not interrupted()
            signal.raise_signal(signal.SIGINT)
            assert interrupted()
            assert seen == []
            signal.raise_signal(signal.SIGINT)
            assert seen == [signal.SIGINT]

    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        with pytest.raises(KeyboardInterrupt):
            twice()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with _interrupts_kept() as interrupted:
            signal.raise_signal(signal.SIGINT)
            assert not interrupted()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_build_in_another_thread_leaves_signals_alone(tmp_path: Path) -> None:
    model = save(one_tail(), tmp_path / "model.onnx")
    with ThreadPoolExecutor() as pool:
        assert pool.submit(build_engine, model, tmp_path / "a.engine", plugin_library=None).result().path.is_file()


def test_an_older_engine_stays_when_a_build_is_refused(tmp_path: Path) -> None:
    engine = tmp_path / "a.engine"
    engine.write_bytes(b"older")
    broken = one_tail()
    wrong_hidden(broken)
    refused(save(broken, tmp_path / "model.onnx"), engine, plugin_library=None)
    assert engine.read_bytes() == b"older"


# ------------------------------------------------------------------------------------- the plugin is looked up by name


def change(attribute: str, value: str) -> Callable[[ir.Node], None]:
    def apply(node: ir.Node) -> None:
        node.attributes[attribute] = ir.AttrString(attribute, value)

    return apply


def change_domain(node: ir.Node) -> None:
    node.domain = "moe_trt"


def change_op(node: ir.Node) -> None:
    node.op_type = "MoEFinalizeAddRmsNorm"


def drop_namespace_and_change_domain(node: ir.Node) -> None:
    del node.attributes["plugin_namespace"]
    node.domain = "moe_trt"


CASE29 = {
    "op": (change_op, "op was 'MoEFinalizeAddRmsNorm'; MoEFinalizeAdd or MoEFinalizeAddRMSNorm is taken"),
    "version": (change("plugin_version", "2"), "plugin_version was '2'; '1' is taken"),
    "namespace": (change("plugin_namespace", "moe"), "plugin_namespace was 'moe'; 'moetrt' is taken"),
    "domain": (change_domain, "domain was 'moe_trt'; 'moetrt' is taken"),
    "domain-for-namespace": (drop_namespace_and_change_domain, "domain was 'moe_trt'; 'moetrt' is taken"),
}


@pytest.mark.parametrize(("fault", "said"), CASE29.values(), ids=CASE29.keys())
def test_case29_the_message_says_which_of_the_four_is_wrong(
    tmp_path: Path, plugin_library: Path, fault: Callable[[ir.Node], None], said: str
) -> None:
    model = one_tail()
    remove_functions(model)
    fault(node_of(model))
    # Against the plugins that TensorRT's own registry has.
    model.graph.opset_imports["moe_trt"] = 1
    line = refused(save(model, tmp_path / "m.onnx"), tmp_path / "a.engine", plugin_library=plugin_library)
    assert line == f"node 'MoEFinalizeAddRMSNorm' finds no plugin: {said}"


def test_case29_an_empty_registry_is_named() -> None:
    with pytest.raises(InputError, match=r"needs the plugin MoEFinalizeAddRMSNorm; the registry has none of moetrt's"):
        check_registry(one_tail(), [("ROIAlign_TRT", "2", "")])
    check_registry(one_tail(), OURS)


@pytest.mark.parametrize("lacking", [["plugin_namespace"], ["plugin_version", "plugin_namespace"]], ids="+".join)
def test_case30_a_function_without_plugin_attributes_is_warned_of(
    tmp_path: Path, plugin_library: Path, lacking: list[str]
) -> None:
    model = one_tail()
    for name in lacking:
        del node_of(model).attributes[name]
    info = build_engine(save(model, tmp_path / "m.onnx"), tmp_path / "a.engine", plugin_library=plugin_library)
    assert info.warnings == (
        f"node 'MoEFinalizeAddRMSNorm' has no attribute {' and no attribute '.join(lacking)}: TensorRT runs the "
        "function MoEFinalizeAddRMSNorm of the file, not the plugin",
    )
    # The warning is right.
    assert info.plugin_layers == ()
    assert json.loads(info.sidecar.read_text())["warnings"] == list(info.warnings)


def test_case30_the_warning_is_read_off_the_network(tmp_path: Path, plugin_library: Path) -> None:
    """TensorRT-RTX 1.7 takes the plugin where the version alone is missing; another may not. What it did counts."""
    model = one_tail()
    del node_of(model).attributes["plugin_version"]
    info = build_engine(save(model, tmp_path / "m.onnx"), tmp_path / "a.engine", plugin_library=plugin_library)
    assert bool(info.plugin_layers) != bool(info.warnings)
    assert len(run_as_functions(model, [])) == 1
    assert run_as_functions(model, ["MoEFinalizeAddRMSNorm"]) == []


def test_functions_that_tensorrt_cannot_tell_apart_need_the_plugin(tmp_path: Path, plugin_library: Path) -> None:
    model = save(two_tails(), tmp_path / "m.onnx")
    line = refused(model, tmp_path / "a.engine", plugin_library=None)
    assert "'MoEFinalizeAddRMSNorm' and node 'second' are MoEFinalizeAddRMSNorm with different optional inputs" in line
    info = build_engine(model, tmp_path / "a.engine", plugin_library=plugin_library)
    assert len(info.plugin_layers) == 2


def test_a_file_without_functions_needs_the_plugin(tmp_path: Path, plugin_library: Path) -> None:
    model = one_tail()
    remove_functions(model)
    path = save(model, tmp_path / "m.onnx")
    assert "has no function of that name" in refused(path, tmp_path / "a.engine", plugin_library=None)
    assert build_engine(path, tmp_path / "a.engine", plugin_library=plugin_library).plugin_layers
    check_functions(model, with_plugin=True)


def test_nodes_of_others_are_left_to_tensorrt() -> None:
    model = with_inputs(("x", (2, 3)))
    x = model.graph.inputs[0]
    model.graph.append(ir.node("Gelu", [x], domain="com.microsoft"))
    model.graph.append(ir.node("Other", [x], {"plugin_version": "1"}, domain="other"))
    check_registry(model, OURS)
    check_functions(model, with_plugin=False)
    assert run_as_functions(model, []) == []


# -------------------------------------------------------------------------------------------------------- refused files


def wrong_map(model: ir.Model) -> None:
    model.graph.inputs[2].dtype = ir.DataType.INT64


def wrong_hidden(model: ir.Model) -> None:
    model.graph.inputs[3].shape = ir.Shape([4, 7])


def wrong_attribute(model: ir.Model) -> None:
    node_of(model).attributes["weight_bias"] = ir.AttrFloat32("weight_bias", 3.0)


def wrong_flag(model: ir.Model) -> None:
    node_of(model).attributes["has_shared_output"] = ir.AttrInt64("has_shared_output", 1)


REFUSED = {
    "map of int64": (wrong_map, "input expanded_idx_to_permuted_idx was int64; int32 is taken"),
    "hidden size": (wrong_hidden, "input residual was [4, 7]"),
    "attribute": (wrong_attribute, "attribute weight_bias was 3"),
}


@pytest.mark.parametrize(
    ("fault", "said"),
    [*REFUSED.values(), (wrong_flag, "its has_* attributes say")],
    ids=[*REFUSED.keys(), "flag without its input"],
)
def test_a_node_that_is_not_taken_is_one_line_and_names_itself(
    tmp_path: Path, plugin_library: Path, fault: Callable[[ir.Model], None], said: str
) -> None:
    model = one_tail()
    fault(model)
    line = refused(save(model, tmp_path / "m.onnx"), tmp_path / "a.engine", plugin_library=plugin_library)
    assert "'MoEFinalizeAddRMSNorm'" in line
    assert said in line


@pytest.mark.parametrize(("fault", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_what_only_the_plugin_sees_is_its_own_line(
    tmp_path: Path,
    plugin_library: Path,
    fault: Callable[[ir.Model], None],
    said: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The graph says nothing of the residual's dtype and shape, so that the plugin is the first to know."""
    model = one_tail()
    fault(model)
    node = node_of(model)
    residual = model.graph.inputs[3]
    hidden = ir.node("Identity", [residual])
    hidden.outputs[0].name = "undeclared"
    model.graph.insert_before(node, hidden)
    node.replace_input_with(3, hidden.outputs[0])
    path = save(model, tmp_path / "m.onnx")
    line = refused(path, tmp_path / "a.engine", plugin_library=plugin_library)
    assert line.startswith("MoEFinalizeAddRMSNorm 'MoEFinalizeAddRMSNorm': ")
    assert said in line
    assert f"('{path}', tensorrt-rtx 1." in line
    assert "[moetrt]" not in capfd.readouterr().err


def test_what_tensorrt_refuses_by_itself_is_its_own_line(tmp_path: Path, plugin_library: Path) -> None:
    model = with_inputs(("x", (2, 3)), ("y", (4, 5)))
    node = ir.node("MatMul", list(model.graph.inputs), name="product")
    node.outputs[0].name = "z"
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    node.outputs[0].shape = ir.Shape([2, 5])
    model.graph.append(node)
    model.graph.outputs.append(node.outputs[0])
    # An earlier refusal of the plugin's must not be taken for this one's reason.
    broken = one_tail()
    wrong_attribute(broken)
    refused(save(broken, tmp_path / "broken.onnx"), tmp_path / "a.engine", plugin_library=plugin_library)
    path = save(model, tmp_path / "m.onnx")
    line = refused(path, tmp_path / "a.engine", plugin_library=plugin_library)
    assert line.startswith("tensorrt-rtx 1.")
    assert f"does not take '{path}': " in line
    assert "product" in line
    assert "weight_bias" not in line


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    engine = tmp_path / "a.engine"
    missing = tmp_path / "missing.onnx"
    assert refused(missing, engine) == f"ONNX model '{missing}' does not exist"
    text = tmp_path / "text.onnx"
    text.write_text("not a model\n" * 50)
    assert refused(text, engine).startswith(f"'{text}' is not an ONNX model")
    assert refused(tmp_path, engine) == f"ONNX model '{tmp_path}' is not a file"


def test_missing_weights_are_named(tmp_path: Path) -> None:
    model = with_inputs(("x", (2, 3)))
    weight = ir.Value(name="w", const_value=ir.tensor(np.ones((3, 400), np.float32), name="w"))
    model.graph.initializers["w"] = weight
    node = ir.node("MatMul", [model.graph.inputs[0], weight])
    node.outputs[0].name = "y"
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([2, 400])
    model.graph.append(node)
    model.graph.outputs.append(node.outputs[0])
    path = tmp_path / "m.onnx"
    ir.save(model, path, external_data="weights.bin")
    (tmp_path / "weights.bin").unlink()
    line = refused(path, tmp_path / "a.engine", plugin_library=None)
    assert "needs its data file 'weights.bin' beside it" in line


def test_a_library_that_is_no_plugin_library_is_named(tmp_path: Path) -> None:
    model = save(one_tail(), tmp_path / "m.onnx")
    engine = tmp_path / "a.engine"
    missing = tmp_path / "missing.so"
    assert refused(model, engine, plugin_library=missing) == f"plugin library '{missing}' does not exist"
    text = tmp_path / "text.so"
    text.write_text("not a library\n" * 50)
    assert refused(model, engine, plugin_library=text).startswith(f"plugin library '{text}' cannot be loaded: ")
    import numpy._core._multiarray_umath as other

    line = refused(model, engine, plugin_library=other.__file__)
    assert line.startswith(f"plugin library '{other.__file__}' is not moetrt's")


def test_places_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    model = save(one_tail(), tmp_path / "m.onnx")
    with pytest.raises(InputError, match=r"^output folder '/proc/self/engines' cannot be written: "):
        build_engine(model, "/proc/self/engines/a.engine", plugin_library=None)
    with pytest.raises(InputError, match="is a folder"):
        build_engine(model, tmp_path, plugin_library=None)
    before = model.read_bytes()
    assert refused(model, model, plugin_library=None) == (
        f"output file '{model}' is the ONNX model itself; another name is taken"
    )
    assert model.read_bytes() == before


def test_the_engine_replaces_no_file_that_it_is_made_from(
    tmp_path: Path, plugin_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    model = one_tail()
    weight = ir.Value(name="w", const_value=ir.tensor(np.ones((3, 400), np.float32), name="w"))
    model.graph.initializers["w"] = weight
    ir.save(model, "m.onnx", external_data="w.bin", size_threshold_bytes=0)
    source, library = Path("m.onnx").rename("a.engine.json"), tmp_path / "ours.so"
    library.write_bytes(plugin_library.read_bytes())
    (tmp_path / "link").symlink_to("folder/../w.bin")
    for engine, said in (
        ("w.bin", "output file 'w.bin' is the data file of 'a.engine.json' itself, "),
        ("link", "output file 'link' is the data file of 'a.engine.json' itself, "),
        ("a.engine", "description of the engine 'a.engine.json' is the ONNX model itself"),
        ("ours.so", "output file 'ours.so' is the plugin library itself"),
    ):
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
        assert refused(source, Path(engine), plugin_library=library).startswith(said)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    assert "is a device" in refused(source, Path("/dev/full"), plugin_library=None)
    with pytest.raises(InputTypeError, match="output file was None"):
        build_engine(source, None)  # type: ignore[arg-type]


def test_a_disk_that_is_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(one_tail(), tmp_path / "m.onnx")

    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    line = refused(model, tmp_path / "a.engine", plugin_library=None)
    assert line == f"engine '{tmp_path / 'a.engine'}' cannot be written: No space left on device"


def test_a_backend_that_cannot_build_here_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(one_tail(), tmp_path / "m.onnx")
    assert refused(model, tmp_path / "a.engine", backend="onnx", plugin_library=None).startswith("backend was 'onnx'")


# -------------------------------------------------------------------------------------------------------- full TensorRT


def with_a_module_named_tensorrt(folder: Path, module: str, code: str, *arguments: Path) -> str:
    """What ``code`` prints in a process of its own, where ``module`` is the text of tensorrt's ``__init__.py``."""
    package = folder / "tensorrt"
    package.mkdir()
    (package / "__init__.py").write_text(module)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("POLYGRAPHY_", "MOETRT_"))}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**kept, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_full_tensorrt_goes_the_same_way(tmp_path: Path, plugin_library: Path) -> None:
    """No GPU is needed to see which classes are called: a module named tensorrt that is TensorRT-RTX underneath."""
    code = """
import sys
from moetrt import backends, engine
backends.gpus = engine.gpus = lambda: (backends.Gpu("a GPU", (9, 0)),)
model, target, library = sys.argv[1:]
backends.choose()
backends.link_unversioned_name()
info = engine.build_engine(model, target, plugin_library=library)
print(info.backend, info.version, *info.targets, *info.plugin_layers)
try:
    engine.build_engine(model, target, targets=["SM89"])
except ValueError as error:
    print(error)
"""
    model = save(one_tail(), tmp_path / "m.onnx")
    module = "from tensorrt_rtx import *\n__version__ = '10.14.1'\n"
    said = with_a_module_named_tensorrt(tmp_path, module, code, model, tmp_path / "a.engine", plugin_library)
    assert said.splitlines() == [
        "tensorrt 10.14.1 SM90 MoEFinalizeAddRMSNorm",
        "targets were SM89; backend tensorrt builds for the GPU of this machine",
    ]


def test_full_tensorrt_without_a_gpu_is_named(tmp_path: Path) -> None:
    code = """
import sys
from moetrt import backends, engine
backends.gpus = engine.gpus = lambda: ()
try:
    engine.build_engine(*sys.argv[1:], backend="tensorrt", plugin_library=None)
except ValueError as error:
    print(error)
"""
    model = save(one_tail(), tmp_path / "m.onnx")
    said = with_a_module_named_tensorrt(tmp_path, "__version__ = '11.0.0'\n", code, model, tmp_path / "a.engine")
    assert said == "backend tensorrt builds on a GPU and none is to be seen; tensorrt-rtx builds without one\n"
