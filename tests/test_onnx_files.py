"""Models are read and written whole or not at all, with one line for each thing that is wrong."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from moetrt import onnx_files
from moetrt.errors import InputError
from moetrt.external_data import MARK_BYTES
from moetrt.onnx_files import load_model, save_model

WEIGHT = np.arange(64 * 64, dtype=np.float32).reshape(64, 64) / 4096


def linear_model(weight: np.ndarray = WEIGHT) -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "weight"], ["m"]), helper.make_node("Add", ["m", "bias"], ["y"])],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", weight.shape[0]])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", weight.shape[1]])],
        [numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(np.float32(3), "bias")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)


@pytest.fixture
def external(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    path = folder / "model.onnx"
    onnx.save(linear_model(), path, save_as_external_data=True, location="weights.bin", size_threshold=1024)
    return path


def run(path: Path) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": np.ones((2, 64), np.float32)})[0]


EXPECTED = np.ones((2, 64), np.float32) @ WEIGHT + 3


def test_external_weights_of_another_folder_are_copied_under_a_relative_name(external: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "mapped.onnx"
    save_model(load_model(external), target)
    assert sorted(os.listdir(target.parent)) == ["mapped.onnx", "mapped.onnx.data"]
    moved = tmp_path / "elsewhere"  # case 31: the folder is moved, and the source is gone
    os.rename(target.parent, moved)
    external.unlink()
    (external.parent / "weights.bin").unlink()
    onnx.checker.check_model(moved / "mapped.onnx")
    np.testing.assert_allclose(run(moved / "mapped.onnx"), EXPECTED, rtol=1e-6)


def test_external_weights_of_the_same_folder_are_named_not_copied(external: Path) -> None:
    target = external.with_name("mapped.onnx")
    save_model(load_model(external), target)
    assert sorted(os.listdir(external.parent)) == ["mapped.onnx", "model.onnx", "weights.bin"]
    np.testing.assert_allclose(run(target), EXPECTED, rtol=1e-6)


def test_case31_a_folder_in_which_a_model_was_saved_beside_its_data_can_be_moved(
    external: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(load_model(external), external.with_name("mapped.onnx"))
    moved = tmp_path / "elsewhere"
    os.rename(external.parent, moved)
    monkeypatch.chdir(moved.parent)
    np.testing.assert_allclose(run(moved / "mapped.onnx"), EXPECTED, rtol=1e-6)
    np.testing.assert_allclose(run(Path("elsewhere/mapped.onnx")), EXPECTED, rtol=1e-6)
    # The data that both files name is written anew, shorter: neither reads beyond it.
    os.truncate(moved / "weights.bin", 4096)
    for name in ("model.onnx", "mapped.onnx"):
        with pytest.raises(InputError, match=rf"{name}.* has 4096 bytes, but 'weight' ends at byte 16384"):
            load_model(moved / name)


def test_too_little_space_is_said_before_anything_is_written(
    external: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=WEIGHT.nbytes - 1))
    target = tmp_path / "out" / "model.onnx"
    with pytest.raises(
        InputError, match=r"model.onnx.data' needs 16384 bytes, but its disk has 16383 bytes free"
    ) as one:
        save_model(load_model(external), target)
    assert "in the folder of the data files it was read with needs none" in one_line(one)
    with pytest.raises(InputError, match=r"needs 16384 bytes, .* 16383 bytes free$"):
        save_model(ir.from_proto(linear_model()), target)
    assert not target.parent.exists()
    # Beside its data nothing is copied, and where blocks can be shared the copy takes none.
    save_model(load_model(external), external.with_name("mapped.onnx"))
    monkeypatch.setattr(onnx_files, "shares_blocks", lambda source, target: True)
    save_model(load_model(external), target)
    np.testing.assert_allclose(run(target), EXPECTED, rtol=1e-6)


def test_progress_of_a_copy_counts_up_to_all_of_it(tmp_path: Path) -> None:
    weight = np.ones((2**20, 16), np.float32)  # 67 MB: at least four pieces of at most 16 MiB
    first = tmp_path / "a" / "model.onnx"
    save_model(ir.from_proto(linear_model(weight)), first)
    said: list[str] = []
    save_model(load_model(first), tmp_path / "b" / "model.onnx", progress=said.append)
    assert said[0].startswith("writing weights: 0.0 of 0.1 GB")
    assert said[-1] == "writing weights: 0.1 of 0.1 GB"
    assert len(said) >= 4


def test_saving_onto_the_file_that_was_read(external: Path, tmp_path: Path) -> None:
    once = tmp_path / "once.onnx"
    save_model(load_model(external), once)
    model = load_model(once)
    save_model(model, once)
    model.graph.initializers["bias"].const_value = ir.Tensor(np.full(64, 5, np.float32).repeat(40).reshape(-1)[:64])
    save_model(model, once)
    np.testing.assert_allclose(run(once), EXPECTED + 2, rtol=1e-6)
    # A new large weight makes the data file be written anew, from itself.
    model.graph.initializers["bias"].const_value = ir.Tensor(np.full((1, 64), 6, np.float32))
    model.graph.initializers["extra"] = ir.Value(
        name="extra", const_value=ir.Tensor(np.zeros((512,), np.float32), name="extra")
    )
    save_model(model, once)
    assert load_model(once).graph.initializers["extra"].const_value.numpy().shape == (512,)  # type: ignore[union-attr]
    np.testing.assert_allclose(run(once), EXPECTED + 3, rtol=1e-6)


def test_case31_a_stale_data_file_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "model.onnx"
    (tmp_path / "model.onnx.data").write_bytes(b"\x7f" * 100_000)
    save_model(ir.from_proto(linear_model()), target)
    assert (tmp_path / "model.onnx.data").stat().st_size == WEIGHT.nbytes + MARK_BYTES
    np.testing.assert_allclose(run(target), EXPECTED, rtol=1e-6)


def test_the_model_in_memory_can_be_used_after_saving(tmp_path: Path) -> None:
    model = ir.from_proto(linear_model())
    save_model(model, tmp_path / "a" / "model.onnx")
    np.testing.assert_array_equal(model.graph.initializers["weight"].const_value.numpy(), WEIGHT)  # type: ignore[union-attr]
    save_model(model, tmp_path / "b" / "model.onnx")
    np.testing.assert_allclose(run(tmp_path / "b" / "model.onnx"), EXPECTED, rtol=1e-6)


def test_case33_bfloat16_bytes_do_not_change(tmp_path: Path) -> None:
    bits = np.arange(65536, dtype=np.uint16)  # every bfloat16 there is, NaN payloads too
    graph = helper.make_graph(
        [helper.make_node("Identity", ["w"], ["y"])],
        "g",
        [],
        [helper.make_tensor_value_info("y", TensorProto.BFLOAT16, [65536])],
        [numpy_helper.from_array(bits.view(ml_dtypes.bfloat16), "w")],
    )
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10))
    save_model(model, tmp_path / "a.onnx")
    (tmp_path / "b").mkdir()
    save_model(load_model(tmp_path / "a.onnx"), tmp_path / "b" / "b.onnx")
    back = load_model(tmp_path / "b" / "b.onnx").graph.initializers["w"].const_value
    assert back is not None
    assert back.dtype == ir.DataType.BFLOAT16
    np.testing.assert_array_equal(back.numpy().view(np.uint16), bits)


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    model = ir.from_proto(linear_model())
    tensor = model.graph.initializers["weight"].const_value
    model.graph.initializers["tied"] = ir.Value(name="tied", const_value=tensor)
    save_model(model, tmp_path / "a.onnx")
    assert (tmp_path / "a.onnx.data").stat().st_size == WEIGHT.nbytes + MARK_BYTES
    (tmp_path / "b").mkdir()
    save_model(load_model(tmp_path / "a.onnx"), tmp_path / "b" / "b.onnx")
    assert (tmp_path / "b" / "b.onnx.data").stat().st_size == WEIGHT.nbytes + MARK_BYTES


def test_source_with_a_hard_linked_data_file_is_copied(external: Path, tmp_path: Path) -> None:
    os.link(external.parent / "weights.bin", tmp_path / "second-name.bin")
    save_model(load_model(external), tmp_path / "out.onnx")
    np.testing.assert_allclose(run(tmp_path / "out.onnx"), EXPECTED, rtol=1e-6)


def test_external_data_of_a_constant_node_is_copied_too(tmp_path: Path) -> None:
    proto = linear_model()
    weight = proto.graph.initializer[0]
    node = helper.make_node("Constant", [], ["weight"], value=weight)
    del proto.graph.initializer[0]
    proto.graph.node.insert(0, node)
    (tmp_path / "in").mkdir()
    options = {"save_as_external_data": True, "location": "w.bin", "size_threshold": 1024, "convert_attribute": True}
    onnx.save(proto, tmp_path / "in" / "model.onnx", **options)
    save_model(load_model(tmp_path / "in" / "model.onnx"), tmp_path / "out" / "model.onnx")
    (tmp_path / "in" / "w.bin").unlink()
    assert (tmp_path / "out" / "model.onnx.data").stat().st_size == WEIGHT.nbytes + MARK_BYTES
    back = load_model(tmp_path / "out" / "model.onnx")
    np.testing.assert_array_equal(back.graph[0].attributes["value"].as_tensor().numpy(), WEIGHT)


def test_string_initializers_stay_in_the_file(tmp_path: Path) -> None:
    model = ir.from_proto(linear_model())
    words = ir.StringTensor([b"word" * 500], shape=ir.Shape([1]), name="words")
    model.graph.initializers["words"] = ir.Value(name="words", const_value=words)
    back = load_model(save_model(model, tmp_path / "model.onnx"))
    assert isinstance(back.graph.initializers["words"].const_value, ir.StringTensor)


def one_line(error: pytest.ExceptionInfo[InputError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty file"),
        (b"hello, this is text\n" * 10, "is not an ONNX model"),
        (linear_model().SerializeToString()[:-7], "was cut short"),
        (linear_model().SerializeToString()[:300], "was cut short"),
        (b"\x08\x0a", "has no IR version, graph or opset"),
    ],
)
def test_files_that_are_not_onnx(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        load_model(path)
    assert words in one_line(error)
    assert "bad.onnx" in str(error.value)


@pytest.mark.parametrize("first", [b"\0", b"\x0a", b"PK\x03\x04", b"version https://git-lfs", b"{}", b"\x80\x04"])
def test_case47_the_first_byte_shows_what_is_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    """Zeros, a field written in another way, a zip archive, a pointer of Git LFS, JSON; pickles begin like field 16."""
    path = tmp_path / "bad.onnx"
    path.write_bytes(first)
    os.truncate(path, 2**31 - 1)  # a hole: it takes no place on the disk, and seconds to read
    if first[0] < 0x80:
        monkeypatch.setattr(onnx, "load", lambda *args, **kwargs: pytest.fail("the file was read"))
    else:
        os.truncate(path, 100)
    with pytest.raises(InputError) as error:
        load_model(path)
    assert "is not an ONNX model, or was cut short" in one_line(error)


def test_case47_every_field_of_a_model_may_come_first(tmp_path: Path) -> None:
    """Writers put them in the order of their numbers; others are allowed."""
    proto = linear_model()
    proto.producer_name, proto.model_version, proto.doc_string = "p", 1, "d"
    for field, _ in proto.ListFields():
        rest = onnx.ModelProto()
        rest.CopyFrom(proto)
        rest.ClearField(field.name)
        alone = onnx.ModelProto()
        alone.CopyFrom(proto)
        for other, _ in proto.ListFields():
            if other.name != field.name:
                alone.ClearField(other.name)
        path = tmp_path / f"{field.name}.onnx"
        path.write_bytes(alone.SerializeToString() + rest.SerializeToString())
        np.testing.assert_allclose(ir.to_proto(load_model(path)).graph.initializer[1].float_data or [3], 3)


def test_case47_a_file_beyond_protobufs_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.onnx"
    path.write_bytes(linear_model().SerializeToString())
    os.truncate(path, 3 * 10**9)
    monkeypatch.setattr(onnx, "load", lambda *args, **kwargs: pytest.fail("the file was read"))
    with pytest.raises(InputError) as error:
        load_model(path)
    assert one_line(error) == (
        f"ONNX model '{path}' has 3000000000 bytes; at most 2147483647 are taken, with larger weights as external data "
        "in a file beside it"
    )


def _field(number: int, content: bytes) -> bytes:
    size, length = len(content), b""
    while True:
        size, low = size >> 7, size & 0x7F
        length += bytes([low | (0x80 if size else 0)])
        if not size:
            return bytes([number << 3 | 2]) + length + content


def nested(depth: int) -> bytes:
    """A model of If in If, written by hand: protobuf's Python classes refuse to be put together so deep."""
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])
    inner = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "inner", [], [y]).SerializeToString()
    otherwise = helper.make_attribute("else_branch", onnx.GraphProto.FromString(inner)).SerializeToString()
    graph = inner
    for _ in range(depth):
        then = onnx.AttributeProto(name="then_branch", type=onnx.AttributeProto.GRAPH).SerializeToString()
        node = helper.make_node("If", ["c"], ["y"]).SerializeToString()
        node += _field(5, then + _field(6, graph)) + _field(5, otherwise)
        graph = _field(1, node) + _field(2, b"g") + _field(12, y.SerializeToString())
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])]
    inputs.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    graph += b"".join(_field(11, value.SerializeToString()) for value in inputs)
    return onnx.ModelProto(ir_version=8, opset_import=[helper.make_opsetid("", 18)]).SerializeToString() + _field(
        7, graph
    )


