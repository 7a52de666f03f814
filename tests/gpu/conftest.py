"""Tests that need a GPU: skipped, with the reason, where PyTorch sees none. Inputs are new in every run."""

import os
import secrets
from pathlib import Path

import pytest
import torch

from moetrt.library import PluginLibrary
from tests.plugins.conftest import driver, driver_build, library, loaded  # noqa: F401  the same driver and library

SEED_VARIABLE = "MOETRT_TEST_SEED"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_not()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def _why_not() -> str:
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU that PyTorch sees"
    major, minor = torch.cuda.get_device_capability()
    return "" if major >= 8 else f"needs SM80 or later; the GPU is SM{major}{minor}"


@pytest.fixture(scope="session")
def seed() -> int:
    """Another one in every run; MOETRT_TEST_SEED repeats one."""
    return int(os.environ.get(SEED_VARIABLE) or secrets.randbits(31))


@pytest.fixture(autouse=True)
def seed_is_named(request: pytest.FixtureRequest, seed: int) -> None:
    """A failure says how to have the same inputs again."""
    request.node.add_report_section("setup", "seed", f"{SEED_VARIABLE}={seed}")


@pytest.fixture
def on_gpu(library: PluginLibrary) -> PluginLibrary:  # noqa: F811
    """The plugin library, once it has seen the device."""
    torch.zeros(1, device="cuda")
    library.current_device()
    return library
