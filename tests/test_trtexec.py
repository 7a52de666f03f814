"""The trtexec command lines use options that the tool of that version has, and none that it calls deprecated."""

import shlex
from pathlib import Path

import pytest

from moetrt.bench import trtexec
from moetrt.errors import InputError
from tests.trtexec_stand_in import MANY, OPTIONS, Refused, install, pairs, parse, shapes

# The versions that each tool stands for. TensorRT-RTX's executable has the defaults of trtexec 11.
VERSIONS = {
    "trtexec-10": [(10, 8), (10, 12), (10, 16)],
    "trtexec-11": [(11, 0), (11, 1)],
    "tensorrt-rtx": [(11, 0)],
}
CASES = [(key, version) for key, versions in VERSIONS.items() for version in versions]

PROFILE = {"input_ids": ((1, 1), (1, 128), (8, 512)), "attention_mask": ((1, 1), (1, 128), (8, 512))}


def commands(key: str) -> list[list[str]]:
    library = "/opt/lib/libmoetrt_plugins.so"
    return [
        trtexec.build_command("m.onnx", "m.engine", tool_key=key, plugin_library=library, profile=PROFILE),
        trtexec.build_command("m.onnx", "m.engine", tool_key=key, plugin_library=None),
        trtexec.run_command(
            "m.engine",
            tool_key=key,
            plugin_library=library,
            shapes={"input_ids": (1, 128)},
            inputs={"input_ids": "ids.bin"},
            seconds=1.5,
            export_prefix="out/m",
            per_layer=True,
        ),
        trtexec.run_command("m.engine", tool_key=key, plugin_library=None),
    ]


def test_every_tool_has_a_known_version() -> None:
    assert set(VERSIONS) == set(trtexec.TOOLS)


@pytest.mark.parametrize(("key", "version"), CASES)
def test_options_exist_and_are_not_deprecated_in_that_version(key: str, version: tuple[int, int]) -> None:
    for command in commands(key):
        assert command[0] == trtexec.TOOLS[key].executable
        # Raises for an option that is not there, comes twice, or takes a value and has none.
        _, _, warnings = parse(command[1:], version)
        assert not warnings


def test_table_tells_options_and_versions_apart() -> None:
    for words, version in (
        (["--onnx=a", "--exportTime=t.json"], (11, 1)),
        (["--onnx=a", "--noCudaGraph"], (10, 16)),
        (["--onnx=a", "--fp16"], (11, 0)),
        (["--onnx"], (11, 0)),
        (["--onnx=a", "--useCudaGraph=1"], (10, 8)),
        (["--onnx=a", "--onnx=b"], (10, 8)),
        (["--loadEngine=a", "--saveEngine=b"], (11, 1)),
        (["--skipInference"], (11, 1)),
        (["--onnx=a", "--shapes=x:2xN"], (11, 1)),
        (["--onnx=a", "--shapes=it's:2"], (11, 1)),
        (["--onnx=a", "--duration=long"], (11, 1)),
        (["--onnx=a", "--profilingVerbosity=high"], (11, 1)),
    ):
        with pytest.raises(Refused):
            parse(words, version)
    assert parse(["--onnx=a", "--useCudaGraph"], (11, 0))[2] == ["--useCudaGraph is deprecated."]
    assert parse(["--onnx=a", "--useCudaGraph"], (10, 16))[2] == []
    assert pairs("a:b:2x3,'c:d':e:f") == {"a:b": "2x3", "c:d": "e:f"}
    assert shapes("x:2x3,y:scalar") == {"x": [2, 3], "y": []}
    assert OPTIONS["--dynamicPlugins"].kind == MANY


def test_trtexec_10_keeps_types_and_times_the_gpu_alone() -> None:
    build, _, run, _ = commands("trtexec-10")
    assert "--stronglyTyped" in build
    assert {"--useCudaGraph", "--noDataTransfers", "--useSpinWait", "--separateProfileRun"} <= set(run)


