"""A module that uses moetrt's contract, all the way to a TensorRT engine, on a machine without a GPU.

    python samples/contract_to_engine.py [OUTPUT_FOLDER]

What your own model needs is in `Block.forward`: the MoE layer hands on its rows before they are weighted and summed
(`MoEOutput`), and one call does the rest of the layer.
"""

import sys
from pathlib import Path

import torch

from moetrt import MoEOutput, UnfinalizedMoEOutput, finalize_add_rms_norm
from moetrt.capture import export
from moetrt.engine import build_engine
from moetrt.mapping import map_file
from moetrt.parity import compare
from moetrt.source import Source

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 64, 96, 8, 2


class MoELayer(torch.nn.Module):
    """Eight experts, two per token, and a shared expert: [T, H] goes in, an unfinalized output comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.up = torch.nn.Parameter(torch.randn(EXPERTS, INTERMEDIATE, HIDDEN) / HIDDEN**0.5)
        self.down = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5)
        self.shared = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> MoEOutput:
        tokens = x.shape[0]
        weights, chosen = self.router(x).sigmoid().topk(TOP_K)  # [T, K] each
        # Your grouped GEMMs stand here. This one computes all first choices, then all second choices: route (t, k) is
        # row k*T + t, and that is what the map says. A real kernel sorts by expert and pads; the map says where.
        expert = chosen.t().reshape(-1)  # [K*T]
        activation = torch.nn.functional.silu(self.up[expert] @ x.repeat(TOP_K, 1).unsqueeze(-1))
        rows = (self.down[expert] @ activation).squeeze(-1)  # [K*T, H], not weighted
        index = torch.arange(TOP_K).unsqueeze(0) * tokens + torch.arange(tokens).unsqueeze(1)  # [T, K]
        return MoEOutput(
            routed=UnfinalizedMoEOutput(rows, weights, index.to(torch.int32)),
            shared_output=self.shared(x),
            routed_scaling_factor=2.5,
        )


class Block(torch.nn.Module):
    """A MoE layer and its tail, as they stand at the end of every decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoELayer()
        self.gamma = torch.nn.Parameter(1 + 0.1 * torch.randn(HIDDEN))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # The weighted sum over experts, the shared expert, the residual and the norm: one plugin node in TensorRT.
        return finalize_add_rms_norm(self.moe(x), residual, self.gamma, eps=1e-6)


def block() -> Source:
    """The model with its inputs; `moetrt export contract_to_engine:block` takes it too (from the folder samples)."""
    torch.manual_seed(0)
    return Source(
        module=Block().eval(),
        example_inputs={"x": torch.randn(5, HIDDEN), "residual": torch.randn(5, HIDDEN)},
        dynamic_shapes={"x": {0: "tokens"}, "residual": {0: "tokens"}},
        output_names=("norm_out", "residual_out"),
        tails_expected=1,
        description="a MoE block",
    )


def main(folder: Path) -> None:
    """Export, map, compare, build."""
    source = block()
    exported = export(source, folder)

    mapped = folder / "mapped.onnx"
    report = map_file(exported.model_path, mapped)
    print(f"tails: {report.found} found, {report.mapped} mapped")

    # The mapped file runs in ONNX Runtime as it stands; its numbers are compared with PyTorch's.
    parity = compare(mapped, source, seed=1)
    print(f"parity: {'passed' if parity.passed else 'FAILED'}: {parity.worst.lines()[0]}")

    # One engine for 1 to 256 tokens, tuned for 16.
    bounds = ((1, HIDDEN), (16, HIDDEN), (256, HIDDEN))
    engine = build_engine(mapped, folder / "block.engine", profiles={"x": bounds, "residual": bounds})
    print(f"engine: {engine.path}, {engine.backend} {engine.version}, plugin layers: {', '.join(engine.plugin_layers)}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/contract"))
