"""Rows that are summed without weights: these were multiplied before the second product, as Llama-4 does, or are all 1.

Without weights only the rows say that a sum is a MoE's: a router's ids picked the weights of the product that made
them, or a sort of the routes put them where they lie.
"""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from moetrt.mapping import inference_problem, map_model
from moetrt.mapping_report import MappingReport
from moetrt.onnx_op import named_inputs, operator_of
from tests.equivalence import compare_models
from tests.foreign_graphs import OPTIMISERS
from tests.mapping_graphs import TOP_K, Graph, NormForm
from tests.test_mapping_routers import exported

T, H, F, E, K, INT64 = 6, 16, 24, 4, 2, 7

Forward = Callable[["Layer", Tensor], Tensor]


class Layer(nn.Module):
    """A MoE layer with its residual and norm; ``experts`` gives [T, H]."""

    def __init__(self, experts: Forward, top_k: int = K) -> None:
        super().__init__()
        self.experts, self.top_k = experts, top_k
        self.router = nn.Linear(H, E, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(E, H, F)), nn.Parameter(torch.randn(E, F, H))
        self.bias, self.heads = nn.Parameter(torch.randn(E, H)), nn.Linear(H, K * H)
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, H))

    def forward(self, *given: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = given
        hidden = x + self.experts(self, x)
        return self.gamma * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)), hidden.relu()

    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.topk(self.router(x).sigmoid(), self.top_k)

    def activations(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the second product reads, [T*K, 1, F], weighted; and the experts, [T*K]."""
        weights, ids = self.chosen(x)
        flat = ids.reshape(-1)
        rows = torch.bmm(x.repeat_interleave(self.top_k, 0)[:, None], self.up[flat]).relu()
        return rows * weights.reshape(-1, 1, 1), flat


def batched(layer: Layer, x: Tensor) -> Tensor:
    rows, flat = layer.activations(x)
    return torch.bmm(rows, layer.down[flat]).view(-1, layer.top_k, H).sum(1)


def with_a_bias(layer: Layer, x: Tensor) -> Tensor:
    rows, flat = layer.activations(x)
    rows = torch.bmm(rows, layer.down[flat]).view(-1, H) + layer.bias[flat]
    return torch.einsum("tkh->th", rows.view(-1, layer.top_k, H))


def einsum_of_experts(layer: Layer, x: Tensor) -> Tensor:
    weights, ids = layer.chosen(x)
    rows = torch.einsum("th,tkhf->tkf", x, layer.up[ids]).relu() * weights[..., None]
    return torch.einsum("tkf,tkfh->tkh", rows, layer.down[ids]).sum(dim=1)


def scaled(layer: Layer, x: Tensor) -> Tensor:
    return batched(layer, x) * 2.5


def sorted_rows(layer: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
    """The rows in their experts' order, and the route of each."""
    rows, flat = layer.activations(x)
    order = torch.argsort(flat)
    return torch.bmm(rows[order], layer.down[flat[order]]).view(-1, H), order


def gathered_back(layer: Layer, x: Tensor) -> Tensor:
    rows, order = sorted_rows(layer, x)
    return rows[torch.argsort(order)].view(-1, layer.top_k, H).sum(1)


def scattered_back(layer: Layer, x: Tensor) -> Tensor:
    rows, order = sorted_rows(layer, x)
    back = torch.zeros_like(rows).scatter(0, order[:, None].expand(-1, H), rows)
    return back.view(-1, layer.top_k, H).sum(1)


def added_to_tokens(layer: Layer, x: Tensor) -> Tensor:
    rows, order = sorted_rows(layer, x)
    token = order // layer.top_k
    return torch.zeros_like(x).scatter_add(0, token[:, None].expand(-1, H), rows)


def added_in_order(layer: Layer, x: Tensor) -> Tensor:
    rows, flat = layer.activations(x)
    token = torch.arange(x.shape[0]).repeat_interleave(layer.top_k)
    return torch.zeros_like(x).scatter_add(
        0, token[:, None].expand(-1, H), torch.bmm(rows, layer.down[flat]).view(-1, H)
    )


FORMS: dict[str, Forward] = {
    form.__name__: form
    for form in (
        batched,
        with_a_bias,
        einsum_of_experts,
        scaled,
        gathered_back,
        scattered_back,
        added_to_tokens,
        added_in_order,
    )
}


def check(model: ir.Model) -> ir.Node:
    """Maps the model, whose one tail has no weights; the numbers stay."""
    before = ir.from_proto(ir.to_proto(model))
    report = map_model(model)
    assert report.complete, [site.became for site in report.sites]
    assert inference_problem(model) is None
    (node,) = (node for node in model.graph if operator_of(node))
    assert node.op_type == "MoEFinalizeAddRMSNorm"
    assert node.attributes["apply_expert_weights"].as_int() == 0
    for tokens in (T, 1, 11):
        x = np.random.default_rng(tokens).standard_normal((tokens, H)).astype(np.float32)
        for difference in compare_models(before, model, {"x0": x}):
            assert difference.relative < 2e-6, str(difference)
    return node


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("form", FORMS)
def test_weights_before_the_second_product(form: str, exporter: str) -> None:
    node = check(ir.from_proto(exported(Layer(FORMS[form]), torch.randn(T, H), exporter=exporter)))
    has_map = form in ("gathered_back", "scattered_back", "added_to_tokens")
    assert ("expanded_idx_to_permuted_idx" in named_inputs(node)) == has_map
    assert node.attributes["routed_scaling_factor"].as_float() == (2.5 if form == "scaled" else 1.0)


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_one_expert_a_token(exporter: str) -> None:
    """Llama-4 routes each token to one expert."""
    check(ir.from_proto(exported(Layer(batched, top_k=1), torch.randn(T, H), exporter=exporter)))


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("form", ["batched", "gathered_back", "with_a_bias"])
def test_after_an_optimiser(form: str, optimiser: str) -> None:
    check(ir.from_proto(OPTIMISERS[optimiser](exported(Layer(FORMS[form]), torch.randn(T, H)))))


# Sums of rows that are no MoE's.


def heads(layer: Layer, x: Tensor) -> Tensor:
    return layer.heads(x).view(-1, K, H).sum(1)  # type: ignore[no-any-return]


def heads_after_experts(layer: Layer, x: Tensor) -> Tensor:
    return heads(layer, x + batched(layer, x))


def experts_of_one_table(layer: Layer, x: Tensor) -> Tensor:
    """The same two experts for every token."""
    return torch.einsum("tf,kfh->tkh", x @ layer.up[0], layer.down[torch.tensor([0, 2])]).sum(1)


def reported(experts: Forward) -> MappingReport:
    return map_model(ir.from_proto(exported(Layer(experts), torch.randn(T, H))))


@pytest.mark.parametrize("experts", [heads, experts_of_one_table])
def test_other_sums_are_no_tails(experts: Forward) -> None:
    assert reported(experts).sites == []


def test_a_sum_after_a_router_is_not_its_experts() -> None:
    """Two heads, as many as the layer before has experts a token."""
    report = reported(heads_after_experts)
    assert [site.operator for site in report.sites] == ["MoEFinalizeAdd"]


def gathered(layer: bool, masked: bool) -> MappingReport:
    g = Graph()
    rows, index = g.input("rows", ["R", H]), g.input("map", ["T", TOP_K], INT64)
    picked = g.op("Gather", rows, g.op("Max", index, g.const(0, INT64)) if masked else index)
    hidden = g.add(g.op("ReduceSum", picked, g.ints(1), keepdims=0), g.input("residual", ["T", H]))
    g.output(NormForm().write(g, hidden, rank=2) if layer else g.op("Relu", hidden), hidden)
    before = g.model()
    report = map_model(model := g.model())
    given = {"rows": np.random.default_rng(1).standard_normal((9, H)).astype(np.float32)}
    given |= {"map": np.array([[0, 8, 3], [-1, 2, 2]]), "residual": np.ones((2, H), np.float32)}
    for difference in compare_models(before, model, given):
        assert difference.relative < 2e-6, str(difference)
    return report


def test_gathered_rows_that_end_a_layer() -> None:
    """Rows of a given map: a residual and a norm after their sum show that it is a MoE's."""
    (site,) = gathered(layer=True, masked=True).sites
    assert (site.matched, site.attributes["apply_expert_weights"]) == (True, 0)
    assert gathered(layer=False, masked=True).sites == []


def test_gathered_rows_of_an_unmasked_map_are_named() -> None:
    (site,) = gathered(layer=True, masked=False).sites
    assert site.operator is None
    assert "entries of -1 in the map 'map' would read the last row" in (site.reason or "")
