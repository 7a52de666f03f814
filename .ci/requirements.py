"""Prints what pyproject.toml asks for, to build, to run and to test, one requirement a line."""

import tomllib
from pathlib import Path

data = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
extras = data["project"]["optional-dependencies"]
wanted = [*data["build-system"]["requires"], *data["project"]["dependencies"]]
wanted += [requirement for name in ("hf", "rtx", "plugin-tool") for requirement in extras[name]]
wanted += [requirement for requirement in extras["dev"] if not requirement.startswith("moetrt[")]
print("\n".join(wanted))
