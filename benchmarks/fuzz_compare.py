"""A graph and its mapped form side by side in ONNX Runtime, each held against the graph in float64.

A number is wrong where its distance from float64 is beyond what the graph's own arithmetic has. The graph's largest
distance from float64 in an output, times four, is allowed; that may be small by luck, so that what a unit in the last
place of the inputs changes in float64 counts as its own too, and eight roundings of the output's own element type, of
its largest value, are allowed beside. Where float64 makes another decision than both
(a comparison, a rounding to integers), or cannot be run, the graph itself is what the mapped one is held against.

NaN and Inf must be where the graph has them, but where only its own arithmetic overflows (float64 is finite there, and
the mapped graph near it); Inf in place of NaN is as loud.
"""

import ctypes
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import onnx.inliner
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

Arrays = dict[str, np.ndarray]

_SIZES = (
    {"T": 0, "B": 2, "S": 0},
    {"T": 1, "B": 1, "S": 1},
    {"T": 3, "B": 3, "S": 1},
    {"T": 17, "B": 1, "S": 17},
)
_ROWS, _TOP_K = 24, 3
_NARROW = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "float64": 2.0**-53}


class Refused(Exception):
    """ONNX Runtime does not load a graph; the text says why."""


@dataclass(frozen=True)
class Feeds:
    """Inputs of a graph.

    Attributes:
        what: in words: sizes, and what is special.
    """

    what: str
    values: Arrays


