"""Functions whose branches on a size were read: each branch gives the same numbers, so that the example's is any's.

A function is known by its source text, as in `moetrt.rewrites.known_forms`: one that changes is read again.
"""

from types import CodeType

from moetrt.rewrites.known_forms import digest

FUNCTIONS = {
    # transformers.masking_utils: position ids are expanded to the batch, or are of its size already.
    "d58af2e1f481a522": "_preprocess_mask_arguments",
    # transformers.integrations.sdpa_attention: one query sees every key, with a causal mask as without.
    "4a4d9fe3f522b6a3": "sdpa_attention_forward",
}
"""The name of each by the digest of its source."""


def is_read(code: CodeType | None) -> bool:
    """Whether ``code`` is of one of the functions."""
    return code is not None and digest(code) in FUNCTIONS
