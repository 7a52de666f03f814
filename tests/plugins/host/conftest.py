"""The host build of the kernel, made once per session."""

import ctypes

import pytest

from tests.plugins.host.host_build import build_library
from tests.plugins.host.host_kernel import load


@pytest.fixture(scope="session")
def host_library() -> ctypes.CDLL:
    """The kernel's source as a library on the host, with the C interface of moetrt/moe_finalize.h."""
    return load(build_library())
