"""What every test shares: no network, and the plugin library that was built from this tree."""

import os
from pathlib import Path

import pytest

# Before anything imports transformers or huggingface_hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")


@pytest.fixture(scope="session")
def plugin_library() -> Path:
    """The path of the built libmoetrt_plugins.so."""
    from moetrt.library import find_plugin_library

    return find_plugin_library()
