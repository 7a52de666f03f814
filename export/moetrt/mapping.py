"""Every MoE tail of an ONNX graph becomes one plugin node, or is listed with the reason why not."""

import gc
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from moetrt.bounds import bounds_of
from moetrt.errors import InputError, MoetrtError
from moetrt.files import Named, check_distinct, output_file, sole_writer, write_atomically
from moetrt.graphs import graphs_of, nodes_of
from moetrt.inlined import plain_choices
from moetrt.inlining import inline_functions, normalise_domains
from moetrt.mapping_report import MAPPED_FORM, MappingReport, ModelFile, Site
from moetrt.onnx_files import (
    OLDEST_OPSET,
    data_path_of,
    files_of,
    load_model,
    proto_of,
    save_model,
    without_external_data,
)
from moetrt.onnx_op import (
    OPSET_VERSION,
    attach_functions,
    make_node,
    named_inputs,
    operator_of,
    read_attributes,
    remove_functions,
)
from moetrt.removal import detach, remove_dead
from moetrt.segments.constants import makers
from moetrt.segments.forms import seed_at
from moetrt.segments.growth import Tail, grow
from moetrt.segments.reading import dim, dims, named, rank
from moetrt.segments.rms_norm import RmsNorm
from moetrt.segments.routers import FORM as ROUTER_FORM
from moetrt.segments.routers import is_routed, router_behind, unheard_routers
from moetrt.segments.tail import Operand, Seed, Term, Write, written
from moetrt.segments.untyped import FORM as UNTYPED_FORM
from moetrt.segments.untyped import unknown_of, untyped_routers, untyped_sum
from moetrt.shapes import fill_in_shapes, fill_in_unknown, name_dimensions, unify_formulas
from moetrt.spec import (
    DOMAIN,
    FINALIZE_ADD,
    FINALIZE_ADD_RMS_NORM,
    OPERATORS,
    PLUGIN_NAMESPACE,
    PLUGIN_VERSION,
    OperatorSpec,
    check_operands,
)
from moetrt.spec import Operand as KnownOperand
from moetrt.type_check import check_types
from moetrt.unaccounted import unaccounted

TAILS_EXPECTED = "moetrt.tails_expected"
"""Key of the model's metadata under which capture writes how many tails the model has."""


