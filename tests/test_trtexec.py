"""The trtexec command lines use options that the tool of that version has, and none that it calls deprecated."""

import shlex

import pytest

from moetrt import trtexec
from moetrt.errors import InputError

# Option -> (the first version looked at that has it, the version from which it is a deprecated no-op). Read from the
# option parser of trtexec 10.8, 10.16, 11.0 and 11.1.
TRTEXEC = {
    "--onnx": (10, None),
    "--dynamicPlugins": (10, None),
    "--minShapes": (10, None),
    "--optShapes": (10, None),
    "--maxShapes": (10, None),
    "--shapes": (10, None),
    "--saveEngine": (10, None),
    "--loadEngine": (10, None),
    "--skipInference": (10, None),
    "--profilingVerbosity": (10, None),
    "--exportTimes": (10, None),
    "--exportProfile": (10, None),
    "--exportLayerInfo": (10, None),
    "--stronglyTyped": (10, 11),
    "--noDataTransfers": (10, 11),
    "--useSpinWait": (10, 11),
    "--useCudaGraph": (10, 11),
    "--separateProfileRun": (10, 11),
}
# TensorRT-RTX's executable has the defaults of trtexec 11.
MAJOR = {"trtexec-10": 10, "trtexec-11": 11, "tensorrt-rtx": 11}

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
            export_prefix="out/m",
            per_layer=True,
        ),
        trtexec.run_command("m.engine", tool_key=key, plugin_library=None),
    ]


def test_every_tool_has_a_known_version() -> None:
    assert set(MAJOR) == set(trtexec.TOOLS)


@pytest.mark.parametrize("key", sorted(trtexec.TOOLS))
def test_options_exist_and_are_not_deprecated_in_that_version(key: str) -> None:
    for command in commands(key):
        assert command[0] == trtexec.TOOLS[key].executable
        for word in command[1:]:
            since, gone = TRTEXEC[word.split("=")[0]]
            assert since <= MAJOR[key]
            assert gone is None or MAJOR[key] < gone, word


def test_trtexec_10_keeps_types_and_times_the_gpu_alone() -> None:
    build, _, run, _ = commands("trtexec-10")
    assert "--stronglyTyped" in build
    assert {"--useCudaGraph", "--noDataTransfers", "--useSpinWait", "--separateProfileRun"} <= set(run)


def test_plugin_is_named_in_both_commands_and_absent_from_the_baseline() -> None:
    build, baseline, run, baseline_run = commands("trtexec-11")
    assert "--dynamicPlugins=/opt/lib/libmoetrt_plugins.so" in build
    assert "--dynamicPlugins=/opt/lib/libmoetrt_plugins.so" in run
    assert not [word for word in baseline + baseline_run if "Plugins" in word]


def test_shapes_are_spelled_as_trtexec_takes_them() -> None:
    build = commands("trtexec-11")[0]
    assert "--minShapes=input_ids:1x1,attention_mask:1x1" in build
    assert "--optShapes=input_ids:1x128,attention_mask:1x128" in build
    assert "--maxShapes=input_ids:8x512,attention_mask:8x512" in build


def test_text_is_what_a_shell_takes() -> None:
    command = trtexec.build_command("my model.onnx", "m.engine", plugin_library="/opt/lib/a.so", profile=PROFILE)
    assert shlex.split(trtexec.command_text(command).replace("\\\n", " ")) == command


def test_unknown_tool_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"'trtexec-9'.*trtexec-11"):
        trtexec.run_command("m.engine", tool_key="trtexec-9", plugin_library=None)
