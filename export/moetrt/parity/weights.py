"""Whether a file has the weights that a model has: by their names, else anywhere in it, whatever their shape."""

from collections.abc import Iterator

import onnx_ir as ir
import torch

from moetrt.capture import weights_of
from moetrt.parity.twins import TORCH_DTYPES, to_torch, values_of

Fingerprint = tuple[torch.dtype, int, int, int]
"""Of a tensor, whatever the order of its elements: dtype, number, and two sums over their bits."""


def other_weights(model: ir.Model, module: torch.nn.Module) -> tuple[list[str], bool]:
    """The weights of a module that a file has not.

    Tools fold and turn weights: one that is anywhere in the file, in whatever order, is there. Weights are read.

    Args:
        model: the file.
        module: the source's.

    Returns:
        The names, and whether the file has other numbers under one of them.
    """
    known: set[Fingerprint] | None = None
    lost, named = [], False
    for name, weight in weights_of(module).items():
        mine = model.graph.initializers.get(name)
        if mine is not None and mine.const_value is not None and mine.dtype in TORCH_DTYPES:
            theirs = to_torch(mine.const_value.numpy())
            if theirs.shape == weight.shape and torch.equal(theirs, weight.detach().cpu().to(theirs.dtype)):
                continue
        known = set(_fingerprints(model)) if known is None else known
        if _fingerprint(weight.detach().cpu()) not in known:
            lost.append(name)
            named |= mine is not None
    return lost, named


def _fingerprints(model: ir.Model) -> Iterator[Fingerprint]:
    for graph in model.graphs():
        for value in values_of(graph):
            tensor = value.const_value
            if tensor is not None and tensor.dtype in TORCH_DTYPES:
                yield _fingerprint(to_torch(tensor.numpy()))


def _fingerprint(tensor: torch.Tensor) -> Fingerprint:
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.contiguous().reshape(-1).view(widths[tensor.element_size()]).long()
    # They wrap around, all alike.
    return tensor.dtype, tensor.numel(), int(bits.sum()), int((bits * bits + 7 * bits).sum())
