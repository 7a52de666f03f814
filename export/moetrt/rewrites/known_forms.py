"""Modules of Transformers that torch.onnx does not take, known by what their forward says, and what they become.

A form is known by the source text of its forwards, not by its name: a family that copies the code is taken as it is,
and a version of Transformers that changes it is not, so that nothing is re-expressed that was not read.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from moetrt.rewrites import compressed_attention, dbrx, lightning, llama4, longrope


@dataclass(frozen=True)
class KnownForm:
    """One form of a module.

    Attributes:
        sources: the digest of the forward's source by submodule, "" for the module itself; see `digest`.
        forward: takes the module and its forward's arguments, and gives what its own forward gives.
        moe: whether it is a MoE layer, or its experts: then ``forward`` ends in ``moetrt::moe_finalize_add``, and takes
            the form of the expert GEMMs as ``experts_form``.
    """

    sources: Mapping[str, str]
    forward: Callable[..., Any]
    moe: bool


FORMS = (
    KnownForm(llama4.SOURCES, llama4.forward, moe=True),
    KnownForm(dbrx.SOURCES, dbrx.forward, moe=True),
    KnownForm(longrope.SOURCES, longrope.forward, moe=False),
    KnownForm(lightning.SOURCES, lightning.forward, moe=False),
    KnownForm(compressed_attention.INDEXER, compressed_attention.indexer, moe=False),
    KnownForm(compressed_attention.SPARSE, compressed_attention.sparse, moe=False),
    KnownForm(compressed_attention.HEAVY, compressed_attention.heavy, moe=False),
)


def digest(function: Callable[..., Any]) -> str:
    """Of a function's source without white space; empty where the source cannot be read."""
    return _digest(getattr(function, "__func__", function))


@cache
def _digest(function: Callable[..., Any]) -> str:
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        return ""
    return hashlib.sha256("".join(text.split()).encode()).hexdigest()[:16]


def known_modules(module: torch.nn.Module) -> dict[str, KnownForm]:
    """The modules in ``module`` that are of a known form, by name."""
    found = {}
    for name, child in module.named_modules():
        form = next((form for form in FORMS if _is(child, form)), None)
        if form is not None:
            found[name] = form
    return found


def _is(module: torch.nn.Module, form: KnownForm) -> bool:
    for path, wanted in form.sources.items():
        try:
            part = module.get_submodule(path)
        except AttributeError:
            return False
        if digest(part.forward) != wanted:
            return False
    return True


@contextmanager
def re_expressed(module: torch.nn.Module, experts_form: str) -> Iterator[None]:
    """While the block runs, the known modules in ``module`` have the forward of their form.

    Args:
        module: nothing happens where it holds none.
        experts_form: one of `moetrt.experts.EXPERTS_FORMS`.
    """
    found = [(module.get_submodule(name), form) for name, form in known_modules(module).items()]
    try:
        for child, form in found:
            # On the instance, where it hides the class's own.
            extra = {"experts_form": experts_form} if form.moe else {}
            child.forward = partial(form.forward, child, **extra)
        yield
    finally:
        for child, _ in found:
            child.__dict__.pop("forward", None)
