"""Every command and every name in the README is one that there is."""

import re
import shlex
from pathlib import Path

import click
import pytest

from moetrt import cli
from moetrt.families import family_names

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
INDENTED = [line[4:] for line in README.replace("\\\n", "").splitlines() if line.startswith("    ")]


def commands(program: str) -> list[list[str]]:
    return [shlex.split(line, comments=True)[1:] for line in INDENTED if line.startswith(f"{program} ")]


@pytest.mark.parametrize("words", commands("moetrt"), ids=" ".join)
def test_moetrt_commands_are_taken(words: list[str]) -> None:
    command = cli.cli.commands[words[0]]
    with command.make_context(words[0], words[1:]) as context:
        assert isinstance(context, click.Context)


def test_every_command_is_shown_and_in_the_table() -> None:
    assert {words[0] for words in commands("moetrt")} | {"demo"} == set(cli.cli.commands)
    assert {match.split()[0] for match in re.findall(r"^\| `([a-z][^`]*)` \|", README, re.MULTILINE)} >= set(
        cli.cli.commands
    )


@pytest.mark.parametrize("words", commands("make"), ids=" ".join)
def test_make_targets_exist(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{words[0]}:", makefile, re.MULTILINE)


def test_python_names_exist_and_fit() -> None:
    blocks = [block for block in re.findall(r"(?:^    .*\n|^\n)+", README, re.MULTILINE) if "import" in block]
    assert len(blocks) == 2
    for block in blocks:
        code = "\n".join(line[4:] for line in block.splitlines())
        compile(code, "README.md", "exec")
        exec("\n".join(line for line in code.splitlines() if line.startswith("from ")), {})


def test_it_has_as_many_families_as_there_are() -> None:
    assert f"for each family on two cores, and there are {len(family_names())};" in README


def test_files_that_it_names_exist() -> None:
    for name in re.findall(r"\]\(([^)#]+)\)", README):
        assert "://" in name or (ROOT / name).exists(), name


def test_constraints_lie_within_the_ranges_of_the_project() -> None:
    import tomllib

    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    asked = [*project["dependencies"], *(word for extra in project["optional-dependencies"].values() for word in extra)]
    requirements = {parsed.name: parsed for parsed in map(Requirement, asked) if parsed.name != "moetrt"}
    for name, requirement in requirements.items():
        if name == "tensorrt":
            continue  # has no wheel to pin; a GPU machine brings its own
        assert requirement.specifier.contains(pins[name]), name
