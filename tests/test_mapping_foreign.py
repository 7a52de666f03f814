"""MoE finalizes that others exported, as they are and after others' optimisers, give the numbers they gave before."""

import warnings
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from moetrt.engine import build_engine
from moetrt.mapping import inference_problem, map_file, map_model
from moetrt.onnx_op import operator_of
from tests.equivalence import compare_models, run_model
from tests.foreign_graphs import (
    BY_MAP,
    BY_POSITION,
    BY_ROUTE,
    DENSE,
    EXPERTS,
    HIDDEN,
    OPTIMISERS,
    TOP_K,
    Tail,
    export_form,
    inputs_of,
    module_of,
    to_opset_17,
)

# In a sum of K products and three additions, each rounded once: float32's 2^-24 and float16's 2^-11, relative to the
# largest value, which the norm divides by a mean square that is as inexact.
TOLERANCE = {torch.float32: 8 * 2.0**-24 * (TOP_K + 4), torch.float16: 2.0**-11 * (TOP_K + 4)}

SIZES = ((2, 3), (3, 5), (1, 1))

NOT_EXPORTED = {
    ("dynamo", "one_hot_of_the_map"): "one_hot needs its number of classes as a number",
    ("dynamo", "one_hot_einsum"): "one_hot needs its number of classes as a number",
}
OVERWRITTEN = {"index_add_of_routes", "index_add_of_sorted_routes", "index_put_of_sorted_routes"}
"""What TorchScript's exporter writes without the addition."""

EXPORTS = [
    (exporter, form)
    for exporter in ("dynamo", "torchscript")
    for form in (*BY_MAP, *BY_POSITION, *BY_ROUTE, *DENSE)
    if (exporter, form) not in NOT_EXPORTED and not (exporter == "torchscript" and form in OVERWRITTEN)
]

_exported: dict[tuple[str, str, torch.dtype], onnx.ModelProto] = {}


def exported(exporter: str, form: str, dtype: torch.dtype = torch.float32) -> onnx.ModelProto:
    key = exporter, form, dtype
    if key not in _exported:
        _exported[key] = export_form(form, exporter, dtype)
    return _exported[key]


def feeds_of(form: str, dtype: torch.dtype, model: ir.Model, batch: int, seq: int, seed: int) -> dict[str, np.ndarray]:
    tensors = inputs_of(form, dtype, batch=batch, seq=seq, seed=seed)
    names = {value.name for value in model.graph.inputs}
    return {name: tensor.numpy() for name, tensor in tensors.items() if name in names}


def check(before: onnx.ModelProto, form: str) -> ir.Model:
    """Maps the model: its one tail goes into one node, and the numbers stay at sizes other than the example's."""
    model = ir.from_proto(before)
    report = map_model(model)
    assert report.complete, [site.became for site in report.sites] + report.notes
    assert report.notes == []
    assert [node.op_type for node in model.graph if operator_of(node)] == ["MoEFinalizeAddRMSNorm"]
    assert inference_problem(model) is None
    for seed, (batch, seq) in enumerate(SIZES):
        feeds = feeds_of(form, torch.float32, model, batch, seq, seed)
        for difference in compare_models(ir.from_proto(before), model, feeds):
            assert difference.relative <= TOLERANCE[torch.float32], str(difference)
    return model


@pytest.mark.parametrize(("exporter", "form"), EXPORTS)
def test_every_form_of_both_exporters(exporter: str, form: str) -> None:
    model = check(exported(exporter, form), form)
    (node,) = (node for node in model.graph if operator_of(node))
    # The tail reads what each token chose, not every expert's rows.
    assert node.inputs[1] is not None
    assert node.inputs[1].shape is not None
    assert node.inputs[1].shape[-1] == TOP_K


@pytest.mark.parametrize("form", [form for form in (*BY_MAP, *BY_POSITION, *DENSE) if ("dynamo", form) in EXPORTS])
def test_pytorch_gives_the_same(form: str) -> None:
    """Of rows whose order the graph does not sort anew: PyTorch and ONNX Runtime may sort equal ids differently."""
    model = ir.from_proto(exported("dynamo", form))
    map_model(model)
    for seed, (batch, seq) in enumerate(SIZES):
        with torch.no_grad():
            wanted = module_of(form)(*inputs_of(form, batch=batch, seq=seq, seed=seed).values())
        got = run_model(model, feeds_of(form, torch.float32, model, batch, seq, seed))
        for one, other in zip(got.values(), wanted, strict=True):
            bound = TOLERANCE[torch.float32] * float(other.abs().max())
            np.testing.assert_allclose(one, other.numpy(), rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("exporter", "form"),
    [(exporter, form) for exporter, form in EXPORTS if exporter == "dynamo" or ("dynamo", form) in NOT_EXPORTED],
)
def test_half_precision(exporter: str, form: str) -> None:
    """Against the float32 graph on the same values: ONNX Runtime's CPU has no scatter that adds float16."""
    model = ir.from_proto(exported(exporter, form, torch.float16))
    report = map_model(model)
    assert report.complete, [site.became for site in report.sites]
    assert report.sites[0].dtype == "FLOAT16"
    for seed, (batch, seq) in enumerate(SIZES):
        feeds = feeds_of(form, torch.float16, model, batch, seq, seed)
        wide = {name: value.astype(np.float32) if value.dtype == np.float16 else value for name, value in feeds.items()}
        wanted = run_model(ir.from_proto(exported(exporter, form)), wide)
        for name, value in run_model(model, feeds).items():
            assert value.dtype == np.float16
            error = np.abs(value.astype(np.float32) - wanted[name]).max()
            assert error <= TOLERANCE[torch.float16] * np.abs(wanted[name]).max(), name


