"""Factories that are wrong in one way each: ``tests.models.wrong:NAME``."""

import importlib
import sys

import torch

NOT_CALLABLE = 3


def raises() -> object:
    """Fails in its own code."""
    raise KeyError("weights of layer 7")


def exits() -> object:
    """Prints, and ends the process as a script would."""
    print("this is not moetrt's")
    sys.exit(0)


def exits_when_imported() -> object:
    """As importing a script without ``if __name__ == "__main__"`` does."""
    return importlib.import_module("tests.models.script")


class _Exits(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sys.exit(5)


def module_exits() -> object:
    """Returns a module that ends the process."""
    return _Exits(), torch.zeros(3, 5)


def talks() -> object:
    """Returns a module that is right, and prints."""
    print("this is not moetrt's")
    return torch.nn.Linear(5, 2), torch.zeros(3, 5)


def number() -> object:
    """Returns what is no model."""
    return 7


def bare_module() -> object:
    """Returns a module without inputs."""
    return torch.nn.Linear(2, 2)


def no_tensors() -> object:
    """Returns a module with inputs that hold no tensor."""
    return torch.nn.Linear(2, 2), {"x": 1.0}


def inputs_do_not_fit() -> object:
    """Returns a module that does not take its own example inputs."""
    return torch.nn.Linear(2, 2), torch.zeros(3, 5)


class _Branches(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1


def data_dependent() -> object:
    """Returns a module that torch.export cannot follow."""
    return _Branches(), torch.ones(3, 5)


def needs_arguments(size: int) -> object:
    """A factory with an argument."""
    return size
