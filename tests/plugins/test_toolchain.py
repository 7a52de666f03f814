"""The build's search for a compiler, nvcc and TensorRT's headers, with programs and folders made up for the purpose."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "plugins" / "cmake" / "toolchain.py"


class Machine:
    """A PATH, folders and environment of its own; nothing of the real machine but its Python."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"PATH": str(folder / "bin"), "HOME": str(folder), "PIP_NO_INDEX": "1"}
        self.program("bin/c++", "exit 0")

    def program(self, name: str, body: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    def toolkit(self, name: str, release: str, *, complete: bool = True) -> Path:
        """A CUDA toolkit; returns its nvcc."""
        codes = " ".join(f"sm_{number}" for number in (75, 80, 86, 89, 90, 100, 103, 120))
        nvcc = self.program(
            f"{name}/bin/nvcc",
            f'case "$1" in\n--version) echo "Cuda compilation tools, release {release}, V{release}.1";;\n'
            f'--list-gpu-code) echo "{codes}";;\n--help) echo "--compress-mode";;\nesac',
        )
        (self.folder / name / "include").mkdir()
        (self.folder / name / "include" / "cuda_runtime.h").touch()
        if complete:
            (self.folder / name / "lib64").mkdir()
            (self.folder / name / "lib64" / "libcudart_static.a").touch()
        return nvcc

    def headers(self, name: str, version: str) -> Path:
        """A folder with an include folder of TensorRT's headers."""
        include = self.folder / name / "include"
        include.mkdir(parents=True)
        (include / "NvInferRuntime.h").touch()
        major, minor = version.split(".")
        (include / "NvInferVersion.h").write_text(
            f"#define TRT_MAJOR_ENTERPRISE {major}\n#define TRT_MINOR_ENTERPRISE {minor}\n"
        )
        return include.parent

    def run(self, **environment: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SCRIPT), "--directory", str(self.folder / "toolchain")]
        values = self.environment | {name: str(value) for name, value in environment.items()}
        return subprocess.run(command, capture_output=True, text=True, env=values, timeout=60, check=False)

    def answer(self, **environment: object) -> dict[str, str]:
        done = self.run(**environment)
        assert done.returncode == 0, done.stderr
        lines = [line.removeprefix("set(").removesuffix('")') for line in done.stdout.splitlines()]
        return dict(line.split(' "', 1) for line in lines)  # type: ignore[misc]

    def error(self, **environment: object) -> str:
        """The one line that it fails with."""
        done = self.run(**environment)
        assert done.returncode == 2
        assert done.stdout == ""
        errors = [line for line in done.stderr.splitlines() if line.startswith("moetrt: error: ")]
        assert errors == done.stderr.splitlines()[-1:]
        return errors[0].removeprefix("moetrt: error: ")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.environment["TensorRT_ROOT"] = str(made.headers("trt", "10.14"))
    return made


def test_what_is_given_comes_before_what_is_found(machine: Machine) -> None:
    nvcc = {name: machine.toolkit(name, "13.0") for name in ("ours", "usual", "home", "path")}
    machine.environment["PATH"] += os.pathsep + str(nvcc["path"].parent)
    assert machine.answer()["MOETRT_NVCC"] == str(nvcc["path"])
    home = {"CUDA_HOME": machine.folder / "home"}
    assert machine.answer(**home)["MOETRT_NVCC"] == str(nvcc["home"])
    assert machine.answer(**home, CUDACXX=nvcc["usual"])["MOETRT_NVCC"] == str(nvcc["usual"])
    assert machine.answer(**home, CUDACXX=nvcc["usual"], MOETRT_NVCC=nvcc["ours"])["MOETRT_NVCC"] == str(nvcc["ours"])


def test_the_answer_names_everything(machine: Machine) -> None:
    nvcc = machine.toolkit("cuda", "12.8")
    assert machine.answer(MOETRT_NVCC=nvcc) == {
        "MOETRT_CXX": str(machine.folder / "bin" / "c++"),
        "MOETRT_NVCC": str(nvcc),
        "MOETRT_CUDA_VERSION": "12.8",
        "MOETRT_CUDA_INCLUDE_DIR": str(machine.folder / "cuda" / "include"),
        "MOETRT_CUDA_LIBRARY_DIR": str(machine.folder / "cuda" / "lib64"),
        "MOETRT_CUDA_KNOWN_ARCHITECTURES": "80;86;89;90;100;120",
        "MOETRT_NVCC_COMPRESSES": "ON",
        "MOETRT_TENSORRT_INCLUDE_DIR": str(machine.folder / "trt" / "include"),
        "MOETRT_TENSORRT_HEADERS": "10.14",
    }