@contextmanager
def _collections_paused() -> Iterator[None]:
    """No garbage collection: all that is made here lives on, and looking it through again makes large graphs slower."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_collections_paused()
def map_file(
    source_path: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    *,
    function: bool = True,
    report_path: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> MappingReport:
    """Maps the tails of an ONNX file.

    Args:
        source_path: the file; its weights may be in other files beside it, and are not read.
        output_path: where the mapped model goes; may be ``source_path``.
        function: whether to add each operator's body as a model-local function, so that readers without the plugin can
            run the file. Without it, only TensorRT with the plugin can.
        report_path: where to write the report as JSON.
        progress: called with a few words now and then while weights are copied.

    Raises:
        InputError: the file cannot be read or is not ONNX, the result is not valid, a folder cannot be written, or two
            of the files (the model, its data files, the mapped model, its data file, the report) are the same, other
            than the model mapped onto itself. No file is written or changed then.
        InputTypeError: a path is no path.
    """
    model = load_model(source_path)
    _check_files(model, source_path, output_path, report_path)
    try:
        report = map_model(model, function=function)
    except MoetrtError as error:
        raise type(error)(f"ONNX model '{os.fspath(source_path)}': {error}") from error

    def check_shapes(proto: onnx.ModelProto) -> None:
        problem = _problem_of(proto)
        if problem is not None:
            if inference_problem(load_model(source_path)) is None:
                raise InputError(f"mapping '{os.fspath(source_path)}' gave a model whose shapes do not fit: {problem}")
            report.notes.append(f"shape inference stops, as it does on the model before mapping: {problem}")

    folder = Path(output_path if report_path is None else report_path).parent
    report.source_model = ModelFile.of(source_path, folder)
    with ExitStack() as stack:
        stack.enter_context(sole_writer(output_path, progress))
        # Renamed after the model is, but its place is known to be writable before.
        temporary = None if report_path is None else stack.enter_context(write_atomically(report_path))
        save_model(model, output_path, progress=progress, check=check_shapes)
        report.model = ModelFile.of(output_path, folder)
        if temporary is not None:
            report.write_json(temporary)
    return report


def _check_files(
    model: ir.Model,
    source_path: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    report_path: str | os.PathLike[str] | None,
) -> None:
    inputs = files_of(model, source_path)
    output = output_file(output_path)
    data: Named = ("data file of the output", data_path_of(output))
    reports: list[Named] = [] if report_path is None else [("report", output_file(report_path, "report"))]
    if output.exists() and output.samefile(source_path):
        # Mapped onto itself: `save_model` reads the old data before it replaces it.
        check_distinct(inputs[1:], [("output file", output)])
        check_distinct([*inputs, data], reports)
    else:
        check_distinct(inputs, [("output file", output), data, *reports])


@_collections_paused()
def inference_problem(model: ir.Model) -> str | None:
    """What strict shape inference says against ``model``, on one line; None where it is content.

    Raises:
        RuntimeError: as of `moetrt.onnx_files.proto_of`.
    """
    return _problem_of(without_external_data(proto_of(model)))


def _problem_of(proto: onnx.ModelProto) -> str | None:
    try:
        onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    except Exception as error:  # onnx raises its own InferenceError, and ValueError from its parts
        return " ".join(str(error).split())
    return None


@_collections_paused()
def map_model(model: ir.Model, *, function: bool = True) -> MappingReport:
    """Maps the tails of ``model`` in place.

    Args:
        model: any ONNX model with opset 17 or later.
        function: as of `map_file`.

    Raises:
        InputError: the model's opset is too old, an operator node in it is broken, or its dtypes do not fit.
    """
    normalise_domains(model)
    opset = model.graph.opset_imports.get("", 0)
    if opset < OLDEST_OPSET:
        raise InputError(f"the opset was {opset}; {OLDEST_OPSET} or later is taken")
    for node in nodes_of(model):
        if operator_of(node) is not None:
            check_operator_node(node)
    remove_functions(model)
    notes = [*map(str, bounds_of(model).values()), *inline_functions(model)]
    unnamed = name_dimensions(model)
    unify_formulas(model)
    fill_in_shapes(model)
    # Before anything is taken out: what does not fit may lie in a tail, and would not be seen any more.
    check_types(nodes_of(model), opset)
    if plain_choices(model):
        fill_in_unknown(model)
    mapper = _Mapper(_names(model))
    for graph in graphs_of(model):
        for node in list(graph):
            if node.graph is graph:
                mapper.map_node(node)
    heard = [*_routed_operands(model), *mapper.left_alone]
    routers = [*unheard_routers(nodes_of(model), heard), *untyped_routers(nodes_of(model), heard)]
    sites = mapper.sites + [_node_site(node, ROUTER_FORM, reason) for node, reason in routers]
    report = MappingReport(sites, _expected(model), sort_topk(model), notes)
    for value, shape in unnamed.items():
        value.shape = shape
    if function:
        attach_functions(model)
    else:
        _forget_functions(model)
    return report


def check_operator_node(node: ir.Node) -> None:
    """Checks the inputs and attributes of one of moetrt's nodes, as far as the graph says their dtypes and shapes.

    Raises:
        InputError, InputTypeError: what is not taken.
    """
    try:
        given = named_inputs(node)
    except ValueError as error:
        raise InputError(str(error)) from error
    read_attributes(node)
    operands = {}
    for name, value in given.items():
        if value.dtype is None or value.shape is None:
            return
        sizes = [size if isinstance(size, int) else None for size in dims(value) or ()]
        operands[name] = KnownOperand(str(value.dtype.numpy()), sizes)
    check_operands(OPERATORS[node.op_type], operands, where=f"node '{node.name}' ({node.op_type})")


def _routed_operands(model: ir.Model) -> Iterator[ir.Value]:
    """The weights and maps of the model's plugin nodes; where no router made these, what their rows' router gives."""
    for node in nodes_of(model):
        if operator_of(node) is not None:
            inputs = named_inputs(node)
            routed = [inputs[name] for name in ("expert_weights", "expanded_idx_to_permuted_idx") if name in inputs]
            yield from routed
            if not any(map(is_routed, routed)):
                router = router_behind(inputs["gemm2_permuted"], dim(inputs["expert_weights"], -1))
                yield from () if router is None else (router,)


def _forget_functions(model: ir.Model) -> None:
    """Leaves the bare nodes: no overload names a function that is not there."""
    for node in nodes_of(model):
        if operator_of(node) is not None:
            node.overload = ""
            model.graph.opset_imports[DOMAIN] = OPSET_VERSION


def _expected(model: ir.Model) -> int | None:
    text = model.metadata_props.get(TAILS_EXPECTED)
    return int(text) if text is not None and text.isdecimal() else None


_Written = tuple[ir.Node, list[str]]
"""A plugin node, and the names of the nodes that it replaced."""


def _ends_a_layer(seed: Seed) -> bool:
    """Whether a residual is added to the seed's sum and the result normalised."""
    grown = grow(seed)
    return grown.tail is not None and grown.norm is not None and bool(grown.tail.terms)


