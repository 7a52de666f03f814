"""The library as a file: what it shows, what it needs, and how moetrt.library tells it from others."""

import ctypes
import re
import subprocess
from pathlib import Path

import pytest
import torch

from moetrt.cuda_op import kernel_params, launch
from moetrt.errors import InputError, MoetrtError
from moetrt.library import (
    ABI_VERSION,
    C_FUNCTIONS,
    HOST_C_FUNCTIONS,
    LIBRARY_VARIABLE,
    TENSORRT_FUNCTIONS,
    KernelLibrary,
    MoEFinalizeParams,
    PluginLibrary,
    build_plugin_library,
    find_host_library,
    find_plugin_library,
    library_sha256,
    load_host_library,
    load_plugin_library,
)
from moetrt.reference import reference
from tests.operator_cases import make_case

ROOT = Path(__file__).parents[2]
HEADER = ROOT / "plugins" / "include" / "moetrt" / "moe_finalize.h"


def run(*command: object) -> str:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout


def compile_c(folder: Path, source: str, *options: str) -> Path:
    (folder / "source.c").write_text(source)
    output = folder / "output"
    run("gcc", "-I", HEADER.parents[1], *options, folder / "source.c", "-o", output)
    return output


def test_it_exports_its_interface_and_nothing_else(plugin_library: Path) -> None:
    symbols = [line.split()[-1] for line in run("nm", "-D", "--defined-only", plugin_library).splitlines()]
    assert sorted(symbols) == sorted((*C_FUNCTIONS, *TENSORRT_FUNCTIONS))


def test_it_needs_neither_cuda_nor_tensorrt_to_load(plugin_library: Path) -> None:
    dynamic = run("readelf", "-d", plugin_library)
    needed = re.findall(r"\(NEEDED\).*\[(.+?)\]", dynamic)
    assert needed
    assert all(re.match(r"(libc|libm|libdl|librt|libpthread|ld-linux[\w-]*)\.so", name) for name in needed), needed
    assert "NODELETE" in dynamic
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic


def test_it_is_small(plugin_library: Path) -> None:
    assert plugin_library.stat().st_size < 8 * 2**20


def test_every_function_of_the_headers_is_there(plugin_library: Path) -> None:
    declared = {
        name for header in HEADER.parent.glob("*.h") for name in re.findall(r"\b(moetrt_\w+)\(", header.read_text())
    }
    assert declared == set(C_FUNCTIONS)


def test_version_and_abi_are_those_of_the_sources(loaded: PluginLibrary) -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    abi = re.search(r"#define MOETRT_ABI_VERSION (\d+)", HEADER.read_text())
    assert version is not None
    assert abi is not None
    assert loaded.version == version[1]
    assert loaded.functions.moetrt_abi_version() == ABI_VERSION == int(abi[1])


def test_the_python_struct_is_the_headers(tmp_path: Path) -> None:
    names = [name for name, _ in MoEFinalizeParams._fields_]
    offsets = "".join(f'printf("%zu\\n", offsetof(moetrt_moe_finalize_params, {name}));' for name in names)
    source = (
        "#include <stddef.h>\n#include <stdio.h>\n#include <moetrt/moe_finalize.h>\n"
        f'int main(void) {{ {offsets} printf("%zu\\n", sizeof(moetrt_moe_finalize_params)); return 0; }}\n'
    )
    printed = [int(line) for line in run(compile_c(tmp_path, source)).split()]
    assert printed == [getattr(MoEFinalizeParams, name).offset for name in names] + [ctypes.sizeof(MoEFinalizeParams)]


def test_a_wrong_parameter_is_refused_in_words(library: PluginLibrary, capfd: pytest.CaptureFixture[str]) -> None:
    params = MoEFinalizeParams(num_tokens=1, top_k=0)
    with pytest.raises(InputError, match=r"^moetrt_moe_finalize: top_k is 0, taken is 1 to "):
        library.moe_finalize(params)
    assert capfd.readouterr().err.startswith("[moetrt] moetrt_moe_finalize: top_k is 0")
    library.clear_last_error()
    assert library.last_error() == ""
    assert library.functions.moetrt_moe_finalize(None, None) != 0
    assert "params is null" in library.last_error()


def test_no_tokens_are_taken_without_a_gpu(library: PluginLibrary) -> None:
    library.moe_finalize(MoEFinalizeParams(top_k=8, hidden_size=64, row_stride=64, weight_before_cast=1))
    assert library.last_error() == ""


def test_the_last_error_is_the_threads_own(library: PluginLibrary) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def refused() -> str:
        assert library.functions.moetrt_moe_finalize(None, None) != 0
        return library.last_error()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(refused).result() != ""
    assert library.last_error() == ""


