"""docs/operator.md: the operators' reference, written from their table (`moetrt.spec`) and body (`moetrt.definition`).

python -m moetrt.operator_page docs/operator.md
"""

import sys
from collections.abc import Callable, Mapping, Sequence

from moetrt.definition import evaluate
from moetrt.errors import MoetrtError
from moetrt.files import write_atomically
from moetrt.onnx_op import OPSET_VERSION
from moetrt.spec import (
    DATA_DTYPES,
    DOMAIN,
    FINALIZE_ADD,
    FINALIZE_ADD_RMS_NORM,
    OPERATORS,
    PLUGIN_NAMESPACE,
    PLUGIN_VERSION,
    AttributeSpec,
    Operand,
    OperatorSpec,
    check_operands,
)

_PAGE = """\
<!-- Written by `make docs` (python -m moetrt.operator_page docs/operator.md) from moetrt/spec.py and definition.py. -->

# The operators

A *route* is one of a token's K experts. T tokens, K routes a token, R rows, H hidden size; Hp is the rows' stride.

| | |
|---|---|
| ONNX domain, opset | `{domain}`, {opset} |
| TensorRT plugin namespace, version | `{namespace}`, `"{version}"` |
| ONNX op_type = TensorRT plugin name = PyTorch operator | {names} |
| rows' dtypes | {dtypes} |
| TensorRT tensor format | linear |

A node carries the attributes `plugin_version` and `plugin_namespace` beside those below; TensorRT's parser finds the
plugin by them. An optional input that is absent is left out of the node: it is not an empty name, and the order of the
others stays. The `has_*` attributes say which are given. FLOAT attributes are float32, INT attributes int32.

{operators}
## Numerics

- Weights, sum over K, scales, shared add and residual add are float32. One rounding to the rows' dtype gives
  `residual_out` (`hidden`). 16-bit inputs are widened without loss.
- The norm reads the rounded value. Mean square, 1/sqrt and the gate's sigmoid are float32.
- `weight_before_cast` 1 multiplies by gamma in float32 and rounds once. 0 rounds the normalised value to the rows'
  dtype first, then multiplies in float32 and rounds again, as Llama, Qwen and DeepSeek in Transformers do.
- `weight_bias` is added to gamma in float32: 1 + gamma does not lose a gamma that is near 0 in bf16.

`make accuracy` compares the kernel with eager PyTorch, each against float64.

## Memory rules

- A row whose map entry is -1 is never loaded. It may hold NaN. Nothing is added for that route.
- A map entry outside [-1, R) reads no memory. That token's outputs are NaN; other tokens are unharmed.
- A row that two routes name counts twice. A row that no route names is never loaded.
- Columns H to Hp of a row are never loaded.
- R is not a function of T: it may be smaller or larger than T*K where there is a map. Without a map R = T*K.
- T = 0 gives empty outputs. Row offsets are int64. Any H >= 1 works; where H times the element size is a multiple of
  16 bytes, rows are read 16 bytes at a time.

## Errors

The same rules and words hold in PyTorch (`moetrt.InputError` is a ValueError, `moetrt.InputTypeError` a TypeError), in
`moetrt map`, and in the plugin while an engine is built (a line that begins with `[moetrt]`, before TensorRT's own).
`TAIL` stands for the node. Each line below was given by the check itself.

| what is wrong | what is said |
|---|---|
{errors}
"""

_ALL = {
    "gemm2_permuted": Operand("bfloat16", (40, 64)),
    "expert_weights": Operand("float32", (16, 2)),
    "expanded_idx_to_permuted_idx": Operand("int32", (16, 2)),
    "shared_output": Operand("bfloat16", (4, 4, 64)),
    "shared_gate": Operand("float32", (16, 1)),
    "residual": Operand("bfloat16", (4, 4, 64)),
    "gamma": Operand("bfloat16", (64,)),
}
"""Operands that are taken: T = 16, K = 2, R = 40, H = 64."""


