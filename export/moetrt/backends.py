"""Which TensorRT a process uses: chosen once, before Polygraphy is imported, and made fit to load plugins."""

import ctypes
import importlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from moetrt.errors import InputError

TENSORRT = "tensorrt"
TENSORRT_RTX = "tensorrt-rtx"

ENVIRONMENT_VARIABLE = "MOETRT_BACKEND"
"""Names the backend where no argument does."""

POLYGRAPHY_SWITCH = "POLYGRAPHY_USE_TENSORRT_RTX"

_MODULES = {TENSORRT: "tensorrt", TENSORRT_RTX: "tensorrt_rtx"}
_INSTALL = {TENSORRT: "pip install 'moetrt[tensorrt]'", TENSORRT_RTX: "pip install 'moetrt[rtx]'"}
# Older parsers let a model-local function shadow the plugin of the same name.
_OLDEST = {TENSORRT: (10, 8), TENSORRT_RTX: (1, 7)}

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Backend:
    """A TensorRT that is imported.

    Attributes:
        name: "tensorrt" or "tensorrt-rtx".
        module: the imported Python module.
        version: its version, such as "1.7.1.116".
    """

    name: str
    module: ModuleType
    version: str

    @property
    def is_rtx(self) -> bool:
        return self.name == TENSORRT_RTX


@dataclass(frozen=True)
class Gpu:
    """A GPU that the CUDA driver shows: ``compute_capability`` is (major, minor)."""

    name: str
    compute_capability: tuple[int, int]


_chosen: Backend | None = None


