"""`moetrt bench` from end to end, with a stand-in for trtexec that has planted times."""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch

from moetrt import cli
from moetrt.backends import Gpu
from moetrt.bench import benchmark, trtexec
from moetrt.bench.model import _check_feeds
from moetrt.bench.plan import MANIFEST, SCRIPT, read_manifest
from moetrt.bench.result import Layer, TailOfModel, attribute
from moetrt.errors import InputError
from tests.test_engine import one_tail, save
from tests.trtexec_stand_in import DEVICE, VARIABLE, install

POINT = "x:8x64 residual:8x64"
TAIL = "MoEFinalizeAddRMSNorm"

Run = Callable[..., dict[str, Any]]


def tail_name(model: Path) -> str:
    return next(node.name for node in ir.load(model).graph if node.op_type == TAIL) or ""


def layer(name: str, ms: float, *origins: str) -> dict[str, Any]:
    return {"Name": name, "ms": ms, "Metadata": "\x1f".join(f"[ONNX Layer: {origin}]" for origin in origins)}


class Planted:
    """What the stand-in is to say, and where it lies."""

    def __init__(self, folder: Path, tail: str) -> None:
        self.path = folder / "planted.json"
        self.executable = install(folder / "bin")
        inner = f"{tail} ({TAIL})"
        self.content: dict[str, Any] = {
            "version": [11, 1, 0],
            "failure": "",
            "drift": 0.0,
            "inputs": {"x": 8 * 64 * 4, "residual": 8 * 64 * 4},
            "plugin": {"compute_ms": 0.5, "layers": [layer("gemm", 0.3, "mm"), layer(tail, 0.2, tail)]},
            "native": {
                "compute_ms": 1.0,
                "layers": [
                    layer("gemm", 0.3, "mm"),
                    layer("__myl_a", 0.1, f"node_Mul_17 | {inner}", f"node_ReduceSum_19 | {inner}"),
                    layer("__myl_b", 0.3, f"node_Add_44 | {inner}"),
                ],
            },
        }
        self.save()

    def save(self, **changes: Any) -> None:
        self.content.update(changes)
        self.path.write_text(json.dumps(self.content))