def test_the_variable_names_the_library(plugin_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "copy.so"
    copy.write_bytes(plugin_library.read_bytes())
    monkeypatch.setenv(LIBRARY_VARIABLE, str(copy))
    assert find_plugin_library() == copy
    assert library_sha256(copy) == library_sha256(plugin_library)
    monkeypatch.setenv(LIBRARY_VARIABLE, str(tmp_path / "none.so"))
    with pytest.raises(InputError, match=r"does not exist"):
        find_plugin_library()


def test_what_is_no_library_is_refused_in_one_line(tmp_path: Path) -> None:
    text = tmp_path / "text.so"
    text.write_text("not a library")
    with pytest.raises(InputError, match=r"text\.so' cannot be loaded: ") as caught:
        load_plugin_library(text)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=r"does not exist"):
        load_plugin_library(tmp_path / "none.so")


def test_another_library_is_refused_by_name(tmp_path: Path) -> None:
    other = compile_c(tmp_path, "int other(void) { return 0; }", "-shared", "-fPIC")
    with pytest.raises(InputError, match=r"is not moetrt's: it has no moetrt_abi_version$"):
        load_plugin_library(other)


def test_another_abi_is_refused_by_number(tmp_path: Path) -> None:
    names = [name for name in (*C_FUNCTIONS, *TENSORRT_FUNCTIONS) if name != "moetrt_abi_version"]
    source = "int moetrt_abi_version(void) { return 99; }" + "".join(f"void {name}(void) {{}}" for name in names)
    with pytest.raises(InputError, match=r"has ABI version 99; 2 is taken, build it anew$"):
        load_plugin_library(compile_c(tmp_path, source, "-shared", "-fPIC"))


def test_a_build_without_a_compiler_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(MoetrtError) as caught:
        build_plugin_library()
    assert str(caught.value) == (
        "the plugin library could not be built: there is no C++ compiler (c++, g++ or clang++) on PATH; "
        "install g++ (Debian, Ubuntu: apt-get install g++)"
    )
    assert capsys.readouterr().out == ""


@pytest.fixture(scope="module")
def host_library() -> KernelLibrary:
    return load_host_library()


def test_the_host_build_exports_its_interface_and_needs_nothing_of_cuda() -> None:
    found = find_host_library()
    symbols = [line.split()[-1] for line in run("nm", "-D", "--defined-only", found).splitlines()]
    assert sorted(symbols) == sorted(HOST_C_FUNCTIONS)
    assert "cuda" not in run("ldd", found)


def test_the_host_build_runs_the_same_call(host_library: KernelLibrary) -> None:
    case = make_case(dtype=torch.bfloat16, gate=True, hidden=72)
    outputs = launch(case.spec, case.tensors, case.attributes, host_library, 0)
    wanted = reference(case.spec, case.tensors, case.attributes)
    for output, right in zip(outputs, wanted, strict=True):
        # One unit in the last place of bf16: the sums' order differs.
        torch.testing.assert_close(output, right, rtol=2**-7, atol=2**-7)


def test_the_host_builds_refusals_are_lines(host_library: KernelLibrary) -> None:
    with pytest.raises(InputError, match=r"^top_k is 0, taken is 1 to 2147483647$"):
        host_library.moe_finalize(MoEFinalizeParams(top_k=0))
    case = make_case(hidden=7)
    outputs = {name: torch.zeros(6, 7) for name in case.spec.outputs}
    params = kernel_params(case.spec, case.tensors, case.spec.complete(case.attributes), outputs)
    with pytest.raises(InputError, match=r"^tactic 99 does not run these params$"):
        host_library.moe_finalize(params, tactic=99)


def test_a_missing_host_build_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = tmp_path / "libmoetrt_plugins.so"
    plugin.write_bytes(b"")
    monkeypatch.setenv("MOETRT_PLUGIN_LIBRARY", str(plugin))
    monkeypatch.delenv("MOETRT_HOST_LIBRARY", raising=False)
    with pytest.raises(InputError) as caught:
        load_host_library()
    assert str(caught.value) == (
        f"the kernel's host build libmoetrt_host.so is not in '{tmp_path}'; "
        "build it with 'moetrt doctor --build' or set MOETRT_HOST_LIBRARY"
    )
    monkeypatch.setenv("MOETRT_HOST_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(InputError, match=r"^the kernel's host build \(MOETRT_HOST_LIBRARY\) '.*' does not exist$"):
        load_host_library()
    monkeypatch.setenv("MOETRT_HOST_LIBRARY", str(plugin))
    with pytest.raises(InputError, match=r"^the kernel's host build '.*' cannot be loaded: "):
        load_host_library()
