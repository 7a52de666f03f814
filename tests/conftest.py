"""What every test shares: no network, and the plugin library that was built from this tree."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything imports transformers or huggingface_hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")


LONGEST = ("test_families.py", "test_mapping_foreign.py", "test_sanitizers.py", "test_mapping.py")
"""Files that begin before all others, so that none of them is what one of several processes does alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def plugin_library() -> Path:
    """The path of the built libmoetrt_plugins.so."""
    from moetrt.library import find_plugin_library

    return find_plugin_library()


BLOCK = "contract_to_engine:block"
"""The contract sample's model, as `moetrt export` takes it; `pythonpath` in pyproject.toml has the folder samples."""


@pytest.fixture(scope="session")
def mapped_block(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contract sample's block, float32, exported and mapped: inputs x and residual, [tokens, 64]."""
    return _mapped(tmp_path_factory.mktemp("block"), None)


@pytest.fixture(scope="session")
def mapped_block_fp16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in float16."""
    return _mapped(tmp_path_factory.mktemp("block_fp16"), "fp16")


def _mapped(folder: Path, dtype: str | None) -> Path:
    from moetrt.capture import export
    from moetrt.mapping import map_file
    from moetrt.source import load_source

    exported = export(load_source(BLOCK, dtype=dtype), folder)
    report = map_file(exported.model_path, folder / "mapped.onnx")
    assert report.complete, report.summary()
    return folder / "mapped.onnx"
