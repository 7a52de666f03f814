"""The plugin library and the kernel's host build: where they are, whether they are ours, how they are built anew."""

import ctypes
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moetrt.errors import InputError, MoetrtError
from moetrt.files import existing_file, write_atomically

LIBRARY_NAME = "libmoetrt_plugins.so"
LIBRARY_VARIABLE = "MOETRT_PLUGIN_LIBRARY"

HOST_LIBRARY_NAME = "libmoetrt_host.so"
HOST_LIBRARY_VARIABLE = "MOETRT_HOST_LIBRARY"

ABI_VERSION = 2
"""MOETRT_ABI_VERSION of plugins/include/moetrt/moe_finalize.h."""

DEFAULT_TACTIC = 0
"""MOETRT_TACTIC_DEFAULT: the library chooses."""

C_FUNCTIONS = (
    "moetrt_abi_version",
    "moetrt_version",
    "moetrt_last_error",
    "moetrt_clear_last_error",
    "moetrt_show_errors",
    "moetrt_moe_finalize",
    "moetrt_moe_finalize_with_tactic",
    "moetrt_moe_finalize_tactics",
    "moetrt_tactic_name",
    "moetrt_current_device",
    "moetrt_register_creators",
)
HOST_C_FUNCTIONS = (
    "moetrt_abi_version",
    "moetrt_last_error",
    "moetrt_show_errors",
    "moetrt_moe_finalize",
    "moetrt_moe_finalize_with_tactic",
)
TENSORRT_FUNCTIONS = ("setLoggerFinder", "getCreators", "getPluginCreators")


class MoEFinalizeParams(ctypes.Structure):
    """``moetrt_moe_finalize_params``: sizes, device pointers and attributes of one tail, as the header describes."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_tokens", "top_k", "num_rows", "row_stride", "hidden_size")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "gemm2_permuted",
                "expert_weights",
                "expanded_idx_to_permuted_idx",
                "shared_output",
                "shared_gate",
                "residual",
                "gamma",
                "norm_out",
                "residual_out",
            )
        ),
        *((name, ctypes.c_int32) for name in ("dtype", "weights_dtype", "gate_dtype", "gamma_dtype")),
        *(
            (name, ctypes.c_float)
            for name in ("eps", "residual_scale", "combine_scale", "routed_scaling_factor", "weight_bias")
        ),
        *(
            (name, ctypes.c_int32)
            for name in ("weight_before_cast", "apply_expert_weights", "programmatic_dependent_launch")
        ),
    )


class Device(ctypes.Structure):
    """``moetrt_device``: what of a GPU decides which tactics it runs."""

    _fields_ = (("compute_capability", ctypes.c_int32), ("multiprocessors", ctypes.c_int32))


@dataclass(frozen=True)
class KernelLibrary:
    """A loaded library that runs tails. What it refuses is kept for each thread, as its last error."""

    path: Path
    functions: ctypes.CDLL

    def last_error(self) -> str:
        """The last refusal on this thread, one line; "" when there was none."""
        return str(self.functions.moetrt_last_error().decode(errors="replace"))

    @contextmanager
    def errors_kept(self) -> Iterator[None]:
        """While the block runs, refusals are not shown on standard error, only kept: the caller tells the user."""
        before = self.functions.moetrt_show_errors(0)
        try:
            yield
        finally:
            self.functions.moetrt_show_errors(before)

    def moe_finalize(self, params: MoEFinalizeParams, stream: int = 0, *, tactic: int = DEFAULT_TACTIC) -> None:
        """Starts the kernel on a CUDA stream (its handle; 0 is the default stream) and returns at once.

        The host build has no streams and returns when the kernel has ended.

        Raises:
            InputError: a parameter or the tactic is not taken, or CUDA could not start the kernel.
        """
        if self.functions.moetrt_moe_finalize_with_tactic(ctypes.byref(params), tactic, stream) != 0:
            raise InputError(self.last_error())


class PluginLibrary(KernelLibrary):
    """The plugin library, whose kernel runs on a GPU."""

    @property
    def version(self) -> str:
        """Its version, as in pyproject.toml when it was built."""
        return str(self.functions.moetrt_version().decode())

    def clear_last_error(self) -> None:
        """Forgets the last refusal on this thread."""
        self.functions.moetrt_clear_last_error()

    def register_creators(self) -> int:
        """Registers the plugins with every TensorRT that this process has loaded by now; returns how many have them.

        Raises:
            InputError: a TensorRT is of a version that is not supported.
        """
        count = int(self.functions.moetrt_register_creators())
        if count < 0:
            raise InputError(self.last_error())
        return count

    def current_device(self) -> Device:
        """The current CUDA device.

        Raises:
            InputError: there is none.
        """
        device = Device()
        if self.functions.moetrt_current_device(ctypes.byref(device)) != 0:
            raise InputError(self.last_error())
        return device

    def tactics(self, params: MoEFinalizeParams, device: Device) -> dict[int, str]:
        """The kernel's tactics worth timing, with their names; the default one comes first. Needs no GPU."""
        ids = (ctypes.c_int32 * 64)()
        count = self.functions.moetrt_moe_finalize_tactics(ctypes.byref(params), ctypes.byref(device), ids, len(ids))
        return {tactic: self.functions.moetrt_tactic_name(tactic).decode() for tactic in ids[:count]}