class _Formula:
    """The body as text: `moetrt.definition.evaluate` runs on it as on tensors. Bound operations become lines."""

    def __init__(self, spec: OperatorSpec) -> None:
        self.lines: list[str] = []
        self._rounded = spec.outputs[-1]
        self._stored = False

    def _bind(self, name: str, text: str) -> str:
        self.lines.append(f"{name} = {_without_outer_brackets(text)}")
        return name

    def attribute(self, name: str) -> str:
        return name

    def choose(self, flag: str, when_set: str, when_clear: str) -> str:
        return f"({when_set} if {flag} else {when_clear})"

    def compute(self, x: str) -> str:
        return x if x == self._rounded and self._stored else f"fp32({x})"

    def data(self, x: str) -> str:
        if self._stored:
            return f"round({_without_outer_brackets(x)})"
        self._stored = True
        return self._bind(self._rounded, f"round({_without_outer_brackets(x)})")

    def mul(self, a: str, b: str) -> str:
        return f"{a} * {b}"

    def add(self, a: str, b: str) -> str:
        return f"({a} + {b})"

    def sigmoid(self, x: str) -> str:
        return f"sigmoid({x})"

    def ones_like(self, x: str) -> str:
        return "1"

    def inverse_rms(self, x: str, eps: str) -> str:
        return self._bind("inverse_rms", f"1 / sqrt(mean({x}^2 over H) + {eps})")

    def rows_in_order(self, rows: str, expert_weights: str) -> str:
        return f"{rows}[t*K+k]"

    def is_row(self, index: str, rows: str) -> str:
        return f"0 <= {index} < R"

    def rows_by_map(self, rows: str, index: str, is_row: str) -> str:
        return f"{rows}[{index}]"

    def keep_mapped(self, routes: str, index: str, is_row: str) -> str:
        name = self._bind("route[k]", routes)
        self.lines.append(f"           where {is_row}; 0 where it is -1; NaN elsewhere")
        return name

    def first_columns(self, x: str, like: str) -> str:
        return f"{x}[:H]"

    def per_route(self, x: str) -> str:
        return x

    def sum_routes(self, x: str) -> str:
        return self._bind("routed", f"sum over k of {x}")

    def per_token(self, x: str) -> str:
        return f"{x}[t]"

    def shaped_like(self, x: str, like: str) -> str:
        return x


def _without_outer_brackets(text: str) -> str:
    """``(a + b)`` as ``a + b``; ``(a) + (b)`` as it is."""
    depth = 0
    for position, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0 and position < len(text) - 1:
            return text
    return text[1:-1] if text.startswith("(") else text


def formula(spec: OperatorSpec) -> list[str]:
    """The operator's body with every input given, one line for each value that has a name."""
    ops = _Formula(spec)
    at = {"expert_weights": "[t,k]", "expanded_idx_to_permuted_idx": "[t,k]", "shared_gate": "[t]"}
    given = {entry.name: entry.name + at.get(entry.name, "") for entry in spec.inputs}
    results = evaluate(spec, ops, given)
    first = [f"{name} = {text}" for name, text in zip(spec.outputs, results, strict=True) if name != text]
    return ops.lines + first


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def _dtype(words: str) -> str:
    return words.replace("data", "the rows'") if words != "data" else "the rows'"


def _attribute_row(entry: AttributeSpec) -> tuple[str, str, str, str, str]:
    taken = "0, 1" if entry.kind == "FLAG" else ", ".join(f"{value:g}" for value in entry.taken) or "finite"
    if entry.minimum == 0:
        taken = "finite, >= 0"
    kind = "INT" if entry.kind == "FLAG" else entry.kind
    return f"`{entry.name}`", kind, f"{entry.default:g}", taken, entry.doc


def _operator(spec: OperatorSpec) -> str:
    inputs = [
        (
            f"`{entry.name}`",
            entry.shape,
            "any of the rows' dtypes" if entry.name == "gemm2_permuted" else _dtype(entry.dtype),
            "optional" if entry.optional else "",
            entry.doc,
        )
        for entry in spec.inputs
    ]
    like = ", else ".join(f"that of {name}" for name in ("residual", "shared_output") if name in _names(spec))
    last = "H" if "gamma" in _names(spec) else "Hp"
    outputs = [(f"`{name}`", f"{like}, else [T, {last}]", "the rows'") for name in spec.outputs]
    lines = "\n".join(formula(spec))
    return f"""\
## {spec.name}

{spec.doc}
PyTorch: `torch.ops.{DOMAIN}.{spec.torch_name}`.

{_table(("input", "shape", "dtype", "", "meaning"), inputs)}

The leading dimensions of [..., H] multiply to T.

{_table(("output", "shape", "dtype"), outputs)}

{_table(("attribute", "type", "default", "taken", "meaning"), [_attribute_row(e) for e in spec.all_attributes])}

With every input given, for each token t (`round` is to the rows' dtype, to nearest even):

```text
{lines}
```
"""