def after_optimisers() -> list[tuple[str, str, str]]:
    """Every form through one optimiser or another, and every optimiser on each kind of form of each exporter.

    Optimisers rewrite nodes, not finalizes: what each does to a Gather, a mask, a sum, a scatter or an einsum, it does
    in every form that has these. Neighbouring forms share most of their nodes, so by turns each optimiser sees all.
    """
    names = list(OPTIMISERS)
    return [(exporter, form, names[number % len(names)]) for number, (exporter, form) in enumerate(EXPORTS)]


@pytest.mark.parametrize(("exporter", "form", "optimiser"), after_optimisers())
def test_after_an_optimiser(exporter: str, form: str, optimiser: str) -> None:
    check(OPTIMISERS[optimiser](exported(exporter, form)), form)


@pytest.mark.parametrize("optimiser", ["none", *OPTIMISERS])
@pytest.mark.parametrize("form", sorted(OVERWRITTEN))
def test_torchscript_index_add_overwrites(form: str, optimiser: str) -> None:
    """The file itself is wrong: its numbers differ from PyTorch's, and mapping it must not hide that."""
    model = exported("torchscript", form)
    model = OPTIMISERS[optimiser](model) if optimiser != "none" else model
    report = map_model(ir.from_proto(model))
    assert (report.found, report.mapped) == (1, 0)
    assert "overwrites a token's rows one by one instead of adding them" in (report.sites[0].reason or "")
    feeds = feeds_of(form, torch.float32, ir.from_proto(model), 2, 3, 0)
    with torch.no_grad():
        wanted = module_of(form)(*inputs_of(form).values())[1]
    assert np.abs(run_model(ir.from_proto(model), feeds)["hidden"] - wanted.numpy()).max() > 0.1


@pytest.mark.parametrize(
    ("exporter", "optimiser"),
    [
        (exporter, optimiser)
        for exporter in ("dynamo", "torchscript")
        for optimiser in ("none", *OPTIMISERS)
        # onnxscript's optimiser makes an invalid model of it, with inputs that nothing makes.
        if (exporter, optimiser) != ("torchscript", "onnxscript")
    ],
)
def test_case21_loop_over_experts_is_named(exporter: str, optimiser: str) -> None:
    model = exported(exporter, "expert_by_expert")
    report = map_model(ir.from_proto(OPTIMISERS[optimiser](model) if optimiser != "none" else model))
    assert (report.found, report.mapped, report.complete) == (1, 0, False)
    assert "each expert's tokens are searched for (NonZero)" in (report.sites[0].reason or "")
    assert "export the experts batched" in (report.sites[0].reason or "")
    assert report.notes == []


class OfPositions(nn.Module):
    """[B, S, H] with nothing added: the sum alone, or its norm."""

    def __init__(self, form: str, *, norm: bool) -> None:
        super().__init__()
        self.tail, self.norm = Tail(BY_POSITION[form]), norm

    def forward(self, rows: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        hidden = self.tail.finalize(rows, weights, index)
        if not self.norm:
            return hidden
        return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6) * self.tail.gamma


