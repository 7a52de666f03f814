"""RMSNorm as people write it in PyTorch, through PyTorch's exporters: every norm is found, every other one is named."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F

from moetrt.mapping import map_model
from moetrt.mapping_report import MappingReport
from moetrt.onnx_files import load_model
from tests.equivalence import compare_models, seeded_inputs
from tests.mapping_checks import RELATIVE

HIDDEN, TOKENS, TOP_K, ROWS = 16, 6, 3, 24

Norm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def variance(x: torch.Tensor) -> torch.Tensor:
    return x.pow(2).mean(-1, keepdim=True)


def llama(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return w * (wide * torch.rsqrt(variance(wide) + 1e-5)).to(x.dtype)


def gpt_oss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (w * (wide * torch.rsqrt(variance(wide) + 1e-5))).to(x.dtype)


def gemma(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(variance(wide) + 1e-5) * (1.0 + w.float())).type_as(x)


SPELLED: dict[str, Norm] = {
    "plain": lambda x, w: w * (x * torch.rsqrt(variance(x) + 1e-5)),
    "llama": llama,
    "gpt-oss": gpt_oss,
    "gemma": gemma,
    "division": lambda x, w: x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w,
    "square": lambda x, w: x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-5) * w,
    "sum": lambda x, w: x * torch.rsqrt((x * x).sum(-1, keepdim=True) / HIDDEN + 1e-5) * w,
    "power": lambda x, w: x * (x.pow(2).mean(2, keepdim=True) + 1e-5).pow(-0.5) * w,
    "flattened": lambda x, w: llama(x.reshape(-1, HIDDEN), w).view_as(x),
}
BUILT_IN: dict[str, Norm] = {
    "rms_norm": lambda x, w: F.rms_norm(x, (HIDDEN,), w, 1e-5),
    "rms_norm of tokens": lambda x, w: F.rms_norm(x.reshape(-1, HIDDEN), (HIDDEN,), w, 1e-5).view_as(x),
}
OTHERS: dict[str, tuple[Norm, str]] = {
    "length": (lambda x, w: x / (x.norm(2, dim=-1, keepdim=True) * HIDDEN**-0.5 + 1e-5) * w, "an L2 norm"),
    "normalize": (lambda x, w: F.normalize(x, dim=-1) * HIDDEN**0.5 * w, "an L2 norm"),
    "layer": (lambda x, w: F.layer_norm(x, (HIDDEN,), w, None, 1e-5), "LayerNorm, not RMSNorm"),
    "groups": (lambda x, w: gpt_oss(x.unflatten(-1, (4, 4)), w[:4]).flatten(-2) * w, "GroupNorm, not RMSNorm"),
}


class Tails(torch.nn.Module):
    """One MoE tail for each norm, each of its own rows."""

    def __init__(self, norms: list[Norm]) -> None:
        super().__init__()
        self.norms = norms
        random = torch.Generator().manual_seed(0)
        self.weights = torch.nn.ParameterList(0.5 + torch.rand(HIDDEN, generator=random) for _ in norms)

    def forward(
        self, all_rows: torch.Tensor, expert_weights: torch.Tensor, index: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        outputs = []
        for rows, weight, norm in zip(all_rows.unbind(), self.weights, self.norms, strict=True):
            routes = torch.where(
                (index >= 0).unsqueeze(-1), rows[index.clamp(min=0)], torch.zeros((), dtype=rows.dtype)
            )
            routed = (routes * expert_weights.to(rows.dtype).unsqueeze(-1)).sum(1)
            hidden = residual + routed.view(residual.shape)
            outputs += [norm(hidden, weight), hidden]
        return tuple(outputs)


def exported(norms: list[Norm], exporter: str, dtype: torch.dtype, path: Path) -> ir.Model:
    """The tails as an ONNX model: "dynamo 22" or "TorchScript 17"."""
    name, opset = exporter.split()
    example = (
        torch.randn(len(norms), ROWS, HIDDEN, dtype=dtype),
        torch.rand(TOKENS, TOP_K),
        torch.zeros(TOKENS, TOP_K, dtype=torch.int64),
        torch.randn(2, TOKENS // 2, HIDDEN, dtype=dtype),
    )
    names = ["rows", "weights", "map", "residual"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            torch.onnx.export(
                Tails(norms).to(dtype).eval(),
                example,
                path,
                dynamo=name == "dynamo",
                opset_version=int(opset),
                input_names=names,
                verbose=False,
                external_data=False,
            )
        finally:
            logging.disable(logging.NOTSET)
    return load_model(path)


def mapped_and_compared(model: ir.Model, *, numbers: bool) -> MappingReport:
    after = model.clone()
    report = map_model(after)
    if numbers:
        inputs = seeded_inputs(model, {}, ranges={"map": (-1, ROWS)})
        for difference in compare_models(model, after, inputs):
            assert difference.relative <= RELATIVE["float32"], str(difference)
    return report


EXPORTERS = ["dynamo 18", "dynamo 23", "TorchScript 17"]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exporter", EXPORTERS)
def test_case25_norms_as_exporters_write_them(exporter: str, dtype: torch.dtype, tmp_path: Path) -> None:
    norms = SPELLED if exporter.startswith("TorchScript") else SPELLED | BUILT_IN
    model = exported(list(norms.values()), exporter, dtype, tmp_path / "model.onnx")
    report = mapped_and_compared(model, numbers=dtype == torch.float32)
    assert [site.reason for site in report.sites] == [None] * len(norms)
    assert [site.operator for site in report.sites] == ["MoEFinalizeAddRMSNorm"] * len(norms)
    # The exporters add Gemma's 1 to so small a weight themselves.
    assert {site.attributes["weight_bias"] for site in report.sites} == {0.0}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exporter", EXPORTERS)
def test_case26_other_norms_as_exporters_write_them(exporter: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = exported([norm for norm, _ in OTHERS.values()], exporter, dtype, tmp_path / "model.onnx")
    report = mapped_and_compared(model, numbers=dtype == torch.float32)
    assert report.found == len(OTHERS)
    for site, (_, words) in zip(report.sites, OTHERS.values(), strict=True):
        assert (site.operator, site.matched) == ("MoEFinalizeAdd", False)
        assert words in (site.reason or ""), site.reason
