"""MoE finalizes as other people write them, exported by PyTorch's two exporters and rewritten by others' optimisers."""

import io
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx.version_converter
import onnx_ir as ir
import torch
from onnx_ir.passes.common import LiftConstantsToInitializersPass
from torch import Tensor, nn
from torch.nn.functional import one_hot

HIDDEN, TOP_K, EXPERTS, BATCH, SEQ = 16, 2, 4, 2, 3

Finalize = Callable[..., Tensor]


class Tail(nn.Module):
    """A finalize, the shared expert's output, the residual ([B, S, H]) and the RMSNorm as Llama writes it."""

    def __init__(self, finalize: Finalize) -> None:
        super().__init__()
        self.finalize = finalize
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN))

    def forward(
        self, rows: Tensor, weights: Tensor, index: Tensor, shared: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        moe = self.finalize(rows, weights, index).to(shared.dtype) + shared
        hidden = residual + moe.view(residual.shape)
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.gamma * wide.to(hidden.dtype), hidden


# Rows picked by the map. gemm2_permuted [R, H], weights [T, K], map [T, K].


def loop_over_k(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    out = torch.zeros(index.shape[0], rows.shape[1], dtype=rows.dtype)
    for k in range(index.shape[1]):
        picked = torch.where((index[:, k] >= 0)[:, None], rows[index[:, k].clamp(min=0).long()], 0.0)
        out = out + picked * weights[:, k, None]
    return out


def loop_over_k_clamped_before(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    at = index.clamp(min=0).long()
    kept = weights.masked_fill(index < 0, 0.0)
    return sum(rows[at[:, k]] * kept[:, k : k + 1] for k in range(index.shape[1]))


def loop_over_unbound_k(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    pairs = zip(weights.unbind(1), index.clamp(min=0).long().unbind(1), strict=True)
    first, *others = (rows.index_select(0, at) * weight.unsqueeze(-1) for weight, at in pairs)
    for other in others:
        first = other + first
    return first


def map_of_k_and_tokens(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    at = index.t()
    picked = torch.where((at >= 0)[..., None], rows[at.clamp(min=0).long()], 0.0)
    return (picked * weights.t()[..., None]).sum(0)


def flat_map_of_k_and_tokens(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    tokens, top_k = index.shape
    at = index.clamp(min=0).t().reshape(-1).long()
    return (rows[at] * weights.t().reshape(-1, 1)).view(top_k, tokens, -1).sum(0)


def matmul_left(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    return torch.matmul(weights[:, None, :], rows[index.clamp(min=0).long()]).squeeze(1)


def matmul_right(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    return torch.matmul(rows[index.clamp(min=0).long()].transpose(1, 2), weights[:, :, None]).squeeze(-1)


def kept_dimension(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    return (rows[index.clamp(min=0).long()] * weights[:, :, None]).sum(1, keepdim=True).squeeze(1)


def einsum_of_k_and_tokens(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    return torch.einsum("tk,kth->th", weights, rows[index.clamp(min=0).t().long()])


def gather_elements(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    at = index.clamp(min=0).long().view(-1, 1).expand(-1, rows.shape[1])
    return (torch.gather(rows, 0, at).view(*index.shape, -1) * weights[:, :, None]).sum(1)


def one_hot_of_the_map(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    picks = one_hot(index.clamp(min=0).long(), rows.shape[0]).to(rows.dtype)
    return (picks * (weights * (index >= 0))[..., None]).sum(1) @ rows


def equals_a_range(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """No entry of -1 equals a row's number."""
    picks = (index[..., None] == torch.arange(rows.shape[0])).to(rows.dtype)
    return torch.matmul((picks * weights[..., None]).sum(1), rows)


def one_hot_einsum(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    picks = one_hot(index.clamp(min=0).long(), rows.shape[0]).to(rows.dtype)
    return torch.einsum("tr,rh->th", torch.einsum("tk,tkr->tr", weights, picks), rows)


def scattered_weights(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    combine = torch.zeros(index.shape[0], rows.shape[0], dtype=rows.dtype)
    return combine.scatter_add(1, index.clamp(min=0).long(), weights) @ rows


BY_MAP: dict[str, Finalize] = {
    form.__name__: form
    for form in (
        loop_over_k,
        loop_over_k_clamped_before,
        loop_over_unbound_k,
        map_of_k_and_tokens,
        flat_map_of_k_and_tokens,
        matmul_left,
        matmul_right,
        kept_dimension,
        einsum_of_k_and_tokens,
        gather_elements,
        one_hot_of_the_map,
        equals_a_range,
        one_hot_einsum,
        scattered_weights,
    )
}


def stacked_terms(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    at = index.clamp(min=0).long()
    return torch.stack([rows[at[:, k]] * weights[:, k, None] for k in range(index.shape[1])]).sum(0)


def stacked_terms_at_the_end(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    at = index.clamp(min=0).long()
    return torch.stack([weights[:, k : k + 1] * rows[at[:, k]] for k in range(index.shape[1])], dim=-1).sum(-1)


BY_MAP |= {form.__name__: form for form in (stacked_terms, stacked_terms_at_the_end)}


def matmul_left_selected(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    return torch.matmul(weights[:, None, :], rows[index.clamp(min=0).long()])[:, 0]


def kept_dimension_selected(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    return (rows[index.clamp(min=0).long()] * weights[:, :, None]).sum(1, keepdim=True)[:, 0:1].squeeze(1)


def columns_summed(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """K lies after H."""
    return (rows[index.clamp(min=0).long()].transpose(1, 2) * weights[:, None, :]).sum(-1)


def large_weights_only(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    return (rows[index.clamp(min=0).long()] * (weights * (weights > 0.1))[..., None]).sum(1)


def factor_after_factor(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """One factor is of truth values that are no mask of the map, and one a second number a route."""
    picked = torch.where((index >= 0)[..., None], rows[index.clamp(min=0).long()], 0.0)
    return (picked * weights[..., None] * (index < 7)[..., None] * torch.sigmoid(weights)[..., None]).sum(1)


BY_MAP |= {
    form.__name__: form
    for form in (
        matmul_left_selected,
        kept_dimension_selected,
        columns_summed,
        large_weights_only,
        factor_after_factor,
    )
}

# Tokens are never flattened. gemm2_permuted [R, H], weights [B, S, K], map [B, S, K].


def positions_summed(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    picked = torch.where((index >= 0)[..., None], rows[index.clamp(min=0).long()], 0.0)
    return (picked * weights[..., None]).sum(2)


def positions_matmul(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    return torch.matmul(weights.unsqueeze(-2), rows[index.clamp(min=0).long()]).squeeze(-2)


def positions_einsum(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    kept = weights.masked_fill(index < 0, 0.0)
    return torch.einsum("bsk,bskh->bsh", kept, rows[index.clamp(min=0).long()])


def positions_loop(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    at = index.clamp(min=0).long()
    return sum(rows[at[..., k]] * weights[..., k, None] for k in range(index.shape[-1]))


def positions_stacked(rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    at = index.clamp(min=0).long()
    return torch.stack([rows[at[..., k]] * weights[..., k : k + 1] for k in range(index.shape[-1])], dim=2).sum(2)


BY_POSITION: dict[str, Finalize] = {
    form.__name__: form
    for form in (positions_summed, positions_matmul, positions_einsum, positions_loop, positions_stacked)
}

# Rows in the routes' own order [T*K, H], or in that of the sorted expert ids [T, K].


def weighted_rows_summed(rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return (rows * weights.reshape(-1, 1)).view(*ids.shape, rows.shape[1]).sum(1)


def rows_times_weights_einsum(rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return torch.einsum("tkh,tk->th", rows.view(*ids.shape, rows.shape[1]), weights)


def index_add_of_routes(rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    tokens, top_k = ids.shape
    token = torch.arange(tokens).repeat_interleave(top_k)
    return torch.zeros(tokens, rows.shape[1], dtype=rows.dtype).index_add(0, token, rows * weights.reshape(-1, 1))


def scatter_add_of_routes(rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    tokens, top_k = ids.shape
    token = torch.arange(tokens)[:, None].expand(tokens, top_k).reshape(-1, 1).expand(-1, rows.shape[1])
    return torch.zeros(tokens, rows.shape[1], dtype=rows.dtype).scatter_add(0, token, rows * weights.reshape(-1, 1))


def index_add_of_sorted_routes(rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    order = torch.argsort(ids.reshape(-1))
    out = torch.zeros(ids.shape[0], rows.shape[1], dtype=rows.dtype)
    return out.index_add(0, order // ids.shape[1], rows * weights.reshape(-1)[order][:, None])


def index_put_of_sorted_routes(rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    order = torch.argsort(ids.reshape(-1))
    out = torch.zeros(ids.shape[0], rows.shape[1], dtype=rows.dtype)
    added = rows * weights.reshape(-1)[order].unsqueeze(-1)
    return out.index_put((torch.div(order, ids.shape[1], rounding_mode="floor"),), added, accumulate=True)


def scattered_back(rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """The rows are put back into the routes' order first, as DeepSeek's own code does."""
    order = torch.argsort(ids.reshape(-1))
    back = torch.empty_like(rows)
    back[order] = rows
    return back.view(*ids.shape, rows.shape[1]).mul(weights.unsqueeze(-1)).sum(1)


def gathered_back(rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """The weighted rows are gathered back by the inverse permutation."""
    order = torch.argsort(ids.reshape(-1))
    weighted = rows * weights.reshape(-1)[order].unsqueeze(-1)
    return weighted[torch.argsort(order)].view(*ids.shape, -1).sum(1)


BY_ROUTE: dict[str, Finalize] = {
    form.__name__: form
    for form in (
        weighted_rows_summed,
        rows_times_weights_einsum,
        index_add_of_routes,
        scatter_add_of_routes,
        index_add_of_sorted_routes,
        index_put_of_sorted_routes,
        scattered_back,
        gathered_back,
    )
}

# Every expert's output for every token, [E, T, H]; weights [T, K] of the chosen experts' ids [T, K].


def scattered(weights: Tensor, ids: Tensor) -> Tensor:
    return torch.zeros(ids.shape[0], EXPERTS, dtype=weights.dtype).scatter(1, ids, weights)


def dense_einsum(rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return torch.einsum("te,eth->th", scattered(weights, ids), rows)


def dense_product(rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return (rows * scattered(weights, ids).t()[..., None]).sum(0)


def dense_bmm(rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return torch.bmm(scattered(weights, ids)[:, None, :], rows.transpose(0, 1)).squeeze(1)


def dense_one_hot(rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    combine = (one_hot(ids, EXPERTS).to(weights.dtype) * weights[..., None]).sum(1)
    return torch.einsum("te,eth->th", combine, rows)


def dense_loop(rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    combine = scattered(weights, ids)
    out = torch.zeros_like(rows[0])
    for expert in range(EXPERTS):
        out = out + torch.tanh(rows[expert]) * combine[:, expert, None]
    return out


DENSE: dict[str, Finalize] = {
    form.__name__: form for form in (dense_einsum, dense_product, dense_bmm, dense_one_hot, dense_loop)
}


def dense_bmm_selected(rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return torch.bmm(scattered(weights, ids)[:, None, :], rows.transpose(0, 1))[:, 0]


def dense_indexed(rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Rows are picked by token and expert."""
    token = torch.arange(ids.shape[0])[:, None]
    return (torch.tanh(rows).transpose(0, 1)[token, ids] * weights[..., None]).sum(1)


def dense_indexed_loop(rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    token = torch.arange(ids.shape[0])
    return sum(torch.tanh(rows)[ids[:, k], token] * weights[:, k, None] for k in range(TOP_K))


def dense_experts_of_this_rank(rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Expert parallelism: the weights of other ranks' experts are multiplied by 0."""
    picked = torch.gather(rows.transpose(0, 1), 1, ids[..., None].expand(-1, -1, rows.shape[-1]))
    return (picked * (weights * (ids < EXPERTS - 1).to(weights.dtype))[..., None]).sum(1)


def dense_loop_of_comparisons(rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(rows[0])
    for expert in range(EXPERTS):
        out += torch.tanh(rows[expert]) * (weights * (ids == expert)).sum(-1, keepdim=True)
    return out


def dense_loop_of_choices(rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    chosen = (torch.where(ids == expert, weights, 0.0).sum(-1)[:, None] for expert in range(EXPERTS))
    return sum(weight * torch.tanh(rows[expert]) for expert, weight in enumerate(chosen))


DENSE |= {
    form.__name__: form
    for form in (
        dense_bmm_selected,
        dense_indexed,
        dense_indexed_loop,
        dense_experts_of_this_rank,
        dense_loop_of_comparisons,
        dense_loop_of_choices,
    )
}


def expert_by_expert(hidden: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Mixtral's loop of Transformers 4: the tokens of each expert are searched for."""
    out = torch.zeros_like(hidden)
    chosen = one_hot(ids, EXPERTS).permute(2, 1, 0)
    for expert in range(EXPERTS):
        route, token = torch.where(chosen[expert])
        out = out.index_add(0, token, torch.tanh(hidden[token] + expert) * weights[token, route, None])
    return out


class Routed(nn.Module):
    """A router's TopK before the tail: the graph shows that a token's experts differ from each other."""

    def __init__(self, finalize: Finalize) -> None:
        super().__init__()
        self.tail = Tail(finalize)

    def forward(self, rows: Tensor, logits: Tensor, shared: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = torch.topk(logits.float().softmax(-1), TOP_K)
        weights = weights / weights.sum(-1, keepdim=True)
        return self.tail(rows, weights.to(rows.dtype), ids, shared, residual)


FORMS: dict[str, Finalize] = BY_MAP | BY_POSITION | BY_ROUTE | DENSE | {"expert_by_expert": expert_by_expert}

_SYMBOLS = {
    "rows": {0: "R"},
    "weights": {0: "T"},
    "index": {0: "T"},
    "logits": {0: "T"},
    "shared": {0: "T"},
    "residual": {0: "B", 1: "S"},
}


def module_of(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The module whose tail has this form."""
    finalize = FORMS[name]
    return (Routed(finalize) if name in DENSE or name == "expert_by_expert" else Tail(finalize)).to(dtype).eval()


def inputs_of(
    name: str, dtype: torch.dtype = torch.float32, *, batch: int = BATCH, seq: int = SEQ, seed: int = 0
) -> dict[str, Tensor]:
    """Random inputs of a form's module, by name."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    tokens = batch * seq
    if name == "expert_by_expert":
        first = {"rows": normal(tokens, HIDDEN), "logits": normal(tokens, EXPERTS)}
    elif name in DENSE:
        first = {"rows": normal(EXPERTS, tokens, HIDDEN), "logits": normal(tokens, EXPERTS)}
    elif name in BY_ROUTE:
        ids = torch.rand(tokens, EXPERTS, generator=random).argsort(-1)[:, :TOP_K].contiguous()
        first = {"rows": normal(tokens * TOP_K, HIDDEN), "weights": normal(tokens, TOP_K), "index": ids}
    else:
        count = tokens * TOP_K + 5
        index = torch.randperm(count, generator=random)[: tokens * TOP_K].reshape(tokens, TOP_K).to(torch.int32)
        index[1:3] -= torch.tensor([0, count], dtype=torch.int32)  # negative: on another rank
        first = {
            "rows": normal(count, HIDDEN),
            "weights": normal(tokens, TOP_K),
            "index": index.clamp(min=-1),
        }
    shared = normal(tokens, HIDDEN)
    if name in BY_POSITION:
        first |= {key: first[key].reshape(batch, seq, TOP_K) for key in ("weights", "index")}
        shared = shared.reshape(batch, seq, HIDDEN)
    first |= {"shared": shared, "residual": normal(batch, seq, HIDDEN)}
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in first.items()}


def export_form(
    name: str, exporter: str, dtype: torch.dtype = torch.float32, opset: int | None = None
) -> onnx.ModelProto:
    """A form's module as ONNX, by the exporter ``"dynamo"`` or ``"torchscript"``; batch, sequence and rows dynamic."""
    module, example = module_of(name, dtype), inputs_of(name, dtype)
    symbols = {key: dict(_SYMBOLS[key]) for key in example}
    if name in BY_POSITION:
        symbols |= {key: {0: "B", 1: "S"} for key in ("weights", "index", "shared")}
    if name in DENSE:
        symbols["rows"] = {1: "T"}
    names = list(example)
    with warnings.catch_warnings(), io.BytesIO() as file:
        warnings.simplefilter("ignore")
        if exporter == "torchscript":
            torch.onnx.export(
                module,
                tuple(example.values()),
                file,
                opset_version=opset or 17,
                dynamo=False,
                input_names=names,
                output_names=["normalised", "hidden"],
                dynamic_axes=symbols,
            )
            return onnx.load_from_string(file.getvalue())
        dynamic = torch.export.Dim.DYNAMIC
        program = torch.onnx.export(
            module,
            tuple(example.values()),
            opset_version=opset or 22,
            dynamo=True,
            verbose=False,
            input_names=names,
            output_names=["normalised", "hidden"],
            dynamic_shapes=tuple(dict.fromkeys(symbols[key], dynamic) for key in names),
        )
    assert program is not None
    return ir.to_proto(program.model)


def by_onnxsim(model: onnx.ModelProto) -> onnx.ModelProto:
    """What onnxsim makes of the model."""
    import onnxsim

    simplified, _ = onnxsim.simplify(model)
    return simplified


def by_onnxruntime(model: onnx.ModelProto) -> onnx.ModelProto:
    """What ONNX Runtime's offline optimisation of the basic level, which keeps to standard operators, makes of it."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory(prefix="moetrt-") as folder:
        options.optimized_model_filepath = str(Path(folder) / "optimised.onnx")
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return onnx.load(options.optimized_model_filepath)


def by_onnxscript(model: onnx.ModelProto) -> onnx.ModelProto:
    """What onnxscript's optimiser makes of it."""
    import onnxscript.optimizer

    optimised = ir.from_proto(model)
    onnxscript.optimizer.optimize(optimised)
    return ir.to_proto(optimised)


def to_opset_17(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model by onnx's version converter, in the opset before the first that torch's dynamo exporter writes.

    The converter looks for axes among initializers alone, and leaves an attribute that opset 17 does not have.
    """
    constants = ir.from_proto(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(constants)
    for node in constants.graph:
        if node.op_type.startswith("Reduce"):
            assert node.attributes.pop("noop_with_empty_axes", ir.AttrInt64("", 0)).as_int() == 0
    converted = onnx.version_converter.convert_version(ir.to_proto(constants), 17)
    onnx.checker.check_model(converted)
    return converted


OPTIMISERS: dict[str, Callable[[onnx.ModelProto], onnx.ModelProto]] = {
    "onnxsim": by_onnxsim,
    "onnxruntime": by_onnxruntime,
    "onnxscript": by_onnxscript,
}
