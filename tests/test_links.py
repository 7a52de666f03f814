"""Case 39: what a model's folder names or links to outside of itself is not read, and so not copied.

Whoever hands on a folder chose its links; a reader that follows them would copy the user's own files into what it
writes. ONNX Runtime refuses the same ones, onnx all links and hard links too.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from moetrt import cli
from moetrt.checkpoint_files import check_in_folder
from moetrt.errors import InputError
from moetrt.files import way_out
from moetrt.mapping import map_file
from moetrt.onnx_files import load_model, save_model
from moetrt.source import load_source
from tests.conftest import BLOCK
from tests.test_onnx_files import WEIGHT, linear_model

OUTSIDE = r"; a path inside the model's folder is taken$"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model whose weights lie in a folder of another person's, and a folder for it without them."""
    onnx.save(linear_model(), tmp_path / "own.onnx", save_as_external_data=True, location="w.data", size_threshold=1024)
    (tmp_path / "private").mkdir()
    os.rename(tmp_path / "w.data", tmp_path / "private" / "w.data")
    (tmp_path / "got").mkdir()
    os.rename(tmp_path / "own.onnx", tmp_path / "got" / "m.onnx")
    return tmp_path / "got" / "m.onnx"


def relocate(model: Path, location: str) -> None:
    proto = onnx.load(model, load_external_data=False)
    proto.graph.initializer[0].external_data[0].value = location
    model.write_bytes(proto.SerializeToString())


def link(folder: Path, name: str, target: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).symlink_to(target)


def file_link(folder: Path) -> str:
    link(folder, "w.data", "../private/w.data")
    return "w.data"


def folder_link(folder: Path) -> str:
    link(folder, "sub", "../private")
    return "sub/w.data"


def chain(folder: Path) -> str:
    link(folder, "w.data", "sub/w.data")
    link(folder, "sub/w.data", str(folder.parent / "private" / "w.data"))
    return "w.data"


def through_a_link_and_back(folder: Path) -> str:
    """As text it is w.data of the folder; the system goes by the link."""
    (folder.parent / "private" / "deep").mkdir()
    link(folder, "sub", "../private/deep")
    (folder / "w.data").write_bytes(WEIGHT.tobytes())
    return "sub/../w.data"


def nowhere(folder: Path) -> str:
    link(folder, "w.data", "/nowhere/w.data")
    return "w.data"


def blobs_of_a_folder_that_is_no_cache(folder: Path) -> str:
    os.rename(folder.parent / "private", folder.parent / "blobs")
    link(folder, "w.data", "../blobs/w.data")
    return "w.data"


def model_and_data_in_one_folder(folder: Path) -> str:
    """As a cache has it, but that the user named none."""
    os.rename(folder / "m.onnx", folder.parent / "private" / "m.onnx")
    link(folder, "m.onnx", "../private/m.onnx")
    link(folder, "w.data", "../private/w.data")
    return "w.data"


LINKS = [
    file_link,
    folder_link,
    chain,
    through_a_link_and_back,
    nowhere,
    blobs_of_a_folder_that_is_no_cache,
    model_and_data_in_one_folder,
]


@pytest.mark.parametrize("make", LINKS)
def test_case_39_a_link_out_of_the_folder_is_refused(model: Path, make: Callable[[Path], str]) -> None:
    relocate(model, make(model.parent))
    with pytest.raises(InputError, match=rf"data of 'weight' is in '.*', a link to '.*/w\.data'{OUTSIDE}"):
        load_model(model)


@pytest.mark.parametrize("name", ["{}/w.data", "../private/w.data", "..\\w.data", "C:\\w.data", "\\w.data", "w\0", ""])
def test_case_39_a_location_out_of_the_folder_is_refused(model: Path, name: str) -> None:
    """Also as Windows reads it, where the copy may go, and also where a file of that name lies in the folder."""
    for place in ("..\\w.data", "C:\\w.data", "\\w.data"):
        (model.parent / place).write_bytes(WEIGHT.tobytes())
    relocate(model, name.format(model.parent))
    with pytest.raises(InputError, match=rf"data of 'weight' is in '.*', no path that stays in it{OUTSIDE}"):
        load_model(model)


