"""What the operators compute, written once over a small set of primitives.

`moetrt.reference` runs it on torch tensors, `moetrt.onnx_op` records it as the body of the ONNX function: neither can
drift from the other, because there is nothing else to drift from.
"""

from collections.abc import Mapping
from typing import Protocol, TypeVar

from moetrt.spec import FINALIZE_ADD_RMS_NORM, OperatorSpec

V = TypeVar("V")


class Ops(Protocol[V]):
    """The primitives: each takes and gives values of one back end. The *compute dtype* is float32."""

    def attribute(self, name: str) -> V:
        """The FLOAT attribute ``name`` as a scalar of the compute dtype."""

    def choose(self, flag: str, when_set: V, when_clear: V) -> V:
        """One of two values of the same shape and dtype, by the FLAG attribute ``flag``."""

    def compute(self, x: V) -> V:
        """``x`` in the compute dtype."""

    def data(self, x: V) -> V:
        """``x`` rounded to the rows' dtype, to nearest even."""

    def mul(self, a: V, b: V) -> V: ...

    def add(self, a: V, b: V) -> V: ...

    def sigmoid(self, x: V) -> V: ...

    def ones_like(self, x: V) -> V: ...

    def inverse_rms(self, x: V, eps: V) -> V:
        """``1 / sqrt(mean(x * x, last dimension) + eps)``, the last dimension kept as 1."""

    def rows_in_order(self, rows: V, expert_weights: V) -> V:
        """``[T*K, Hp]`` as ``[T, K, Hp]``."""

    def is_row(self, index: V, rows: V) -> V:
        """Booleans ``[T, K]``: whether the map entry is in ``[0, R)``."""

    def rows_by_map(self, rows: V, index: V, is_row: V) -> V:
        """``[T, K, Hp]``: the row of each route; any row where ``is_row`` is false."""

    def keep_mapped(self, routes: V, index: V, is_row: V) -> V:
        """``routes`` where the map entry is a row, 0 where it is -1, NaN where it is neither."""

    def first_columns(self, x: V, like: V) -> V:
        """The columns ``[0, H)`` of the last dimension, H being the last dimension of ``like``."""

    def per_route(self, x: V) -> V:
        """``[T, K]`` as ``[T, K, 1]``."""

    def sum_routes(self, x: V) -> V:
        """``[T, K, H]`` to ``[T, H]``."""

    def per_token(self, x: V) -> V:
        """``[..., H]`` as ``[T, H]``."""

    def shaped_like(self, x: V, like: V) -> V:
        """``[T, H]`` in the shape of ``like``, ``[..., H]``."""


def evaluate(spec: OperatorSpec, ops: Ops[V], given: Mapping[str, V]) -> tuple[V, ...]:
    """Computes the operator's outputs.

    Args:
        spec: which of the two operators.
        ops: the back end.
        given: the inputs that are present, by name.

    Returns:
        The outputs in the order of ``spec.outputs``, in the rows' dtype.
    """
    routed = ops.mul(_finalize(ops, given), ops.attribute("routed_scaling_factor"))
    combined = routed
    if "shared_output" in given:
        shared = ops.compute(ops.per_token(given["shared_output"]))
        if "shared_gate" in given:
            shared = ops.mul(shared, ops.sigmoid(ops.compute(given["shared_gate"])))
        combined = ops.add(routed, shared)
    hidden = ops.mul(combined, ops.attribute("combine_scale"))
    if "residual" in given:
        residual = ops.compute(ops.per_token(given["residual"]))
        hidden = ops.add(hidden, ops.mul(residual, ops.attribute("residual_scale")))
    # The one rounding of the sum: the norm below reads what the next layer will read.
    rounded = ops.data(hidden)

    def shaped(x: V) -> V:
        for name in ("residual", "shared_output"):
            if name in given:
                return ops.shaped_like(x, given[name])
        return x

    if spec != FINALIZE_ADD_RMS_NORM:
        return (shaped(rounded),)

    stored = ops.compute(rounded)
    normalised = ops.mul(stored, ops.inverse_rms(stored, ops.attribute("eps")))
    gamma = ops.add(ops.compute(given["gamma"]), ops.attribute("weight_bias"))
    normalised = ops.choose("weight_before_cast", normalised, ops.compute(ops.data(normalised)))
    return shaped(ops.data(ops.mul(normalised, gamma))), shaped(rounded)


def _finalize(ops: Ops[V], given: Mapping[str, V]) -> V:
    """The weighted sum of each token's rows, ``[T, H]`` in the compute dtype."""
    rows, weights = given["gemm2_permuted"], given["expert_weights"]
    index = given.get("expanded_idx_to_permuted_idx")
    if index is None:
        routes = ops.rows_in_order(rows, weights)
    else:
        is_row = ops.is_row(index, rows)
        routes = ops.rows_by_map(rows, index, is_row)
    routes = ops.compute(routes)
    width = next((given[name] for name in ("gamma", "residual", "shared_output") if name in given), None)
    if width is not None:
        routes = ops.first_columns(routes, width)
    weights = ops.compute(weights)
    weights = ops.choose("apply_expert_weights", weights, ops.ones_like(weights))
    routes = ops.mul(routes, ops.per_route(weights))
    if index is not None:
        routes = ops.keep_mapped(routes, index, is_row)
    return ops.sum_routes(routes)
