"""Finds what the plugin library is built with: a C++ compiler, nvcc with its runtime, and TensorRT's headers.

CMake runs this file before anything is compiled, with the standard library alone. What the machine lacks of CUDA and
TensorRT is fetched from the Python package index into a folder of the build, once. The answer is a file of CMake
``set`` commands.

    python toolchain.py --directory build/toolchain --output build/plugins/toolchain.cmake

Environment:
    MOETRT_NVCC, CUDACXX     the nvcc to use; it must work
    CUDA_HOME, CUDA_PATH     a toolkit; used when it is usable, as is the nvcc on PATH
    MOETRT_CUDA_VERSION      the toolkit that is fetched when there is none, "13.0" by default. The package index has no
                             nvcc of CUDA 12: name that of a toolkit
    TensorRT_ROOT            a TensorRT installation with include/NvInferRuntime.h
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

DEFAULT_CUDA_VERSION = "13.0"
# Together a compiler, in one folder tree.
CUDA_PACKAGES = ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime", "cuda-cccl")
# C++20 in device code and thread-block clusters begin here.
OLDEST_CUDA = (12, 0)
# IPluginV3 and bfloat16 fields begin in TensorRT 10.
OLDEST_TENSORRT = (10, 0)

# No TensorRT wheel carries headers; this one, a collection of kernels, carries those of 10.14 under Apache-2.0.
HEADERS_REQUIREMENT = "kernel-lens==2.0.1"
HEADERS_SHA256 = "07cc714e8b5e7f34b672f7c7fad93febe7c747be5837ba276b1527370134ffe0"
HEADERS_FOLDER = "kernel_lens/include/tensorrt"

INSTALL_CXX = "install g++ (Debian, Ubuntu: apt-get install g++)"

ARCHITECTURES = ("80", "86", "89", "90", "100", "120")


class ToolchainError(Exception):
    """Something is missing and cannot be fetched; the message says what to install or set."""


def main() -> int:
    """Answers for one build; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True, help="where fetched parts are kept")
    parser.add_argument("--output", type=Path, help="the CMake file to write; standard output when left out")
    arguments = parser.parse_args()
    directory = arguments.directory.resolve()
    try:
        compiler = find_cxx()
        nvcc = find_nvcc(directory)
        headers, tensorrt = find_headers(directory)
        text = cmake_text(compiler, nvcc, headers, tensorrt)
    except ToolchainError as error:
        print(f"moetrt: error: {error}", file=sys.stderr)
        return 2
    if arguments.output is None:
        print(text, end="")
        return 0
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    if not arguments.output.exists() or arguments.output.read_text() != text:
        arguments.output.write_text(text)
    return 0


def find_cxx() -> str:
    """Returns the host C++ compiler, which nvcc needs too."""
    wanted = os.environ.get("CXX", "").strip()
    if wanted:
        found = shutil.which(wanted.split()[0])
        if found is None:
            raise ToolchainError(f"the C++ compiler {wanted!r} (CXX) is not on PATH; {INSTALL_CXX}, or set CXX")
        return found
    for name in ("c++", "g++", "clang++"):
        found = shutil.which(name)
        if found is not None:
            return found
    raise ToolchainError(f"there is no C++ compiler (c++, g++ or clang++) on PATH; {INSTALL_CXX}")