def _names(model: ir.Model) -> set[str]:
    """The names of all nodes and values, and of the scopes that they say they are in."""
    names: set[str] = set()
    for graph in graphs_of(model):
        values = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
        for name in filter(None, (*(node.name for node in graph), *(value.name for value in values))):
            while name and name not in names:
                names.add(name)
                name = name.rpartition("/")[0]
    return names


class _Mapper:
    """Maps tails one after another and keeps what they became; names stay unique.

    Attributes:
        names: taken already, by nodes, values or scopes. What is written for a plugin node is in a scope of its name.
        left_alone: what the tails that were not mapped are made from.
    """

    def __init__(self, names: set[str]) -> None:
        self.names = names
        self.sites: list[Site] = []
        self.left_alone: list[ir.Value] = []

    def map_node(self, node: ir.Node) -> None:
        """Maps the tail that begins at ``node``, if one does."""
        if operator_of(node) is FINALIZE_ADD_RMS_NORM:
            _write_plugin_attributes(node)
            self.sites.append(_site(node, [], MAPPED_FORM, True, None))
            return
        seed = seed_at(node)
        unknown = untyped_sum(node) if seed is None else None
        if unknown is not None:
            self.left_alone += [value for value in node.inputs if value is not None]
            self.sites.append(_node_site(node, UNTYPED_FORM, unknown))
        if seed is None or (seed.may_be_pooling and not _ends_a_layer(seed)):
            return
        problem = seed.problem or _unknown_operand(seed)
        if problem is not None:
            self.sites.append(self._leave(seed, problem))
            return
        self.sites.append(self._map_seed(seed))

    def _leave(self, seed: Seed, reason: str | None) -> Site:
        self.left_alone += [value for value in seed.node.inputs if value is not None]
        self.left_alone += [operand.value for operand in seed.operands.values()]
        return _left_alone(seed, reason)

    def _map_seed(self, seed: Seed) -> Site:
        grown = grow(seed)
        reason, tail = grown.reason, grown.tail
        if tail is not None and grown.norm is not None:
            try:
                return _site(*self._write_norm(seed, tail, grown.norm), seed.form, True, None)
            except MoetrtError as error:
                # The operator does not take the whole tail; it may take the experts' sum alone.
                reason = str(error)
                alone = Tail(seed.value, seed.node, seed.scale, seed.terms).copy()
                tail = alone if alone.value.dtype == seed.data else None
        if tail is not None:
            if operator_of(seed.node) is not None and tail.scale == seed.scale and len(tail.terms) == len(seed.terms):
                # It is that node already: another one would only have another name.
                _write_plugin_attributes(seed.node)
                return _site(seed.node, [], seed.form, reason is None, reason)
            try:
                return _site(*self._write_finalize(grown.seed, tail), seed.form, reason is None, reason)
            except MoetrtError as error:
                reason = str(error)
        return self._leave(seed, reason)

    def _write_norm(self, seed: Seed, tail: Tail, norm: RmsNorm) -> _Written:
        shared, residual = _split_terms(tail.terms)
        operands = dict(seed.operands) | _term_operands(shared)
        if residual is not None:
            operands["residual"] = residual.operand
        operands["gamma"] = norm.gamma
        attributes = _sum_attributes(seed, tail, shared) | {
            "eps": norm.eps,
            "residual_scale": residual.scale if residual is not None else 1.0,
            "weight_bias": norm.weight_bias,
            "weight_before_cast": norm.weight_before_cast,
        }
        replaced = {"norm_out": norm.result, "residual_out": tail.value}
        shape_nodes = _shape_nodes(tail, residual or shared)
        return self._write(FINALIZE_ADD_RMS_NORM, seed, tail, operands, attributes, shape_nodes, replaced, norm.views)

    def _write_finalize(self, seed: Seed, tail: Tail) -> _Written:
        (shared,) = tail.terms or (None,)
        operands = dict(seed.operands) | _term_operands(shared)
        attributes = _sum_attributes(seed, tail, shared)
        return self._write(
            FINALIZE_ADD, seed, tail, operands, attributes, _shape_nodes(tail, shared), {"hidden": tail.value}
        )

    def _write(
        self,
        spec: OperatorSpec,
        seed: Seed,
        tail: Tail,
        operands: Mapping[str, Operand],
        attributes: Mapping[str, float | int],
        shape_nodes: list[ir.Node],
        replaced: Mapping[str, ir.Value],
        views: Iterable[ir.Node] = (),
    ) -> _Written:
        """Puts the plugin node where the sum was made, and takes out what nobody reads any more.

        Everything that the sum depends on lies before that place, and everything that reads it after, so the graph
        stays sorted. ``views`` lie between the sum and the norm: the norm's result goes through copies of them.
        """
        graph = tail.node.graph
        assert isinstance(graph, ir.Graph)
        if not {"residual", "shared_output"} & set(operands):
            _tokens_like(seed)
        name = self._unique_name("/".join(filter(None, (_scope(seed.node), spec.name))))
        added: list[ir.Node] = []
        inputs = {key: written(operand, _writer(f"{name}/{key}", added)) for key, operand in operands.items()}
        try:
            node = make_node(spec, inputs, attributes, name=name)
        except MoetrtError:
            for extra in reversed(added):
                detach(extra)
            raise
        dropped = unaccounted(replaced.values(), [*added, node], seed.known)
        if dropped is not None:
            for extra in (node, *reversed(added)):
                detach(extra)
            raise InputError(f"{dropped} would be dropped: {spec.name} does not read it")
        self.names.add(name)
        added.append(node)
        finals: dict[str, ir.Value] = {}
        for output, key in zip(node.outputs, spec.outputs, strict=True):
            output.name = f"{name}/{key}"
            value = output if {"residual", "shared_output"} & set(operands) else _seed_shaped(output, seed, added)
            finals[key] = _reshaped(value, shape_nodes, added)
        _hoist_constants(graph, (operand.value for operand in operands.values()))
        graph.insert_before(tail.node, added)
        for view in views:
            # Its shape may be read off the sum, so its copy stands where it stands.
            copied: list[ir.Node] = []
            finals["norm_out"] = _reshaped(finals["norm_out"], [view], copied)
            graph.insert_after(view, copied)
        removed = [name for key, old in replaced.items() for name in _replace(old, finals[key])]
        node.metadata_props.update(seed.node.metadata_props)
        return node, removed[::-1]

    def _unique_name(self, name: str) -> str:
        number, candidate = 0, name
        while candidate in self.names:
            number += 1
            candidate = f"{name}_{number}"
        return candidate