def test_case48_a_model_that_is_nested_too_deep_is_called_that(tmp_path: Path) -> None:
    path = tmp_path / "deep.onnx"
    path.write_bytes(nested(45))
    with pytest.raises(InputError) as error:
        load_model(path)
    assert one_line(error) == (
        f"ONNX model '{path}' is nested too deep: protobuf reads 100 messages inside one another, and each If, Loop or "
        "Scan inside another takes 3; export it with fewer"
    )
    path.write_bytes(nested(31))
    assert len(list(load_model(path).graphs())) == 63


@pytest.mark.parametrize("place", ["weight", "output"])
def test_dtype_that_onnx_has_not(tmp_path: Path, place: str) -> None:
    proto = linear_model()
    if place == "weight":
        proto.graph.initializer[0].data_type = 99
        name = proto.graph.initializer[0].name
    else:
        proto.graph.output[0].type.tensor_type.elem_type = 99
        name = proto.graph.output[0].name
    (tmp_path / "bad.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(InputError, match=f"the dtype of '{name}' was 99") as error:
        load_model(tmp_path / "bad.onnx")
    one_line(error)


def test_model_that_is_not_well_formed(tmp_path: Path) -> None:
    proto = linear_model()
    broken = proto.graph.input.add(name="broken")
    broken.type.sequence_type.elem_type.tensor_type.elem_type = 99
    (tmp_path / "bad.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(InputError, match="is not well formed") as error:
        load_model(tmp_path / "bad.onnx")
    one_line(error)


def test_data_file_cut_short_between_reading_and_saving(external: Path, tmp_path: Path) -> None:
    model = load_model(external)
    os.truncate(external.parent / "weights.bin", 100)
    with pytest.raises(InputError, match="ended 16284 bytes early"):
        save_model(model, tmp_path / "out" / "model.onnx")
    assert not (tmp_path / "out").exists()


def save_raw(proto: onnx.ModelProto, path: Path) -> Path:
    path.write_bytes(proto.SerializeToString())
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input": ["zzz", "weight"]}, "'zzz'"),
        ({"op_type": "NoSuchOperator"}, "NoSuchOperator"),
        ({"domain": "undeclared"}, "undeclared"),
        ({"op_type": "MoEFinalizeAdd", "name": "tail"}, "node 'tail': domain was ''; 'moetrt' is taken"),
    ],
    ids=["undefined input", "unknown op", "undeclared domain", "our op in the standard domain"],
)
def test_an_invalid_model_is_named_when_it_is_read(
    tmp_path: Path, change: dict[str, Any], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    proto = linear_model()
    for field, value in change.items():
        if isinstance(value, list):
            getattr(proto.graph.node[0], field)[:] = value
        else:
            setattr(proto.graph.node[0], field, value)
    with pytest.raises(InputError) as error:
        load_model(save_raw(proto, tmp_path / "bad.onnx"))
    assert words in one_line(error)
    assert "ONNX model" in str(error.value)
    assert "bad.onnx'" in str(error.value)
    # onnx_ir's own lines are not printed.
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("opset", [3, 16, 99, onnx.defs.onnx_opset_version() + 1])
def test_opsets_that_are_not_taken(tmp_path: Path, opset: int) -> None:
    proto = linear_model()
    proto.opset_import[0].version = opset
    newest = onnx.defs.onnx_opset_version()
    with pytest.raises(InputError, match=rf"'.*bad.onnx': its opset was {opset}; 17 to {newest} are taken") as error:
        load_model(save_raw(proto, tmp_path / "bad.onnx"))
    one_line(error)


def test_a_graph_without_a_name_is_taken(tmp_path: Path) -> None:
    proto = linear_model()
    proto.graph.name = ""
    np.testing.assert_allclose(
        run(save_model(load_model(save_raw(proto, tmp_path / "a.onnx")), tmp_path / "b.onnx")), EXPECTED, rtol=1e-6
    )


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("offset", "abc", "offset of 'weight' in its data file was 'abc'; a number of bytes is taken"),
        ("offset", "-4096", "offset of 'weight' in its data file was '-4096'"),
        ("length", "1_0", "length of 'weight' in its data file was '1_0'"),
        ("length", "12", "length of 'weight' in 'weights.bin' was 12 bytes; its shape and dtype make 16384"),
        ("length", "16388", "length of 'weight' in 'weights.bin' was 16388 bytes; its shape and dtype make 16384"),
        ("offset", "4096", "'weight' ends at byte 20480"),
    ],
)
def test_places_in_a_data_file_that_cannot_be(external: Path, field: str, value: str, words: str) -> None:
    proto = onnx.load(external, load_external_data=False)
    entries = {entry.key: entry for entry in proto.graph.initializer[0].external_data}
    if field in entries:
        entries[field].value = value
    else:
        proto.graph.initializer[0].external_data.add(key=field, value=value)
    with pytest.raises(InputError) as error:
        load_model(save_raw(proto, external))
    assert words in one_line(error)
    assert "model.onnx'" in str(error.value)


