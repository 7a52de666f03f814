"""The operators as a table: every input, output and attribute.

The PyTorch op, the ONNX node, its function and the checks are made from it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moetrt.errors import InputError, InputTypeError

DOMAIN = "moetrt"
"""ONNX domain, TensorRT plugin namespace and torch.library namespace."""

PLUGIN_NAMESPACE = DOMAIN
PLUGIN_VERSION = "1"

DATA_DTYPES = ("bfloat16", "float16", "float32")
"""What the rows may be; the other floating-point inputs are the rows' dtype or float32."""


_FLOAT32_MAX = (2 - 2**-23) * 2.0**127


@dataclass(frozen=True)
class InputSpec:
    """One input of an operator.

    Attributes:
        name: its name everywhere.
        shape: its shape in the words of the documentation.
        dtype: "data" (the rows' dtype), "data or float32", or "int32".
        optional: whether it may be absent; an absent input is left out of a node, and the order of the rest stays.
        doc: what it is.
    """

    name: str
    shape: str
    dtype: str
    doc: str
    optional: bool = False

    @property
    def flag(self) -> str:
        """The attribute that says whether an optional input is given."""
        return f"has_{self.name}"


@dataclass(frozen=True)
class AttributeSpec:
    """One attribute: ``kind`` is "FLOAT" (float32 field) or "FLAG" (INT, an int32 field of 0 or 1)."""

    name: str
    kind: str
    default: float | int
    doc: str
    taken: tuple[float, ...] = ()
    minimum: float = -math.inf

    def check(self, value: object, where: str) -> float | int:
        """Returns ``value`` as the attribute's Python type.

        Raises:
            InputTypeError: it is not a number of the attribute's kind.
            InputError: it is a number that is not taken.
        """
        if self.kind == "FLAG":
            if not isinstance(value, int):
                raise InputTypeError(f"{where}: attribute {self.name} was {value!r}; 0 or 1 is taken")
            if value not in (0, 1):
                raise InputError(f"{where}: attribute {self.name} was {value!r}; 0 or 1 is taken")
            return int(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputTypeError(f"{where}: attribute {self.name} was {value!r}; a float is taken")
        # Attributes are float32 fields; nan fails the comparison too.
        if not -_FLOAT32_MAX <= value <= _FLOAT32_MAX or value < self.minimum:
            least = "" if self.minimum == -math.inf else f" of at least {self.minimum:g}"
            raise InputError(f"{where}: attribute {self.name} was {value!r}; a finite float{least} is taken")
        if self.taken and value not in self.taken:
            raise InputError(
                f"{where}: attribute {self.name} was {value!r}; {' or '.join(f'{v:g}' for v in self.taken)} is taken"
            )
        return float(value)


@dataclass(frozen=True)
class OperatorSpec:
    """One operator.

    Attributes:
        name: ONNX op_type and TensorRT plugin name.
        torch_name: name in the torch.library namespace ``moetrt``.
        inputs: in the order of a node's inputs.
        outputs: in order.
        attributes: all but the ``has_*`` flags, which follow from ``inputs``.
        doc: what it computes.
    """

    name: str
    torch_name: str
    inputs: tuple[InputSpec, ...]
    outputs: tuple[str, ...]
    attributes: tuple[AttributeSpec, ...]
    doc: str

    @property
    def optional_inputs(self) -> tuple[InputSpec, ...]:
        return tuple(spec for spec in self.inputs if spec.optional)

    @property
    def flags(self) -> tuple[AttributeSpec, ...]:
        """The ``has_*`` attributes; their default says what a node without the flag has."""
        return tuple(
            AttributeSpec(spec.flag, "FLAG", int(spec.name in _PRESENT_BY_DEFAULT), f"whether {spec.name} is given")
            for spec in self.optional_inputs
        )

    @property
    def all_attributes(self) -> tuple[AttributeSpec, ...]:
        """Every attribute of a node but ``plugin_version`` and ``plugin_namespace``."""
        return self.flags + self.attributes

    def complete(self, attributes: Mapping[str, object], where: str | None = None) -> dict[str, float | int]:
        """Returns ``attributes`` (without ``has_*`` flags) with each checked and the defaults filled in.

        Args:
            attributes: by name.
            where: what to call the node in messages; the operator's name by default.

        Raises:
            InputError, InputTypeError: an unknown name, or a value that is not taken.
        """
        where = where or self.name
        known = {spec.name for spec in self.attributes}
        for name in attributes:
            if name not in known:
                raise InputError(f"{where}: attribute {name} is unknown; taken are {', '.join(sorted(known))}")
        return {spec.name: spec.check(attributes.get(spec.name, spec.default), where) for spec in self.attributes}


_PRESENT_BY_DEFAULT = ("expanded_idx_to_permuted_idx", "residual")

_ROUTED_INPUTS = (
    InputSpec("gemm2_permuted", "[R, Hp], Hp >= H", "data", "the second expert GEMM's rows, one a route, unweighted"),
    InputSpec("expert_weights", "[T, K]", "data or float32", "the routing weight of each route"),
    InputSpec(
        "expanded_idx_to_permuted_idx",
        "[T, K]",
        "int32",
        "the row of each route; -1: on another rank, nothing is added; absent: row t*K+k",
        optional=True,
    ),
    InputSpec("shared_output", "[..., H]", "data", "the shared expert's output", optional=True),
    InputSpec(
        "shared_gate",
        "[T, 1]",
        "data or float32",
        "logits: shared_output is multiplied by their sigmoid, in float32",
        optional=True,
    ),
)

_ROUTED_ATTRIBUTES = (
    AttributeSpec("combine_scale", "FLOAT", 1.0, "multiplies the sum of the routed and the shared part"),
    AttributeSpec(
        "routed_scaling_factor",
        "FLOAT",
        1.0,
        "multiplies the routed part; 1.0 where the routing method folded it into the weights",
    ),
    AttributeSpec(
        "apply_expert_weights", "FLAG", 1, "0: the weights were applied before GEMM1, every route counts once"
    ),
)

_LAUNCH_ATTRIBUTES = (
    AttributeSpec(
        "programmatic_dependent_launch",
        "FLAG",
        1,
        "1: on SM90 and later the kernel may start while the one before it ends; the numbers are the same",
    ),
)

FINALIZE_ADD_RMS_NORM = OperatorSpec(
    name="MoEFinalizeAddRMSNorm",
    torch_name="moe_finalize_add_rms_norm",
    inputs=(
        *_ROUTED_INPUTS,
        InputSpec("residual", "[..., H]", "data", "the residual stream", optional=True),
        InputSpec("gamma", "[H]", "data or float32", "the weight of the RMSNorm"),
    ),
    outputs=("norm_out", "residual_out"),
    attributes=(
        AttributeSpec("eps", "FLOAT", 1e-6, "added to the mean square", minimum=0.0),
        AttributeSpec("residual_scale", "FLOAT", 1.0, "multiplies the residual"),
        *_ROUTED_ATTRIBUTES,
        AttributeSpec("weight_bias", "FLOAT", 0.0, "added to gamma in float32 (1 for Gemma)", taken=(0.0, 1.0)),
        AttributeSpec(
            "weight_before_cast",
            "FLAG",
            1,
            "1: gamma is multiplied in float32 and rounded once; 0: the normalised value is rounded first",
        ),
        *_LAUNCH_ATTRIBUTES,
    ),
    doc="Finalize, scale, shared-expert add, residual add and RMSNorm of a Mixture-of-Experts layer.",
)

FINALIZE_ADD = OperatorSpec(
    name="MoEFinalizeAdd",
    torch_name="moe_finalize_add",
    inputs=_ROUTED_INPUTS,
    outputs=("hidden",),
    attributes=_ROUTED_ATTRIBUTES + _LAUNCH_ATTRIBUTES,
    doc="Finalize, scale and shared-expert add of a Mixture-of-Experts layer.",
)

OPERATORS: dict[str, OperatorSpec] = {spec.name: spec for spec in (FINALIZE_ADD_RMS_NORM, FINALIZE_ADD)}


@dataclass(frozen=True)
class Operand:
    """What is known of one input: its dtype (numpy's spelling) and its dimensions, None where not known yet."""

    dtype: str
    shape: Sequence[int | None]


def check_operands(
    spec: OperatorSpec,
    operands: Mapping[str, Operand],
    *,
    where: str | None = None,
    data_dtypes: Sequence[str] = DATA_DTYPES,
) -> None:
    """Checks dtypes, ranks and the sizes that are known.

    Args:
        spec: the operator.
        operands: the inputs that are given, by name.
        where: what to call the node in messages; the operator's name by default.
        data_dtypes: what the rows may be.

    Raises:
        InputTypeError: a dtype that is not taken.
        InputError: an input missing, unknown, or of a shape that is not taken.
    """
    where = where or spec.name
    by_name = {entry.name: entry for entry in spec.inputs}
    for name in operands:
        if name not in by_name:
            raise InputError(f"{where}: input {name} is unknown; taken are {', '.join(by_name)}")
    for entry in spec.inputs:
        if not entry.optional and entry.name not in operands:
            raise InputError(f"{where}: input {entry.name} is missing; it is not optional")
    if "shared_gate" in operands and "shared_output" not in operands:
        raise InputError(f"{where}: input shared_gate is given without shared_output, which it gates")
    _check_dtypes(spec, operands, where, data_dtypes)
    _check_shapes(operands, where)


def _check_dtypes(spec: OperatorSpec, operands: Mapping[str, Operand], where: str, data_dtypes: Sequence[str]) -> None:
    data = operands["gemm2_permuted"].dtype
    for entry in spec.inputs:
        if entry.name not in operands:
            continue
        if entry.name == "gemm2_permuted":
            taken = tuple(data_dtypes)
        elif entry.dtype == "int32":
            taken = ("int32",)
        elif entry.dtype == "data":
            taken = (data,)
        else:
            taken = tuple(dict.fromkeys((data, "float32")))
        if operands[entry.name].dtype not in taken:
            follows_rows = entry.dtype != "int32" and entry.name != "gemm2_permuted"
            why = f" (gemm2_permuted is {data})" if follows_rows else ""
            raise InputTypeError(
                f"{where}: input {entry.name} was {operands[entry.name].dtype}; {' or '.join(taken)} is taken{why}"
            )


def _check_shapes(operands: Mapping[str, Operand], where: str) -> None:
    shapes = {name: tuple(operand.shape) for name, operand in operands.items()}

    def fail(name: str, taken: str) -> InputError:
        return InputError(f"{where}: input {name} was {_text(shapes[name])}; {taken} is taken")

    for name, rank in (
        ("gemm2_permuted", 2),
        ("expert_weights", 2),
        ("expanded_idx_to_permuted_idx", 2),
        ("shared_gate", 2),
        ("gamma", 1),
    ):
        if name in shapes and len(shapes[name]) != rank:
            raise fail(name, f"rank {rank}, {_SHAPES[name]},")
    for name in ("shared_output", "residual"):
        if name in shapes and len(shapes[name]) < 2:
            raise fail(name, "rank 2 or more, [..., H],")

    rows, stride = shapes["gemm2_permuted"]
    tokens, top_k = shapes["expert_weights"]
    if top_k == 0:
        raise fail("expert_weights", "K >= 1 in [T, K]")
    if "expanded_idx_to_permuted_idx" in shapes:
        wanted = (tokens, top_k)
        if _differ(shapes["expanded_idx_to_permuted_idx"], wanted):
            raise fail("expanded_idx_to_permuted_idx", f"[T, K] = {_text(wanted)}, the shape of expert_weights,")
    elif rows is not None and tokens is not None and top_k is not None and rows != tokens * top_k:
        raise fail("gemm2_permuted", f"R = T*K = {tokens * top_k} rows where the map is absent")

    hidden = None
    for name in ("gamma", "residual", "shared_output"):
        if name in shapes and hidden is None:
            hidden = shapes[name][-1]
    for name in ("residual", "shared_output"):
        if name in shapes and _differ((shapes[name][-1],), (hidden,)):
            raise fail(name, f"a last dimension of H = {hidden}")
    if hidden is not None:
        if hidden < 1:
            raise fail("gamma" if "gamma" in shapes else "shared_output", "H >= 1")
        if stride is not None and stride < hidden:
            raise fail("gemm2_permuted", f"Hp >= H = {hidden} in [R, Hp]")
    if "shared_gate" in shapes and _differ(shapes["shared_gate"], (tokens, 1)):
        raise fail("shared_gate", f"[T, 1] = {_text((tokens, 1))}")
    for name in ("residual", "shared_output"):
        if name in shapes and tokens is not None:
            leading = shapes[name][:-1]
            known = [dim for dim in leading if dim is not None]
            if len(known) == len(leading) and math.prod(known) != tokens:
                raise fail(name, f"leading dimensions that multiply to T = {tokens}")


_SHAPES = {entry.name: entry.shape for entry in FINALIZE_ADD_RMS_NORM.inputs}


def _differ(got: Sequence[int | None], wanted: Sequence[int | None]) -> bool:
    """Whether two shapes differ in a dimension that is known in both."""
    return any(a is not None and b is not None and a != b for a, b in zip(got, wanted, strict=True))


def _text(shape: Sequence[int | None]) -> str:
    return "[" + ", ".join("?" if dim is None else str(dim) for dim in shape) + "]"
