"""A Hugging Face model folder, all the way to a TensorRT engine, on a machine without a GPU.

    python samples/huggingface_to_engine.py [MODEL_FOLDER [OUTPUT_FOLDER]]

Without a folder, a small Qwen3-MoE with random weights is saved first and taken as it would be from a download.
"""

import sys
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moetrt.capture import export
from moetrt.engine import build_engine
from moetrt.mapping import map_file
from moetrt.parity import compare
from moetrt.source import load_source


def save_small_model(folder: Path) -> None:
    """Writes a two-layer Qwen3-MoE with eight experts as `save_pretrained` writes any model."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=512,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def main(model: Path, folder: Path) -> None:
    """Export, map, compare, build."""
    source = load_source(str(model))
    exported = export(source, folder)
    print(f"{source.description}: {exported.tails_expected} tails expected")

    # The tail crosses the layer boundary: it ends in the next layer's norm, or in the model's last.
    mapped = folder / "mapped.onnx"
    report = map_file(exported.model_path, mapped)
    print(f"tails: {report.found} found, {report.mapped} mapped")
    for site in report.unmatched:
        print(f"  not mapped: {site.name}: {site.reason}")

    parity = compare(mapped, source, seed=1)
    print(f"parity: {'passed' if parity.passed else 'FAILED'}: {parity.worst.lines()[0]}")

    # Batch 1 to 4, sequences of 1 to 128 tokens, tuned for one of 32.
    engine = build_engine(mapped, folder / "model.engine", profiles={"input_ids": ((1, 1), (1, 32), (4, 128))})
    print(f"engine: {engine.path}, {engine.backend} {engine.version}, plugin layers: {', '.join(engine.plugin_layers)}")


if __name__ == "__main__":
    output = Path(sys.argv[2] if len(sys.argv) > 2 else "out/huggingface")
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]), output)
    else:
        save_small_model(output / "model")
        main(output / "model", output)