class Session:
    """A model in ONNX Runtime, unoptimised, on one thread.

    Raises:
        Refused: it is not loaded.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        try:
            self._session = onnxruntime.InferenceSession(
                _rounded(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # ONNX Runtime's own exceptions have no common base
            raise Refused(" ".join(str(error).split())) from error
        self._types = {value.name: value.type for value in self._session.get_inputs()}

    def run(self, feeds: Mapping[str, np.ndarray]) -> Arrays | None:
        """The outputs by name; None where the graph does not run on these inputs."""
        given = {}
        for name, array in feeds.items():
            if self._types.get(name) == "tensor(bfloat16)":
                given[name] = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
                    array.view(np.uint16), TensorProto.BFLOAT16
                )
            elif name in self._types:
                given[name] = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        names = [output.name for output in self._session.get_outputs()]
        try:
            made = self._session.run_with_ort_values(names, given)
        except Exception:  # ONNX Runtime's own exceptions have no common base
            return None
        return {name: _array(value) for name, value in zip(names, made, strict=True)}


def _rounded(model: onnx.ModelProto) -> onnx.ModelProto:
    """A graph of float16 that ONNX Runtime rounds after each node, as the graph says.

    It has most operators in float32 alone, and hands their results on in float32, through one Identity too, which it
    takes for another node between Casts; what goes through two is float16 there.
    """
    casts = [a.i for node in model.graph.node if node.op_type == "Cast" for a in node.attribute if a.name == "to"]
    inputs = [value.type.tensor_type.elem_type for value in model.graph.input]
    if TensorProto.FLOAT16 not in (*casts, *inputs):
        return model
    rounded = onnx.ModelProto()
    rounded.CopyFrom(model)
    del rounded.graph.node[:]
    for node in model.graph.node:
        made = rounded.graph.node.add()
        made.CopyFrom(node)
        for number, name in enumerate(node.output):
            if name:
                made.output[number] = f"{name}/made"
                for before, after in ((f"{name}/made", f"{name}/rounded"), (f"{name}/rounded", name)):
                    rounded.graph.node.add().CopyFrom(helper.make_node("Identity", [before], [after]))
    return rounded


def _array(value: onnxruntime.OrtValue) -> np.ndarray:
    if value.element_type() != TensorProto.BFLOAT16:
        return np.asarray(value.numpy())
    shape = value.shape()
    size = 2 * math.prod(shape)
    bits = ctypes.string_at(value.data_ptr(), size) if size else b""
    return np.frombuffer(bits, dtype=helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16)).reshape(shape)


def feeds_of(model: onnx.ModelProto, seed: int) -> Iterator[Feeds]:
    """Inputs for a model: 0, 1, 3 and 17 tokens, then special values.

    Dimensions that are not T, B, S, N (T * K), R or E are T, and 1 the second time.
    """
    random = np.random.default_rng(seed)
    known = {"T", "B", "S", "N", "R"}
    names = {
        dim.dim_param
        for value in model.graph.input
        for dim in value.type.tensor_type.shape.dim
        if not dim.HasField("dim_value") and dim.dim_param not in known
    }
    # ONNX Runtime's Einsum divides by the number of elements, which ends the process.
    operators = {node.op_type for node in model.graph.node}
    dividing = "Einsum" in operators
    # NaN as an integer may be any.
    casts = {a.i for node in model.graph.node if node.op_type == "Cast" for a in node.attribute if a.name == "to"}
    guesses = bool(casts - {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})
    # A matrix has 0 for the rows that it does not choose, and 0 times NaN is NaN; the operator does not read them.
    spreads = bool({"OneHot", "Equal", "ScatterElements"} & operators)

    def drawn(sizes: Mapping[str, int], others: int | None = None, **special: bool) -> Arrays:
        return {value.name: _input(value, sizes, others, random, **special) for value in model.graph.input}

    for sizes in _SIZES[1:] if dividing else _SIZES:
        what = f"T={sizes['T']}"
        values = drawn(sizes)
        yield Feeds(what, values)
        if sizes["T"] > 1:
            yield Feeds(f"{what}, entries beyond the rows", drawn(sizes, beyond=True))
            if names:
                yield Feeds(f"{what}, unnamed sizes 1", drawn(sizes, 1))
        if sizes["T"] == 17:
            yield Feeds(f"{what}, small numbers", drawn(sizes, small=True))
            if guesses:
                continue
            # A map that drops its -1 drops the row that these read (the first, or the last), and that row's weight.
            kept = {"weights", *(["rows"] if spreads else [])}
            yield Feeds(f"{what}, NaN and Inf", _with_specials(values, set(values) - kept, random))


def _input(
    value: onnx.ValueInfoProto,
    sizes: Mapping[str, int],
    others: int | None,
    random: np.random.Generator,
    *,
    beyond: bool = False,
    small: bool = False,
) -> np.ndarray:
    tokens = sizes["T"]
    numbers = {**sizes, "N": tokens * _TOP_K, "R": _ROWS, "K": _TOP_K}
    tensor = value.type.tensor_type
    shape = [
        dim.dim_value if dim.HasField("dim_value") else numbers.get(dim.dim_param, tokens if others is None else others)
        for dim in tensor.shape.dim
    ]
    kind = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    if tensor.elem_type in (TensorProto.INT32, TensorProto.INT64):
        if value.name == "ids":
            return random.integers(0, 4, shape).astype(kind)
        low, high = (-3, _ROWS + 3) if beyond else (-1, _ROWS)
        return random.integers(low, high, shape).astype(kind)
    # Of small numbers eps is no small part.
    array = random.standard_normal(shape) * (0.02 if small and value.name in ("rows", "shared", "residual") else 1.0)
    return (random.random(shape) if value.name == "weights" else array).astype(kind)


def _with_specials(values: Arrays, names: set[str], random: np.random.Generator) -> Arrays:
    """Some numbers of one row of each of these inputs are NaN or infinite."""
    special = dict(values)
    for name, array in values.items():
        if name in names and array.dtype.kind != "i" and array.size:
            copied = array.copy()
            flat = copied.reshape(-1)
            width = array.shape[-1] if array.ndim > 1 else 1
            count = flat.size // width
            start = int(random.integers(count // 3, count - 1) if count > 3 else 0) * width
            for number in (np.nan, np.inf, -np.inf):
                flat[start + int(random.integers(width))] = number
            special[name] = copied
    return special


@dataclass(frozen=True)
class Wrong:
    """A number of the mapped graph that is wrong.

    Attributes:
        error: its distance from float64; infinite where one is no number and the other is.
        allowed: the distance that the graph's own arithmetic explains.
    """

    feeds: str
    output: str
    error: float
    allowed: float

    def __str__(self) -> str:
        return f"{self.feeds}: '{self.output}' is off by {self.error:.3g}, allowed {self.allowed:.3g}"


class Comparison:
    """A graph, its mapped form, and the graph in float64, which is only run where the two differ.

    Raises:
        Refused: the mapped model is not loaded.
    """

    def __init__(self, original: onnx.ModelProto, mapped: onnx.ModelProto, session: Session) -> None:
        self._original = original
        self._before, self._after = session, Session(mapped)
        self._exact: Session | None = None
        self._has_exact = True

    def wrong(self, feeds: Feeds, before: Arrays) -> Wrong | None:
        """What is wrong with the mapped graph's outputs, where the graph itself gives ``before``."""
        after = self._after.run(feeds.values)
        if after is None or list(after) != list(before):
            return Wrong(feeds.what, "all of them: it does not run", np.inf, 0.0)
        for name, one in before.items():
            other = after[name]
            if one.shape != other.shape or one.dtype != other.dtype:
                return Wrong(feeds.what, f"{name}' of shape {list(other.shape)}, not '{list(one.shape)}", np.inf, 0.0)
            if one.dtype.kind in "iub":
                if not np.array_equal(one, other):
                    return Wrong(feeds.what, name, float(np.abs(one.astype(float) - other.astype(float)).max()), 0.0)
            elif not _near(one, other, 8.0, _scale(one)).all():
                found = self._beyond(feeds, name, before, after)
                if found is not None:
                    return found
        return None

    def _beyond(self, feeds: Feeds, name: str, outputs: Arrays, mapped: Arrays) -> Wrong | None:
        before, after = outputs[name], mapped[name]
        unit = _UNIT[str(before.dtype)]
        one, other = before.astype(np.float64), after.astype(np.float64)
        exact, *blurred = self._in_float64(feeds, name) or [one]
        if exact.shape != one.shape:
            exact, blurred = one, []
        with np.errstate(invalid="ignore"):
            both = np.isfinite(one) & np.isfinite(exact)
            own = max(np.abs(of - exact)[both & np.isfinite(of)].max(initial=0.0) for of in (one, *blurred))
            allowed = 4.0 * own + 8.0 * unit * _scale(one)
            off = np.abs(other - exact)
            fits = both & np.isfinite(other) & (off <= allowed)
            fits |= (one == other) | (np.isnan(one) & ~np.isfinite(other))
            # Only the graph's own arithmetic overflows.
            fits |= ~np.isfinite(one) & np.isfinite(exact) & (off <= allowed + 8.0 * unit * np.abs(exact))
            # float64 decides otherwise.
            fits |= np.isfinite(one) & ~np.isfinite(exact) & (np.abs(one - other) <= allowed)
        if fits.all():
            return None
        worst = np.where(fits, 0.0, np.where(np.isfinite(off), off, np.inf))
        return Wrong(feeds.what, name, float(worst.max()), float(allowed))

    def _in_float64(self, feeds: Feeds, name: str) -> list[np.ndarray]:
        """One output of the graph in float64, and those of inputs that are a unit in the last place off.

        Returns:
            nothing where ONNX Runtime has no operator for it.
        """
        if self._exact is None and self._has_exact:
            try:
                self._exact = Session(in_float64(self._original))
            except Refused:
                self._has_exact = False
        if self._exact is None:
            return []
        random = np.random.default_rng(0)
        draws = [{key: _blurred(value, random) for key, value in feeds.values.items()} for _ in range(4)]
        runs = [self._exact.run(values) for values in (_all_widened(feeds.values), *draws)]
        found = [outputs[name] for outputs in runs if outputs is not None]
        return found if len(found) == len(runs) and len({array.shape for array in found}) == 1 else []


