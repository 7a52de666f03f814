"""A file that was mapped before, once or twice, keeps its nodes and their names, and each tail is one (case 43)."""

from itertools import pairwise
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from moetrt import MoEOutput, UnfinalizedMoEOutput, finalize_add, finalize_add_rms_norm
from moetrt.capture import export
from moetrt.inspection import inspect_file
from moetrt.mapping import map_file, map_model
from moetrt.onnx_files import load_model, proto_of, save_model
from moetrt.onnx_op import operator_of
from moetrt.source import as_source
from tests.mapping_graphs import HIDDEN, Graph, NormForm


class Layer(nn.Module):
    """A contract layer that ends in the norm of its own module, in one that it calls itself, or in none."""

    def __init__(self, ends: str) -> None:
        super().__init__()
        self.ends, self.gamma = ends, nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor, weights: Tensor, index: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        moe = MoEOutput(UnfinalizedMoEOutput(x.tanh().repeat_interleave(2, 0), weights, index))
        if self.ends == "norm":
            return finalize_add_rms_norm(moe, residual, self.gamma, eps=1e-6)
        hidden = finalize_add(moe)
        return (hidden, residual) if self.ends == "nothing" else (hidden * 2.0 + residual, residual)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(ends) for ends in ("norm", "nothing", "sum"))

    def forward(self, x: Tensor, weights: Tensor, index: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x, residual = layer(x, weights, index, residual)
        return x, residual


def names(path: Path) -> list[str]:
    return [node.name or "" for node in load_model(path).graph if operator_of(node)]


def test_case43_export_and_two_rounds_of_map_keep_the_layers_path(tmp_path: Path) -> None:
    index = torch.arange(12, dtype=torch.int32).view(6, 2)
    inputs = {"x": torch.randn(6, HIDDEN), "weights": torch.rand(6, 2), "index": index}
    source = as_source((Layers(), inputs | {"residual": torch.randn(6, HIDDEN)}))
    files = [export(source, tmp_path).model_path, *(tmp_path / f"mapped_{round}.onnx" for round in range(3))]
    for before, after in pairwise(files):
        report = map_file(before, after)
        assert report.found == 3
        assert [site.name for site in report.sites] == names(after)
    assert names(files[0]) == ["layers.0", "layers.1", "layers.2"]
    assert names(files[1]) == ["layers.0", "layers.1", "layers.2/MoEFinalizeAdd"]
    assert files[1].read_bytes() == files[2].read_bytes() == files[3].read_bytes()
    for file in files:
        found = inspect_file(file)
        assert [tail.name for tail in found.tails] == names(file)
        headings = [line for line in found.lines()[1:] if not line.startswith((" ", "warning", "TensorRT", "ONNX"))]
        assert [line.partition(":")[0] for line in headings] == names(file)


def ending(how: str) -> ir.Model:
    """A captured node with what follows it; nothing of it is a norm, so it stays MoEFinalizeAdd."""
    g = Graph()
    value = g.routed()
    if how in ("shared", "shared, scaled"):
        value = g.add(value, g.input("shared", ["T", HIDDEN]))
    if how in ("scaled", "shared, scaled"):
        value = g.mul(value, g.const(2.5))
    if how == "view":
        g.input("residual", ["B", "S", HIDDEN])
        value = g.to_tokens(value)
    if how == "identity":
        value = g.op("Identity", value)
    if how == "layer norm":
        value = g.op("LayerNormalization", value, g.vector(1), g.vector(2))
    if how == "norm":
        value = NormForm().write(g, g.add(value, g.input("residual", ["T", HIDDEN])), rank=2)
    g.output(g.op("Sigmoid", value))
    return g.model()


ENDINGS = ("nothing", "shared", "scaled", "shared, scaled", "view", "identity", "layer norm", "norm")


@pytest.mark.parametrize("name", ["node", "layers.3.mlp", "", "MoEFinalizeAdd", "layers.1/MoEFinalizeAdd_2"])
@pytest.mark.parametrize("how", ENDINGS)
def test_case43_the_second_round_changes_nothing(how: str, name: str) -> None:
    model = ending(how)
    node = next(node for node in model.graph if operator_of(node))
    node.name = name or None
    map_model(model)
    once = proto_of(model).SerializeToString(deterministic=True)
    for _ in range(2):
        map_model(model)
        assert proto_of(model).SerializeToString(deterministic=True) == once
    (mapped,) = (node.name or "" for node in model.graph if operator_of(node))
    assert mapped.count("MoEFinalizeAdd") <= 1


@pytest.mark.parametrize("how", ENDINGS)
def test_case43_inspect_lists_each_tail_once(how: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    save_model(ending(how), path)
    for _ in range(2):
        text = "\n".join(inspect_file(path).lines())
        assert text.count("in  gemm2_permuted") == 1
        map_file(path, path)
