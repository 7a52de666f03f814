"""The test driver, built with the plugin library's own CMake project."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moetrt.library import PluginLibrary, load_plugin_library
from tests.plugins.driver import Driver

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def driver_build(plugin_library: Path) -> Path:
    """The folder of libmoetrt_driver.so and libmoetrt_recording.so."""
    build = ROOT / "build" / "driver"
    configure = ["-S", str(ROOT / "plugins"), "-B", str(build), "-DMOETRT_DRIVER=ON"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}"]
    # The packages cmake and ninja put their commands beside this interpreter.
    folder = Path(sys.executable).parent
    cmake = str(folder / "cmake") if (folder / "cmake").exists() else shutil.which("cmake")
    assert cmake is not None
    for command in (
        configure,
        ["--build", str(build), "--parallel", "2", "--target", "moetrt_driver", "moetrt_recording"],
    ):
        done = subprocess.run([cmake, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return build


@pytest.fixture(scope="session")
def driver(driver_build: Path, plugin_library: Path) -> Driver:
    """The driver with the plugin library."""
    return Driver(driver_build / "libmoetrt_driver.so", plugin_library)


@pytest.fixture(scope="session")
def recording(driver_build: Path) -> Driver:
    """The driver with the same plugin around a kernel that only remembers what it was asked to run."""
    return Driver(driver_build / "libmoetrt_driver.so", driver_build / "libmoetrt_recording.so")


@pytest.fixture(scope="session")
def loaded(plugin_library: Path) -> PluginLibrary:
    return load_plugin_library(plugin_library)


@pytest.fixture
def library(loaded: PluginLibrary) -> Iterator[PluginLibrary]:
    """The loaded library with no refusal remembered."""
    loaded.clear_last_error()
    yield loaded
    loaded.clear_last_error()
