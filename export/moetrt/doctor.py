"""What this machine has for exporting, mapping, building and running, and what to do about what it lacks."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moetrt import backends
from moetrt.errors import InputError
from moetrt.library import (
    ABI_VERSION,
    build_plugin_library,
    find_host_library,
    find_plugin_library,
    load_host_library,
    load_plugin_library,
)
from moetrt.spec import DOMAIN, OPERATORS, PLUGIN_VERSION

_PACKAGES = ("torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "polygraphy", "numpy", "ml_dtypes")
_SECONDS = 120


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what it is.
        status: "ok", "missing", or "none" for what a CPU-only machine need not have.
        detail: what was found.
        remedy: what to do, "" where nothing is to be done.
        needed: whether work on a machine without a GPU needs it.
    """

    name: str
    status: str
    detail: str
    remedy: str = ""
    needed: bool = True

    def as_dict(self) -> dict[str, Any]:
        """The check as JSON takes it."""
        return asdict(self)


def examine(*, build: bool = False) -> list[Check]:
    """Looks at everything; with ``build`` the plugin library is built first when it is missing.

    Raises:
        MoetrtError: the library was to be built and could not be.
    """
    if build and not _found():
        build_plugin_library()
    return list(_checks())


def _found() -> bool:
    try:
        find_plugin_library()
        find_host_library()
    except InputError:
        return False
    return True


def _checks() -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield from _packages()
    yield from _compilers()
    library, check = _library()
    yield check
    yield _host_library()
    rtx = _version("tensorrt-rtx")
    if rtx is None:
        yield Check("tensorrt-rtx", "missing", "not installed", "to build engines here: pip install 'moetrt[rtx]'")
    else:
        yield Check("tensorrt-rtx", "ok", rtx)
        yield _link()
        if library:
            yield _registry("tensorrt_rtx", library)
    if library and _version("tensorrt-lean-cu13-bindings"):
        yield _registry("tensorrt_lean_bindings", library)
    yield _tensorrt()
    yield _gpu()


def _packages() -> Iterator[Check]:
    versions = {package: _version(package) for package in _PACKAGES}
    missing = [package for package, version in versions.items() if version is None]
    found = ", ".join(f"{package} {version}" for package, version in versions.items() if version)
    if missing:
        yield Check("packages", "missing", f"no {', no '.join(missing)}; {found}", f"pip install {' '.join(missing)}")
    else:
        yield Check("packages", "ok", found)
    transformers = _version("transformers")
    if transformers:
        yield Check("transformers", "ok", transformers, needed=False)
    else:
        remedy = "for Hugging Face models: pip install 'moetrt[hf]'"
        yield Check("transformers", "none", "not installed", remedy, needed=False)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _compilers() -> Iterator[Check]:
    """What building the plugin library takes; of no matter where it is built already."""
    compiler = shutil.which("g++")
    if compiler:
        yield Check("g++", "ok", f"{_first_line(compiler, '--version')} ({compiler})", needed=False)
    else:
        yield Check("g++", "none", "not on PATH", "to build the library: apt-get install g++", needed=False)
    nvcc = shutil.which("nvcc")
    if nvcc:
        release = re.search(r"release [\d.]+", _output(nvcc, "--version"))
        yield Check("nvcc", "ok", f"{release[0] if release else 'unknown release'} ({nvcc})", needed=False)
    else:
        yield Check("nvcc", "none", "not on PATH; fetched as packages when the library is built", needed=False)
    header = next(
        (folder / "NvInferRuntime.h" for folder in _header_folders() if (folder / "NvInferRuntime.h").is_file()), None
    )
    if header:
        yield Check("TensorRT headers", "ok", str(header), needed=False)
    else:
        yield Check(
            "TensorRT headers", "none", "not found; fetched as a package when the library is built", needed=False
        )


def _header_folders() -> list[Path]:
    root = os.environ.get("TensorRT_ROOT")
    system = ["/usr/local/include", f"/usr/include/{platform.machine()}-linux-gnu", "/usr/include"]
    return ([Path(root), Path(root, "include")] if root else []) + [Path(folder) for folder in system]


def _library() -> tuple[Path | None, Check]:
    try:
        library = load_plugin_library()
    except InputError as error:
        return None, Check("plugin library", "missing", str(error), "moetrt doctor --build")
    megabytes = library.path.stat().st_size / 1e6
    detail = f"{library.version}, ABI {ABI_VERSION}, {megabytes:.1f} MB, all symbols: {library.path}"
    return library.path, Check("plugin library", "ok", detail)


def _host_library() -> Check:
    try:
        library = load_host_library()
    except InputError as error:
        remedy = "for moetrt compare: moetrt doctor --build"
        return Check("kernel's host build", "none", str(error), remedy, needed=False)
    return Check("kernel's host build", "ok", str(library.path), needed=False)


def _link() -> Check:
    """The name that TensorRT-RTX's ONNX parser opens; made here, so that its other tools find it too."""
    try:
        backends.choose(backends.TENSORRT_RTX)
        link = backends.link_unversioned_name()
    except InputError as error:
        return Check("unversioned name", "missing", str(error))
    return Check("unversioned name", "ok", f"{link} -> {link.readlink() if link.is_symlink() else 'a file'}")


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _first_line(*command: str) -> str:
    return (_output(*command).splitlines() or ["does not answer"])[0]


def _registry(module: str, library: Path) -> Check:
    """Whether that TensorRT's plugin registry, asked in a process of its own, has our creators from the library."""
    command = [sys.executable, "-c", _ASK_REGISTRY, module, str(library), DOMAIN]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Check(f"registry {module}", "missing", f"did not answer within {_SECONDS} s")
    answered = set(done.stdout.split())
    wanted = {f"{DOMAIN}::{name}::{PLUGIN_VERSION}" for name in OPERATORS}
    if wanted <= answered:
        return Check(f"registry {module}", "ok", ", ".join(sorted(wanted)))
    said = (done.stderr.strip().splitlines() or ["no creators of ours"])[-1]
    return Check(f"registry {module}", "missing", said, "build the library anew: moetrt doctor --build")


# In a process of its own: a library registers with each TensorRT that a process has loaded.
_ASK_REGISTRY = """
import importlib, sys
trt = importlib.import_module(sys.argv[1])
registry = trt.get_plugin_registry()
registry.load_library(sys.argv[2])
for creator in registry.all_creators:
    if creator.plugin_namespace == sys.argv[3]:
        print(creator.plugin_namespace, creator.name, creator.plugin_version, sep="::")
"""


def _tensorrt() -> Check:
    version = _version("tensorrt")
    if version:
        return Check("tensorrt", "ok", version, needed=False)
    remedy = "to build for the GPU of this machine: pip install 'moetrt[tensorrt]'" if backends.gpus() else ""
    return Check("tensorrt", "none", "not installed", remedy, needed=False)


def _gpu() -> Check:
    found = [f"{gpu.name} (SM{gpu.compute_capability[0]}{gpu.compute_capability[1]})" for gpu in backends.gpus()]
    if not found:
        return Check(
            "GPU", "none", "no driver or no GPU: engines are built by TensorRT-RTX and run elsewhere", needed=False
        )
    cuda = backends.driver_cuda()
    # The library has CUDA's runtime in it, which starts no kernel on a driver of an earlier major version.
    remedy = (
        "the plugin library as the package builds it has CUDA 13's runtime: it needs driver 580 or later"
        if cuda < (13, 0)
        else ""
    )
    return Check("GPU", "ok", f"{', '.join(found)}; the driver takes CUDA {cuda[0]}.{cuda[1]}", remedy, needed=False)
