"""docs/operator.md is what the operators' definition gives, and its formula is the body."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from moetrt.operator_page import formula, page
from moetrt.reference import reference
from moetrt.spec import FINALIZE_ADD_RMS_NORM, OPERATORS, OperatorSpec

PAGE = Path(__file__).resolve().parent.parent / "docs" / "operator.md"


def test_committed_page_is_the_generated_one() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "make docs writes it anew"


@pytest.mark.parametrize("spec", OPERATORS.values(), ids=lambda spec: spec.name)
def test_formula_names_every_input_and_output_and_every_attribute_that_changes_numbers(spec: OperatorSpec) -> None:
    words = set(re.findall(r"\w+", " ".join(formula(spec))))
    numbers = {entry.name for entry in spec.attributes} - {"programmatic_dependent_launch"}
    assert {entry.name for entry in spec.inputs} | set(spec.outputs) | numbers <= words


def test_formula_computes_what_the_operator_computes() -> None:
    """The page's lines, read as Python for one token in float32, against the reference."""
    generator = torch.Generator().manual_seed(0)
    rows, hidden, top_k = 6, 5, 3
    given = {
        "gemm2_permuted": torch.randn(rows, hidden + 2, generator=generator),
        "expert_weights": torch.rand(1, top_k, generator=generator),
        "expanded_idx_to_permuted_idx": torch.tensor([[4, -1, 0]], dtype=torch.int32),
        "shared_output": torch.randn(1, hidden, generator=generator),
        "shared_gate": torch.randn(1, 1, generator=generator),
        "residual": torch.randn(1, hidden, generator=generator),
        "gamma": torch.randn(hidden, generator=generator),
    }
    attributes = {
        "eps": 1e-3,
        "residual_scale": 0.5,
        "combine_scale": 1.5,
        "routed_scaling_factor": 2.5,
        "weight_bias": 1.0,
        "weight_before_cast": 1,
        "apply_expert_weights": 1,
    }
    wanted = reference(FINALIZE_ADD_RMS_NORM, given, attributes)
    names = {
        **{name: tensor.numpy() for name, tensor in given.items()},
        **attributes,
        "fp32": lambda x: x,
        "round": lambda x: x,
        "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
        "sqrt": np.sqrt,
        "mean": np.mean,
        "H": hidden,
        "t": 0,
    }
    lines = formula(FINALIZE_ADD_RMS_NORM)
    assert lines[1].strip() == "where 0 <= expanded_idx_to_permuted_idx[t,k] < R; 0 where it is -1; NaN elsewhere"
    route, total, *rest = lines[0], *lines[2:]
    entries = given["expanded_idx_to_permuted_idx"][0].tolist()
    text = route.partition(" = ")[2]
    routes = [eval(text, names | {"k": k}) if entries[k] >= 0 else np.zeros(hidden) for k in range(top_k)]
    assert total == "routed = sum over k of route[k]"
    names["routed"] = sum(routes)
    for line in rest:
        name, _, text = line.partition(" = ")
        names[name] = eval(text.replace("^2 over H", "**2"), names)
    for name, tensor in zip(FINALIZE_ADD_RMS_NORM.outputs, wanted, strict=True):
        # Six operations on each element, and a sum of at most 5 terms twice: 16 roundings of float32 at most.
        np.testing.assert_allclose(names[name].ravel(), tensor.numpy().ravel(), rtol=16 * 2.0**-24, atol=16 * 2.0**-24)