def find_nvcc(directory: Path) -> Path:
    """Returns an nvcc that is new enough and has the static runtime beside it, fetching one when there is none."""
    for variable in ("MOETRT_NVCC", "CUDACXX"):
        named = os.environ.get(variable, "").strip()
        if named:
            path = Path(shutil.which(named) or named)
            reason = nvcc_fault(path)
            if reason:
                raise ToolchainError(f"{variable} is {named!r}: {reason}")
            return path
    candidates = [Path(os.environ[name], "bin", "nvcc") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    on_path = shutil.which("nvcc")
    if on_path:
        candidates.append(Path(on_path))
    for path in candidates:
        reason = nvcc_fault(path)
        if not reason:
            return path
        print(f"moetrt: '{path}' is not used: {reason}", file=sys.stderr)
    return fetch_nvcc(directory)


def nvcc_fault(nvcc: Path) -> str:
    """Returns why ``nvcc`` cannot build the library, "" when it can."""
    if not nvcc.is_file():
        return "there is no such file"
    version = nvcc_version(nvcc)
    if version is None:
        return "it does not answer --version"
    if version < OLDEST_CUDA:
        return f"it is CUDA {version[0]}.{version[1]}; {OLDEST_CUDA[0]}.{OLDEST_CUDA[1]} or later is taken"
    include, library = cuda_folders(nvcc)
    if include is None:
        return "cuda_runtime.h is not in its toolkit"
    if library is None:
        return "libcudart_static.a is not in its toolkit"
    return ""


def nvcc_version(nvcc: Path) -> tuple[int, int] | None:
    """Returns (major, minor) of the CUDA release, None where the program does not say."""
    try:
        answer = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    match = re.search(r"release (\d+)\.(\d+)", answer)
    return (int(match[1]), int(match[2])) if match else None


def cuda_folders(nvcc: Path) -> tuple[Path | None, Path | None]:
    """Returns the toolkit's include folder and the folder of libcudart_static.a."""
    roots = [nvcc.resolve().parent.parent]
    # The nvcc on PATH may be a script that calls the real one: ask where it believes its toolkit is.
    trace = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=False)
    roots += [Path(top).resolve() for top in re.findall(r"^#\$ TOP=(.+)$", trace.stderr, re.MULTILINE)]
    include = library = None
    for root in roots:
        for base in (root, root / "targets" / "x86_64-linux", root / "targets" / "sbsa-linux"):
            if include is None and (base / "include" / "cuda_runtime.h").is_file():
                include = base / "include"
            for name in ("lib64", "lib"):
                if library is None and (base / name / "libcudart_static.a").is_file():
                    library = base / name
    return include, library


def fetch_nvcc(directory: Path) -> Path:
    """Installs nvcc and what it needs from the package index into ``directory``; a later call finds it there."""
    version = os.environ.get("MOETRT_CUDA_VERSION", "").strip() or DEFAULT_CUDA_VERSION
    if not re.fullmatch(r"1[3-9]\.\d+", version):
        raise ToolchainError(
            f"MOETRT_CUDA_VERSION is {version!r}; a release such as '13.0' is taken (for CUDA 12 set MOETRT_NVCC)"
        )
    requirements = [f"nvidia-{name}=={version}.*" for name in CUDA_PACKAGES]
    folder = directory / f"cuda-{version}"
    mark = folder / "complete"
    wanted = "\n".join(requirements) + "\n"
    if not mark.is_file() or mark.read_text() != wanted:
        print(f"moetrt: fetching nvcc {version} (350 MB, once) into '{folder}'", file=sys.stderr)
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="cuda-", dir=directory) as temporary:
            beside = Path(temporary) / "installed"
            pip("install", "--no-deps", "--target", str(beside), *requirements, fetches=f"nvcc {version}")
            (beside / mark.name).write_text(wanted)
            shutil.rmtree(folder, ignore_errors=True)
            beside.rename(folder)
    found = sorted(folder.glob("nvidia/*/bin/nvcc"))
    if not found:
        raise ToolchainError(f"the packages {', '.join(requirements)} hold no nvcc; name one with MOETRT_NVCC")
    reason = nvcc_fault(found[0])
    if reason:
        raise ToolchainError(f"'{found[0]}', fetched, cannot be used: {reason}; name another with MOETRT_NVCC")
    return found[0]


def find_headers(directory: Path) -> tuple[Path, tuple[int, int]]:
    """Returns the folder of NvInferRuntime.h and TensorRT's version there, fetching 10.14's when there is none."""
    # Spelled as CMake spells it: <PackageName>_ROOT.
    root = os.environ.get("TensorRT_ROOT", "").strip()
    if root:
        for folder in (Path(root) / "include", Path(root)):
            version = headers_version(folder)
            if version is not None and version >= OLDEST_TENSORRT:
                return folder, version
            if version is not None:
                was = f"{version[0]}.{version[1]}"
                raise ToolchainError(f"TensorRT_ROOT is {root!r}, TensorRT {was}; 10.0 or later is taken")
        raise ToolchainError(f"TensorRT_ROOT is {root!r} and has no include/NvInferRuntime.h; correct it or unset it")
    for folder in system_include_folders():
        version = headers_version(folder)
        if version is not None and version >= OLDEST_TENSORRT:
            return folder, version
    folder = fetch_headers(directory)
    version = headers_version(folder)
    if version is None:
        raise ToolchainError(f"'{folder}' holds no TensorRT headers; set TensorRT_ROOT")
    return folder, version


def system_include_folders() -> list[Path]:
    """Where a system's TensorRT has its headers."""
    named = [entry for entry in os.environ.get("CPATH", "").split(os.pathsep) if entry]
    triplets = [f"/usr/include/{machine}-linux-gnu" for machine in ("x86_64", "aarch64")]
    fixed = ("/usr/local/include", *triplets, "/usr/include", "/usr/local/tensorrt/include")
    return [Path(entry) for entry in (*named, *fixed)]