def test_a_full_disk_is_one_line_and_leaves_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = save_model(ir.from_proto(linear_model()), tmp_path / "model.onnx")

    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(InputError, match=r"'.*model.onnx' cannot be written: No space left on device"):
            save_model(ir.from_proto(linear_model(WEIGHT * 2)), target)
    assert sorted(os.listdir(tmp_path)) == ["model.onnx", "model.onnx.data"]
    np.testing.assert_allclose(run(target), EXPECTED, rtol=1e-6)


def test_a_link_for_the_output(tmp_path: Path) -> None:
    model = ir.from_proto(linear_model())
    real, link = tmp_path / "real.onnx", tmp_path / "link.onnx"
    link.symlink_to("real.onnx")
    save_model(model, link)
    assert link.is_symlink()
    for path in (real, link):
        np.testing.assert_allclose(run(path), EXPECTED, rtol=1e-6)
    # In another folder the data would lie beside one of the two alone.
    (tmp_path / "other").mkdir()
    far = tmp_path / "other" / "far.onnx"
    far.symlink_to(real)
    before = real.read_bytes()
    with pytest.raises(InputError, match=r"far.onnx' is a link into another folder .*real.onnx' is taken"):
        save_model(model, far)
    assert os.listdir(far.parent) == ["far.onnx"]
    assert real.read_bytes() == before
    (tmp_path / "data.onnx.data").symlink_to("data.onnx")
    with pytest.raises(InputError, match=r"data file '.*data.onnx.data' is the output file itself"):
        save_model(model, tmp_path / "data.onnx")


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'.*nothing.onnx' does not exist"):
        load_model(tmp_path / "nothing.onnx")
    with pytest.raises(InputError, match="is not a file"):
        load_model(tmp_path)


