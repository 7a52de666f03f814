"""The PyTorch reference: the operators' definition on torch tensors, on any device.

Inside it computes in float32, or in float64 where the rows are float64: the latter is the gold that errors are measured
against, and is taken by the reference alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from moetrt.definition import evaluate
from moetrt.errors import InputError, InputTypeError
from moetrt.spec import DATA_DTYPES, Operand, OperatorSpec, check_operands

REFERENCE_DTYPES = (*DATA_DTYPES, "float64")


def operand(tensor: torch.Tensor) -> Operand:
    """What `moetrt.spec.check_operands` needs to know of a tensor; symbolic dimensions count as not known."""
    shape = tuple(dim if isinstance(dim, int) else None for dim in tensor.shape)
    return Operand(str(tensor.dtype).removeprefix("torch."), shape)


def check_tensors(
    spec: OperatorSpec, given: Mapping[str, torch.Tensor], *, data_dtypes: Sequence[str] = REFERENCE_DTYPES
) -> None:
    """Checks the tensors that an operator is given: their types, dtypes, known sizes, and that one device has them all.

    Args:
        spec: the operator.
        given: the inputs that are present, by name.
        data_dtypes: what the rows may be.

    Raises:
        InputTypeError, InputError: one that is not taken.
    """
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            raise InputTypeError(f"{spec.name}: input {name} was a {type(tensor).__name__}; a torch.Tensor is taken")
    check_operands(spec, {name: operand(tensor) for name, tensor in given.items()}, data_dtypes=data_dtypes)
    device = given["gemm2_permuted"].device
    for name, tensor in given.items():
        if tensor.device != device:
            raise InputError(
                f"{spec.name}: input {name} was on {tensor.device}; {device}, where gemm2_permuted is, is taken"
            )


def reference(
    spec: OperatorSpec, tensors: Mapping[str, torch.Tensor | None], attributes: Mapping[str, object]
) -> tuple[torch.Tensor, ...]:
    """Computes an operator in PyTorch.

    Args:
        spec: `moetrt.spec.FINALIZE_ADD_RMS_NORM` or `moetrt.spec.FINALIZE_ADD`.
        tensors: the inputs by name, None or left out where absent; shapes and dtypes as in ``spec``. float64 rows are
            computed in float64, with the other inputs float64 or float32.
        attributes: by name; the defaults of ``spec`` where left out.

    Returns:
        ``(norm_out, residual_out)`` or ``(hidden,)``: the rows' dtype, the shape of residual, else of shared_output,
        else ``[T, H]``.

    Raises:
        InputTypeError, InputError: a dtype, shape, device or attribute that is not taken.
    """
    complete = spec.complete(attributes)
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    check_tensors(spec, given)
    return evaluate(spec, _TorchOps(given["gemm2_permuted"], complete), given)


@dataclass(frozen=True)
class _TorchOps:
    """The definition's primitives on tensors."""

    rows: torch.Tensor
    attributes: Mapping[str, float | int]

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.float64 if self.rows.dtype == torch.float64 else torch.float32

    def attribute(self, name: str) -> torch.Tensor:
        # Attributes are float32 in TensorRT and ONNX: the float64 run reads the same number.
        value = torch.tensor(self.attributes[name], dtype=torch.float32, device=self.rows.device)
        return value.to(self.compute_dtype)

    def choose(self, flag: str, when_set: torch.Tensor, when_clear: torch.Tensor) -> torch.Tensor:
        return when_set if self.attributes[flag] else when_clear

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.compute_dtype)

    def data(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.rows.dtype)

    def mul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * b

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x)

    def ones_like(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(x)

    def inverse_rms(self, x: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
        return 1 / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)

    def rows_in_order(self, rows: torch.Tensor, expert_weights: torch.Tensor) -> torch.Tensor:
        return rows.reshape(*expert_weights.shape, rows.shape[1])

    def is_row(self, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return (index >= 0) & (index < rows.shape[0])

    def rows_by_map(self, rows: torch.Tensor, index: torch.Tensor, is_row: torch.Tensor) -> torch.Tensor:
        if rows.shape[0] == 0:
            return rows.new_zeros(*index.shape, rows.shape[1])
        return rows[torch.where(is_row, index, 0).long()]

    def keep_mapped(self, routes: torch.Tensor, index: torch.Tensor, is_row: torch.Tensor) -> torch.Tensor:
        filler = torch.where(index == -1, 0.0, float("nan")).to(routes.dtype)
        return torch.where(is_row.unsqueeze(-1), routes, filler.unsqueeze(-1))

    def first_columns(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return x[..., : like.shape[-1]]

    def per_route(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(-1)

    def sum_routes(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(dim=1)

    def per_token(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(0, -2)

    def shaped_like(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return x.reshape(like.shape)