@pytest.mark.parametrize("norm", [False, True], ids=["sum", "norm"])
@pytest.mark.parametrize("form", ["positions_summed", "positions_loop"])
def test_positions_without_a_residual_keep_their_shape(form: str, norm: bool) -> None:
    """The operator gives [T, H] where nothing is added; the graph's [B, S, H] is made of it."""
    dynamic, inputs = torch.export.Dim.DYNAMIC, inputs_of(form)
    example = tuple(inputs[key] for key in ("rows", "weights", "index"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            OfPositions(form, norm=norm).eval(),
            example,
            dynamic_shapes=({0: dynamic}, {0: dynamic, 1: dynamic}, {0: dynamic, 1: dynamic}),
            opset_version=22,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    before, model = program.model.clone(), program.model
    report = map_model(model)
    assert (report.found, report.mapped) == (1, 1), report.sites
    (node,) = (node for node in model.graph if operator_of(node))
    assert node.op_type == ("MoEFinalizeAddRMSNorm" if norm else "MoEFinalizeAdd")
    assert inference_problem(model) is None
    for seed, (batch, seq) in enumerate(SIZES):
        feeds = feeds_of(form, torch.float32, model, batch, seq, seed)
        for difference in compare_models(before, model, feeds):
            assert difference.relative <= TOLERANCE[torch.float32], str(difference)


class DensePositions(nn.Module):
    """Every expert's output for every position, [B, S, E, H], and a combine matrix [B, S, E]."""

    def forward(self, rows: Tensor, logits: Tensor, residual: Tensor) -> Tensor:
        weights, ids = torch.topk(logits.softmax(-1), TOP_K)
        combine = torch.zeros_like(logits).scatter(-1, ids, weights)
        return residual + torch.einsum("bse,bseh->bsh", combine, torch.tanh(rows))


def test_every_expert_for_every_position() -> None:
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    example = tuple(torch.randn(2, 3, *sizes) for sizes in ((EXPERTS, HIDDEN), (EXPERTS,), (HIDDEN,)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            DensePositions(), example, dynamic_shapes=(dynamic,) * 3, opset_version=22, dynamo=True, verbose=False
        )
    assert program is not None
    before, model = program.model.clone(), program.model
    report = map_model(model)
    (site,) = report.sites
    assert (site.form, site.operator) == ("all experts", "MoEFinalizeAdd"), site.became
    assert (site.shapes["expert_weights"] or [])[-1] == TOP_K
    for batch, seq in SIZES:
        feeds = {
            str(value.name): torch.randn(batch, seq, *tensor.shape[2:]).numpy()
            for value, tensor in zip(model.graph.inputs, example, strict=True)
        }
        for difference in compare_models(before, model, feeds):
            assert difference.relative <= TOLERANCE[torch.float32], str(difference)


@pytest.mark.parametrize("form", ["loop_over_k", "index_add_of_sorted_routes", "dense_einsum"])
def test_weights_in_another_file(form: str, tmp_path: Path) -> None:
    model = exported("dynamo", form)
    source = tmp_path / "model.onnx"
    moved = onnx.ModelProto()
    moved.CopyFrom(model)
    onnx.save_model(
        moved, source, save_as_external_data=True, location="weights.bin", size_threshold=90, convert_attribute=True
    )
    assert (tmp_path / "weights.bin").stat().st_size > 0
    report = map_file(source, tmp_path / "mapped.onnx")
    assert report.complete, report.sites
    feeds = feeds_of(form, torch.float32, ir.from_proto(model), 3, 5, 1)
    mapped = ir.load(tmp_path / "mapped.onnx")
    for difference in compare_models(ir.from_proto(model), mapped, feeds):
        assert difference.relative <= TOLERANCE[torch.float32], str(difference)


@pytest.mark.parametrize("form", [form for exporter, form in EXPORTS if exporter == "dynamo"])
def test_opset_17_of_torch_onnx(form: str) -> None:
    model = to_opset_17(exported("dynamo", form))
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 17)]
    check(model, form)


@pytest.mark.parametrize("opset", [18, 19, 20, 21, 23, 24])
@pytest.mark.parametrize("form", ["index_add_of_routes", "dense_one_hot"])
def test_opsets_of_torch_onnx(form: str, opset: int) -> None:
    model = export_form(form, "dynamo", opset=opset)
    assert next(entry.version for entry in model.opset_import if entry.domain == "") == opset
    check(model, form)


@pytest.mark.parametrize("opset", [18, 20])
@pytest.mark.parametrize("form", ["loop_over_unbound_k", "scatter_add_of_routes"])
def test_opsets_of_torchscript(form: str, opset: int) -> None:
    check(export_form(form, "torchscript", opset=opset), form)


@pytest.mark.parametrize(
    "form",
    ["flat_map_of_k_and_tokens", "index_add_of_sorted_routes", "scattered_weights", "dense_product", "dense_loop"],
)
def test_made_maps_build(form: str, tmp_path: Path, plugin_library: Path) -> None:
    """The nodes that make a map are ones that TensorRT-RTX takes, and the plugin is in the engine."""
    path = tmp_path / "model.onnx"
    onnx.save_model(exported("dynamo", form), path)
    assert map_file(path, tmp_path / "mapped.onnx").complete
    engine = build_engine(tmp_path / "mapped.onnx", tmp_path / "model.engine", plugin_library=plugin_library)
    assert len(engine.plugin_layers) == 1
