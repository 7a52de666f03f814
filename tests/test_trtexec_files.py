"""trtexec's files are read as it writes them, oddities included; what is cut off or missing is named in one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetrt.bench.trtexec_files import (
    first_error,
    onnx_origins,
    read_layers,
    read_log,
    read_profile,
    read_times,
    version_in,
)
from moetrt.errors import InputError
from tests.trtexec_stand_in import write_layers, write_profile, write_times


def test_times(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write_times(path, [0.125, 0.25, 1234567.0])
    times = read_times(path)
    # Six digits are what trtexec prints.
    assert times.compute_ms == times.latency_ms == (0.125, 0.25, 1.23457e6)
    assert times.end_ms == 1.23477e6


@pytest.mark.parametrize("milliseconds", [0.25, 2999.0, 60000.0])
def test_step_is_that_of_a_32_bit_float(milliseconds: float, tmp_path: Path) -> None:
    write_times(tmp_path / "t.json", [milliseconds])
    times = read_times(tmp_path / "t.json")
    assert times.end_ms == pytest.approx(200 + milliseconds, rel=1e-5)
    assert times.step_ms == np.spacing(np.float32(times.end_ms))


def test_profile_begins_with_its_count(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(path, [("a", 0.5), ("b", 0.0)], count=7)
    profile = read_profile(path)
    assert profile.iterations == 7
    assert [(layer.name, layer.median_ms, layer.average_ms) for layer in profile.layers] == [
        ("a", 0.5, 0.5),
        ("b", 0.0, 0.0),
    ]
    assert profile.total_ms == 0.5


def test_percentage_of_nothing_is_nan_and_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(path, [("a", 0.0)])
    assert "-nan" in path.read_text()
    assert read_profile(path).total_ms == 0


@pytest.mark.parametrize(
    "name",
    [
        'PWN("quoted")',
        "back\\slash",
        "\\new",
        '{ForeignNode[a...b]}, " : nan }',
        'größe" \u2028 \x1e \x85',
        'a", "timeMs" : 1',
    ],
)
def test_names_are_written_without_escapes(tmp_path: Path, name: str) -> None:
    path = tmp_path / "p.json"
    write_profile(path, [(name, 0.25), ("b", 0.5)])
    assert [(layer.name, layer.median_ms) for layer in read_profile(path).layers] == [(name, 0.25), ("b", 0.5)]


def test_layers_with_and_without_detail(tmp_path: Path) -> None:
    path = tmp_path / "l.json"
    layers = [
        {"Name": "fused", "Metadata": "[ONNX Layer: a]\x1e[ONNX Layer: in | t (Op)]"},
        {"Name": "copy", "Metadata": ""},
    ]
    write_layers(path, layers, detailed=True)
    read = read_layers(path)
    assert read["fused"].origins == ("a", "in | t (Op)")
    assert read["copy"].origins is None
    # The separator may come as it is, which strict JSON forbids.
    path.write_text(path.read_text().replace("\\u001e", "\x1e"))
    assert read_layers(path)["fused"].origins == ("a", "in | t (Op)")
    write_layers(path, layers, detailed=False)
    assert read_layers(path)["fused"].origins is None


def test_name_of_two_different_layers_tells_nothing(tmp_path: Path) -> None:
    path = tmp_path / "l.json"
    layers = [{"Name": "x", "Metadata": f"[ONNX Layer: {node}]"} for node in "ab"]
    write_layers(path, layers, detailed=True)
    assert read_layers(path)["x"].origins is None


@pytest.mark.parametrize(
    ("metadata", "origins"),
    [
        ("[ONNX Layer: /model/Mul[0]]", ("/model/Mul[0]",)),
        ("[ONNX Layer: a]\x1e[ONNX Layer: a]", ("a",)),
        ("something of another parser", None),
        # Case 49: a unit separator between the nodes of one fusion, a record separator between fusions.
        ("[ONNX Layer: a]\x1f[ONNX Layer: b | t (Op)]\x1e[ONNX Layer: c]", ("a", "b | t (Op)", "c")),
        ("[ONNX Layer: a]\x1f", ("a",)),
        # What is no whole node is something all the same: cut off, of another parser, a name with a separator in it.
        ("[ONNX Layer: a]\x1f[ONNX Layer: b | t (O", ("a", "")),
        ("a]\x1f[ONNX Layer: b]", ("", "b")),
        ("[ONNX Layer: a]\x1esomething of another parser", ("a", "")),
        ("[ONNX Layer: a\x1fb]\x1e[ONNX Layer: c]", ("", "c")),
        ("[ONNX Layer: a\x1fb]", None),
    ],
)
def test_metadata(metadata: str, origins: tuple[str, ...] | None) -> None:
    assert onnx_origins(metadata) == origins


def test_log(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text(
        "&&&& RUNNING TensorRT.trtexec [TensorRT v101601] [b9] # trtexec\n"
        "[11/30/2026-05:55:49] [I] Selected Device: NVIDIA H200\n"
        "[11/30/2026-05:55:49] [I] Memory Bus Width: 6144 bits (ECC enabled)\n"
        "[11/30/2026-05:55:49] [I] Application Memory Clock Rate: 3.201 GHz\n"
        "[11/30/2026-05:55:49] [W] * GPU compute time is unstable\n"
        "[11/30/2026-05:55:50] [W] * GPU compute time is unstable\n"
    )
    log = read_log(path)
    assert (log.version, log.device) == ("10.16.1", "NVIDIA H200")
    assert log.warnings == ("* GPU compute time is unstable",)
    # 6144 bits, twice a clock: 4.9 TB/s.
    assert log.bandwidth == pytest.approx(6144 / 8 * 2 * 3.201e9)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("[TensorRT v100800] [b43]", "10.8.0"),
        ("[I] TensorRT version: 11.1.0", "11.1.0"),
        ("[I] TensorRT-RTX version: 1.7.1", "1.7.1"),
        ("nothing of it", None),
    ],
)
def test_version(text: str, version: str | None) -> None:
    assert version_in(text) == version


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[x] [E] theirs\n[moetrt] node 'a': ours\n", "[moetrt] node 'a': ours"),
        ("[x] [I] fine\n[x] [E] Error Code 4: first\n[x] [E] second\n&&&& FAILED\n", "Error Code 4: first"),
        ("Segmentation fault\n", "Segmentation fault"),
        ("&&&& RUNNING x\n[x] [I] Cannot find any\n&&&& FAILED x\n", "[x] [I] Cannot find any"),
        ("", "it printed nothing"),
    ],
)
def test_first_error(text: str, line: str) -> None:
    assert first_error(text) == line


Reader = Callable[[Path], Any]


@pytest.mark.parametrize("reader", [read_times, read_profile, read_layers])
def test_missing_cut_off_and_other_files(tmp_path: Path, reader: Reader) -> None:
    path = tmp_path / "f.json"
    with pytest.raises(InputError, match=r"f\.json' does not exist"):
        reader(path)
    write_profile(path, [("a", 0.5), ("b", 0.25)])
    whole = path.read_text()
    write_layers(path, [{"Name": "a", "Metadata": ""}], detailed=True)
    if reader is not read_layers:
        with pytest.raises(InputError, match="--export"):
            reader(path)
        path.write_text(whole)
    if reader is not read_profile:
        path.write_text(whole)
        with pytest.raises(InputError, match="--export"):
            reader(path)
    for length in range(len(path.read_text().rstrip())):
        path.write_text(whole[:length])
        with pytest.raises(InputError, match=r"f\.json'"):
            reader(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_time_that_is_none_is_refused(tmp_path: Path, value: float) -> None:
    write_times(tmp_path / "t.json", [0.5, value])
    with pytest.raises(InputError, match=r"t\.json': computeMs of query 1 was"):
        read_times(tmp_path / "t.json")


def test_layer_time_that_is_none_is_refused(tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", [("a", float("nan"))])
    with pytest.raises(InputError, match=r"medianMs of layer 'a' was nan"):
        read_profile(tmp_path / "p.json")


@pytest.mark.parametrize(("reader", "text"), [(read_times, "[\n]\n"), (read_profile, '[\n  { "count" : 0 }\n]\n')])
def test_empty_is_refused(tmp_path: Path, reader: Reader, text: str) -> None:
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(InputError, match=r"has no (query|layer)"):
        reader(tmp_path / "f.json")