@cache
def gpus() -> tuple[Gpu, ...]:
    """The GPUs that the CUDA driver shows; none where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    found = []
    major_attribute, minor_attribute = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
    for ordinal in range(count.value):
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        name = ctypes.create_string_buffer(256)
        if (
            driver.cuDeviceGet(ctypes.byref(device), ordinal) == 0
            and driver.cuDeviceGetName(name, len(name), device) == 0
            and driver.cuDeviceGetAttribute(ctypes.byref(major), major_attribute, device) == 0
            and driver.cuDeviceGetAttribute(ctypes.byref(minor), minor_attribute, device) == 0
        ):
            found.append(Gpu(name.value.decode(errors="replace"), (major.value, minor.value)))
    return tuple(found)


def driver_cuda() -> tuple[int, int]:
    """The newest CUDA (major, minor) that the driver takes; (0, 0) where there is no driver."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return (0, 0)
    return (version.value // 1000, version.value % 1000 // 10)


def installed(name: str) -> bool:
    """Whether the Python module of the backend ``name`` is installed; it is not imported."""
    module = _MODULES[name]
    return module in sys.modules or importlib.util.find_spec(module) is not None


def resolve(backend: str | None = None) -> str:
    """The name of the backend that would be used; nothing is imported.

    Args:
        backend: "tensorrt" or "tensorrt-rtx". None: the environment variable MOETRT_BACKEND, else "tensorrt" where it
            is installed and a GPU is there, else "tensorrt-rtx".

    Raises:
        InputError: the name is unknown, or the backend is not installed.
    """
    asked, source = backend, "backend"
    if asked is None and os.environ.get(ENVIRONMENT_VARIABLE):
        asked, source = os.environ[ENVIRONMENT_VARIABLE], f"backend (from {ENVIRONMENT_VARIABLE})"
    if asked is not None and (not isinstance(asked, str) or asked not in _MODULES):
        raise InputError(f"{source} was '{asked}'; taken are {' and '.join(_MODULES)}")
    name = asked or (TENSORRT if installed(TENSORRT) and gpus() else TENSORRT_RTX)
    if not installed(name):
        raise InputError(f"backend {name}: the Python module {_MODULES[name]} is not installed; {_INSTALL[name]}")
    return name


def switch_polygraphy(name: str) -> None:
    """Makes Polygraphy use the backend ``name``; must run before the rest of Polygraphy is imported.

    Raises:
        InputError: Polygraphy was imported already and is set to the other TensorRT.
    """
    # This module alone has no importer of TensorRT in it, so it may come before the switch.
    import polygraphy.config

    wanted = name == TENSORRT_RTX
    # polygraphy.util is the first module that fixes which TensorRT all later ones import.
    if "polygraphy.util" in sys.modules and bool(polygraphy.config.USE_TENSORRT_RTX) != wanted:
        raise InputError(
            f"backend {name}: Polygraphy was imported before and is set to the other TensorRT; "
            f"set {POLYGRAPHY_SWITCH}={int(wanted)} or import moetrt.parity first"
        )
    # The variable is for child processes, the attribute for this one.
    os.environ[POLYGRAPHY_SWITCH] = str(int(wanted))
    polygraphy.config.USE_TENSORRT_RTX = wanted


def choose(backend: str | None = None, *, progress: Progress | None = None) -> Backend:
    """Imports the TensorRT of this process, once, and sets Polygraphy to it.

    Args:
        backend: as for `resolve`; once chosen, None gives what was chosen.
        progress: told when a link is made beside TensorRT-RTX's libraries (see `link_unversioned_name`).

    Raises:
        InputError: as `resolve`; or the module cannot be imported or is too old, or this process uses the other one
            already, or the link cannot be made.
    """
    global _chosen
    if _chosen is not None and backend is None:
        return _chosen
    name = resolve(backend)
    if _chosen is not None:
        if _chosen.name != name:
            raise InputError(
                f"backend {name}: this process uses {_chosen.name} already, and Polygraphy holds to one; "
                "start a new process"
            )
        return _chosen
    switch_polygraphy(name)
    try:
        module = importlib.import_module(_MODULES[name])
    except Exception as error:  # a broken installation raises whatever its loader does
        reason = " ".join(str(error).split())
        raise InputError(f"backend {name}: the module {_MODULES[name]} cannot be imported: {reason}") from error
    version = str(module.__version__)
    oldest = _OLDEST[name]
    if tuple(int(part) for part in version.split(".")[:2]) < oldest:
        raise InputError(
            f"backend {name}: version {version} is too old; {'.'.join(map(str, oldest))} or later is taken"
        )
    if name == TENSORRT_RTX:
        link_unversioned_name(progress=progress)
    _chosen = Backend(name, module, version)
    return _chosen


def link_unversioned_name(*, progress: Progress | None = None) -> Path:
    """Makes ``libtensorrt_rtx.so`` beside the ONNX parser a link to the TensorRT-RTX that is loaded.

    TensorRT-RTX's ONNX parser opens that unversioned name when it adds a plugin; the wheel ships only the versioned
    one, and the process would end in std::terminate. Safe to run again and in several processes at once.

    Args:
        progress: told what was linked; nothing is said where the link is right already.

    Returns:
        The link.

    Raises:
        InputError: the libraries are not loaded, the folder cannot be written, or a file that is no link is in the way.
    """
    library = _loaded_library("libtensorrt_rtx.so")
    # The parser looks beside itself: its RPATH is $ORIGIN.
    parser = _loaded_library("libtensorrt_onnxparser_rtx.so")
    link = parser.parent / "libtensorrt_rtx.so"
    if _same_file(link, library):
        return link
    if link.exists() and not link.is_symlink():
        raise InputError(
            f"'{link}' is a file of another TensorRT-RTX than the one that is loaded, '{library}'; remove it"
        )
    target = library.name if library.parent == parser.parent else str(library)
    try:
        # Made under another name and renamed, so that another process sees the old link or the new one, never none.
        with tempfile.TemporaryDirectory(prefix=".moetrt-link-", dir=link.parent) as folder:
            fresh = Path(folder) / link.name
            fresh.symlink_to(target)
            os.replace(fresh, link)
    except OSError as error:
        raise InputError(
            f"TensorRT-RTX's ONNX parser needs '{link}' to load a plugin, and its folder cannot be written "
            f"({error.strerror or error}); have it made once: ln -s {target} {link}"
        ) from error
    if progress is not None:
        progress(f"linked {link} -> {target}: TensorRT-RTX's ONNX parser opens this name when it adds a plugin")
    return link


def _same_file(link: Path, library: Path) -> bool:
    try:
        return os.path.samefile(link, library)
    except OSError:
        return False


def _loaded_library(stem: str) -> Path:
    """The file of the loaded shared library whose name is ``stem`` followed by its version or nothing."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    # The path is the sixth column; it alone may hold spaces.
    paths = {columns[5] for line in maps if len(columns := line.split(maxsplit=5)) == 6}
    found = sorted(path for path in paths if Path(path).name == stem or Path(path).name.startswith(stem + "."))
    if len(found) != 1:
        what = "is not loaded" if not found else f"is loaded {len(found)} times: {', '.join(found)}"
        raise InputError(f"the library {stem} of TensorRT-RTX {what}; one copy is needed")
    return Path(found[0])
