"""What an ONNX file holds of moetrt's operators, and what each of its readers will run."""

import difflib
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir

from moetrt.bounds import Bound, as_json, bounds_of
from moetrt.errors import MoetrtError
from moetrt.graphs import nodes_of
from moetrt.mapping import TAILS_EXPECTED, check_operator_node, map_model
from moetrt.mapping_report import MAPPED_FORM, Site, attribute_line, operand_line
from moetrt.onnx_files import load_model
from moetrt.onnx_op import named_inputs, operator_of, read_attributes
from moetrt.segments.captured import FORM
from moetrt.segments.reading import dims
from moetrt.spec import DOMAIN, OPERATORS, PLUGIN_NAMESPACE, PLUGIN_VERSION

FUNCTION = "the function body"
PLUGIN = "the plugin"

ONNX_RUNTIME = "ONNX Runtime, onnx.reference"
TENSORRT_PLUGIN = "TensorRT, TensorRT-RTX with the plugin library"
TENSORRT_ALONE = "TensorRT, TensorRT-RTX without it"


@dataclass(frozen=True)
class TailNode:
    """One operator node of the file.

    Attributes:
        name: the node's name.
        operator: its op_type.
        attributes: all but the ``has_*`` flags, defaults filled in.
        inputs: by name: value, dtype (ONNX's spelling) and shape (numbers, symbols, None).
        outputs: likewise.
        plugin_version, plugin_namespace: as the node has them; None where it has not.
        function: whether the file has the function that this node calls.
    """

    name: str
    operator: str
    attributes: dict[str, float | int]
    inputs: dict[str, dict[str, Any]]
    outputs: dict[str, dict[str, Any]]
    plugin_version: str | None
    plugin_namespace: str | None
    function: bool

    @property
    def dtype(self) -> str | None:
        """The rows' dtype in ONNX's spelling."""
        return self.inputs["gemm2_permuted"]["dtype"] if "gemm2_permuted" in self.inputs else None

    @property
    def runs_function(self) -> bool:
        """Whether TensorRT runs the file's function although the plugin is loaded.

        Seen with TensorRT-RTX 1.7.1: it looks for a plugin before a function only where a node names a namespace; a
        version that is missing is taken for "1".
        """
        return self.function and self.plugin_namespace is None

    @property
    def runs_plugin(self) -> bool:
        """Whether TensorRT finds the plugin for this node where it is loaded."""
        version, namespace = self.plugin_version, self.plugin_namespace
        spelled = version in (None, PLUGIN_VERSION) and namespace in (None, PLUGIN_NAMESPACE)
        return spelled and not self.runs_function