def headers_version(folder: Path) -> tuple[int, int] | None:
    """Returns (major, minor) of the TensorRT headers in ``folder``, None where there are none."""
    if not (folder / "NvInferRuntime.h").is_file() or not (folder / "NvInferVersion.h").is_file():
        return None
    text = (folder / "NvInferVersion.h").read_text(errors="replace")
    numbers = []
    for part in ("MAJOR", "MINOR"):
        match = re.search(rf"#define\s+(?:NV_TENSORRT|TRT)_{part}(?:_ENTERPRISE)?\s+(\d+)", text)
        if match is None:
            return None
        numbers.append(int(match[1]))
    return numbers[0], numbers[1]


def fetch_headers(directory: Path) -> Path:
    """Downloads the one wheel, checks its hash and unpacks the headers alone; a later call finds them there."""
    folder = directory / f"tensorrt-headers-{HEADERS_SHA256[:12]}"
    if not folder.is_dir():
        print(f"moetrt: fetching TensorRT's headers into '{folder}'", file=sys.stderr)
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="headers-", dir=directory) as temporary:
            listed = Path(temporary) / "requirements.txt"
            listed.write_text(f"{HEADERS_REQUIREMENT} --hash=sha256:{HEADERS_SHA256}\n")
            pip(
                *("download", "--no-deps", "--only-binary=:all:", "--require-hashes", "--dest", temporary),
                *("--requirement", str(listed)),
                fetches="TensorRT's headers",
                instead="set TensorRT_ROOT",
            )
            (wheel,) = Path(temporary).glob("*.whl")
            if hashlib.sha256(wheel.read_bytes()).hexdigest() != HEADERS_SHA256:
                raise ToolchainError(f"the wheel of {HEADERS_REQUIREMENT} has another hash; set TensorRT_ROOT")
            unpacked = Path(temporary) / "unpacked"
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(
                    unpacked,
                    [name for name in archive.namelist() if name.startswith(HEADERS_FOLDER) or "LICENSE" in name],
                )
            unpacked.rename(folder)
    return folder / HEADERS_FOLDER


def pip(*arguments: str, fetches: str, instead: str = "name one with MOETRT_NVCC") -> None:
    """Runs pip of this interpreter; its last error line becomes ours."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    if "No module named pip" in done.stderr:
        raise ToolchainError(
            f"{fetches} would be fetched with pip, which '{sys.executable}' lacks; install pip or {instead}"
        )
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or done.stderr.splitlines()
    why = errors[-1].removeprefix("ERROR:").strip() if errors else f"pip ended with {done.returncode}"
    raise ToolchainError(f"{fetches} could not be fetched ({why}); {instead}, or make the package index reachable")


def cmake_text(compiler: str, nvcc: Path, headers: Path, tensorrt: tuple[int, int]) -> str:
    """The answer as CMake commands; every path is absolute."""
    version = nvcc_version(nvcc)
    include, library = cuda_folders(nvcc)
    if version is None or include is None or library is None:
        raise ToolchainError(f"'{nvcc}' cannot be used: {nvcc_fault(nvcc)}")
    listed = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=False).stdout
    known = [number for number in ARCHITECTURES if f"sm_{number}" in listed.split()]
    if not known:
        raise ToolchainError(f"'{nvcc}' compiles for none of the architectures {', '.join(ARCHITECTURES)}")
    usage = subprocess.run([nvcc, "--help"], capture_output=True, text=True, check=False).stdout
    values = {
        "MOETRT_CXX": compiler,
        "MOETRT_NVCC": nvcc.absolute().as_posix(),
        "MOETRT_CUDA_VERSION": f"{version[0]}.{version[1]}",
        "MOETRT_CUDA_INCLUDE_DIR": include.as_posix(),
        "MOETRT_CUDA_LIBRARY_DIR": library.as_posix(),
        "MOETRT_CUDA_KNOWN_ARCHITECTURES": ";".join(known),
        "MOETRT_NVCC_COMPRESSES": "ON" if "--compress-mode" in usage else "OFF",
        "MOETRT_TENSORRT_INCLUDE_DIR": headers.as_posix(),
        "MOETRT_TENSORRT_HEADERS": f"{tensorrt[0]}.{tensorrt[1]}",
    }
    return "".join(f'set({name} "{value}")\n' for name, value in values.items())


if __name__ == "__main__":
    sys.exit(main())
