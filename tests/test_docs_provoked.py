"""The messages of docs/troubleshooting.md that a machine without a GPU can provoke, provoked."""

import json
import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from moetrt import cli, models
from moetrt.backends import gpus
from moetrt.library import load_plugin_library
from moetrt.mapping import map_file
from tests.plugins.test_rtx_engines import Rtx
from tests.test_docs_troubleshooting import OTHERS, covers, first_cells, quotes, sections

# A command line, what its last line says, and the exit code where it is not 2. {m}: a mapped file with the inputs x and
# residual [tokens, 64]; {u}: the same before mapping; {d}: an empty folder; {w}: the folder that `prepared` fills.
B = "contract_to_engine:block"
COMMANDS: list[tuple[str, str] | tuple[str, str, int]] = [
    ("inspect {d}/none.onnx", "… '…' does not exist"),
    ("inspect {d}", "… '…' is not a file"),
    ("map {u} -o {d}", "… '…' is a folder"),
    ("map {u} -o /dev/null", "… '…' is …; a regular file is taken"),
    ("map {m} -o {d}/a.onnx --report {m}", "… '…' is the … itself…; another name is taken"),
    ("map {u} -o {w}/empty.onnx/a.onnx", "… '…' cannot be written: …"),
    (f"export {B} -o {{w}}/empty.onnx", "output folder '…' cannot be written: …"),
    (f"export {B} -o {{d}}/a --dynamic x:0=t --static", "--dynamic and --static were both given; one of them is taken"),
    ("build {m} -o {d}/e --plugin {m} --no-plugin", "--plugin and --no-plugin were both given; one of them is taken"),
    (
        f"compare {{m}} --against {B} --load-inputs {{d}}/i --shapes x:2x64",
        "--load-inputs and --shapes were both given; one of them is taken",
    ),
    ("bench {m} -o {d}/b --script --read", "--script, --dry-run and --read: one of them is taken"),
    ("export block -o {d}/a", "source folder '…' does not exist; …"),
    ("export a-b:c -o {d}/a", "source was '…'; …"),
    ("export {m} -o {d}/a", "source '…' is a file; …"),
    ("export {d} -o {d}/a", "source folder '…' has no config.json; a Hugging Face model folder is taken"),
    ("export {w}/broken -o {d}/a", "source folder '…' was not loaded: …"),
    (
        "export {w}/own_code -o {d}/a",
        "…: Transformers … has no model of type '…', and the folder brings model code of its own, …",
    ),
    (
        "export no_such_module:f -o {d}/a",
        "source '…': there is no module '…' in the current folder or the installation",
    ),
    ("export contract_to_engine:nothing -o {d}/a", "source '…': '…' has no '…'"),
    ("export contract_to_engine:HIDDEN -o {d}/a", "source '…' is of type …; a function without arguments is taken"),
    ("export os:getcwd -o {d}/a", "… gave an object of type …; …"),
    ("export contract_to_engine:Block -o {d}/a", "… gave the module … without inputs; …"),
    ("export tests.models.families:llama -o {d}/a", "… is a model without MoE; a model with experts is taken"),
    (f"export {B} -o {{d}}/a --dtype fp8", "the dtype was …; one of … is taken"),
    (f"export {B} -o {{d}}/a --opset 12", "the opset was …; … to … are taken"),
    (f"export {B} -o {{d}}/a --experts fast", "the experts form was '…'; … is taken"),
    (f"export {B} -o {{d}}/a --dynamic x", "--dynamic was '…'; NAME:DIM=SYMBOL,... is taken, such as …"),
    (f"export {B} -o {{d}}/a --dynamic y:0=t", "dynamic dimensions name the input '…'; there are …"),
    (f"export {B} -o {{d}}/a --dynamic x:7=t", "dynamic dimension … of input '…'; it has …, counted from 0"),
    ("inspect {w}/empty.onnx", "ONNX model '…' is an empty file"),
    ("inspect {w}/text.onnx", "'…' is not an ONNX model, or was cut short: …"),
    ("map {w}/opset.onnx -o {d}/a.onnx", "ONNX model '…': its opset was …; … to … are taken"),
    ("map {w}/twice.onnx -o {d}/a.onnx", "ONNX model '…': standard operators are imported as opset …; one is taken"),
    ("map {w}/alone.onnx -o {d}/a.onnx", "ONNX model '…' needs its data file '…' beside it: …"),
    ("map {w}/no_tail.onnx -o {d}/a.onnx", "'…' has no MoE tail; '…' is a copy", 1),
    ("map {w}/layer_norm.onnx -o {d}/a.onnx", "not every tail of '…' was mapped: …; --allow-unmatched accepts that", 1),
    ("build {m} -o {d}/e --backend cuda", "… was '…'; taken are …"),
    ("build {m} -o {d}/e --plugin {m}", "… '…' cannot be loaded: …"),
    ("build {m} -o {d}/e --target SM90", "target was '…'; TensorRT-RTX … builds for …"),
    ("build {m} -o {d}/e --min x", "shape was '…'; NAME:DIMS is taken, such as hidden:4x2048"),
    ("build {m} -o {d}/e --min x:1x64 --min x:2x64", "shape of … is given twice: … and …"),
    ("build {m} -o {d}/e --min x:99999999999x64", "shape of … has the size …; at most … is taken"),
    ("build {m} -o {d}/e --min y:1x64", "shape of '…': the model has no such input; its inputs are …"),
    ("build {m} -o {d}/e --min x:1", "… shape of '…' was …, rank …; rank …, […], is taken"),
    (
        "build {m} -o {d}/e --min x:1x32",
        "… shape of '…' was …; […] is taken: the model fixes … where … was given",
    ),
    ("build {m} -o {d}/e --min x:9x64 --max x:4x64", "… shape of '…', …, is above its … shape, …"),
    (
        "build {m} -o {d}/e --min x:9x64 --max residual:4x64",
        "dimension … has the … … in …, above its …, … in …",
    ),
    (
        "build {m} -o {d}/e --min x:9x64 residual:4x64",
        "… of dimension … was … in … and … in …; one dimension has one range",
    ),
    ("build {w}/no_tail.onnx -o {d}/e", "no layer of '…' is the plugin's: '…' has no mapped tail (…)", 1),
    ("build {w}/bare.onnx -o {d}/e --no-plugin", "… is … and the file has no function of that name: …"),
    ("build {w}/version.onnx -o {d}/e", "… finds no plugin: …"),
    (f"compare {{m}} --against {B} --seed -99999999999999999999", "the seed was …; … to … is taken"),
    (f"compare {{m}} --against {B} --shapes y:2x64", "there is no input '…'; there are …"),
    (f"compare {{m}} --against {B} --shapes x:2", "input '…' was given … dimensions; … are taken"),
    (f"compare {{m}} --against {B} --shapes x:2x32", "dimension … of input '…' was …; it is fixed at …"),
    (
        f"compare {{m}} --against {B} --shapes x:2x64 residual:3x64",
        "dimension … of input '…' was …, but '…' is … already",
    ),
    (f"compare {{w}}/no_tail.onnx --against {B}", "'…' has the inputs …; … has …: is it this model's file?"),
    (
        f"compare {{m}} --against {B} --dtype fp16",
        "the weights of '…' are …, those of … were loaded as …; a source of the file's own type is taken (--dtype …)",
    ),
    (f"compare {{m}} --against {B} --experts-implementation eager", "… is no Transformers model: …"),
    (f"compare {{m}} --against {B} --unmapped {{w}}/no_tail.onnx", "'…' is not the file that '…' was mapped from: …"),
    (f"compare {{m}} --against {B} --load-inputs {{w}}/text.onnx", "inputs file '…' is not in Polygraphy's format: …"),
    ("bench {m} -o {d}/b --tool nsys", "tool was '…'; auto, … are taken"),
    ("bench {m} -o {d}/b --tool python", "tool python runs on a GPU and none is to be seen; …"),
    ("bench {m} -o {d}/b --script --repeats 0 --tool trtexec-11", "repeats was …; 1 or more is taken"),
    ("bench {m} -o {d}/b --script --seconds 0 --tool trtexec-11", "seconds was …; a number above 0 is taken"),
    ("bench {m} -o {d}/b --script --bandwidth 0", "--bandwidth was …; 1e-06 to 1e+06 TB/s is taken"),
    ("bench {w}/no_tail.onnx -o {d}/b --script --tool trtexec-11", "'…' has no mapped tail (moetrt map makes them)"),
    (
        "bench {m} -o {d}/b --script --tool trtexec-11 --max x:4x64 --point y:2x64",
        "point names input '…'; the model's inputs are …",
    ),
    (
        "bench {m} -o {d}/b --script --tool trtexec-11 --max x:4x64 --point x:2",
        "point gives input '…' the shape …; rank … is taken",
    ),
    (
        "bench {m} -o {d}/b --script --tool trtexec-11 --load-inputs {w}/text.onnx",
        "inputs file '…' is not in Polygraphy's format: …",
    ),
    ("bench {m} -o {d}/b --read --repeats 3", "--read takes the benchmark as DIR has it; … was given"),
    ("report {d}/none", "folder to report on '…' …"),
    ("report {d}", "'…' holds nothing to report on: no JSON file of … lies in it"),
    ("report {w}/old", "'…': its format was …; this version of moetrt reads …/…: write it again with …"),
    ("families nobody", "there is no family '…'; there are …"),
    ("families mixtral --page {d}/page.md", "--page was given with families or dtypes; …"),
]