def here(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the stand-in on PATH, and a GPU into the machine."""
    monkeypatch.setenv(VARIABLE, str(planted.path))
    monkeypatch.setenv("PATH", f"{planted.executable.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(benchmark, "gpus", lambda: (Gpu("test", (9, 0)),))


@pytest.fixture
def planted(tmp_path: Path, mapped_block: Path, monkeypatch: pytest.MonkeyPatch) -> Planted:
    """The stand-in, on a machine with a GPU."""
    stand_in = Planted(tmp_path / "tool", tail_name(mapped_block))
    here(stand_in, monkeypatch)
    return stand_in


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*words: object, code: int = 2) -> str:
        capsys.readouterr()
        assert cli.run([str(word) for word in words]) == code
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        return lines[0]

    return run


@pytest.fixture
def run(planted: Planted, mapped_block: Path, tmp_path: Path) -> Run:
    """Runs the command and gives bench.json."""

    def run(*words: object, repeats: int = 2) -> dict[str, Any]:
        command = [
            "bench",
            mapped_block,
            "-o",
            tmp_path / "out",
            "--repeats",
            repeats,
            "--point",
            *POINT.split(),
            *words,
        ]
        assert cli.run([str(word) for word in command]) == 0
        content: dict[str, Any] = json.loads((tmp_path / "out/bench.json").read_text())
        return content

    return run


def median(figure: dict[str, Any]) -> float:
    return float(figure["median"])


@pytest.mark.parametrize("version", [[10, 8, 0], [10, 16, 1], [11, 0, 0], [11, 1, 0]])
def test_planted_times_come_back(
    planted: Planted, run: Run, version: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    planted.save(version=version)
    result = run("--bandwidth", "1")
    assert result["format"] == "moetrt.bench/1"
    assert result["tool"] == f"trtexec-{version[0]}"
    assert result["versions"]["TensorRT"] == ".".join(map(str, version))
    assert result["device"] == DEVICE
    (point,) = result["points"]
    assert point["shapes"] == {"x": [8, 64], "residual": [8, 64]}
    end = point["end_to_end"]
    assert (median(end["plugin_ms"]["low"]), median(end["native_ms"]["low"])) == (0.5, 1.0)
    assert median(end["ratio"]["low"]) == 2.0
    (tail,) = point["tails"]
    assert tail["ratio"]["exact"]
    assert median(tail["plugin_ms"]["low"]) == 0.2
    assert median(tail["native_ms"]["low"]) == pytest.approx(0.4)
    assert median(tail["ratio"]["low"]) == pytest.approx(2.0)
    assert tail["layers"]["native"] == {"own": ["__myl_a", "__myl_b"], "shared": []}
    assert median(point["share_in_tails"]["plugin"]["low"]) == pytest.approx(0.2 / 0.5)
    assert median(point["share_in_tails"]["native"]["low"]) == pytest.approx(0.4 / 0.7)
    assert point["unattributed"]["native"]["median"] == 0
    assert tail["floor"]["ms"] == pytest.approx(tail["floor"]["bytes"] / 1e12 * 1e3)
    assert tail["floor"]["of_plugin_time"] == pytest.approx(tail["floor"]["ms"] / 0.2)
    said = capsys.readouterr().out
    assert "2.00 ± 0.00" in said
    assert f"TensorRT {'.'.join(map(str, version))}" in said


def test_swapped_times_are_seen(planted: Planted, run: Run) -> None:
    planted.content["plugin"]["compute_ms"], planted.content["native"]["compute_ms"] = 1.0, 0.5
    planted.content["plugin"]["layers"][1]["ms"] = 0.8
    planted.save()
    (point,) = run()["points"]
    assert median(point["end_to_end"]["ratio"]["low"]) == 0.5
    assert median(point["tails"][0]["ratio"]["low"]) == pytest.approx(0.5)


@pytest.mark.parametrize("repeats", [4, 8])
def test_clock_that_drifts_favours_neither(planted: Planted, run: Run, repeats: int) -> None:
    """Each run is 5 % slower than the one before: the ways take turns in going first, so the drift cancels.

    Within a repeat the ratio is 2 x 1.05 or 2 / 1.05; the median of an even number of them is their mean.
    """
    planted.save(drift=0.05)
    (point,) = run(repeats=repeats)["points"]
    ratio = point["end_to_end"]["ratio"]["low"]
    # Six digits in the files.
    assert sorted({round(value, 3) for value in ratio["runs"]}) == [round(2 / 1.05, 3), 2.1]
    assert ratio["median"] == pytest.approx((2.1 + 2 / 1.05) / 2, rel=1e-4)
    assert ratio["iqr"] == pytest.approx(2.1 - 2 / 1.05, rel=1e-3)


def test_single_run_has_no_spread(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (point,) = run(repeats=1)["points"]
    assert point["end_to_end"]["ratio"]["low"]["iqr"] is None
    assert "±" not in capsys.readouterr().out.partition("ratio: native")[2]


def test_layer_that_is_shared_gives_a_range(planted: Planted, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    tail = planted.content["plugin"]["layers"][1]["Name"]
    planted.content["native"]["layers"] += [
        layer("__myl_fused", 0.2, "mm_2", f"node_Mul_3 | {tail} ({TAIL})"),
        layer("{ForeignNode[a...b]}", 0.1),
    ]
    planted.save()
    (point,) = run()["points"]
    ratio = point["tails"][0]["ratio"]
    assert not ratio["exact"]
    assert (median(ratio["low"]), median(ratio["high"])) == (pytest.approx(2.0), pytest.approx(3.0))
    assert point["tails"][0]["layers"]["native"]["shared"] == ["__myl_fused"]
    assert point["unattributed"]["native"]["median"] == pytest.approx(0.1)
    share = point["share_in_tails"]["native"]
    assert (median(share["low"]), median(share["high"])) == (pytest.approx(0.4), pytest.approx(0.6))
    said = capsys.readouterr().out
    assert "2.00 to 3.00" in said
    assert "native: 10.0% of the time is in layers that do not name their nodes" in said


@pytest.mark.parametrize("hidden", [False, True], ids=["other nodes", "no nodes named"])
def test_native_layers_that_are_not_found_give_no_ratio(
    planted: Planted, run: Run, capsys: pytest.CaptureFixture[str], hidden: bool, tmp_path: Path
) -> None:
    planted.content["native"]["layers"] = [layer("gemm", 0.3, "mm"), layer("a", 0.4, *([] if hidden else ["add"]))]
    planted.save()
    result = run()
    (point,) = result["points"]
    for timing in (point["tails"][0], point["all_tails"]):
        assert timing["native_ms"] is None
        assert timing["ratio"] is None
        assert median(timing["plugin_ms"]["low"]) == 0.2
    assert point["share_in_tails"]["native"] is None
    assert median(point["end_to_end"]["ratio"]["low"]) == 2.0
    assert any("no native layer that took time names a node of tail" in note for note in result["notes"])
    said = capsys.readouterr().out
    assert re.search(r"all tails +200\.0 ± 0\.0 +not found +- ", said)
    assert "native not found" in said
    for page in ("report.html", "report.md"):
        text = (tmp_path / "out" / page).read_text()
        assert "not found" in text
        assert "in the tails they were not found" in text


def test_warnings_of_trtexec_are_passed_on(planted: Planted, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    planted.save(warning="CUDA graph capture failed.")
    assert run()["notes"] == ["CUDA graph capture failed."]
    assert "note: CUDA graph capture failed." in capsys.readouterr().out


def test_warnings_that_differ_in_numbers_are_passed_on_once(planted: Planted, run: Run) -> None:
    planted.save(warning="* GPU compute time is unstable, with coefficient of variance = {run}.25%.")
    assert run()["notes"] == [
        "* GPU compute time is unstable, with coefficient of variance = 0.25%. "
        "(and 3 more with other numbers: see the logs)"
    ]


@pytest.mark.parametrize(("milliseconds", "coarse"), [(0.0014, True), (0.0017, False)])
def test_query_that_is_short_beside_the_steps_of_its_time(
    planted: Planted, run: Run, milliseconds: float, coarse: bool
) -> None:
    # The stand-in's queries begin 200 ms into the run, where 32-bit floats are 2^-16 ms apart.
    planted.content["plugin"]["compute_ms"] = milliseconds
    planted.save()
    notes = [note for note in run()["notes"] if "in steps of" in note]
    assert len(notes) == coarse
    if coarse:
        assert notes[0].startswith("a plugin query of point 1 takes 1.4 us, told in steps of 0.015 us")


@pytest.mark.parametrize("dtype", [ir.DataType.UINT8, ir.DataType.INT8, ir.DataType.BOOL, ir.DataType.INT64])
def test_inputs_of_another_width_are_refused(dtype: ir.DataType) -> None:
    """trtexec itself takes a file of twice the size, and reads half of it."""
    given = {"x": ir.Value(name="x", type=ir.TensorType(dtype), shape=ir.Shape([2]))}
    wide = {"x": torch.ones(2, dtype=torch.int16)}
    with pytest.raises(InputError, match=r"^the inputs have 'x' as torch\.int16; the model takes torch\."):
        _check_feeds(given, [], [wide], "the inputs")


def test_bandwidth_comes_from_the_log(run: Run) -> None:
    bandwidth = run()["bandwidth"]
    # 5120 bits at 2.5 GHz, twice a clock.
    assert bandwidth["bytes_per_second"] == pytest.approx(3.2e12)
    assert "log" in bandwidth["source"]


def test_two_points(planted: Planted, mapped_block: Path, tmp_path: Path) -> None:
    words = ["--repeats", "1", "--point", "x:4x64", "residual:4x64", "--point", "x:16x64"]
    assert cli.run(["bench", str(mapped_block), "-o", str(tmp_path / "out"), *words]) == 0
    plan, manifest = read_manifest(tmp_path / "out")
    # The residual of the second point has the same named dimension as x.
    assert [dict(point.shapes) for point in plan.points] == [
        {"x": (4, 64), "residual": (4, 64)},
        {"x": (16, 64), "residual": (16, 64)},
    ]
    assert plan.profile["x"] == ((4, 64), (4, 64), (16, 64))
    assert plan.tails[0].floor_bytes[1] is not None
    assert plan.tails[0].floor_bytes[1] > plan.tails[0].floor_bytes[0]  # type: ignore[operator]
    assert "--point x:16x64" in manifest.command
    result = json.loads((tmp_path / "out/bench.json").read_text())
    assert [point["name"] for point in result["points"]] == ["1", "2"]


def test_saved_inputs_are_loaded(run: Run, mapped_block: Path, tmp_path: Path, planted: Planted) -> None:
    from polygraphy.json import save_json

    feed = {"x": torch.randn(8, 64), "residual": torch.randn(8, 64)}
    save_json([feed], str(tmp_path / "inputs.json"))
    words = ["--repeats", "1", "--load-inputs", str(tmp_path / "inputs.json")]
    assert cli.run(["bench", str(mapped_block), "-o", str(tmp_path / "out"), *words]) == 0
    plan, _ = read_manifest(tmp_path / "out")
    (point,) = plan.points
    assert dict(point.shapes) == {"x": (8, 64), "residual": (8, 64)}
    for name, file in point.inputs.items():
        raw = bytearray((tmp_path / "out" / file).read_bytes())
        assert torch.equal(torch.frombuffer(raw, dtype=torch.float32).reshape(8, 64), feed[name])
    # The stand-in saw files of the right size.
    log = (tmp_path / "out/bench/1/plugin.1.log").read_text()
    assert "--loadInputs=x:bench/1/input.0.bin,residual:bench/1/input.1.bin" in log


def test_static_model_with_a_map_among_its_inputs(planted: Planted, tmp_path: Path) -> None:
    """The contract alone: every operand is an input of the graph, with sizes that the file fixes."""
    from polygraphy.json import save_json

    path = save(one_tail(), tmp_path / "m.onnx")
    feed = {
        "gemm2_permuted": torch.zeros(16, 8),
        "expert_weights": torch.zeros(4, 2),
        "expanded_idx_to_permuted_idx": torch.zeros(4, 2, dtype=torch.int32),
        "residual": torch.zeros(4, 8),
        "gamma": torch.zeros(8),
    }
    save_json([feed], str(tmp_path / "inputs.json"))
    inner = f"node_Mul | {TAIL} ({TAIL})"
    planted.save(
        static=True,
        inputs={name: tensor.numel() * 4 for name, tensor in feed.items()},
        plugin={"compute_ms": 0.5, "layers": [layer(TAIL, 0.2, TAIL)]},
        native={"compute_ms": 1.0, "layers": [layer("a", 0.4, inner)]},
    )
    words = ["-o", str(tmp_path / "out"), "--repeats", "1", "--load-inputs", str(tmp_path / "inputs.json")]
    assert cli.run(["bench", str(path), *words]) == 0
    (point,) = json.loads((tmp_path / "out/bench.json").read_text())["points"]
    assert median(point["tails"][0]["ratio"]["low"]) == pytest.approx(2.0)
    # Two rows, the residual and two outputs of 8 numbers, weights and map of 2, for each of 4 tokens; gamma of 8.
    assert point["tails"][0]["floor"]["bytes"] == 4 * (4 * (2 * 8 + 3 * 8 + 2 + 2)) + 4 * 8


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (
            "build",
            r"build, plugin: trtexec ended with code 1: \[moetrt\] node 'tail': gamma was of 63; 64 is taken;",
        ),
        ("run", r"repeat 1 of 2, plugin: trtexec ended with code 1: Error Code 1: Cuda Runtime \(out of memory\); see"),
        ("silent", r"trtexec ended with code 139: "),
        ("half", r"profile '.*plugin\.1\.profile\.json' is cut off"),
        ("no profile", r"trtexec wrote no '.*1/plugin\.1\.profile\.json'; see"),
        ("nan", r"times '.*plugin\.1\.times\.json': computeMs of query 0 was nan"),
    ],
)
def test_failures_are_one_line(
    planted: Planted, refused: Callable[..., str], mapped_block: Path, tmp_path: Path, failure: str, said: str
) -> None:
    planted.save(failure=failure)
    line = refused("bench", mapped_block, "-o", tmp_path / "out", "--repeats", 2, "--point", *POINT.split())
    assert re.search(said, line), line
    assert not (tmp_path / "out/bench.json").exists()


def test_time_limit(planted: Planted, refused: Callable[..., str], mapped_block: Path, tmp_path: Path) -> None:
    planted.save(failure="hang")
    line = refused("bench", mapped_block, "-o", tmp_path / "out", "--time-limit", 3, "--point", *POINT.split())
    assert "plugin: took longer than 3 s (--time-limit allows more)" in line


def test_tool_of_another_version_is_refused(
    planted: Planted, refused: Callable[..., str], mapped_block: Path, tmp_path: Path
) -> None:
    line = refused("bench", mapped_block, "-o", tmp_path / "out", "--tool", "trtexec-10")
    assert "trtexec' is of TensorRT 11.1.0; tool was trtexec-10, trtexec-11 is taken" in line
    planted.save(version=[10, 7, 0])
    assert "TensorRT 10.7.0; 10.8 to 11 are taken" in refused("bench", mapped_block, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def whole(mapped_block: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a benchmark that was run."""
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as monkeypatch:
        here(Planted(folder / "tool", tail_name(mapped_block)), monkeypatch)
        words = ["--repeats", "2", "--point", *POINT.split()]
        assert cli.run(["bench", str(mapped_block), "-o", str(folder / "out"), *words]) == 0
    return folder / "out"


class TestReadBack:
    """The folder of a benchmark, read where it was made or elsewhere."""

    @pytest.fixture
    def folder(self, whole: Path, tmp_path: Path) -> Path:
        # As deep as the other: the manifest has the model relative to itself.
        return shutil.copytree(whole, tmp_path / "out")

    def test_again(self, folder: Path, mapped_block: Path) -> None:
        before = (folder / "bench.json").read_text()
        assert "moetrt bench" in before
        (folder / "bench.json").unlink()
        assert cli.run(["bench", str(mapped_block), "-o", str(folder), "--read"]) == 0
        assert (folder / "bench.json").read_text() == before

    @pytest.mark.parametrize(
        "name", ["1/native.2.times.json", "1/plugin.1.layers.json", "1/native.1.log", "plugin.log"]
    )
    def test_missing_file(self, folder: Path, mapped_block: Path, refused: Callable[..., str], name: str) -> None:
        (folder / "bench" / name).unlink()
        assert f"{name}' does not exist" in refused("bench", mapped_block, "-o", folder, "--read")

    def test_other_model(self, folder: Path, mapped_block_fp16: Path, refused: Callable[..., str]) -> None:
        line = refused("bench", mapped_block_fp16, "-o", folder, "--read")
        assert "is of another model than" in line
        assert "SHA-256" in line

    def test_file_of_another_benchmark(
        self, folder: Path, mapped_block: Path, refused: Callable[..., str], planted: Planted
    ) -> None:
        """A plan that was written anew and not run: the figures that lie there are the old one's."""
        words = ["bench", str(mapped_block), "-o", str(folder), "--repeats", "2", "--point", "x:4x64", "--script"]
        assert cli.run(words) == 0
        # Nor are the figures themselves left to be taken for the new plan's.
        assert not (folder / "bench.json").exists()
        assert "plugin.log' is of another benchmark" in refused("bench", mapped_block, "-o", folder, "--read")

    def test_log_of_another_version(self, folder: Path, mapped_block: Path, refused: Callable[..., str]) -> None:
        log = folder / "bench/1/native.2.log"
        text = log.read_text()
        log.write_text(text.replace("TensorRT version: 11.1.0", "TensorRT version: 11.0.0"))
        line = refused("bench", mapped_block, "-o", folder, "--read")
        assert "the logs differ in TensorRT" in line
        assert "native.2.log' has 11.0.0" in line
        log.write_text(text.replace("TensorRT version: 11.1.0", "TensorRT version: 10.9.0"))
        assert "native.2.log' is of TensorRT 10.9.0; this benchmark is for trtexec-11" in refused(
            "bench", mapped_block, "-o", folder, "--read"
        )
        log.write_text(text.partition("\n")[0] + "\ntrtexec: error while loading shared libraries\n")
        assert "names no TensorRT version; the run did not start: trtexec: error while loading" in refused(
            "bench", mapped_block, "-o", folder, "--read"
        )

    def test_logs_of_two_gpus(self, folder: Path, mapped_block: Path, refused: Callable[..., str]) -> None:
        log = folder / "bench/1/native.2.log"
        log.write_text(log.read_text().replace(DEVICE, "NVIDIA Other"))
        assert "the logs differ in the GPU" in refused("bench", mapped_block, "-o", folder, "--read")

    def test_plugin_that_did_not_run(self, folder: Path, mapped_block: Path, refused: Callable[..., str]) -> None:
        shutil.copy(folder / "bench/1/native.1.layers.json", folder / "bench/1/plugin.1.layers.json")
        shutil.copy(folder / "bench/1/native.1.profile.json", folder / "bench/1/plugin.1.profile.json")
        line = refused("bench", mapped_block, "-o", folder, "--read")
        assert "plugin.1.layers.json' have a native layer, '__myl_a', for tail" in line
        for repeat in (1, 2):
            shutil.copy(folder / "bench/1/native.1.layers.json", folder / f"bench/1/plugin.{repeat}.layers.json")
            shutil.copy(folder / "bench/1/native.1.profile.json", folder / f"bench/1/plugin.{repeat}.profile.json")
            layers = folder / f"bench/1/plugin.{repeat}.layers.json"
            layers.write_text(layers.read_text().replace("MoEFinalize", "Other"))
        line = refused("bench", mapped_block, "-o", folder, "--read")
        assert "no layer of the engine with the plugin is tail" in line

    def test_files_of_the_two_ways_exchanged(
        self, folder: Path, mapped_block: Path, refused: Callable[..., str]
    ) -> None:
        kept = {what: (folder / f"bench/1/native.1.{what}.json").read_text() for what in ("profile", "layers")}
        shutil.copy(folder / "bench/1/plugin.1.profile.json", folder / "bench/1/native.1.profile.json")
        line = refused("bench", mapped_block, "-o", folder, "--read")
        assert f"native.1.profile.json' times layer '{tail_name(mapped_block)}', which" in line
        assert "native.1.layers.json' does not have: they are not of one engine" in line
        shutil.copy(folder / "bench/1/plugin.1.layers.json", folder / "bench/1/native.1.layers.json")
        line = refused("bench", mapped_block, "-o", folder, "--read")
        assert "native.1.layers.json' have a plugin layer" in line
        for what, text in kept.items():
            (folder / f"bench/1/native.1.{what}.json").write_text(text)
        assert cli.run(["bench", str(mapped_block), "-o", str(folder), "--read"]) == 0

    @pytest.mark.parametrize("what", ["profile", "layers"])
    def test_repeat_with_other_layers(
        self, folder: Path, mapped_block: Path, refused: Callable[..., str], what: str
    ) -> None:
        path = folder / f"bench/1/native.2.{what}.json"
        if what == "layers":
            content = json.loads(path.read_text())
            content["Layers"][0]["Metadata"] = "[ONNX Layer: other]"
            path.write_text(json.dumps(content))
        else:
            path.write_text("".join(line for line in path.read_text().splitlines(True) if "__myl_b" not in line))
        line = refused("bench", mapped_block, "-o", folder, "--read")
        assert f".{what}.json' has other layers than '" in line
        assert f"native.2.{what}.json'" in line
        assert "both are of one engine, native" in line

    @pytest.mark.parametrize("name", ["plugin.log", "1/native.2.log"])
    def test_log_of_a_run_that_failed(
        self, folder: Path, mapped_block: Path, refused: Callable[..., str], name: str
    ) -> None:
        log = folder / "bench" / name
        text = log.read_text()
        log.write_text(text.replace("&&&& PASSED", "[E] Error Code 1: out of memory\n&&&& FAILED"))
        line = refused("bench", mapped_block, "-o", folder, "--read")
        assert f"{name}' is of a run that failed: Error Code 1: out of memory" in line
        log.write_text(text.partition("&&&& PASSED")[0])
        assert f"{name}' has no PASSED line" in refused("bench", mapped_block, "-o", folder, "--read")

    def test_manifest_that_was_changed(self, folder: Path, mapped_block: Path, refused: Callable[..., str]) -> None:
        manifest = folder / MANIFEST
        text = manifest.read_text()
        manifest.write_text(text.replace('"repeats": 2', '"repeats": 1'))
        assert "was changed since" in refused("bench", mapped_block, "-o", folder, "--read")
        manifest.write_text(text[:200])
        assert "is cut off" in refused("bench", mapped_block, "-o", folder, "--read")
        for name, value, says in (
            ("format", "moetrt.bench-manifest/2", 'format was "moetrt.bench-manifest/2"; "moetrt.bench-manifest/1" is'),
            ("notes", 3, "notes was 3; a list is taken"),
            ("versions", ["3"], 'versions was ["3"]; an object is taken'),
            ("points", {"1": 2}, 'points was {"1": 2}; a list is taken'),
            ("tails", [3], "tails[0] was 3; an object is taken"),
            ("repeats", "2", 'repeats was "2"; a whole number is taken'),
            ("seconds", "3", 'seconds was "3"; a finite number is taken'),
        ):
            manifest.write_text(json.dumps(json.loads(text) | {name: value}))
            line = refused("bench", mapped_block, "-o", folder, "--read")
            assert f"{MANIFEST}' is no whole moetrt.bench-manifest/1 file ({says}" in line
            assert line.endswith("write it again with moetrt bench")
        manifest.unlink()
        assert "manifest of the benchmark" in refused("bench", mapped_block, "-o", folder, "--read")

    def test_read_takes_no_plan(self, folder: Path, mapped_block: Path, refused: Callable[..., str]) -> None:
        line = refused("bench", mapped_block, "-o", folder, "--read", "--repeats", 3)
        assert "--read takes the benchmark as DIR has it; --repeats was given" in line


class TestScript:
    """bench.sh under bash, against the stand-in."""

    @pytest.fixture
    def folder(self, planted: Planted, mapped_block: Path, tmp_path: Path) -> Path:
        words = ["--repeats", "2", "--point", *POINT.split(), "--script"]
        assert cli.run(["bench", str(mapped_block), "-o", str(tmp_path / "out"), *words]) == 0
        return tmp_path / "out"

    def bash(self, folder: Path, *words: object, code: int = 0, cwd: Path | None = None, **variables: str) -> str:
        done = subprocess.run(
            ["bash", str(folder / SCRIPT), *map(str, words)],
            capture_output=True,
            text=True,
            check=False,
            cwd=cwd,
            env=os.environ | variables,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr

    def test_lines_that_are_printed_run_where_the_folder_has_a_blank(
        self, planted: Planted, mapped_block: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = tmp_path / "my out"
        words = ["--repeats", "1", "--point", *POINT.split(), "--script"]
        assert cli.run(["bench", str(mapped_block), "-o", str(folder), *words]) == 0
        lines = [shlex.split(line.partition(":  ")[2]) for line in capsys.readouterr().out.splitlines()]
        program, script = next(line for line in lines if line[:1] == ["bash"])
        assert (program, script) == ("bash", str(folder / SCRIPT))
        self.bash(folder)
        read = next(line for line in lines if line[:1] == ["moetrt"])
        assert cli.run(read[1:]) == 0
        assert (folder / "bench.json").is_file()

    def test_gives_the_same_figures(self, folder: Path, mapped_block: Path, run: Run) -> None:
        said = self.bash(folder)
        assert "[6/6] x:8x64,residual:8x64, repeat 2 of 2, plugin" in said
        assert cli.run(["bench", str(mapped_block), "-o", str(folder), "--read"]) == 0
        result = json.loads((folder / "bench.json").read_text())
        direct = run()
        assert result["points"] == direct["points"]
        assert median(result["points"][0]["end_to_end"]["ratio"]["low"]) == 2.0

    def test_of_tensorrt_10(self, planted: Planted, mapped_block: Path, tmp_path: Path) -> None:
        """Its defaults are others: without the options that the plan gives it, the stand-in is slower, or silent."""
        planted.save(version=[10, 8, 0])
        words = ["-o", str(tmp_path / "ten"), "--repeats", "1", "--point", *POINT.split(), "--script"]
        assert cli.run(["bench", str(mapped_block), *words, "--tool", "trtexec-10"]) == 0
        self.bash(tmp_path / "ten")
        manifest = tmp_path / "ten" / MANIFEST
        # Notes of the plan, such as random inputs, go with the figures.
        manifest.write_text(manifest.read_text().replace('"notes": []', '"notes": ["random inputs"]'))
        assert cli.run(["bench", str(mapped_block), "-o", str(tmp_path / "ten"), "--read"]) == 0
        result = json.loads((tmp_path / "ten/bench.json").read_text())
        assert median(result["points"][0]["end_to_end"]["plugin_ms"]["low"]) == 0.5
        assert result["notes"] == ["random inputs"]

    def test_works_elsewhere(self, folder: Path, mapped_block: Path, tmp_path: Path) -> None:
        """The folder and the model on another machine, in places with spaces, started from a third."""
        there = tmp_path / "other place"
        shutil.copytree(folder, there / "the bench")
        shutil.copytree(mapped_block.parent, there / "models")
        self.bash(there / "the bench", f"models/{mapped_block.name}", cwd=there)
        assert (there / "the bench/bench/1/native.2.times.json").exists()
        assert "is not there; bash bench.sh MODEL names it" in self.bash(there / "the bench", code=1)

    def test_failure_stops_it_with_the_first_error(self, folder: Path, planted: Planted) -> None:
        planted.save(failure="build")
        said = self.bash(folder, code=1).splitlines()
        assert said[0] == "[moetrt] node 'tail': gamma was of 63; 64 is taken"
        assert said[1] == "bench.sh: error: build, plugin ended with code 1; see bench/plugin.log"
        planted.save(failure="run")
        assert "Cuda Runtime (out of memory)" in self.bash(folder, code=1)

    def test_time_limit(self, folder: Path, planted: Planted) -> None:
        planted.save(failure="hang")
        assert "took longer than 2 s" in self.bash(folder, code=1, LIMIT="2")

    def test_other_version_model_and_library(self, folder: Path, planted: Planted, mapped_block_fp16: Path) -> None:
        planted.save(version=[10, 16, 0])
        assert "is of TensorRT 10; this was written for 11 (moetrt bench --tool trtexec-10" in self.bash(folder, code=1)
        planted.save(version=[11, 1, 0])
        assert "is not the file that this was written for" in self.bash(folder, mapped_block_fp16, code=1)
        assert "no-such-tool is not there" in self.bash(folder, code=1, TRTEXEC="no-such-tool")
        (folder / "bench/libmoetrt_plugins.so").unlink()
        assert "bench/libmoetrt_plugins.so is not there" in self.bash(folder, code=1)

    def test_other_library_is_noted(self, folder: Path, mapped_block: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """As on a machine of another architecture, where the library was built anew."""
        (folder / "bench/libmoetrt_plugins.so").write_bytes(b"another")
        self.bash(folder)
        assert cli.run(["bench", str(mapped_block), "-o", str(folder), "--read"]) == 0
        assert "note: the plugin library that ran is another than bench.manifest.json's" in capsys.readouterr().out

    def test_reading_before_running(self, folder: Path, mapped_block: Path, refused: Callable[..., str]) -> None:
        line = refused("bench", mapped_block, "-o", folder, "--read")
        assert "plugin.log' does not exist: the benchmark was not run, or not to its end" in line


class TestPlan:
    """What is asked for, before anything is run; there is neither GPU nor trtexec."""

    @pytest.fixture(autouse=True)
    def nothing_here(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(benchmark, "gpus", tuple)
        monkeypatch.setattr(trtexec, "find_executable", lambda name: None)

    def test_script_where_there_is_no_tool(
        self, mapped_block: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.run(["bench", str(mapped_block), "-o", str(tmp_path / "out")]) == 0
        said = capsys.readouterr().out
        assert "trtexec is not here; no GPU is to be seen here; the commands are those of TensorRT 11" in said
        assert f"bash {tmp_path / 'out/bench.sh'}" in said
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["bench", MANIFEST, SCRIPT]

    @pytest.mark.parametrize("tool", ["trtexec-10", "trtexec-11", "tensorrt-rtx"])
    def test_dry_run_prints_commands_and_writes_nothing(
        self, mapped_block: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tool: str
    ) -> None:
        assert cli.run(["bench", str(mapped_block), "-o", str(tmp_path / "out"), "--dry-run", "--tool", tool]) == 0
        said = capsys.readouterr().out
        # Two builds, five repeats of two ways.
        assert said.count("--onnx=") == 2
        assert said.count("--exportTimes=") == 10
        assert said.count("--dynamicPlugins=bench/libmoetrt_plugins.so") == 6
        assert ("--useCudaGraph" in said) == (tool == "trtexec-10")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["--tool", "trtexec-9"], "tool was 'trtexec-9'; auto, trtexec-10"),
            (["--tool", "python"], "tool python runs on a GPU and none is to be seen"),
            (["--repeats", "0"], "repeats was 0; 1 or more is taken"),
            (["--seconds", "nan"], "seconds was nan"),
            (["--time-limit", "-1"], "time limit was -1 s"),
            (["--bandwidth", "inf"], "--bandwidth was inf"),
            (["--point", "y:4x64"], "'y': the model has no such input"),
            (["--point", "x:4x32"], "min shape of 'x' was 4x32; [tokensx64] is taken"),
            (["--point", "x:4x64", "residual:5x64"], "of dimension tokens was 4 in x and 5 in residual"),
            (
                ["--point", "x:4x64", "--max", "x:2x64"],
                "point gives input 'x' the shape 4x64; the profile takes 1x64 to 2x64",
            ),
            (["--point", "x:4x64", "residual:5x64", "--max", "x:9x64"], "with its other inputs"),
            (["--point", "x:4", "--max", "x:9x64"], "the shape 4; rank 2 is taken"),
            (["--point", "y:4", "--max", "x:9x64"], "point names input 'y'; the model's inputs are x, residual"),
            (["--point", "x:4x64", "--point", "x:4"], "shapes of different ranks: 4x64, 4"),
            (["--point", "x:4x64", "--point", "x:8x64", "--max", "x:6x64"], "the profile takes"),
            (["--point", "x:4x64", "--load-inputs", "f.json"], "inputs file 'f.json' does not exist"),
            (["--script", "--read"], "one of them is taken"),
            (["--plugin", "nope.so"], "plugin library 'nope.so' does not exist"),
        ],
    )
    def test_refusals(
        self, mapped_block: Path, tmp_path: Path, refused: Callable[..., str], words: list[str], said: str
    ) -> None:
        assert said in refused("bench", mapped_block, "-o", tmp_path / "out", *words)
        assert not (tmp_path / "out").exists()

    def test_saved_inputs_that_do_not_fit(
        self, mapped_block: Path, tmp_path: Path, refused: Callable[..., str]
    ) -> None:
        from polygraphy.json import save_json

        path = tmp_path / "inputs.json"
        for feeds, said in (
            ([{"x": torch.zeros(4, 64, dtype=torch.float16), "residual": torch.zeros(4, 64)}], "torch.float16"),
            ([{"x": torch.zeros(4, 64)}], "have no 'residual'"),
            ([{"y": torch.zeros(4, 64)}], "have 'y'; the model's inputs are x, residual"),
            ([], "holds no list of inputs by name"),
            ({"x": 1}, "holds no list of inputs by name"),
            ([1], "holds no list of inputs by name"),
            ([{"x": None}], "input 'x' is of type NoneType; arrays are taken"),
            ([{"x": [1, 2]}], "input 'x' is of type list; arrays are taken"),
        ):
            save_json(feeds, str(path))
            assert said in refused("bench", mapped_block, "-o", tmp_path / "out", "--load-inputs", path)
        path.write_text("[1, 2")
        assert "is not in Polygraphy's format" in refused(
            "bench", mapped_block, "-o", tmp_path / "out", "--load-inputs", path
        )

    def test_each_feed_is_a_point(self, mapped_block: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """What `moetrt compare --save-inputs` keeps is one of these."""
        from polygraphy.json import save_json

        feeds = [{name: torch.zeros(tokens, 64) for name in ("x", "residual")} for tokens in (4, 16)]
        save_json(feeds, str(tmp_path / "inputs.json"))
        words = ["-o", str(tmp_path / "out"), "--load-inputs", str(tmp_path / "inputs.json"), "--dry-run"]
        assert cli.run(["bench", str(mapped_block), *words]) == 0
        said = capsys.readouterr().out
        assert "--minShapes=x:4x64,residual:4x64" in said
        assert "--maxShapes=x:16x64,residual:16x64" in said
        assert "--loadInputs=x:bench/2/input.0.bin,residual:bench/2/input.1.bin" in said

    def test_map_is_not_made_up(self, tmp_path: Path, refused: Callable[..., str]) -> None:
        """Of random numbers most name no row, and rows that are not named are not read: the time would be too good."""
        path = save(one_tail(), tmp_path / "m.onnx")
        line = refused("bench", path, "-o", tmp_path / "out")
        assert (
            f"input 'expanded_idx_to_permuted_idx' is the map of tail '{TAIL}', and random numbers are no map" in line
        )
        assert "--load-inputs" in line

    def test_sizes_that_the_file_does_not_tell_have_no_floor(
        self, mapped_block: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = shutil.copytree(mapped_block.parent, tmp_path / "models")
        model = ir.load(folder / mapped_block.name)
        node = next(node for node in model.graph if node.op_type == TAIL)
        weights = node.inputs[1]
        assert weights is not None
        weights.shape = None
        ir.save(model, folder / "m.onnx")
        assert cli.run(["bench", str(folder / "m.onnx"), "-o", str(tmp_path / "out")]) == 0
        assert "note: the shapes in the file do not tell how many tokens tail" in capsys.readouterr().out
        assert read_manifest(tmp_path / "out")[0].tails[0].floor_bytes == (None,)

    def test_model_without_tails(self, tmp_path: Path, refused: Callable[..., str]) -> None:
        graph = ir.Graph([], [], nodes=[], opset_imports={"": 22}, name="g")
        ir.save(ir.Model(graph, ir_version=10), tmp_path / "m.onnx")
        assert "has no mapped tail (moetrt map makes them)" in refused(
            "bench", tmp_path / "m.onnx", "-o", tmp_path / "out"
        )

    def test_file_without_native_form(self, mapped_block: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
        folder = shutil.copytree(mapped_block.parent, tmp_path / "models")
        model = ir.load(folder / mapped_block.name)
        model.functions.clear()
        ir.save(model, folder / "m.onnx")
        assert "has no function of that name" in refused("bench", folder / "m.onnx", "-o", tmp_path / "out")


TAILS = [TailOfModel(name, TAIL, (None,)) for name in ("a/Tail", "a/Tail_1")]


@pytest.mark.parametrize(
    ("name", "origins", "tails", "shared", "known"),
    [
        ("x", ("a/Tail",), {"a/Tail"}, False, True),
        ("x", (f"node_Mul | a/Tail_1 ({TAIL})",), {"a/Tail_1"}, False, True),
        ("x", (f"node_Mul | a/Tail ({TAIL})", "mm"), {"a/Tail"}, True, True),
        ("x", (f"i | a/Tail ({TAIL})", f"i | a/Tail_1 ({TAIL})"), {"a/Tail", "a/Tail_1"}, True, True),
        ("x", (f"i | a/Tail ({TAIL}) | Block (Block)",), {"a/Tail"}, False, True),
        # Case 49: what cannot be read may be anything.
        ("x", (f"node_Mul | a/Tail ({TAIL})", ""), {"a/Tail"}, True, True),
        # The metadata win over the name.
        ("a/Tail", ("mm",), set(), False, True),
        ("Reformatting CopyNode for Input Tensor 0 to a/Tail", None, {"a/Tail"}, False, True),
        ("Reformatting CopyNode for Input Tensor 0 to a/Tail_1", None, {"a/Tail_1"}, False, True),
        ("a/Tail", None, {"a/Tail"}, False, True),
        ("a/Tail + mm", None, {"a/Tail"}, True, True),
        ("PWN(PWN(mm), a/Tail)", None, {"a/Tail"}, True, True),
        ("PWN(a/Tail, a/Tail_1)", None, {"a/Tail", "a/Tail_1"}, True, True),
        ("{ForeignNode[a/Tail...a/Tail_1]}", None, set(), False, False),
        ("b/a/Tail", None, set(), False, False),
        ("node_Mul_17", None, set(), False, False),
    ],
)
def test_attribution(name: str, origins: tuple[str, ...] | None, tails: set[str], shared: bool, known: bool) -> None:
    part = attribute(Layer(name, origins), TAILS)
    assert (set(part.tails), part.shared, part.known) == (tails, shared, known)
