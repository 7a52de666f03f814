"""What became of a model's MoE tails: a report of every site."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moetrt.files import file_sha256, write_atomically
from moetrt.provenance import command, versions

FORMAT = "moetrt.mapping/1"

MAPPED_FORM = "mapped before"
"""Form of a tail that was a plugin node with its norm already."""


def attribute_line(attributes: Mapping[str, float | int]) -> str:
    """A node's attributes as an indented line of text."""
    return "    attributes: " + ", ".join(f"{name}={value:g}" for name, value in attributes.items())


def operand_line(direction: str, name: str, entry: Mapping[str, Any]) -> str:
    """One input or output of a node as an indented line of text."""
    shape = "?"
    if entry["shape"] is not None:
        shape = "[" + ", ".join("?" if size is None else str(size) for size in entry["shape"]) + "]"
    return f"    {direction} {name}: {entry['dtype'] or '?'} {shape} ({entry['value']})"


@dataclass(frozen=True)
class Site:
    """One MoE tail of the graph.

    Attributes:
        name: the plugin node's name, else the name of the node where the tail was found.
        form: how the graph spelled it: "finalize node" (capture's), "gather", "rows by route", "one-hot",
            "all experts", "capacity", "loop", "index_add", "mapped before", "untyped": a sum that may be one but for a
            value of unknown dtype or rank, or "router": a TopK whose experts reach no tail that was found.
        operator: the plugin node that is there now, or None.
        matched: whether all that belongs to the tail is in that node.
        reason: where not, the first thing that kept it out, in words.
        nodes: the names of the nodes that went into the plugin node, in the order of the graph; empty where none did.
        attributes: the node's attributes, without its ``has_*`` flags.
        inputs: by name: value, dtype and shape; of a tail that was not mapped, what would go into the node.
        outputs: likewise.
    """

    name: str
    form: str
    operator: str | None
    matched: bool
    reason: str | None
    nodes: list[str] = field(default_factory=list)
    attributes: dict[str, float | int] = field(default_factory=dict)
    inputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The site for JSON."""
        return asdict(self) | {"dtype": self.dtype}

    def lines(self) -> list[str]:
        """The site's nodes, attributes and operands as text, one indented line each."""
        lines = [f"    nodes: {', '.join(self.nodes)}"] if self.nodes else []
        if self.attributes:
            lines.append(attribute_line(self.attributes))
        lines += [operand_line("in ", name, entry) for name, entry in self.inputs.items()]
        return lines + [operand_line("out", name, entry) for name, entry in self.outputs.items()]

    @property
    def became(self) -> str:
        """In words, what the tail is now and, where something was left out, why."""
        if self.matched:
            return str(self.operator)
        return f"{self.operator} without its norm: {self.reason}" if self.operator else f"not mapped: {self.reason}"

    @property
    def dtype(self) -> str | None:
        """The rows' dtype in ONNX's spelling."""
        rows = self.inputs.get("gemm2_permuted")
        return rows["dtype"] if rows else None

    @property
    def shapes(self) -> dict[str, list[int | str | None] | None]:
        """The shapes of all inputs and outputs by name."""
        return {name: entry["shape"] for name, entry in (self.inputs | self.outputs).items()}


@dataclass(frozen=True)
class ModelFile:
    """An ONNX file that the report speaks of.

    Attributes:
        file: its path from the report's folder.
        sha256: of that file; its external data is not part of it.
    """

    file: str
    sha256: str

    @classmethod
    def of(cls, path: str | os.PathLike[str], folder: Path) -> "ModelFile":
        """The file at ``path`` as a report in ``folder`` names it."""
        return cls(os.path.relpath(path, folder), file_sha256(path))


@dataclass
class MappingReport:
    """What became of a model's tails.

    Attributes:
        sites: every tail, in the order of the graph, and then the routers whose experts reach none of them.
        expected: how many tails the model has according to capture; None where nobody said.
        sorted_topk: how many TopK nodes were made to sort, because TensorRT takes no others.
        notes: what else the user should know.
        source_model: the file before mapping; None where no file was read.
        model: the mapped file; None where none was written.
    """

    sites: list[Site]
    expected: int | None = None
    sorted_topk: int = 0
    notes: list[str] = field(default_factory=list)
    source_model: ModelFile | None = None
    model: ModelFile | None = None

    @property
    def found(self) -> int:
        return len(self.sites)

    @property
    def mapped(self) -> int:
        """How many tails are wholly in their plugin node."""
        return sum(site.matched for site in self.sites)

    @property
    def unmatched(self) -> list[Site]:
        return [site for site in self.sites if not site.matched]

    @property
    def complete(self) -> bool:
        """Whether there are tails, as many as expected, and all are mapped."""
        expected = self.found if self.expected is None else self.expected
        return self.mapped == self.found == expected and (self.found > 0 or self.expected == 0)

    def summary(self) -> str:
        """One line: how many were found, expected and mapped, and of how many only the sum was."""
        expected = "unknown" if self.expected is None else str(self.expected)
        partly = sum(site.operator is not None for site in self.unmatched)
        mapped = f"{self.mapped} mapped whole, {partly} without their norm" if partly else f"{self.mapped} mapped"
        return f"tails: {self.found} found, {expected} expected, {mapped}"

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON."""
        return {
            "format": FORMAT,
            "command": command(),
            "versions": versions("onnx", "onnx-ir"),
            "source_model": None if self.source_model is None else asdict(self.source_model),
            "model": None if self.model is None else asdict(self.model),
            "found": self.found,
            "expected": self.expected,
            "mapped": self.mapped,
            "complete": self.complete,
            "sorted_topk": self.sorted_topk,
            "notes": list(self.notes),
            "sites": [site.as_dict() for site in self.sites],
        }

    def write_json(self, path: str | os.PathLike[str]) -> Path:
        """Writes the report to ``path``.

        Raises:
            InputError: the folder cannot be written.
        """
        with write_atomically(path) as temporary:
            temporary.write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")
        return Path(path)
