"""Functions of Transformers' files that torch.onnx does not take, known by what they say, and what they become."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

from moetrt.errors import InputError
from moetrt.rewrites import delta_rule, kimi_delta_rule, mamba2, selective_scan
from moetrt.rewrites.known_forms import digest

FUNCTIONS = (
    (delta_rule.NAME, delta_rule.SOURCE, delta_rule.by_token),
    (kimi_delta_rule.NAME, kimi_delta_rule.SOURCE, kimi_delta_rule.by_token),
    (selective_scan.NAME, selective_scan.SOURCE, selective_scan.by_token),
    (mamba2.NAME, mamba2.SOURCE, mamba2.by_token),
)
"""A function's name in the file that calls it, its digest, and what takes its place."""


@contextmanager
def functions_replaced(module: torch.nn.Module) -> Iterator[None]:
    """While the block runs, the files that the modules in ``module`` come from call ours for the known functions.

    Raises:
        InputError: a file has a function of such a name that is another: exported as it is, it would hold the example's
            length, and nothing would say so.
    """
    files = sorted({type(child).__module__ for child in module.modules()} & set(sys.modules))
    with ExitStack() as stack:
        for file in files:
            for name, source, replacement in FUNCTIONS:
                function = getattr(sys.modules[file], name, None)
                if function is None:
                    continue
                if digest(function) != source:
                    raise InputError(f"'{name}' of {file} is not the code that moetrt knows, so it is not exported")
                stack.enter_context(patch.object(sys.modules[file], name, replacement))
        yield