def find_plugin_library() -> Path:
    """Returns the library that MOETRT_PLUGIN_LIBRARY names, else the one that was installed with the package.

    Raises:
        InputError: there is none.
    """
    named = os.environ.get(LIBRARY_VARIABLE)
    if named:
        return existing_file(named, f"plugin library ({LIBRARY_VARIABLE})").absolute()
    for folder in _package_folders():
        candidate = folder / "lib" / LIBRARY_NAME
        if candidate.is_file():
            return candidate
    raise InputError(
        f"plugin library {LIBRARY_NAME} is not in '{_package_folders()[0] / 'lib'}'; "
        f"build it with 'moetrt doctor --build' or set {LIBRARY_VARIABLE}"
    )


def find_host_library() -> Path:
    """Returns the kernel's host build: what MOETRT_HOST_LIBRARY names, else the file beside the plugin library.

    Raises:
        InputError: there is none.
    """
    named = os.environ.get(HOST_LIBRARY_VARIABLE)
    if named:
        return existing_file(named, f"the kernel's host build ({HOST_LIBRARY_VARIABLE})").absolute()
    candidate = find_plugin_library().with_name(HOST_LIBRARY_NAME)
    if not candidate.is_file():
        raise InputError(
            f"the kernel's host build {HOST_LIBRARY_NAME} is not in '{candidate.parent}'; "
            f"build it with 'moetrt doctor --build' or set {HOST_LIBRARY_VARIABLE}"
        )
    return candidate


def load_host_library(path: str | os.PathLike[str] | None = None) -> KernelLibrary:
    """Loads the kernel's host build, which runs tails on the process's own memory.

    Args:
        path: the library; None is `find_host_library`'s.

    Raises:
        InputError: it cannot be loaded, is not moetrt's, or has another ABI version.
    """
    found = find_host_library() if path is None else existing_file(path, "the kernel's host build").absolute()
    functions = _open(found, "the kernel's host build", HOST_C_FUNCTIONS)
    _declare_calls(functions)
    return KernelLibrary(found, functions)


def _open(found: Path, what: str, names: Sequence[str]) -> ctypes.CDLL:
    """Loads a library that must have ``names`` and our ABI version."""
    try:
        functions = ctypes.CDLL(str(found))
    except OSError as error:
        reason = str(error).removeprefix(f"{found}: ")
        raise InputError(f"{what} '{found}' cannot be loaded: {reason}") from error
    missing = [name for name in names if not hasattr(functions, name)]
    if missing:
        raise InputError(f"{what} '{found}' is not moetrt's: it has no {missing[0]}")
    abi = int(functions.moetrt_abi_version())
    if abi != ABI_VERSION:
        raise InputError(f"{what} '{found}' has ABI version {abi}; {ABI_VERSION} is taken, build it anew")
    return functions


def _declare_calls(functions: ctypes.CDLL) -> None:
    params = ctypes.POINTER(MoEFinalizeParams)
    functions.moetrt_last_error.restype = ctypes.c_char_p
    functions.moetrt_moe_finalize.argtypes = (params, ctypes.c_void_p)
    functions.moetrt_moe_finalize_with_tactic.argtypes = (params, ctypes.c_int32, ctypes.c_void_p)


