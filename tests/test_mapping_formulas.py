"""Sizes that the exporter writes as products or quotients of symbols are those that they are added to (case 46)."""

import warnings

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import helper
from torch import Tensor, nn

from moetrt.mapping import map_model
from tests.equivalence import compare_models
from tests.mapping_checks import assert_same_numbers, declined
from tests.mapping_graphs import FLOAT, HIDDEN, TOP_K, Graph, NormForm

TOLERANCE = 8 * 2.0**-24 * (TOP_K + 4)
"""K products and three additions, rounded once each, and a mean of as many squares."""


class Flattened(nn.Module):
    """Rows by a map [T, K]; shared and residual are [B, S, H], and are flattened where they are added."""

    def forward(self, rows: Tensor, weights: Tensor, index: Tensor, shared: Tensor, residual: Tensor) -> object:
        routed = (rows[index.clamp(min=0).long()] * weights[..., None]).sum(1) + shared.view(-1, HIDDEN)
        hidden = residual.view(-1, HIDDEN) + routed
        return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6) * torch.ones(HIDDEN), hidden


def test_case46_a_view_of_all_tokens_in_a_module_by_dynamo() -> None:
    tokens, rows = 6, 20
    three = torch.randn(2, 3, HIDDEN)
    index = torch.randint(0, rows, (tokens, TOP_K), dtype=torch.int32)
    example = (torch.randn(rows, HIDDEN), torch.randn(tokens, TOP_K), index, three, three)
    free = torch.export.Dim.DYNAMIC
    shapes = ({0: free}, {0: free}, {0: free}, {0: free, 1: free}, {0: free, 1: free})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(Flattened(), example, dynamo=True, verbose=False, dynamic_shapes=shapes)
    assert program is not None
    before = ir.to_proto(program.model)
    sizes = {str(size) for value in before.graph.value_info for size in _sizes(value)}
    assert any("*" in size for size in sizes), sizes  # else the exporter names sizes in another way by now
    model = ir.from_proto(before)
    report = map_model(model)
    assert report.complete, [site.became for site in report.sites]
    random = np.random.default_rng(0)
    for batch, seq in ((2, 3), (1, 1), (3, 5)):
        feeds = {
            "rows": random.standard_normal((rows, HIDDEN)),
            "weights": random.standard_normal((batch * seq, TOP_K)),
            "index": random.integers(0, rows, (batch * seq, TOP_K)),
            "shared": random.standard_normal((batch, seq, HIDDEN)),
            "residual": random.standard_normal((batch, seq, HIDDEN)),
        }
        typed = {name: array.astype(np.int32 if name == "index" else np.float32) for name, array in feeds.items()}
        for difference in compare_models(ir.from_proto(before), model, typed):
            assert difference.relative <= TOLERANCE, str(difference)


def _sizes(value: onnx.ValueInfoProto) -> list[str | int]:
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


def joined(shared: str, residual: str = "", flat_sum: str = "T") -> Graph:
    """[T, H] and what was [B, S, H], each of which the file says to have as many rows as a formula of its own."""
    g = Graph()
    value = g.routed()
    g.values[-1].type.tensor_type.shape.dim[0].dim_param = flat_sum
    for name, size in (("shared", shared), ("residual", residual)):
        if not size:
            continue
        flat = g.op("Reshape", g.input(name, ["B", "S", HIDDEN]), g.ints(-1, HIDDEN))
        g.values.append(helper.make_tensor_value_info(flat, FLOAT[g.dtype], [size, HIDDEN]))
        value = g.add(value, flat)
    g.output(NormForm().write(g, value, rank=2), value)
    return g


@pytest.mark.parametrize(
    ("shared", "residual", "flat_sum"),
    [
        ("B*S", "", "T"),
        ("B*S", "B*S", "T"),
        ("B*S", "S*B", "T"),
        ("T*K//2", "B*S", "T"),
        ("B*S", "A*C", "D*E"),
        ("B*S", "T", "T"),
        ("T", "B*S", "T"),
    ],
)
def test_case46_formulas_of_other_symbols_are_taken(shared: str, residual: str, flat_sum: str) -> None:
    """Flattened on one side or both, of rows [T*K] or of a batch and a sequence."""
    before = joined(shared, residual, flat_sum).model()
    model = ir.from_proto(ir.to_proto(before))
    report = map_model(model)
    assert report.complete, [site.became for site in report.sites]
    assert_same_numbers(before, model)


@pytest.mark.parametrize("size", ["U", "batch-size", "max(B, S)"])
def test_case46_a_name_of_its_own_may_still_be_another_length(size: str) -> None:
    declined(joined(size), f"one of whose dimensions is '{size}' where the sum has 'T'")