def _unknown_operand(seed: Seed) -> str | None:
    """Which of the seed's operands has no known dtype, or comes with no known rank: it may be any other."""
    for key, operand in seed.operands.items():
        has_rank = operand.reshape_to is not None or operand.make is not None or rank(operand.value) is not None
        if operand.value.dtype is None or not has_rank:
            return f"{key} {unknown_of(operand.value)}"
    return None


def _sum_attributes(seed: Seed, tail: Tail, shared: Term | None) -> dict[str, float | int]:
    combine = shared.scale if shared is not None else 1.0
    return {
        "combine_scale": combine,
        "routed_scaling_factor": tail.scale / combine,
        "apply_expert_weights": seed.apply_expert_weights,
    }


def _shape_nodes(tail: Tail, last: Term | None) -> list[ir.Node]:
    """The Reshapes between the shape that the operator gives its outputs and the shape of the sum."""
    return last.shape_nodes if last is not None else tail.shape_nodes


def _split_terms(terms: list[Term]) -> tuple[Term | None, Term | None]:
    """Which term is the shared expert's output and which the residual: the sum is the same either way."""
    if not terms:
        return None, None
    if len(terms) == 1:
        only = terms[0]
        return (only, None) if only.gate is not None or only.shared else (None, only)
    first, second = terms
    return (second, first) if second.gate is not None else (first, second)


