"""Where NaN or infinities come into a model's run: a weight, an input, or the first tail that reads them."""

from collections.abc import Mapping, Sequence

import torch

from moetrt.capture import weights_of
from moetrt.onnx_op import operator_of
from moetrt.parity.tails import Tail

_ROWS, _MAP = "gemm2_permuted", "expanded_idx_to_permuted_idx"


def first_not_finite(
    module: torch.nn.Module, feed: Mapping[str, torch.Tensor], tails: Sequence[Tail], values: Mapping[str, torch.Tensor]
) -> str:
    """In words, where NaN or Inf come in; empty where it is not known.

    Args:
        module: the PyTorch model.
        feed: its inputs.
        tails: of the mapped file, in order.
        values: what the tails read, by name.
    """
    for name, weight in weights_of(module).items():
        if found := _specials(weight.detach()):
            return f"weight '{name}', which has {found}"
    # Rows that no map names are read by nobody: what they hold comes in nowhere.
    rows = [tail.inputs[_ROWS] for tail in tails]
    padded = {row.name for row in rows if all(operator_of(use.node) is not None for use in row.uses())}
    for name, tensor in feed.items():
        if name not in padded and (found := _specials(tensor)):
            return f"input '{name}', which has {found}"
    for tail in tails:
        for name, value in tail.inputs.items():
            read = values.get(value.name or "")
            if read is not None and name == _ROWS and _MAP in tail.inputs:
                read = _named_rows(read, values.get(tail.inputs[_MAP].name or ""))
            if read is not None and (found := _specials(read)):
                return f"before tail {tail.index + 1} of {len(tails)}, {tail.name}, whose {name} has {found}"
    return ""


def _named_rows(rows: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """The rows that a map names."""
    return rows if index is None else rows[index[(index >= 0) & (index < len(rows))].long().unique()]


def _specials(tensor: torch.Tensor) -> str:
    """How many NaN and Inf there are, in words; empty without any."""
    if not tensor.is_floating_point():
        return ""
    counts = (("NaN", int(tensor.isnan().sum())), ("Inf", int(tensor.isinf().sum())))
    return " and ".join(f"{count} {kind}" for kind, count in counts if count)