NO_TAIL = """
<ir_version: 10, opset_import: ["" : 22]>
g (float[4] a) => (float[4] b) { b = Relu (a) }
"""
LAYER_NORM = """
<ir_version: 10, opset_import: ["" : 22]>
g (float[R, 4] rows, float[T, 2] weights, int32[T, 2] map, float[T, 4] residual) => (float[T, 4] normed)
<float[4] gamma = {1.0, 1.0, 1.0, 1.0}, int64[1] axis = {1}, int64[1] last = {-1}, int32 zero = {0}, float none = {0.0}>
{
    clamped = Max (map, zero)
    picked = Gather <axis = 0> (rows, clamped)
    keep = GreaterOrEqual (map, zero)
    wide = Unsqueeze (keep, last)
    masked = Where (wide, picked, none)
    factor = Unsqueeze (weights, last)
    weighted = Mul (masked, factor)
    routed = ReduceSum <keepdims = 0> (weighted, axis)
    hidden = Add (residual, routed)
    normed = LayerNormalization (hidden, gamma)
}
"""


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, mapped_block: Path) -> Path:
    """A folder with files that are wrong in one way each."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "empty.onnx").touch()
    (folder / "text.onnx").write_text("version https://git-lfs.github.com/spec/v1\n")
    onnx.save(onnx.parser.parse_model(NO_TAIL), folder / "no_tail.onnx")
    onnx.save(onnx.parser.parse_model(LAYER_NORM), folder / "layer_norm.onnx")
    onnx.save(onnx.parser.parse_model(NO_TAIL.replace("22", "9")), folder / "opset.onnx")
    twice = onnx.parser.parse_model(NO_TAIL)
    twice.opset_import.append(helper.make_opsetid("ai.onnx", 20))
    onnx.save(twice, folder / "twice.onnx")
    alone = onnx.parser.parse_model(NO_TAIL)
    alone.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(4, np.float32), "w"))
    onnx.save(alone, folder / "alone.onnx", save_as_external_data=True, location="alone.data", size_threshold=0)
    (folder / "alone.data").unlink()
    map_file(mapped_block.with_name("model.onnx"), folder / "bare.onnx", function=False)
    version = onnx.load(folder / "bare.onnx")
    for node in version.graph.node:
        for attribute in node.attribute:
            if attribute.name == "plugin_version":
                attribute.s = b"2"
    onnx.save(version, folder / "version.onnx")
    for name, config in {
        "broken": {"model_type": "qwen3_moe", "hidden_size": "wide"},
        "own_code": {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "model.Own", "AutoConfig": "model.C"}},
    }.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "old").mkdir()
    (folder / "old/mapping.json").write_text(json.dumps({"format": "moetrt.mapping/0"}))
    return folder


@pytest.mark.parametrize("case", COMMANDS, ids=lambda case: case[0])
def test_command(
    case: tuple[str, str] | tuple[str, str, int],
    mapped_block: Path,
    prepared: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command, quote, code = (*case, 2)[:3]
    assert any(covers(quote, shown) or shown == quote for shown in quotes()), "it is not in the page"
    words = [
        word.format(m=mapped_block, u=mapped_block.with_name("model.onnx"), d=tmp_path, w=prepared)
        for word in command.split()
    ]
    assert cli.run(words) == code
    line = capsys.readouterr().err.splitlines()[-1]
    assert covers(f"moetrt: error: {quote}", line), line


def test_every_area_of_the_page_is_provoked() -> None:
    """One command at least for each section whose messages a command line can reach."""
    provoked = {
        name
        for name, text in sections().items()
        for _, quote, *_ in COMMANDS
        if any(covers(quote, shown) or shown == quote for shown in first_cells(text))
    }
    reached_from_python = {"The operator", "The contract"}
    assert set(sections()) - set(OTHERS) - reached_from_python <= provoked


OF_OTHERS = {quote for name in OTHERS for quote in first_cells(sections()[name])}


def tail(
    *, domain: str = "moetrt", index: int = TensorProto.INT32, hidden: int = 64, **attributes: object
) -> onnx.ModelProto:
    """One node with static inputs, T = 4, K = 2, R = 8; H of the residual is ``hidden``, of gamma 64."""
    wanted = {"plugin_version": "1", "plugin_namespace": domain} | attributes
    node = helper.make_node("MoEFinalizeAddRMSNorm", list("rwmsg"), ["n", "h"], "tail", domain=domain, **wanted)
    kinds = {"r": (1, [8, 64]), "w": (1, [4, 2]), "m": (index, [4, 2]), "s": (1, [4, hidden]), "g": (1, [64])}
    inputs = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in kinds.items()]
    outputs = [helper.make_tensor_value_info(name, 1, [4, 64]) for name in "nh"]
    opsets = [helper.make_opsetid("", 22), helper.make_opsetid(domain, 1)]
    return helper.make_model(helper.make_graph([node], "g", inputs, outputs), opset_imports=opsets, ir_version=10)


CUDA_35 = "cudaError 35: CUDA driver version is insufficient for CUDA runtime version"


@pytest.mark.parametrize(
    ("model", "line", "said"),
    [
        (tail(plugin_version="2"), "", ["Plugin not found, are the plugin name, version, and namespace correct?"]),
        (tail(domain="other"), "", ["Plugin not found, are the plugin name, version, and namespace correct?"]),
        (
            tail(eps=-1.0),
            "attribute eps was -1; a finite float of at least 0 is taken",
            ["Assertion failed: plugin: Could not create the plugin."],
        ),
        (
            tail(index=TensorProto.INT64),
            "input expanded_idx_to_permuted_idx was int64; int32 is taken",
            ["getOutputDataTypes reported a non-zero return code", CUDA_35],
        ),
        (
            tail(hidden=32),
            "input residual was [4, 32]; a last dimension of H = 64 is taken",
            ["IPluginV3OneBuild output shape computation failed with a non-zero return code", CUDA_35],
        ),
    ],
    ids=["version", "namespace", "attribute", "dtype", "shape"],
)
def test_tensorrt_says_less_than_the_plugin(
    model: onnx.ModelProto, line: str, said: list[str], plugin_library: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rtx = Rtx(load_plugin_library(plugin_library))
    network = rtx.builder.create_network(0)
    parser = rtx.trt.OnnxParser(network, rtx.logger)
    assert not parser.parse(model.SerializeToString())
    text = "\n".join(message for message, _ in rtx.errors)
    for words in said:
        assert words in OF_OTHERS
        if words == CUDA_35 and gpus():
            continue
        assert words in text
    own = capfd.readouterr().err
    assert own == (f"[moetrt] MoEFinalizeAddRMSNorm 'tail': {line}\n" if line else "")


def test_tensorrt_rtx_finds_a_plugin_of_another_namespace_by_its_domain(plugin_library: Path) -> None:
    """docs/versions.md says so: that TensorRT-RTX takes a file is no sign that the attribute is right."""
    rtx = Rtx(load_plugin_library(plugin_library))
    network = rtx.builder.create_network(0)
    parser = rtx.trt.OnnxParser(network, rtx.logger)
    assert parser.parse(tail(plugin_namespace="other").SerializeToString())
    assert [network.get_layer(i).type for i in range(network.num_layers)] == [rtx.trt.LayerType.PLUGIN_V3]


def test_library_without_a_slash_is_not_found_in_the_current_folder(plugin_library: Path, tmp_path: Path) -> None:
    shutil.copy(plugin_library, tmp_path / "libmoetrt_plugins.so")

    def load(name: str) -> str:
        # In a process of its own: one that has the library already finds it by its name.
        command = [sys.executable, "-c", f"import ctypes; ctypes.CDLL({name!r})"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stderr

    words = "libmoetrt_plugins.so: cannot open shared object file: No such file or directory"
    assert words in OF_OTHERS
    assert words in load("libmoetrt_plugins.so")
    assert load("./libmoetrt_plugins.so") == ""


def of_onnx_runtime(words: str, call: Callable[[], object]) -> None:
    assert words in OF_OTHERS
    with pytest.raises(Exception, match=re.escape(words)):
        call()


def session(text: str) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(onnx.parser.parse_model(text).SerializeToString())


BF16 = """
<ir_version: 10, opset_import: ["" : 22]>
g (bfloat16[4] a) => (float[4] b) { b = Cast <to = 1> (a) }
"""


def test_onnx_runtime_needs_the_function(prepared: Path) -> None:
    words = "moetrt:MoEFinalizeAddRMSNorm(-1) is not a registered function/op"
    of_onnx_runtime(words, lambda: onnxruntime.InferenceSession(str(prepared / "bare.onnx")))


def test_onnx_runtime_has_no_bf16_arithmetic_on_the_cpu() -> None:
    text = BF16.replace("float[4] b", "bfloat16[4] b").replace("Cast <to = 1> (a)", "Mul (a, a)")
    of_onnx_runtime("NOT_IMPLEMENTED : Could not find an implementation for Mul(14) node", lambda: session(text))


def test_onnx_runtime_takes_no_rotary_embedding_of_another_batch() -> None:
    rotary = session("""
    <ir_version: 10, opset_import: ["" : 23]>
    g (float[3, 2, 5, 8] x, float[1, 5, 4] cos, float[1, 5, 4] sin) => (float[3, 2, 5, 8] y) {
        y = RotaryEmbedding (x, cos, sin)
    }""")
    feeds = {name: np.ones(shape, np.float32) for name, shape in (("x", (3, 2, 5, 8)), ("cos", (1, 5, 4)))}
    words = "Inputs 'cos_cache' and 'sin_cache' are expected to have the same shape as input 'x'"
    of_onnx_runtime(words, lambda: rotary.run(None, feeds | {"sin": feeds["cos"]}))


@pytest.mark.parametrize(
    ("implementation", "words"),
    [
        ("eager", "Could not guard on data-dependent expression"),
        (
            "grouped_mm",
            "No ONNX function found for <OpOverload(op='transformers.grouped_mm_fallback', overload='default')>",
        ),
    ],
)
def test_torch_onnx_alone_takes_no_experts(
    implementation: str, words: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert words in OF_OTHERS
    caplog.set_level(logging.CRITICAL)
    model = models.mixtral()
    model.set_experts_implementation(implementation)
    block = model.get_submodule("model.layers.0.mlp").eval()
    with pytest.raises(torch.onnx.errors.OnnxExporterError) as raised:
        torch.onnx.export(block, (torch.randn(2, 5, model.config.hidden_size),), dynamo=True, verbose=False)
    causes = [str(raised.value)]
    error: BaseException | None = raised.value
    while error := error.__cause__:
        causes.append(str(error))
    assert any(words in cause for cause in causes)


NOT_PROVOKED = {
    # What our own builds keep from happening: the link is made, and formats are linear.
    "terminate called",
    "Failed to find any supported plugin/custom tactic format",
}


def test_messages_of_others_are_provoked() -> None:
    """Each is named in a test of this file, or is one that nothing here provokes."""
    here = Path(__file__).read_text(encoding="utf-8")
    assert {quote for quote in OF_OTHERS if quote not in here} == set()
    assert NOT_PROVOKED <= OF_OTHERS


def test_bf16_arrays_are_not_taken() -> None:
    from polygraphy.backend.onnxrt import OnnxrtRunner

    def infer(value: object) -> None:
        with OnnxrtRunner(lambda: session(BF16)) as runner:
            runner.infer({"a": value})

    array = np.ones(4, ml_dtypes.bfloat16)
    of_onnx_runtime("Got unsupported ScalarType BFloat16", lambda: infer(torch.ones(4, dtype=torch.bfloat16)))
    of_onnx_runtime("Received unexpected dtype: bfloat16", lambda: infer(array))
    of_onnx_runtime("Expected type: bfloat16", lambda: infer(array))
    of_onnx_runtime("Numpy_type 256 can't be converted to MLDataType", lambda: session(BF16).run(None, {"a": array}))