def _term_operands(term: Term | None) -> dict[str, Operand]:
    if term is None:
        return {}
    return {"shared_output": term.operand} | ({"shared_gate": term.gate} if term.gate is not None else {})


def _writer(name: str, added: list[ir.Node]) -> Write:
    """What puts nodes into ``added``, each with a name of its own that begins with ``name``."""

    def write(
        op_type: str,
        inputs: Sequence[ir.Value],
        attributes: Mapping[str, Any],
        dtype: ir.DataType | None,
        sizes: Sequence[int | str | None],
    ) -> ir.Value:
        node = ir.node(op_type, inputs, attributes, name=f"{name}/{op_type}_{len(added)}")
        output = node.outputs[0]
        output.name, output.shape = node.name, ir.Shape(sizes)
        if dtype is not None:
            output.dtype = dtype
        added.append(node)
        return output

    return write


def _seed_shaped(output: ir.Value, seed: Seed, added: list[ir.Node]) -> ir.Value:
    """``output``, [T, H], in the shape of the sum, which is [B, S, H] where the graph never flattens its tokens."""
    found = _tokens_like(seed)
    if found is None:
        return output
    like, axis = found
    write = _writer(str(output.name), added)
    width = ir.tensor([int(dim(seed.value, -1) or 0)], dtype=ir.DataType.INT64)
    sizes = [
        write("Shape", [like], {"start": axis, "end": axis + 2}, ir.DataType.INT64, [2]),
        write("Constant", [], {"value": width}, ir.DataType.INT64, [1]),
    ]
    shape = write("Concat", sizes, {"axis": 0}, ir.DataType.INT64, [3])
    return write("Reshape", [output, shape], {"allowzero": 1}, output.dtype, dims(seed.value) or ())


def _tokens_like(seed: Seed) -> tuple[ir.Value, int] | None:
    """What has the B and S of a sum of [B, S, H], and on which axis B; None where the sum is [T, H].

    Raises:
        InputError: nothing that the operator reads has them.
    """
    if rank(seed.value) == 2:
        return None
    shape = dims(seed.value) or []
    if not shape or not isinstance(shape[-1], int):
        raise InputError(
            f"the sum '{seed.value.name}' has shape {dims(seed.value)}; H, its last dimension, is taken as a number"
        )
    for value in (*(operand.value for operand in seed.operands.values()), seed.placed):
        here = dims(value) if value is not None and None not in shape else None
        for axis in (0, 1):
            # Rows that lie expert by expert, [E, B, S, H], have them after their first dimension.
            if value is not None and here and len(here) in (3 + axis, 4) and here[axis : axis + 2] == shape[:2]:
                return value, axis
    raise InputError(
        f"the sum '{seed.value.name}' has shape {shape}, and neither the rows nor the weights nor the map have its "
        "first two dimensions: flatten the tokens before, [T, K], and give the sum its shape afterwards"
    )


def _reshaped(output: ir.Value, shape_nodes: list[ir.Node], added: list[ir.Node]) -> ir.Value:
    """``output`` through copies of the Reshapes that the sum went through after its last addition."""
    value = output
    for number, step in enumerate(shape_nodes):
        name = f"{output.name}/{step.op_type}_{number}"
        copied = ir.Node(
            step.domain, step.op_type, [value, *step.inputs[1:]], list(step.attributes.values()), name=name
        )
        copied.outputs[0].name = name
        copied.outputs[0].type = output.type
        copied.outputs[0].shape = step.outputs[0].shape
        added.append(copied)
        value = copied.outputs[0]
    return value


