"""Every expert's rows times a scattered table of weights, with the tokens in their shape [B, S] again (case 52).

gpt-oss was written so in Transformers 4, which optimum-onnx exports.
"""

import io
import warnings
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from moetrt.mapping import inference_problem, map_model
from moetrt.onnx_op import operator_of
from tests.equivalence import compare_models

HIDDEN, EXPERTS, TOP_K = 16, 4, 2

Table = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]


def scattered(weights: Tensor, ids: Tensor) -> Tensor:
    return torch.zeros(ids.shape[0], EXPERTS, dtype=weights.dtype).scatter(1, ids, weights)


def product(rows: Tensor, weights: Tensor, ids: Tensor, batch: int, seq: int) -> Tensor:
    """As Transformers had it."""
    table = scattered(weights, ids).transpose(0, 1).view(EXPERTS, batch, -1)[..., None]
    return (rows.view(EXPERTS, batch, -1, HIDDEN) * table).sum(dim=0)


def product_of_a_table_by_position(rows: Tensor, weights: Tensor, ids: Tensor, batch: int, seq: int) -> Tensor:
    table = scattered(weights, ids).view(batch, seq, EXPERTS).permute(2, 0, 1)
    return (table.unsqueeze(-1) * rows.view(EXPERTS, batch, seq, HIDDEN)).sum(0)


def einsum(rows: Tensor, weights: Tensor, ids: Tensor, batch: int, seq: int) -> Tensor:
    table = scattered(weights, ids).view(batch, seq, EXPERTS)
    return torch.einsum("ebsh,bse->bsh", rows.view(EXPERTS, batch, seq, HIDDEN), table)


def einsum_of_a_table_by_expert(rows: Tensor, weights: Tensor, ids: Tensor, batch: int, seq: int) -> Tensor:
    table = scattered(weights, ids).t().view(EXPERTS, batch, seq)
    return torch.einsum("ebs,ebsh->bsh", table, rows.view(EXPERTS, batch, seq, HIDDEN))


def matmul(rows: Tensor, weights: Tensor, ids: Tensor, batch: int, seq: int) -> Tensor:
    table = scattered(weights, ids).view(batch, seq, 1, EXPERTS)
    return torch.matmul(table, rows.view(EXPERTS, batch, seq, HIDDEN).permute(1, 2, 0, 3)).squeeze(-2)


def one_hot_table(rows: Tensor, weights: Tensor, ids: Tensor, batch: int, seq: int) -> Tensor:
    table = (one_hot(ids, EXPERTS).to(weights.dtype) * weights[..., None]).sum(1).view(batch, seq, EXPERTS)
    return torch.einsum("bse,ebsh->bsh", table, rows.view(EXPERTS, batch, seq, HIDDEN))


TABLES = (
    product,
    product_of_a_table_by_position,
    einsum,
    einsum_of_a_table_by_expert,
    matmul,
    one_hot_table,
)


class Layer(nn.Module):
    """A router, every expert on every token, the table, the residual where ``whole``, and the RMSNorm."""

    def __init__(self, table: Table, whole: bool) -> None:
        super().__init__()
        self.table, self.whole = table, whole
        self.router, self.experts = nn.Linear(HIDDEN, EXPERTS), nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) / 4)
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN))

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        batch, seq, _ = x.shape
        tokens = x.reshape(-1, HIDDEN)
        weights, ids = self.router(tokens).topk(TOP_K)
        rows = torch.bmm(tokens.unsqueeze(0).expand(EXPERTS, -1, -1), self.experts)
        hidden = self.table(rows, weights.softmax(-1), ids, batch, seq)
        if self.whole:
            hidden = residual + hidden
        norm = self.gamma * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6))
        return norm, hidden if self.whole else residual.neg()


def exported(table: Table, exporter: str, whole: bool) -> onnx.ModelProto:
    torch.manual_seed(0)
    module, file = Layer(table, whole).eval(), io.BytesIO()
    names = {"input_names": ["x", "residual"], "output_names": ["norm_out", "hidden"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        example = (torch.randn(2, 3, HIDDEN), torch.randn(2, 3, HIDDEN))
        if exporter == "torchscript":
            axes = {name: {0: "B", 1: "S"} for name in ("x", "residual")}
            torch.onnx.export(module, example, file, opset_version=17, dynamo=False, dynamic_axes=axes, **names)
            return onnx.load_from_string(file.getvalue())
        symbols = dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC)
        program = torch.onnx.export(
            module, example, opset_version=18, dynamo=True, verbose=False, dynamic_shapes=(symbols, symbols), **names
        )
    assert program is not None
    return ir.to_proto(program.model)


@pytest.mark.parametrize(
    ("table", "exporter", "whole"),
    [
        *((table, "torchscript", whole) for table in TABLES for whole in (True, False)),
        *((table, "dynamo", True) for table in (product, einsum)),
        (product_of_a_table_by_position, "dynamo", False),
    ],
)
def test_case52_dense_experts_times_a_table_of_positions(table: Table, exporter: str, whole: bool) -> None:
    before = exported(table, exporter, whole)
    model = ir.from_proto(before)
    report = map_model(model)
    assert report.complete, [site.became for site in report.sites]
    (node,) = (node for node in model.graph if operator_of(node))
    assert node.op_type == "MoEFinalizeAddRMSNorm"
    assert node.inputs[1] is not None
    assert list(node.inputs[1].shape or [])[-1:] == [TOP_K]
    assert inference_problem(model) is None
    random = np.random.default_rng(0)
    for sizes in ((2, 3), (1, 1), (3, 5), (1, 7)):
        feeds = {name: random.standard_normal((*sizes, HIDDEN)).astype(np.float32) for name in ("x", "residual")}
        if not whole:
            feeds = {value.name or "": feeds[value.name or ""] for value in model.graph.inputs}
        for difference in compare_models(ir.from_proto(before), model, feeds):
            # K products and an addition, or the E of which all but K are 0, rounded once each; then the norm's mean.
            assert difference.relative <= 8 * 2.0**-24 * (TOP_K + 4), str(difference)