def _all_widened(values: Arrays) -> Arrays:
    return {key: _widened(value) for key, value in values.items()}


def _blurred(array: np.ndarray, random: np.random.Generator) -> np.ndarray:
    wide = _widened(array)
    if array.dtype.kind in "iub":
        return wide
    return np.asarray(wide * (1.0 + 2.0 * _UNIT[str(array.dtype)] * random.uniform(-1.0, 1.0, wide.shape)))


def _widened(array: np.ndarray) -> np.ndarray:
    return array if array.dtype.kind in "iub" else array.astype(np.float64)


def _scale(array: np.ndarray) -> float:
    wide = np.abs(array.astype(np.float64))
    return float(wide[np.isfinite(wide)].max(initial=0.0))


def _near(one: np.ndarray, other: np.ndarray, roundings: float, scale: float) -> np.ndarray:
    """Where both are the same, or as near as a few roundings of the largest value."""
    first, second = one.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore"):
        close = np.abs(first - second) <= roundings * _UNIT[str(one.dtype)] * scale
    return close | (first == second) | (np.isnan(first) & np.isnan(second))


def in_float64(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with every floating-point number in float64, its Casts to narrower ones too."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    if model.functions:
        # The inliner knows no defaults of attributes.
        for node in wide.graph.node:
            given = {attribute.name for attribute in node.attribute}
            for function in wide.functions:
                if (function.domain, function.name) == (node.domain, node.op_type):
                    node.attribute.extend(a for a in function.attribute_proto if a.name not in given)
        wide = onnx.inliner.inline_local_functions(wide)
    graph = wide.graph
    del graph.value_info[:]
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type in _NARROW:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for tensor in graph.initializer:
        _widen(tensor)
    for number, node in reversed(list(enumerate(graph.node))):
        if node.op_type == "OneHot":
            # It is not there in float64.
            before, after = f"{node.output[0]}/values", f"{node.output[0]}/narrow"
            graph.node.insert(number + 1, helper.make_node("Cast", [after], [node.output[0]], to=TensorProto.DOUBLE))
            node.output[0] = after
            graph.node.insert(number, helper.make_node("Cast", [node.input[2]], [before], to=TensorProto.FLOAT))
            graph.node[number + 1].input[2] = before
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name == "to" and node.op_type == "Cast" and node.output[0].endswith("/values"):
                continue
            if attribute.name == "to" and attribute.i in _NARROW:
                attribute.i = TensorProto.DOUBLE
            elif attribute.type == onnx.AttributeProto.TENSOR:
                _widen(attribute.t)
            elif node.op_type == "Constant" and attribute.name == "value_float":
                number = numpy_helper.from_array(np.array(attribute.f, dtype=np.float64))
                attribute.CopyFrom(helper.make_attribute("value", number))
            elif attribute.name == "stash_type":
                attribute.i = TensorProto.DOUBLE
    return wide


def _widen(tensor: TensorProto) -> None:
    if tensor.data_type in _NARROW:
        array = numpy_helper.to_array(tensor).astype(np.float64)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
