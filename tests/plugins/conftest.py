"""The test driver, built with the plugin library's own CMake project.

MOETRT_DRIVER_BUILD names the folder of one that is built already, for a machine that has no compiler.
"""

import fcntl
import os
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
    """The folder of libmoetrt_driver.so, libmoetrt_recording.so and libmoetrt_hosted.so."""
    if built := os.environ.get("MOETRT_DRIVER_BUILD"):
        return Path(built)
    build = ROOT / "build" / "driver"
    configure = ["-S", str(ROOT / "plugins"), "-B", str(build), "-DMOETRT_DRIVER=ON"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}"]
    # The packages cmake and ninja put their commands beside this interpreter.
    folder = Path(sys.executable).parent
    cmake = str(folder / "cmake") if (folder / "cmake").exists() else shutil.which("cmake")
    assert cmake is not None
    build.mkdir(parents=True, exist_ok=True)
    with (build / ".lock").open("w") as lock:
        # Tests run in several processes, and CMake's folder takes one at a time.
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (
            configure,
            [
                "--build",
                str(build),
                "--parallel",
                "2",
                "--target",
                "moetrt_driver",
                "moetrt_recording",
                "moetrt_hosted",
            ],
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
def hosted(driver_build: Path) -> Driver:
    """The driver with the same plugin around the kernel's host build: its "GPU" is the process's memory."""
    return Driver(driver_build / "libmoetrt_driver.so", driver_build / "libmoetrt_hosted.so")


@pytest.fixture(scope="session")
def loaded(plugin_library: Path) -> PluginLibrary:
    return load_plugin_library(plugin_library)


@pytest.fixture
def library(loaded: PluginLibrary) -> Iterator[PluginLibrary]:
    """The loaded library with no refusal remembered."""
    loaded.clear_last_error()
    yield loaded
    loaded.clear_last_error()