@pytest.mark.parametrize(
    ("target", "reason"), [("v.data", "cannot be read: Too many levels"), ("nothing", "does not exist")]
)
def test_links_that_lead_nowhere(model: Path, target: str, reason: str) -> None:
    link(model.parent, "w.data", target)
    link(model.parent, "v.data", "w.data")
    with pytest.raises(InputError, match=rf"needs its data file 'w\.data' beside it: the file '.*/w\.data' {reason}"):
        load_model(model)


def test_a_second_location_is_looked_at_too(model: Path) -> None:
    """Readers differ in which of two they take."""
    relocate(model, "../private/w.data")
    proto = onnx.load(model, load_external_data=False)
    proto.graph.initializer[0].external_data.add(key="location", value="w.data")
    model.write_bytes(proto.SerializeToString())
    (model.parent / "w.data").write_bytes(WEIGHT.tobytes())
    with pytest.raises(InputError, match=f"no path that stays in it{OUTSIDE}"):
        load_model(model)


def copied(model: Path) -> None:
    """Checks that the weights come to the place where they are wanted."""
    target = model.parents[1] / "out" / "m.onnx"
    save_model(load_model(model), target)
    assert (target.parent / "m.onnx.data").read_bytes()[: WEIGHT.nbytes] == WEIGHT.tobytes()


def test_links_within_the_folder_and_hard_links_are_taken(model: Path) -> None:
    """Nothing tells a hard link from a file."""
    (model.parent / "sub").mkdir()
    os.link(model.parents[1] / "private" / "w.data", model.parent / "sub" / "w.data")
    link(model.parent, "w.data", "sub/w.data")
    copied(model)


def test_the_folder_that_is_named_may_be_a_link_and_the_model_too(model: Path) -> None:
    shutil.copy(model.parents[1] / "private" / "w.data", model.parent)
    link(model.parents[1], "alias", "got")
    copied(model.parents[1] / "alias" / "m.onnx")
    # As onnx and ONNX Runtime do: the data lies beside the path that was given.
    os.rename(model, model.parents[1] / "private" / "m.onnx")
    link(model.parent, "m.onnx", "../private/m.onnx")
    copied(model)


def cache(root: Path, files: dict[str, Path]) -> Path:
    """A Hugging Face cache with one model, as huggingface_hub lays it out; returns the snapshot."""
    home = root / "hub" / "models--a--b"
    snapshot = home / "snapshots" / ("0" * 40)
    (home / "blobs").mkdir(parents=True)
    for number, (name, file) in enumerate(files.items()):
        shutil.copy(file, home / "blobs" / f"{number:040x}")
        link(snapshot, name, f"{'../' * (2 + name.count('/'))}blobs/{number:040x}")
    return snapshot


@pytest.mark.parametrize("below", ["", "onnx/"])
@pytest.mark.parametrize("alias", [False, True])
def test_a_cache_links_to_its_own_blobs(model: Path, below: str, alias: bool) -> None:
    files = {f"{below}m.onnx": model, f"{below}w.data": model.parents[1] / "private" / "w.data"}
    snapshot = cache(model.parents[1], files)
    if alias:
        link(model.parents[1], "alias", str(snapshot))
        snapshot = model.parents[1] / "alias"
    save_model(load_model(snapshot / below / "m.onnx"), model.parent / "out.onnx")
    assert (model.parent / "out.onnx.data").read_bytes()[: WEIGHT.nbytes] == WEIGHT.tobytes()


def test_case_39_a_cache_links_to_no_other_ones_blobs_and_its_blobs_nowhere(model: Path) -> None:
    snapshot = cache(model.parents[1], {"m.onnx": model, "w.data": model.parents[1] / "private" / "w.data"})
    blob = (snapshot / "w.data").resolve()
    other = cache(model.parents[1] / "private", {"w.data": blob})
    (snapshot / "w.data").unlink()
    (snapshot / "w.data").symlink_to((other / "w.data").resolve())
    with pytest.raises(InputError, match=OUTSIDE):
        load_model(snapshot / "m.onnx")
    (snapshot / "w.data").unlink()
    (snapshot / "w.data").symlink_to(f"../../blobs/{blob.name}")
    load_model(snapshot / "m.onnx")
    blob.unlink()
    blob.symlink_to(model.parents[1] / "private" / "w.data")
    with pytest.raises(InputError, match=OUTSIDE):
        load_model(snapshot / "m.onnx")
    blob.unlink()
    os.rename(blob.parent, model.parents[1] / "blobs")
    shutil.copy(model.parents[1] / "private" / "w.data", model.parents[1] / "blobs" / blob.name)
    blob.parent.symlink_to(model.parents[1] / "blobs")
    with pytest.raises(InputError, match=OUTSIDE):
        load_model(snapshot / "m.onnx")


