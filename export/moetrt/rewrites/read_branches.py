"""Functions whose branches on a size were read: each branch gives the same numbers, so that the example's is any's.

A function is known by its source text, as in `moetrt.rewrites.known_forms`: one that changes is read again.
"""

import sys
from functools import cache
from types import FunctionType

from moetrt.rewrites.known_forms import digest

FUNCTIONS = {
    # transformers.masking_utils: position ids are expanded to the batch, or are of its size already.
    "d58af2e1f481a522": "_preprocess_mask_arguments",
    # transformers.integrations.sdpa_attention: one query sees every key, with a causal mask as without.
    "4a4d9fe3f522b6a3": "sdpa_attention_forward",
}
"""The name of each by the digest of its source."""


def is_read(file: str, line: int) -> bool:
    """Whether a line of code is in one of the functions."""
    return any(first <= line <= last for first, last in _lines(file))


@cache
def _lines(file: str) -> tuple[tuple[int, int], ...]:
    """The first and last line of each of the functions that ``file`` defines."""
    module = next((part for part in list(sys.modules.values()) if getattr(part, "__file__", None) == file), None)
    found = []
    for function in vars(module).values() if module is not None else ():
        if isinstance(function, FunctionType) and digest(function) in FUNCTIONS:
            lines = [line for _, _, line in function.__code__.co_lines() if line is not None]
            found.append((min(lines), max(lines)))
    return tuple(found)