def _replace(old: ir.Value, new: ir.Value) -> list[str]:
    """Makes ``new`` what ``old`` was, name and graph output too; returns the names of the nodes that this removed."""
    new.shape = old.shape if old.shape is not None else new.shape
    new.type = old.type if old.type is not None else new.type
    new.metadata_props.update(old.metadata_props)
    producer, name = old.producer(), old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    old.name = None
    removed = remove_dead(producer) if producer is not None else []
    new.name = name
    return removed


def _hoist_constants(graph: ir.Graph, values: Iterable[ir.Value]) -> None:
    """What makes a constant may stand later than the plugin node that reads it now; it depends on nothing."""
    for value in values:
        moved = [node for node in makers(value) or () if node.graph is graph]
        graph.remove(moved)
        graph.insert_before(graph[0], moved)


_OWN_NAME = re.compile(rf"(^|/)({'|'.join(OPERATORS)})(_[0-9]+)?$")


def _scope(node: ir.Node) -> str:
    """The module that a node comes from, as capture or torch.onnx notes it, else the node's name, if it says more."""
    module = node.metadata_props.get("module")
    if module:
        return module
    text = node.metadata_props.get("pkg.torch.onnx.name_scopes", "")
    scopes = [part.strip(" '\"") for part in text.strip("[]").split(",")]
    if len(scopes) > 1 and scopes[-2]:
        return scopes[-2]
    name = node.name or node.outputs[0].name or node.op_type
    if operator_of(node) is not None:
        # Mapped before, and perhaps numbered then.
        return _OWN_NAME.sub("", name)
    return "" if name == node.op_type else name.removesuffix(f"/{node.op_type}")


def _left_alone(seed: Seed, reason: str | None) -> Site:
    """The site of a tail whose nodes stay as they are."""
    if operator_of(seed.node) is not None:
        return _site(seed.node, [], seed.form, False, reason)
    scope = _scope(seed.node)
    return Site(
        name=f"{scope} ({named(seed.node)})" if scope else named(seed.node),
        form=seed.form,
        operator=None,
        matched=False,
        reason=reason,
        attributes={"routed_scaling_factor": seed.scale, "apply_expert_weights": seed.apply_expert_weights},
        inputs={name: _described(operand.value) for name, operand in seed.operands.items()},
        outputs={"hidden": _described(seed.value)},
    )


def _node_site(node: ir.Node, form: str, reason: str) -> Site:
    """The site of a node that shows that there is a tail, which was not found."""
    scope = _scope(node)
    return Site(
        name=f"{scope} ({named(node)})" if scope else named(node),
        form=form,
        operator=None,
        matched=False,
        reason=reason,
    )


def _write_plugin_attributes(node: ir.Node) -> None:
    for key, value in (("plugin_version", PLUGIN_VERSION), ("plugin_namespace", PLUGIN_NAMESPACE)):
        if key not in node.attributes:
            node.attributes[key] = ir.AttrString(key, value)


def _site(node: ir.Node, replaced: list[str], form: str, matched: bool, reason: str | None) -> Site:
    spec = OPERATORS[node.op_type]
    return Site(
        name=node.name or "",
        form=form,
        operator=node.op_type,
        matched=matched,
        reason=reason,
        nodes=replaced,
        attributes=read_attributes(node),
        inputs={name: _described(value) for name, value in named_inputs(node).items()},
        outputs={name: _described(value) for name, value in zip(spec.outputs, node.outputs, strict=True)},
    )


def _described(value: ir.Value) -> dict[str, Any]:
    return {"value": value.name, "dtype": value.dtype.name if value.dtype is not None else None, "shape": dims(value)}


def sort_topk(model: ir.Model) -> int:
    """Makes every TopK sort: TensorRT takes no other, and sorted is one of the orders that sorted=0 allows.

    Returns:
        how many did not before.
    """
    changed = 0
    for node in nodes_of(model):
        if node.op_type == "TopK" and node.domain == "" and node.attributes.get_int("sorted", 1) == 0:
            node.attributes["sorted"] = ir.AttrInt64("sorted", 1)
            changed += 1
    return changed