@pytest.mark.parametrize("place", ["function", "sparse", "list"])
def test_data_of_tensors_that_are_not_handed_on_is_refused(
    model: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were read where the current folder had a file of that name, and not copied: the mapped file named others."""
    shutil.copy(model.parents[1] / "private" / "w.data", model.parent)
    monkeypatch.chdir(model.parent)
    proto = onnx.load(model, load_external_data=False)
    weight = onnx.TensorProto.FromString(proto.graph.initializer[0].SerializeToString())
    del proto.graph.initializer[0]
    if place == "function":
        constant = onnx.helper.make_node("Constant", [], ["w"], value=weight)
        proto.functions.append(
            onnx.helper.make_function("own", "W", [], ["w"], [constant], [onnx.helper.make_opsetid("", 22)])
        )
        proto.graph.node.insert(0, onnx.helper.make_node("W", [], ["weight"], domain="own"))
        proto.opset_import.append(onnx.helper.make_opsetid("own", 1))
    elif place == "sparse":
        index = onnx.helper.make_tensor("index", onnx.TensorProto.INT64, [WEIGHT.size], range(WEIGHT.size))
        proto.graph.sparse_initializer.add(values=weight, indices=index, dims=WEIGHT.shape)
    else:
        attribute = onnx.AttributeProto(name="list", type=onnx.AttributeProto.TENSORS, tensors=[weight])
        node = onnx.helper.make_node("W", [], ["weight"], domain="own")
        node.attribute.append(attribute)
        proto.graph.node.insert(0, node)
        proto.opset_import.append(onnx.helper.make_opsetid("own", 1))
    model.write_bytes(proto.SerializeToString())
    with pytest.raises(InputError, match=r"'weight' is .* and lies in a data file; expected in the model itself$"):
        load_model(model)


@pytest.fixture
def linked(mapped_block: Path, tmp_path: Path) -> Path:
    """A mapped model whose weights are a link out of its folder."""
    folder = tmp_path / "got"
    shutil.copytree(mapped_block.parent, folder, ignore=shutil.ignore_patterns("*.data"))
    (data,) = mapped_block.parent.glob("*.data")
    (folder / data.name).symlink_to(data)
    return folder / "mapped.onnx"


@pytest.mark.parametrize(
    "command",
    [
        "map {model} -o {out}/m.onnx",
        "map {model} -o {model}",
        "inspect {model}",
        "compare {model} --against " + BLOCK,
        "build {model} -o {out}/m.engine",
        "bench {model} -o {out} --script --tool trtexec-11",
    ],
)
def test_case_39_every_command_that_reads_weights_refuses(
    linked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert cli.run(command.format(model=linked, out=tmp_path / "out").split()) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len([line for line in lines if line.startswith("moetrt: error: ")]) == 1
    assert "is in 'model.onnx.data', a link to '" in lines[-1]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as Transformers saves it, in shards."""
    from moetrt.quiet import quiet
    from tests.models import families

    folder = tmp_path_factory.mktemp("checkpoint")
    with quiet():
        families.deepseek_v3().save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def shard_link(folder: Path) -> str:
    return moved(folder, min(path.name for path in folder.glob("*.safetensors")))


def moved(folder: Path, name: str) -> str:
    (folder.parent / "private").mkdir(exist_ok=True)
    os.rename(folder / name, folder.parent / "private" / name)
    link(folder, name, f"../private/{name}")
    return rf"'{name}' is a link to '.*/private/{name}'"


def named_by_the_index(folder: Path, name: str) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first = sorted(content["weight_map"])[0]
    content["weight_map"][first] = name
    index.write_text(json.dumps(content))


def shard_by_name(folder: Path) -> str:
    named_by_the_index(folder, "../x.safetensors")
    return r"'\.\./x\.safetensors', which 'model\.safetensors\.index\.json' names, is no path that stays in it"


def shard_in_a_linked_folder(folder: Path) -> str:
    (folder.parent / "private").mkdir()
    link(folder, "sub", "../private")
    named_by_the_index(folder, "sub/x.safetensors")
    return (
        r"'sub/x\.safetensors', which 'model\.safetensors\.index\.json' names, is a link to '.*/private/x\.safetensors'"
    )


def named_by_the_config(folder: Path) -> str:
    (folder.parent / "private").mkdir()
    link(folder, "sub", "../private")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "sub/x.safetensors"}))
    return r"'sub/x\.safetensors', which 'config\.json' names, is a link to '.*/private/x\.safetensors'"