def test_plugin_is_named_in_both_commands_and_absent_from_the_baseline() -> None:
    build, baseline, run, baseline_run = commands("trtexec-11")
    assert "--dynamicPlugins=/opt/lib/libmoetrt_plugins.so" in build
    assert "--dynamicPlugins=/opt/lib/libmoetrt_plugins.so" in run
    assert not [word for word in baseline + baseline_run if "Plugins" in word]


def test_library_in_this_folder_is_not_looked_for_on_the_linkers_path() -> None:
    command = trtexec.build_command("m.onnx", "m.engine", plugin_library="libmoetrt_plugins.so")
    assert "--dynamicPlugins=./libmoetrt_plugins.so" in command


def test_shapes_are_spelled_as_trtexec_takes_them() -> None:
    build = commands("trtexec-11")[0]
    assert "--minShapes=input_ids:1x1,attention_mask:1x1" in build
    assert "--optShapes=input_ids:1x128,attention_mask:1x128" in build
    assert "--maxShapes=input_ids:8x512,attention_mask:8x512" in build
    assert trtexec.shapes_text({"x:0": (2, 3), "step": ()}) == "'x:0':2x3,step:scalar"


@pytest.mark.parametrize("name", ["a,b", "it's"])
def test_name_that_trtexec_cannot_take_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="a comma or a quote"):
        trtexec.shapes_text({name: (1,)})


def test_files_of_inputs_are_spelled_as_trtexec_takes_them() -> None:
    inputs = {"ids": "a=b/ids.bin", "x:0": "x.bin", "y": "c:d/y.bin"}
    # Without quotes the name would reach to the last colon.
    assert trtexec.inputs_text(inputs) == "ids:a=b/ids.bin,'x:0':x.bin,'y':c:d/y.bin"
    assert pairs(trtexec.inputs_text(inputs)) == inputs
    for file in ("a,b.bin", "it's.bin"):
        with pytest.raises(InputError, match=r"^file '.*' of input 'x' has a comma or a quote in its path"):
            trtexec.inputs_text({"x": file})


def test_text_is_what_a_shell_takes() -> None:
    command = trtexec.build_command("my model.onnx", "m.engine", plugin_library="/opt/lib/a.so", profile=PROFILE)
    assert shlex.split(trtexec.command_text(command).replace("\\\n", " ")) == command


def test_unknown_tool_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"'trtexec-9'.*trtexec-11"):
        trtexec.run_command("m.engine", tool_key="trtexec-9", plugin_library=None)


@pytest.mark.parametrize(
    ("version", "key"), [("10.8.0", "trtexec-10"), ("10.16.1", "trtexec-10"), ("11.1.0", "trtexec-11")]
)
def test_tool_of_a_version(version: str, key: str) -> None:
    assert trtexec.key_of_version(version) == key


@pytest.mark.parametrize("version", ["8.6.1", "10.7.0", "12.0.0"])
def test_version_that_is_not_taken(version: str) -> None:
    with pytest.raises(InputError, match=rf"TensorRT {version}; 10.8 to 11 are taken"):
        trtexec.key_of_version(version)


def test_executable_is_looked_for_on_path_and_then_in_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = install(tmp_path / "path"), install(tmp_path / "root/bin")
    monkeypatch.setenv("TensorRT_ROOT", str(tmp_path / "root"))
    monkeypatch.setenv("PATH", str(first.parent))
    assert trtexec.find_executable("trtexec") == first
    monkeypatch.setenv("PATH", str(tmp_path))
    assert trtexec.find_executable("trtexec") == second
    assert trtexec.find_executable("trtexec_of_nobody") is None


def test_what_is_no_trtexec_has_no_version(tmp_path: Path) -> None:
    silent = tmp_path / "trtexec"
    silent.write_text("#!/bin/sh\necho help\n")
    silent.chmod(0o755)
    assert trtexec.version_of(silent) is None
    assert trtexec.version_of(tmp_path / "missing") is None