def test_a_toolkit_that_is_found_but_not_usable_is_passed_over(machine: Machine) -> None:
    old = machine.toolkit("old", "11.8")
    bare = machine.toolkit("bare", "13.0", complete=False)
    good = machine.toolkit("good", "13.0")
    machine.environment["PATH"] += os.pathsep + str(good.parent)
    done = machine.run(CUDA_HOME=old.parents[1], CUDA_PATH=bare.parents[1])
    assert f'set(MOETRT_NVCC "{good}")' in done.stdout
    assert f"'{old}' is not used: it is CUDA 11.8; 12.0 or later is taken" in done.stderr
    assert f"'{bare}' is not used: libcudart_static.a is not in its toolkit" in done.stderr


def test_a_toolkit_that_is_named_but_not_usable_is_an_error(machine: Machine) -> None:
    old = machine.toolkit("old", "11.8")
    assert machine.error(MOETRT_NVCC=old) == f"MOETRT_NVCC is '{old}': it is CUDA 11.8; 12.0 or later is taken"
    assert machine.error(CUDACXX="/none/nvcc") == "CUDACXX is '/none/nvcc': there is no such file"
    broken = machine.program("broken/bin/nvcc", "exit 1")
    assert machine.error(MOETRT_NVCC=broken) == f"MOETRT_NVCC is '{broken}': it does not answer --version"


def test_a_missing_compiler_is_named_with_its_remedy(machine: Machine) -> None:
    (machine.folder / "bin" / "c++").unlink()
    remedy = "install g++ (Debian, Ubuntu: apt-get install g++)"
    assert machine.error() == f"there is no C++ compiler (c++, g++ or clang++) on PATH; {remedy}"
    assert machine.error(CXX="g++-99 -m64") == (
        f"the C++ compiler 'g++-99 -m64' (CXX) is not on PATH; {remedy}, or set CXX"
    )


def test_an_index_that_cannot_be_reached_is_one_line(machine: Machine) -> None:
    said = machine.error()
    assert said.startswith("nvcc 13.0 could not be fetched (")
    assert said.endswith("; name one with MOETRT_NVCC, or make the package index reachable")
    assert list((machine.folder / "toolchain").iterdir()) == []
    assert machine.error(MOETRT_CUDA_VERSION="13.1").startswith("nvcc 13.1 could not be fetched (")
    for version in ("latest", "12.8"):
        assert machine.error(MOETRT_CUDA_VERSION=version) == (
            f"MOETRT_CUDA_VERSION is '{version}'; a release such as '13.0' is taken (for CUDA 12 set MOETRT_NVCC)"
        )


def test_headers_are_those_of_the_root_that_is_named(machine: Machine) -> None:
    nvcc = machine.toolkit("cuda", "13.0")
    newer = machine.headers("newer", "11.1")
    answer = machine.answer(MOETRT_NVCC=nvcc, TensorRT_ROOT=newer)
    assert answer["MOETRT_TENSORRT_HEADERS"] == "11.1"
    assert answer["MOETRT_TENSORRT_INCLUDE_DIR"] == str(newer / "include")
    older = machine.headers("older", "8.6")
    assert machine.error(MOETRT_NVCC=nvcc, TensorRT_ROOT=older) == (
        f"TensorRT_ROOT is '{older}', TensorRT 8.6; 10.0 or later is taken"
    )
    assert machine.error(MOETRT_NVCC=nvcc, TensorRT_ROOT="/none") == (
        "TensorRT_ROOT is '/none' and has no include/NvInferRuntime.h; correct it or unset it"
    )


def test_headers_of_the_system_come_before_those_that_are_fetched(machine: Machine) -> None:
    nvcc = machine.toolkit("cuda", "13.0")
    del machine.environment["TensorRT_ROOT"]
    system = machine.headers("system", "10.9")
    assert machine.answer(MOETRT_NVCC=nvcc, CPATH=system / "include")["MOETRT_TENSORRT_HEADERS"] == "10.9"
    # Too old for IPluginV3: passed over, and then there is nothing to be had without an index.
    old = machine.headers("old", "8.6")
    if not Path("/usr/include/x86_64-linux-gnu/NvInferRuntime.h").exists():
        said = machine.error(MOETRT_NVCC=nvcc, CPATH=old / "include")
        assert said.startswith("TensorRT's headers could not be fetched (")
        assert said.endswith("; set TensorRT_ROOT, or make the package index reachable")


def test_the_file_is_written_only_when_it_changes(machine: Machine) -> None:
    nvcc = machine.toolkit("cuda", "13.0")
    output = machine.folder / "build" / "toolchain.cmake"
    command = [sys.executable, str(SCRIPT), "--directory", str(machine.folder / "t"), "--output", str(output)]
    environment = machine.environment | {"MOETRT_NVCC": str(nvcc)}
    subprocess.run(command, env=environment, check=True)
    os.utime(output, (1, 1))
    subprocess.run(command, env=environment, check=True)
    assert output.stat().st_mtime == 1
    assert f'set(MOETRT_NVCC "{nvcc}")' in output.read_text()