def index_that_the_config_names(folder: Path) -> str:
    (folder / "sub").mkdir()
    os.rename(folder / "model.safetensors.index.json", folder / "sub" / "own.safetensors.index.json")
    content = {"metadata": {}, "weight_map": {"lm_head.weight": "/x.safetensors"}}
    (folder / "sub" / "own.safetensors.index.json").write_text(json.dumps(content))
    config = json.loads((folder / "config.json").read_text())
    name = "sub/own.safetensors.index.json"
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": name}))
    return r"'/x\.safetensors', which 'sub/own\.safetensors\.index\.json' names, is no path that stays in it"


@pytest.mark.parametrize(
    "make",
    [
        shard_link,
        lambda folder: moved(folder, "config.json"),
        lambda folder: moved(folder, "generation_config.json"),
        lambda folder: moved(folder, "model.safetensors.index.json"),
        shard_by_name,
        shard_in_a_linked_folder,
        named_by_the_config,
        index_that_the_config_names,
    ],
)
def test_case_39_a_checkpoint_reads_nothing_outside_its_folder(
    checkpoint: Path, tmp_path: Path, make: Callable[[Path], str]
) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    words = make(folder)
    with pytest.raises(InputError, match=rf"^source folder '.*/model': {words}; expected a file inside the folder$"):
        load_source(folder)


def test_a_single_file_of_weights_is_no_exception(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    link(tmp_path / "model", "model.safetensors", "../x.safetensors")
    with pytest.raises(InputError, match=r"'model\.safetensors' is a link to '.*/x\.safetensors'"):
        check_in_folder(tmp_path / "model")


def test_a_checkpoint_in_a_cache_and_one_whose_tokenizer_is_a_link(checkpoint: Path, tmp_path: Path) -> None:
    """Tokenizers are not read; and files that are no JSON are what Transformers has words for."""
    snapshot = cache(tmp_path, {path.name: path for path in checkpoint.iterdir()})
    link(snapshot, "tokenizer.json", "/x/tokenizer.json")
    link(tmp_path, "alias", str(snapshot))
    check_in_folder(snapshot)
    assert load_source(tmp_path / "alias").description == "DeepseekV3ForCausalLM"
    for text in ("{", "[]", "[" * 100_000, '{"weight_map": ["../x"], "transformers_weights": 3}'):
        for name in ("config.json", "model.safetensors.index.json"):
            (snapshot / name).unlink()
            (snapshot / name).write_text(text)
        check_in_folder(snapshot)


def test_way_out_of_names(tmp_path: Path) -> None:
    for name in ("w", "sub/w", "./w", "sub/../w", "..w", "w..", "sub\\w", "größe"):
        assert way_out(tmp_path, name) is None, name
    for name in ("", ".", "..", "/w", "../w", "sub/../../w", "sub\\..\\..\\w", "\\\\host\\share\\w", "C:w", "./"):
        assert way_out(tmp_path, name) == "no path that stays in it", name


def test_a_mapped_copy_has_nothing_of_what_lies_outside(linked: Path, tmp_path: Path) -> None:
    """From Python too, and the output's folder is not made."""
    with pytest.raises(InputError, match=OUTSIDE):
        map_file(linked, tmp_path / "out" / "m.onnx")
    assert not (tmp_path / "out").exists()
