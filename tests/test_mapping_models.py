"""Whole models, captured and mapped: every tail is found, and ONNX Runtime gives the captured model's numbers."""

import numpy as np
import pytest

from moetrt.capture import capture
from moetrt.mapping import inference_problem, map_model
from moetrt.onnx_op import operator_of
from moetrt.source import load_source
from tests.equivalence import compare_models, seeded_inputs


@pytest.mark.parametrize(
    ("name", "dtype", "inputs"),
    [
        ("tests.models.families:deepseek_v3", "float32", {"shared_output", "residual"}),
        ("moetrt.models:qwen2_moe", "float16", {"shared_output", "shared_gate", "residual"}),
        ("moetrt.models:qwen3_moe", "bfloat16", {"residual"}),
    ],
)
def test_every_tail_of_the_family_is_mapped(name: str, dtype: str, inputs: set[str]) -> None:
    model = capture(load_source(name, dtype=dtype))
    mapped = model.clone()
    report = map_model(mapped)
    assert report.complete, [site.reason for site in report.unmatched]
    assert report.expected == report.mapped >= 1
    assert {node.op_type for node in mapped.graph if operator_of(node)} == {"MoEFinalizeAddRMSNorm"}
    assert inference_problem(mapped) is None
    for site in report.sites:
        assert set(site.inputs) == {"gemm2_permuted", "expert_weights", "gamma"} | inputs
        assert site.shapes["norm_out"][:2] == ["batch", "seq"]  # case 20: still symbolic
        # Transformers rounds the normalised value before it multiplies by gamma; in float32 there is nothing to round.
        assert site.attributes["weight_before_cast"] == int(dtype == "float32")
    if dtype == "bfloat16":
        return  # ONNX Runtime has no bfloat16 arithmetic on a CPU
    for batch, seq in ((1, 1), (2, 5)):
        feeds = seeded_inputs(model, {"batch": batch, "seq": seq}, ranges={"input_ids": (0, 90)})
        (logits,) = compare_models(model, mapped, feeds)
        assert np.isfinite(logits.scale)
        assert logits.relative <= (2e-6 if dtype == "float32" else 4e-3), str(logits)
