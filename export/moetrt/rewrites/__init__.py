"""What models write in a way that torch.onnx does not take, re-expressed while they are exported.

Each file is one obstacle. The module is left as it was, also when the export raises; the numbers stay the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moetrt.rewrites.complex_numbers import real_pairs
from moetrt.rewrites.known_forms import re_expressed
from moetrt.rewrites.known_functions import functions_replaced
from moetrt.rewrites.scalars import scalars_keep_their_value


@contextmanager
def rewritten(module: torch.nn.Module, experts_form: str) -> Iterator[None]:
    """Applies all of them to ``module``; ``experts_form`` is one of `moetrt.experts.EXPERTS_FORMS`."""
    with real_pairs(), scalars_keep_their_value(), functions_replaced(module), re_expressed(module, experts_form):
        yield