def test_data_file_missing_short_or_outside(external: Path) -> None:
    data = external.parent / "weights.bin"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"'weights.bin' has 16383 bytes, but 'weight' ends at byte 16384"):
        load_model(external)
    data.unlink()
    with pytest.raises(InputError, match=r"needs its data file 'weights.bin' beside it"):
        load_model(external)
    for location in ("../weights.bin", "/etc/passwd"):
        proto = onnx.load(external, load_external_data=False)
        proto.graph.initializer[0].external_data[0].value = location
        external.write_bytes(proto.SerializeToString())
        with pytest.raises(InputError, match="a path inside the model's folder is taken"):
            load_model(external)


def test_an_invalid_model_leaves_the_old_files(tmp_path: Path) -> None:
    target = tmp_path / "model.onnx"
    save_model(ir.from_proto(linear_model()), target)
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    bad = linear_model(WEIGHT * 2)
    bad.graph.node[1].op_type = "NoSuchOperator"
    model = ir.from_proto(bad)
    with pytest.raises(InputError, match=r"is not valid.*NoSuchOperator") as error:
        save_model(model, target)
    one_line(error)
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before
    np.testing.assert_array_equal(model.graph.initializers["weight"].const_value.numpy(), WEIGHT * 2)  # type: ignore[union-attr]


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(InputError, match="cannot be written"):
        save_model(ir.from_proto(linear_model()), tmp_path / "file" / "model.onnx")
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(InputError, match="is a folder"):
        save_model(ir.from_proto(linear_model()), tmp_path / "folder.onnx")