def _names(spec: OperatorSpec) -> list[str]:
    return [entry.name for entry in spec.inputs]


def _refusals() -> list[tuple[str, str]]:
    """What is wrong, and the line that the check gives for it."""
    spec = FINALIZE_ADD_RMS_NORM

    def operands(**changes: Operand | None) -> Callable[[], object]:
        given = {name: value for name, value in (_ALL | changes).items() if value is not None}
        return lambda: check_operands(spec, given, where="TAIL")

    def attributes(**values: object) -> Callable[[], object]:
        return lambda: spec.complete(values, "TAIL")

    bf16, fp32 = "bfloat16", "float32"
    cases: Mapping[str, Callable[[], object]] = {
        "a required input is absent": operands(gamma=None),
        "an input that the operator has not": operands(beta=Operand(bf16, (64,))),
        "a gate without what it gates": operands(shared_output=None),
        "rows of another dtype": operands(gemm2_permuted=Operand("float64", (40, 64))),
        "a residual that is not of the rows' dtype": operands(residual=Operand(fp32, (4, 4, 64))),
        "16-bit weights that are not of the rows' dtype": operands(expert_weights=Operand("float16", (16, 2))),
        "an int64 map": operands(expanded_idx_to_permuted_idx=Operand("int64", (16, 2))),
        "a flat map": operands(expanded_idx_to_permuted_idx=Operand("int32", (32,))),
        "rows with a batch dimension": operands(gemm2_permuted=Operand(bf16, (1, 40, 64))),
        "a residual of rank 1": operands(residual=Operand(bf16, (64,))),
        "K = 0": operands(
            expert_weights=Operand(fp32, (16, 0)), expanded_idx_to_permuted_idx=Operand("int32", (16, 0))
        ),
        "a map of another K": operands(expanded_idx_to_permuted_idx=Operand("int32", (16, 4))),
        "no map, and R is not T*K": operands(expanded_idx_to_permuted_idx=None),
        "residual and gamma of different H": operands(residual=Operand(bf16, (4, 4, 32))),
        "H = 0": operands(
            gamma=Operand(bf16, (0,)), residual=Operand(bf16, (4, 4, 0)), shared_output=Operand(bf16, (4, 4, 0))
        ),
        "rows narrower than H": operands(gemm2_permuted=Operand(bf16, (40, 32))),
        "a gate that is not one number a token": operands(shared_gate=Operand(fp32, (16, 64))),
        "a residual of other tokens": operands(residual=Operand(bf16, (4, 5, 64))),
        "an attribute that the operator has not": attributes(epsilon=1e-6),
        "a FLAG that is a float": attributes(weight_before_cast=1.0),
        "a FLAG that is neither 0 nor 1": attributes(weight_before_cast=2),
        "a FLOAT that is text": attributes(eps="1e-6"),
        "a FLOAT that is not finite, or negative where it must not be": attributes(eps=-1.0),
        "a FLOAT of which only some values are taken": attributes(weight_bias=0.5),
    }
    lines = []
    for what, call in cases.items():
        try:
            call()
        except MoetrtError as error:
            lines.append((what, f"`{error}`"))
        else:
            raise AssertionError(f"{what}: was taken")
    return lines


def page() -> str:
    """The page in Markdown."""
    return _PAGE.format(
        domain=DOMAIN,
        opset=OPSET_VERSION,
        namespace=PLUGIN_NAMESPACE,
        version=PLUGIN_VERSION,
        names="; ".join(f"`{spec.name}` = `{DOMAIN}::{spec.torch_name}`" for spec in OPERATORS.values()),
        dtypes=", ".join(DATA_DTYPES),
        operators="\n".join(map(_operator, (FINALIZE_ADD_RMS_NORM, FINALIZE_ADD))),
        errors="\n".join(f"| {what} | {said} |" for what, said in _refusals()),
    )


if __name__ == "__main__":
    with write_atomically(sys.argv[1]) as temporary:
        temporary.write_text(page(), encoding="utf-8")