def load_plugin_library(path: str | os.PathLike[str] | None = None) -> PluginLibrary:
    """Loads the library for its C interface; it also registers its plugins with the TensorRT that is loaded.

    Args:
        path: the library; None is `find_plugin_library`'s.

    Raises:
        InputError: it cannot be loaded, is no plugin library of moetrt, or has another ABI version.
    """
    found = find_plugin_library() if path is None else existing_file(path, "plugin library").absolute()
    functions = _open(found, "plugin library", (*C_FUNCTIONS, *TENSORRT_FUNCTIONS))
    _declare_calls(functions)
    functions.moetrt_version.restype = ctypes.c_char_p
    functions.moetrt_clear_last_error.restype = None
    functions.moetrt_tactic_name.restype = ctypes.c_char_p
    return PluginLibrary(found, functions)


def library_sha256(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a library's file, as 64 hexadecimal digits."""
    with existing_file(path, "plugin library").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def build_plugin_library() -> Path:
    """Builds the libraries from the sources that came with the package and puts them where they are looked for.

    The compiler's output goes to standard error. What it needs of CUDA and TensorRT is fetched when the machine lacks
    it (plugins/cmake/toolchain.py).

    Raises:
        MoetrtError: a compiler or CMake is missing, or the build failed.

    Returns:
        The plugin library.
    """
    source, work = _source_and_work_folders()
    cmake = _program("cmake")
    build = work / "plugins"
    generator = ["-G", "Ninja"] if _find_program("ninja") else []
    configure = [cmake, "-S", str(source), "-B", str(build), *generator]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-DMOETRT_TOOLCHAIN_DIRECTORY={work / 'toolchain'}"]
    configure += [f"-DMOETRT_VERSION={_version()}"]
    for command in (configure, [cmake, "--build", str(build), "--parallel", str(os.cpu_count() or 1)]):
        reason = _run_and_show(command)
        if reason:
            raise MoetrtError(f"the plugin library could not be built: {reason}")
    folder = _package_folders()[0] / "lib"
    for name in (HOST_LIBRARY_NAME, LIBRARY_NAME):
        with write_atomically(folder / name) as temporary:
            shutil.copy2(build / name, temporary)
    return folder / LIBRARY_NAME


def _run_and_show(command: list[str]) -> str:
    """Shows the command's output on standard error; returns "" or, where it failed, the reason in one line."""
    # Not on standard output: that belongs to the result, so that `moetrt doctor --json` stays readable.
    reason = f"the compiler's output is above ({' '.join(command[:3])})"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stderr.write(line)
            if line.startswith(_TOOLCHAIN_ERROR):
                reason = line.removeprefix(_TOOLCHAIN_ERROR).strip()
    return "" if process.returncode == 0 else reason


# How plugins/cmake/toolchain.py begins its one line.
_TOOLCHAIN_ERROR = "moetrt: error: "


def _package_folders() -> list[Path]:
    """The package's folders: an editable install has one of sources and one of what was built."""
    import moetrt

    return [Path(folder) for folder in moetrt.__path__]


def _source_and_work_folders() -> tuple[Path, Path]:
    """The folder of the library's CMakeLists.txt, and the one to build in."""
    for package in _package_folders():
        clone = package.parent.parent
        if (clone / "plugins" / "CMakeLists.txt").is_file():
            return clone / "plugins", clone / "build"
        if (package / "plugins" / "CMakeLists.txt").is_file():
            cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            return package / "plugins", Path(cache) / "moetrt"
    raise MoetrtError("the plugin library's sources are not in the package; build it in a clone of the project")


def _version() -> str:
    try:
        return importlib.metadata.version("moetrt")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _find_program(name: str) -> str | None:
    # The packages cmake and ninja put their commands beside this interpreter, which need not be on PATH.
    return shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}")


def _program(name: str) -> str:
    found = _find_program(name)
    if found is None:
        raise MoetrtError(f"{name} is not on PATH, and the plugin library is built with it: pip install {name}")
    return found
