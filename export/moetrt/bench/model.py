"""Plans a benchmark of a mapped model: its tails and their bytes, the points to measure at, and the inputs to feed."""

import math
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import onnx_ir as ir
import torch

from moetrt.bench.plan import FILES, TOOLS, Plan, Point, TailOfModel
from moetrt.bounds import bounds_of
from moetrt.errors import InputError, MoetrtError
from moetrt.files import existing_file, file_sha256, write_atomically
from moetrt.library import find_plugin_library, library_sha256
from moetrt.onnx_files import load_model
from moetrt.onnx_op import check_node, named_inputs
from moetrt.profiles import Profile, Shape, make_profile
from moetrt.registry import check_functions, our_nodes
from moetrt.traffic import Tail, bytes_moved, ways

Shapes = Mapping[str, Shape]

_TRAFFIC_DTYPES = {ir.DataType.FLOAT: "fp32", ir.DataType.FLOAT16: "fp16", ir.DataType.BFLOAT16: "bf16"}
_TORCH_DTYPES = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.INT32: torch.int32,
    ir.DataType.INT64: torch.int64,
    ir.DataType.BOOL: torch.bool,
    ir.DataType.INT8: torch.int8,
    ir.DataType.UINT8: torch.uint8,
}
_WHOLE_NUMBERS = (ir.DataType.INT32, ir.DataType.INT64)

MAP = "expanded_idx_to_permuted_idx"


def make_plan(
    model_path: str | os.PathLike[str],
    folder: Path,
    *,
    tool: str,
    plugin_library: str | os.PathLike[str] | None = None,
    minimum: Shapes | None = None,
    optimum: Shapes | None = None,
    maximum: Shapes | None = None,
    points: Sequence[Shapes] = (),
    feeds: Sequence[Mapping[str, torch.Tensor]] = (),
    inputs_name: str = "the saved inputs",
    repeats: int = 5,
    seconds: float | None = None,
) -> tuple[Plan, list[str]]:
    """Plans a benchmark; nothing is written.

    Args:
        model_path: the mapped model.
        folder: where the benchmark's files will go.
        tool: one of `moetrt.bench.plan.TOOLS`.
        plugin_library: the library; None is the one that came with the package.
        minimum, optimum, maximum: as for `make_profile`; with none of them the profile spans the points and is tuned
            for the first.
        points: sizes to measure at, by input. An input that a point leaves out takes its named dimensions from the
            others, and the optimum for the rest. No point: the optimum.
        feeds: inputs to measure with, each a point by its shapes, in place of ``points``.
        inputs_name: what to call ``feeds`` in messages.
        repeats: how often each way is run at each point.
        seconds: measure each run for at least this long; None is the tool's default.

    Returns:
        The plan, and lines that the user should see.

    Raises:
        InputError: the model has no tail or no native form, a point lies outside the profile, or the like.
    """
    if tool not in TOOLS:
        raise InputError(f"tool was '{tool}'; auto, {', '.join(TOOLS)} are taken")
    if repeats < 1:
        raise InputError(f"repeats was {repeats}; 1 or more is taken")
    if seconds is not None and not 0 < seconds < math.inf:
        raise InputError(f"seconds was {seconds:g}; a number above 0 is taken")
    if points and feeds:
        raise InputError("points and inputs were both given; the inputs' own shapes are the points")
    source = existing_file(model_path, "ONNX model")
    model = load_model(source)
    nodes = list(our_nodes(model))
    if not nodes:
        raise InputError(f"'{source}' has no mapped tail (moetrt map makes them)")
    names = [node.name or "" for node in nodes]
    for name in names:
        if not name or names.count(name) > 1:
            raise InputError(f"'{source}' has tails named '{name}' more than once or not at all: no time is theirs")
    for node in nodes:
        check_node(node)
    # The same file is the baseline.
    check_functions(model, with_plugin=False)
    inputs = {value.name or "": value for value in model.graph.inputs if value.name not in model.graph.initializers}
    given: list[dict[str, Shape]] = [{name: tuple(tensor.shape) for name, tensor in feed.items()} for feed in feeds]
    given = given or [_told(inputs, point) for point in points]
    notes = [*map(str, bounds_of(model).values()), *_check_feeds(inputs, nodes, feeds, inputs_name)]
    for point in given:
        # Before the profile, which may be made of them.
        _check_not_empty(point)
    bounds = (minimum, optimum, maximum) if minimum or optimum or maximum else _bounds(given)
    profile = make_profile(model, *bounds)
    planned = []
    for index, point in enumerate(given or [{name: best for name, (_, best, _) in profile.items()}]):
        shapes_of = _complete(inputs, point, profile)
        _check_not_empty(shapes_of)
        _check_inside(shapes_of, profile)
        files = (
            {name: f"{FILES}/{index + 1}/input.{place}.bin" for place, name in enumerate(feeds[index])} if feeds else {}
        )
        planned.append(Point(str(index + 1), shapes_of, files))
    library = existing_file(plugin_library, "plugin library") if plugin_library is not None else find_plugin_library()
    tails = []
    for node in nodes:
        floors = [_floor_bytes(node, _symbols(inputs, point.shapes)) for point in planned]
        if None in floors:
            notes.append(f"the shapes in the file do not tell how many tokens tail '{node.name}' has: it has no floor")
        tails.append(TailOfModel(node.name or "", node.op_type, tuple(floors)))
    plan = Plan(
        tool=tool,
        model=os.path.relpath(source, folder),
        model_sha256=file_sha256(source),
        library=f"{FILES}/{library.name}",
        library_sha256=library_sha256(library),
        profile=profile,
        dynamic=tuple(name for name, value in inputs.items() if any(not isinstance(dim, int) for dim in _shape(value))),
        points=tuple(planned),
        repeats=repeats,
        seconds=None if seconds is None else float(seconds),
        tails=tuple(tails),
    )
    return plan, notes