@pytest.mark.parametrize("output", ["mapped.onnx", "other/mapped.onnx"], ids=["beside its data", "in another folder"])
def test_case31_weights_over_2_gb_never_pass_through_memory(tmp_path: Path, output: str) -> None:
    """A sparse data file of 3 GiB is read and saved by a process that may not use 2 GiB of memory."""
    rows = 3 * 2**30 // 4 // 4096
    tensor = TensorProto(name="weight", data_type=TensorProto.FLOAT, dims=[4096, rows])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "big.bin"), ("offset", "0"), ("length", str(3 * 2**30))):
        tensor.external_data.add(key=key, value=value)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "weight"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4096])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, rows])],
    )
    graph.initializer.append(tensor)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with open(tmp_path / "big.bin", "wb") as file:
        file.truncate(3 * 2**30)
    script = (
        "import sys; from moetrt.onnx_files import load_model, save_model\n"
        "import resource; resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))\n"
        "save_model(load_model(sys.argv[1]), sys.argv[2])\n"
        # Not getrusage: there a child starts with the peak of the process that made it, which is pytest with torch.
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))\n"
    )
    target = tmp_path / output
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "model.onnx"), str(target)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 2**30
    assert target.stat().st_size < 4096
    if target.parent != tmp_path:
        data = target.with_name("mapped.onnx.data").stat()
        assert data.st_size == 3 * 2**30 + MARK_BYTES
        assert data.st_blocks * 512 < 2**20