@dataclass
class Inspection:
    """What `inspect_file` found.

    Attributes:
        path: the file.
        ir_version, opset: of the file.
        tails: its operator nodes, in the order of the graph.
        expected: how many tails the file says it has; None where it does not.
        sites: the tails that are not mapped yet, or not wholly, as `moetrt map` would report them.
        refused: how many of ``tails`` the plugin refuses.
        readers: by reader: what it will run.
        warnings: what is wrong, or will surprise, one line each.
        bounds: the sizes at which the file is right, by symbol, where it is not right at all.
    """

    path: str
    ir_version: int
    opset: int
    tails: list[TailNode]
    expected: int | None
    sites: list[Site]
    refused: int
    readers: dict[str, str]
    warnings: list[str] = field(default_factory=list)
    bounds: dict[str, Bound] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The inspection for JSON."""
        return asdict(self) | {"sites": [site.as_dict() for site in self.sites], "bounds": as_json(self.bounds)}

    def lines(self) -> list[str]:
        """The inspection as text."""
        expected = "" if self.expected is None else f" ({self.expected} expected)"
        lines = [f"{self.path}: opset {self.opset}, IR version {self.ir_version}, {len(self.tails)} tails{expected}"]
        lines += map(str, self.bounds.values())
        # A node that mapping would put more into is listed once, with what it would become.
        becomes = {name: site for site in self.sites if site.form == FORM for name in (site.name, *site.nodes)}
        for tail in self.tails:
            lines.append(f"{tail.name}: {tail.operator}, {tail.dtype or 'unknown dtype'}")
            if tail.name in becomes:
                lines[-1] += f"; moetrt map: {becomes[tail.name].became}"
                lines += becomes[tail.name].lines()
                continue
            lines.append(attribute_line(tail.attributes))
            lines += [operand_line("in ", name, entry) for name, entry in tail.inputs.items()]
            lines += [operand_line("out", name, entry) for name, entry in tail.outputs.items()]
        listed = [becomes[tail.name] for tail in self.tails if tail.name in becomes]
        for site in [site for site in self.sites if site not in listed]:
            lines.append(f"{site.name}: {site.form}, {site.dtype or 'unknown dtype'}; moetrt map: {site.became}")
            lines += site.lines()
        lines += [f"{reader}: {runs}" for reader, runs in self.readers.items()]
        return lines + [f"warning: {warning}" for warning in self.warnings]


def inspect_file(path: str | os.PathLike[str]) -> Inspection:
    """Reads an ONNX file and says which tails it has, and what runs them where.

    Raises:
        InputError: the file cannot be read or is not ONNX.
    """
    model = load_model(path)
    warnings: list[str] = []
    refused: list[str] = []
    tails: list[TailNode] = []
    for node in nodes_of(model):
        warnings += spelling_differences(node)
        if operator_of(node) is not None:
            tails.append(_tail(node, model, refused))
    sites: list[Site] = []
    if not refused:
        sites, unmapped = _unmapped(path)
        warnings += unmapped
    warnings += refused
    expected = model.metadata_props.get(TAILS_EXPECTED)
    inspection = Inspection(
        path=os.fspath(Path(path)),
        ir_version=model.ir_version,
        opset=model.graph.opset_imports.get("", 0),
        tails=tails,
        expected=int(expected) if expected is not None and expected.isdecimal() else None,
        sites=sites,
        refused=len(refused),
        readers=_readers(model, tails),
        warnings=warnings,
        bounds=bounds_of(model),
    )
    warnings += _function_warnings(model, tails)
    warnings += _graph_warnings(model)
    return inspection


def _text(node: ir.Node, name: str) -> str | None:
    attribute = node.attributes.get(name)
    return attribute.as_string() if attribute is not None and attribute.type == ir.AttributeType.STRING else None


def spelling_differences(node: ir.Node) -> list[str]:
    """Which of op, version and namespace of a node misses one of moetrt's operators by a little.

    Empty for nodes that are right, and for those that are something else.
    """
    if node.domain in ("", "ai.onnx", "ai.onnx.ml"):
        near = [node.op_type] if node.op_type in OPERATORS else []
    else:
        cutoff = 0.8 if node.domain.lower() == DOMAIN else 0.9
        by_fold = {name.lower(): name for name in OPERATORS}
        near = [by_fold[name] for name in difflib.get_close_matches(node.op_type.lower(), by_fold, n=1, cutoff=cutoff)]
    if not near:
        if node.domain == DOMAIN:
            return [f"node '{node.name}': op was '{node.op_type}'; {' or '.join(OPERATORS)} is taken"]
        return []
    found: list[str] = []
    if node.op_type != near[0]:
        found.append(f"node '{node.name}': op was '{node.op_type}'; '{near[0]}' is taken")
    namespace = _text(node, "plugin_namespace")
    if node.domain != DOMAIN:
        found.append(f"node '{node.name}': domain was '{node.domain}'; '{DOMAIN}' is taken")
    if namespace not in (None, PLUGIN_NAMESPACE):
        found.append(f"node '{node.name}': plugin_namespace was '{namespace}'; '{PLUGIN_NAMESPACE}' is taken")
    version = _text(node, "plugin_version")
    if version not in (None, PLUGIN_VERSION):
        found.append(f"node '{node.name}': plugin_version was '{version}'; '{PLUGIN_VERSION}' is taken")
    return found


def _tail(node: ir.Node, model: ir.Model, refused: list[str]) -> TailNode:
    spec = OPERATORS[node.op_type]
    try:
        check_operator_node(node)
        given = named_inputs(node)
        attributes = read_attributes(node)
    except MoetrtError as error:
        refused.append(f"{error}: the plugin refuses the node")
        given = {f"input {index}": value for index, value in enumerate(node.inputs) if value is not None}
        attributes = {}
    return TailNode(
        name=node.name or "",
        operator=node.op_type,
        attributes=attributes,
        inputs={name: _described(value) for name, value in given.items()},
        outputs={name: _described(value) for name, value in zip(spec.outputs, node.outputs, strict=False)},
        plugin_version=_text(node, "plugin_version"),
        plugin_namespace=_text(node, "plugin_namespace"),
        function=node.op_identifier() in model.functions,
    )


def _described(value: ir.Value) -> dict[str, Any]:
    return {"value": value.name, "dtype": value.dtype.name if value.dtype is not None else None, "shape": dims(value)}


def _readers(model: ir.Model, tails: list[TailNode]) -> dict[str, str]:
    if not tails:
        return {}
    functions = sum(tail.function for tail in tails)
    whole = functions == len(tails)
    if whole:
        onnx_runtime = FUNCTION
        if any(tail.dtype == "BFLOAT16" for tail in tails):
            onnx_runtime += "; on a CPU it has no bfloat16 arithmetic for the rest of the model"
    else:
        onnx_runtime = f"cannot run it: {len(tails) - functions} of {len(tails)} nodes have no function"
    by_plugin = sum(tail.runs_plugin for tail in tails)
    if by_plugin == len(tails):
        with_plugin = PLUGIN
    elif whole:
        with_plugin = f"{PLUGIN} for {by_plugin} nodes, {FUNCTION} for {len(tails) - by_plugin}"
    else:
        with_plugin = f"{PLUGIN} for {by_plugin} nodes; it may refuse the other {len(tails) - by_plugin}"
    if not whole:
        alone = "cannot run it: there is no function for every node"
    elif _overloaded(model):
        alone = "cannot run it: it cannot tell the overloads of a function apart"
    else:
        alone = f"{FUNCTION}, as native layers"
    return {ONNX_RUNTIME: onnx_runtime, TENSORRT_PLUGIN: with_plugin, TENSORRT_ALONE: alone}


def _overloaded(model: ir.Model) -> list[str]:
    """The operators that have more than one function: TensorRT finds a function by op_type alone."""
    names = [identifier[1] for identifier in model.functions]
    return [name for name in OPERATORS if names.count(name) > 1]


def _function_warnings(model: ir.Model, tails: list[TailNode]) -> list[str]:
    found: list[str] = []
    for tail in tails:
        missing = [
            name
            for name, value in (("plugin_version", tail.plugin_version), ("plugin_namespace", tail.plugin_namespace))
            if value is None
        ]
        if tail.runs_function:
            found.append(
                f"node '{tail.name}' ({tail.operator}) has a function but no {' and no '.join(missing)}: TensorRT will "
                "run the function even where the plugin is loaded; moetrt map writes both"
            )
        elif missing:
            found.append(
                f"node '{tail.name}' ({tail.operator}) has no {' and no '.join(missing)}; moetrt map writes both"
            )
    for domain, name, _ in model.functions:
        if name in OPERATORS and domain != DOMAIN:
            found.append(
                f"function '{name}' is in the domain '{domain}': TensorRT finds functions by name alone, and "
                f"would run it for {DOMAIN}'s nodes; rename it"
            )
    for name in _overloaded(model):
        found.append(
            f"{name} nodes differ in their optional inputs, so the file has one overload an input list: TensorRT needs "
            "the plugin for it, ONNX Runtime does not"
        )
    if tails and not any(tail.function for tail in tails):
        found.append("the file has no function bodies (--no-function): only TensorRT with the plugin can run it")
    return found


def _graph_warnings(model: ir.Model) -> list[str]:
    unsorted = [
        node.name
        for node in nodes_of(model)
        if node.op_type == "TopK" and node.domain == "" and node.attributes.get_int("sorted", 1) == 0
    ]
    if not unsorted:
        return []
    return [
        f"{len(unsorted)} TopK nodes have sorted=0 ('{unsorted[0]}'), which TensorRT does not take; moetrt map sorts"
    ]


def _unmapped(path: str | os.PathLike[str]) -> tuple[list[Site], list[str]]:
    """The sites that mapping the file again would change or cannot map, and the same in words."""
    try:
        report = map_model(load_model(path), function=False)
    except MoetrtError as error:
        return [], [f"mapping would fail: {error}"]
    sites = [site for site in report.sites if not _is_done(site)]
    found = []
    for site in sites:
        if not site.matched:
            found.append(f"tail '{site.name}' is {site.became}")
        else:
            found.append(f"tail '{site.name}' is not mapped yet: moetrt map makes it {site.operator}")
    if report.expected is not None and report.expected != report.found:
        found.append(f"{report.expected} tails are expected, but {report.found} are found")
    return sites, found


def _is_done(site: Site) -> bool:
    """Whether the tail is in its plugin node already: mapping it replaces no node, or that node by its like."""
    return site.matched and site.form in (MAPPED_FORM, FORM) and len(site.nodes) <= 1