def read_feeds(path: str | os.PathLike[str]) -> list[dict[str, torch.Tensor]]:
    """Inputs that Polygraphy or `moetrt compare --save-inputs` saved, one feed a point.

    Raises:
        InputError: the file is missing or is no such file.
    """
    from moetrt.backends import resolve, switch_polygraphy

    # Reading a file needs no TensorRT; which one Polygraphy is set to must still be settled first.
    with suppress(InputError):
        switch_polygraphy(resolve())
    from moetrt.parity.replay import load_feeds

    return load_feeds(path)


def write_inputs(plan: Plan, folder: Path, feeds: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """Writes each point's inputs as raw bytes, as ``--loadInputs`` takes them."""
    for point, feed in zip(plan.points, feeds, strict=False):
        for name, file in point.inputs.items():
            with write_atomically(folder / file) as temporary:
                temporary.write_bytes(feed[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def copy_library(plan: Plan, folder: Path, plugin_library: str | os.PathLike[str] | None) -> None:
    """Puts the plugin library into the benchmark's folder, unless it lies there."""
    source = Path(plugin_library) if plugin_library is not None else find_plugin_library()
    target = folder / plan.library
    if target.exists() and library_sha256(target) == plan.library_sha256:
        return
    with write_atomically(target) as temporary:
        shutil.copyfile(source, temporary)


def _check_feeds(
    inputs: Mapping[str, ir.Value],
    nodes: Sequence[ir.Node],
    feeds: Sequence[Mapping[str, torch.Tensor]],
    inputs_name: str,
) -> list[str]:
    """Checks the inputs that are fed, and says what the tool's random numbers mean for the others."""
    for feed in feeds:
        for name, tensor in feed.items():
            if name not in inputs:
                raise InputError(f"{inputs_name} have '{name}'; the model's inputs are {', '.join(inputs)}")
            dtype = inputs[name].dtype
            wanted = _TORCH_DTYPES.get(dtype) if dtype is not None else None
            # trtexec would take numbers of twice the width without a word, and read the first half of the file.
            if wanted is not None and tensor.dtype != wanted:
                raise InputError(f"{inputs_name} have '{name}' as {tensor.dtype}; the model takes {wanted}")
        missing = [name for name in inputs if name not in feed]
        if missing:
            raise InputError(f"{inputs_name} have no '{missing[0]}'; each feed needs {', '.join(inputs)}")
    if feeds:
        return []
    for node in nodes:
        routes = named_inputs(node).get(MAP)
        if routes is not None and routes.name in inputs:
            raise InputError(
                f"input '{routes.name}' is the map of tail '{node.name}', and random numbers are no map: rows that it "
                "does not name are not read; give saved inputs (--load-inputs)"
            )
    notes = []
    for name, value in inputs.items():
        if value.dtype not in _WHOLE_NUMBERS:
            continue
        rows = _table_rows(value)
        if rows is None:
            meaning = "; --load-inputs gives it others"
        else:
            meaning = (
                f", which are not valid token ids: it looks rows up in a table of {rows}, 0 to {rows - 1}; use "
                "--load-inputs (moetrt compare --save-inputs writes such a file)"
            )
        notes.append(f"input '{name}' gets random whole numbers, -128 to 127 from trtexec{meaning}")
    return notes


def _table_rows(value: ir.Value) -> int | None:
    """The rows of the table that an input's numbers are looked up in, as token ids are; None where there is none."""
    for use in value.uses():
        node = use.node
        if node.op_type == "Gather" and use.idx == 1 and node.inputs[0] is not None:
            table = node.inputs[0]
            axis = node.attributes.get_int("axis", 0)
            if table.is_initializer() and table.shape is not None and isinstance(table.shape[axis], int):
                return int(table.shape[axis])  # type: ignore[arg-type]
        elif node.op_type in ("Cast", "Identity") and (rows := _table_rows(node.outputs[0])) is not None:
            return rows
    return None


def _shape(value: ir.Value) -> list[int | ir.SymbolicDim]:
    return list(value.shape) if value.shape is not None else []


def _symbols(inputs: Mapping[str, ir.Value], shapes: Shapes) -> dict[str, int]:
    """The sizes of the inputs' named dimensions."""
    return {
        dim.value: size
        for name, shape in shapes.items()
        for dim, size in zip(_shape(inputs[name]), shape, strict=True)
        if isinstance(dim, ir.SymbolicDim) and dim.value
    }


def _bounds(points: Sequence[Shapes]) -> tuple[dict[str, Shape], dict[str, Shape], dict[str, Shape]]:
    """The smallest, the first and the largest shapes of the points, by input."""
    low: dict[str, Shape] = {}
    best: dict[str, Shape] = {}
    high: dict[str, Shape] = {}
    for name in dict.fromkeys(name for point in points for name in point):
        shapes = [point[name] for point in points if name in point]
        if len({*map(len, shapes)}) > 1:
            raise InputError(f"points give input '{name}' shapes of different ranks: {', '.join(map(_dims, shapes))}")
        best[name] = shapes[0]
        low[name] = tuple(map(min, zip(*shapes, strict=True)))
        high[name] = tuple(map(max, zip(*shapes, strict=True)))
    return low, best, high


def _told(inputs: Mapping[str, ir.Value], point: Shapes) -> dict[str, Shape]:
    """A point with the inputs that it leaves out, as far as its named dimensions tell their shapes."""
    shapes = dict(point)
    if any(name not in inputs or len(shape) != len(_shape(inputs[name])) for name, shape in point.items()):
        return shapes  # make_profile says what is wrong
    known = _symbols(inputs, point)
    for name, value in inputs.items():
        sizes = [dim if isinstance(dim, int) else known.get(dim.value or "") for dim in _shape(value)]
        if name not in shapes and None not in sizes:
            shapes[name] = tuple(size for size in sizes if size is not None)
    return shapes


def _complete(inputs: Mapping[str, ir.Value], point: Shapes, profile: Mapping[str, Profile]) -> dict[str, Shape]:
    for name, shape in point.items():
        if name not in inputs:
            raise InputError(f"point names input '{name}'; the model's inputs are {', '.join(inputs)}")
        if len(shape) != len(_shape(inputs[name])):
            raise InputError(
                f"point gives input '{name}' the shape {_dims(shape)}; rank {len(_shape(inputs[name]))} is taken"
            )
    known = _symbols(inputs, point)
    complete = {}
    for name, value in inputs.items():
        best = profile[name][1]
        complete[name] = tuple(
            dim if isinstance(dim, int) else known.get(dim.value or "", best[axis])
            for axis, dim in enumerate(_shape(value))
        )
        if name in point and complete[name] != tuple(point[name]):
            raise InputError(
                f"point gives input '{name}' the shape {_dims(point[name])}; with its other inputs and the model's "
                f"fixed sizes it is {_dims(complete[name])}"
            )
    return complete


def _check_not_empty(shapes: Shapes) -> None:
    for name, shape in shapes.items():
        if 0 in shape:
            raise InputError(
                f"point gives input '{name}' the shape {_dims(shape)}, of no element: there is nothing to time; sizes "
                "of 1 or more are taken"
            )


def _check_inside(shapes: Shapes, profile: Mapping[str, Profile]) -> None:
    for name, shape in shapes.items():
        low, _, high = profile[name]
        if any(not least <= size <= most for least, size, most in zip(low, shape, high, strict=True)):
            raise InputError(
                f"point gives input '{name}' the shape {_dims(shape)}; the profile takes {_dims(low)} to {_dims(high)}"
            )


def _floor_bytes(node: ir.Node, symbols: Mapping[str, int]) -> int | None:
    """The bytes that the tail must move, all routes on this rank; None where the file does not tell its sizes."""

    def sizes(value: ir.Value | None) -> list[int] | None:
        if value is None or value.shape is None:
            return None
        known = []
        for dim in value.shape:
            size = dim
            if isinstance(dim, ir.SymbolicDim) and dim.value:
                # An expression that is none of sizes, such as a name of the exporter's with odd characters.
                with suppress(ValueError):
                    size = dim.evaluate(dict(symbols))
            if not isinstance(size, int):
                return None
            known.append(size)
        return known

    def dtype(name: str, otherwise: str) -> str:
        found = given[name].dtype if name in given else None
        return _TRAFFIC_DTYPES[found] if found is not None else otherwise

    given = named_inputs(node)
    weights = sizes(given["expert_weights"])
    # Every array of H numbers a token tells H, and T where the weights do not.
    wide = [sizes(value) for value in (*node.outputs, given.get("residual"), given.get("shared_output"))]
    known = next((shape for shape in wide if shape), None)
    if weights is None or known is None:
        return None
    rows = dtype("gemm2_permuted", "")
    try:
        tail = Tail(
            tokens=weights[0],
            top_k=weights[1],
            hidden=known[-1],
            dtype=rows,
            weights_dtype=dtype("expert_weights", rows),
            gate_dtype=dtype("shared_gate", rows),
            gamma_dtype=dtype("gamma", rows),
            mapped=MAP in given,
            shared="shared_output" in given,
            gate="shared_gate" in given,
            residual="residual" in given,
            norm="gamma" in given,
        )
    except MoetrtError:
        # The rows' dtype is not written into the file.
        return None
    return bytes_moved(ways(tail)["fused"])


def _dims(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"
