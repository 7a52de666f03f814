"""Each sample runs as it stands on a machine without a GPU, from any folder, and says what it did."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLES = Path(__file__).resolve().parent.parent / "samples"


def run_sample(name: str, *words: object, cwd: Path) -> str:
    command = [sys.executable, str(SAMPLES / name), *map(str, words)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_contract_to_engine(tmp_path: Path) -> None:
    said = run_sample("contract_to_engine.py", cwd=tmp_path)
    assert "tails: 1 found, 1 mapped" in said
    assert "parity: passed" in said
    assert "plugin layers: MoEFinalizeAddRMSNorm" in said
    assert (tmp_path / "out/contract/block.engine").stat().st_size > 0


def test_huggingface_to_engine(tmp_path: Path) -> None:
    said = run_sample("huggingface_to_engine.py", cwd=tmp_path)
    assert "Qwen3MoeForCausalLM: 2 tails expected" in said
    assert "tails: 2 found, 2 mapped" in said
    assert "parity: passed" in said
    layers = said.partition("plugin layers: ")[2].split(", ")
    assert len(layers) == 2
    # The folder that it saved is one that any Hugging Face model could be in.
    assert (tmp_path / "out/huggingface/model/config.json").is_file()


def test_every_sample_is_run_here() -> None:
    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {path.stem for path in SAMPLES.glob("*.py")} <= tests


@pytest.mark.parametrize("path", sorted(SAMPLES.iterdir()), ids=lambda path: path.name)
def test_no_sample_is_left_without_words_for_its_reader(path: Path) -> None:
    if path.suffix == ".py":
        text = path.read_text(encoding="utf-8")
        assert text.startswith('"""')
        assert f"python samples/{path.name}" in text
    else:
        assert os.path.isdir(path)
