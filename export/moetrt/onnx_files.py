"""ONNX models go from file to file without their weights passing through memory."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import onnx
import onnx_ir as ir
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from moetrt.errors import InputError
from moetrt.external_data import check_external_data, claim_marks, mark_of, new_mark
from moetrt.file_copy import copy_range, data_ranges, shares_blocks
from moetrt.files import Named, check_distinct, existing_file, output_file, write_atomically
from moetrt.graphs import graphs_of
from moetrt.node_order import sort_nodes
from moetrt.quiet import quiet
from moetrt.spec import DOMAIN, OPERATORS

OLDEST_OPSET = 17
"""The first version of the standard operators that is taken; the last is the one that the installed onnx knows."""

# Smaller tensors stay in the model file: scalars and shapes are read while mapping.
SMALL_TENSOR_BYTES = 1024

_MARK = "moetrt.external_data"
"""Where a tensor in memory has the mark of its data file, as that was when it was read."""

# Readers map the data file into memory page by page.
_ALIGNMENT = 4096


@dataclass(frozen=True)
class _Place:
    """A tensor of a model, and how to put another in its place."""

    tensor: ir.TensorProtocol
    put: Callable[[ir.TensorProtocol], None]


def _attribute_place(node: ir.Node, name: str, tensor: ir.TensorProtocol) -> _Place:
    def put(new: ir.TensorProtocol) -> None:
        node.attributes[name] = ir.AttrTensor(name, new)

    return _Place(tensor, put)


def _initializer_place(value: ir.Value, tensor: ir.TensorProtocol) -> _Place:
    def put(new: ir.TensorProtocol) -> None:
        value.const_value = new

    return _Place(tensor, put)


def _places(model: ir.Model) -> Iterator[_Place]:
    """Every initializer, and every tensor attribute whose data is external already."""
    for graph in graphs_of(model):
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield _initializer_place(value, value.const_value)
        for node in graph:
            # Most nodes have no attribute, which their own dict says soonest.
            for name, attribute in list(node.attributes.items()) if node.attributes.data else ():
                if attribute.type == ir.AttributeType.TENSOR and isinstance(attribute.value, ir.ExternalTensor):
                    yield _attribute_place(node, name, attribute.value)


# protobuf writes no longer message, and reads none.
_LARGEST_FILE = 2**31 - 1


def read_proto(path: str | os.PathLike[str]) -> onnx.ModelProto:
    """Reads an ONNX file as it is; data in other files stays there.

    What its size or its first byte shows to be something else is not read.

    Raises:
        InputError: the file is missing, a folder, too large, not ONNX, cut short, or nested deeper than protobuf reads.
        InputTypeError: ``path`` is no path.
    """
    source = existing_file(path, "ONNX model")
    size = source.stat().st_size
    if size == 0:
        raise InputError(f"ONNX model '{source}' is an empty file")
    if size > _LARGEST_FILE:
        raise InputError(
            f"ONNX model '{source}' has {size} bytes; at most {_LARGEST_FILE} are taken, with larger weights as "
            "external data in a file beside it"
        )
    with source.open("rb") as file:
        first = file.read(1)[0]
    if not _may_begin_with(first):
        raise InputError(
            f"'{source}' is not an ONNX model, or was cut short: its first byte was 0x{first:02x}, and none begins so"
        )
    try:
        return onnx.load(source, format="protobuf", load_external_data=False)
    except Exception as error:  # protobuf's implementations differ in what they raise
        text = _one_line(error)
        if "MaxDepth" in text or "nesting" in text:
            raise InputError(
                f"ONNX model '{source}' is nested too deep: protobuf reads {_MOST_LEVELS} messages inside one another, "
                "and each If, Loop or Scan inside another takes 3; export it with fewer"
            ) from error
        raise InputError(f"'{source}' is not an ONNX model, or was cut short: {text}") from error


_MOST_LEVELS = 100
"""protobuf's limit on messages inside one another, which readers of ONNX files leave as it is."""


def _may_begin_with(first: int) -> bool:
    """Whether a model's message may begin with this byte: the number of one of its fields, and how that is written."""
    field = onnx.ModelProto.DESCRIPTOR.fields_by_number.get(first >> 3)
    # Fields beyond 15 take a second byte, and another version of ONNX may have more of them.
    return first > 0x7F or (field is not None and first & 7 == (0 if field.type == field.TYPE_INT64 else 2))


def load_model(path: str | os.PathLike[str]) -> ir.Model:
    """Reads an ONNX file; data in other files stays there until somebody asks for a value.

    Args:
        path: the ``.onnx`` file (protobuf). External data is looked for beside it.

    Raises:
        InputError: as of `read_proto`, `moetrt.node_order.sort_nodes` and
            `moetrt.external_data.check_external_data`; the model does not pass onnx.checker or has another opset than
            those from ``OLDEST_OPSET`` to onnx's newest; or a data file that it names is too short.
        InputTypeError: ``path`` is no path.
    """
    source = existing_file(path, "ONNX model")
    proto = read_proto(source)
    if not proto.ir_version or not proto.HasField("graph") or not proto.opset_import:
        raise InputError(f"'{source}' is not an ONNX model, or was cut short: it has no IR version, graph or opset")
    _check_texts(proto, source)
    if not proto.graph.name:
        # The checker wants a name; no reader does.
        proto.graph.name = "graph"
    _check_opset(proto, source)
    _name_standard_domain(proto, source)
    for node in proto.graph.node:
        if node.op_type in OPERATORS and node.domain in ("", "ai.onnx"):
            # The checker would only say that it knows no such operator.
            raise InputError(f"ONNX model '{source}': node '{node.name}': domain was ''; '{DOMAIN}' is taken")
        if node.op_type == "SimplifiedLayerNormalization" and node.domain == "":
            raise InputError(
                f"ONNX model '{source}': node '{node.name}' is a {node.op_type}, which ONNX Runtime's optimiser writes "
                "for itself alone; a model optimised at its basic level is taken"
            )
    marks = check_external_data(proto, source)
    _check_dtypes(proto, source)
    try:
        sort_nodes(proto)
    except InputError as error:
        raise InputError(f"ONNX model '{source}': {error}") from error
    check_proto(proto, source)
    try:
        with quiet():
            model = ir.from_proto(proto)
    except Exception as error:  # onnx_ir raises whatever its parts raise, with the path to the broken part in the text
        raise InputError(f"ONNX model '{source}' is not well formed: {_one_line(error)}") from error
    folder = Path(os.path.abspath(source.parent))
    for place in _places(model):
        if isinstance(place.tensor, ir.ExternalTensor):
            place.tensor.base_dir = folder
            place.tensor.meta[_MARK] = marks[os.fspath(place.tensor.location)]
            _check_external(source, folder, place.tensor)
    return model


def _check_texts(proto: onnx.ModelProto, source: Path) -> None:
    """Checks that every name and text is UTF-8, as protobuf wants it: the reader gives what is not as bytes."""
    found = _first_bytes(proto)
    if found is not None:
        place, value = found
        raise InputError(f"ONNX model '{source}': {place.lstrip('.')} was {value[:80]!r}; text in UTF-8 is taken")


def _first_bytes(message: Message) -> tuple[str, bytes] | None:
    """The first text of a message that is none, and where it stands."""
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_STRING:
            # Asked of every name of the model: the type of most is seen at once.
            if type(value) is str:
                continue
            for place, text in (("", value),) if type(value) is bytes else ((f"[{i}]", t) for i, t in enumerate(value)):
                if type(text) is bytes:
                    return f".{field.name}{place}", text
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            single = isinstance(value, Message)
            for index, part in enumerate((value,) if single else value):
                if (found := _first_bytes(part)) is not None:
                    return f".{field.name}{'' if single else f'[{index}]'}{found[0]}", found[1]
    return None


def _check_opset(proto: onnx.ModelProto, source: Path) -> None:
    newest = onnx.defs.onnx_opset_version()
    for opset in proto.opset_import:
        if opset.domain in ("", "ai.onnx") and not OLDEST_OPSET <= opset.version <= newest:
            raise InputError(
                f"ONNX model '{source}': its opset was {opset.version}; {OLDEST_OPSET} to {newest} are taken"
            )


def _name_standard_domain(proto: onnx.ModelProto, source: Path) -> None:
    """Spells the standard operators' domain "" where it is "ai.onnx": onnx.checker does not take one for the other."""
    holders: list[Any] = [proto, *proto.functions]
    for holder in holders:
        versions = sorted({opset.version for opset in holder.opset_import if opset.domain in ("", "ai.onnx")})
        if len(versions) > 1:
            both = " and ".join(str(version) for version in versions)
            raise InputError(f"ONNX model '{source}': standard operators are imported as opset {both}; one is taken")
        for opset in holder.opset_import:
            if opset.domain == "ai.onnx":
                opset.domain = ""
    for nodes in (proto.graph.node, *(function.node for function in proto.functions)):
        _name_domain_of(nodes)


def _name_domain_of(nodes: Iterable[onnx.NodeProto]) -> None:
    for node in nodes:
        if node.domain == "ai.onnx":
            node.domain = ""
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                _name_domain_of(inner.node)


def _check_dtypes(proto: onnx.ModelProto, source: Path) -> None:
    """Checks that every value's and weight's dtype is one of ONNX's.

    Raises:
        InputError: one is not.
    """
    graph = proto.graph
    infos = [*graph.input, *graph.output, *graph.value_info]
    dtypes = [(info.name, info.type.tensor_type.elem_type) for info in infos if info.type.HasField("tensor_type")]
    for name, dtype in dtypes + [(tensor.name, tensor.data_type) for tensor in graph.initializer]:
        if dtype not in onnx.TensorProto.DataType.values():
            raise InputError(
                f"ONNX model '{source}': the dtype of '{name}' was {dtype}; one that ONNX numbers is taken"
            )


def data_files(model: ir.Model) -> list[Path]:
    """The files that hold tensors of ``model``, each once, in the order of the model."""
    paths = [Path(place.tensor.path) for place in _places(model) if isinstance(place.tensor, ir.ExternalTensor)]
    return list(dict.fromkeys(paths))


def files_of(model: ir.Model, path: str | os.PathLike[str]) -> list[Named]:
    """``path``, which ``model`` was read from, and its data files, as `moetrt.files.check_distinct` takes them."""
    return [("ONNX model", path), *((f"data file of '{os.fspath(path)}'", file) for file in data_files(model))]


def data_path_of(path: Path) -> Path:
    """Where `save_model` puts the large tensors of the model ``path``."""
    return path.with_name(path.name + ".data")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _check_external(source: Path, folder: Path, tensor: ir.ExternalTensor) -> None:
    location = os.fspath(tensor.location)
    if tensor.length not in (None, 0, tensor.nbytes):
        raise InputError(
            f"ONNX model '{source}': length of '{tensor.name}' in '{location}' was {tensor.length} bytes; "
            f"its shape and dtype make {tensor.nbytes}"
        )
    end = (tensor.offset or 0) + tensor.nbytes
    size = (folder / location).stat().st_size
    if end > size:
        raise InputError(
            f"ONNX model '{source}': data file '{location}' has {size} bytes, but '{tensor.name}' ends at byte {end}; "
            "it was cut short or belongs to another model"
        )


def save_model(
    model: ir.Model,
    path: str | os.PathLike[str],
    *,
    progress: Callable[[str], None] | None = None,
    check: Callable[[onnx.ModelProto], None] | None = None,
) -> Path:
    """Writes ``model`` to ``path`` after checking it; nothing is replaced unless all of it could be written.

    Tensors above ``SMALL_TENSOR_BYTES`` go to one file ``<name of path>.data`` in the same folder, under its relative
    name. Tensors that lie in another data file of that folder already are left there; from other folders their bytes
    are copied file to file, inside the kernel (hard links would save the copy, but onnx and onnx_ir refuse to read
    them). The new data file gets a mark, and every tensor in a data file names that of its own, as of
    `moetrt.external_data`. Afterwards the tensors of ``model`` are the ones on disk, so the model can be used, and
    saved, again, also when ``path`` is where it came from.

    Args:
        model: the model.
        path: the ``.onnx`` file.
        progress: called with a few words now and then while the data file is written.
        check: called with the message that is written, without its external data, before anything is replaced; what it
            raises passes through.

    Returns:
        ``path``.

    Raises:
        InputError: the model does not pass onnx.checker, a data file was replaced since the model was read, the folder
            cannot be written or has too little space for the data file, or as of `moetrt.files.output_file`.
        InputTypeError: ``path`` is no path.
        RuntimeError: as of `proto_of`.
    """
    target = output_file(path)
    data_path = data_path_of(target)
    check_distinct([], [("output file", target), ("data file", data_path)])
    places = [place for place in _places(model) if _belongs_outside(place.tensor)]
    real = Path(os.path.realpath(target))
    if places and real.parent != Path(os.path.realpath(target.parent)):
        # Readers look for data beside the path that they are given; it cannot lie beside both.
        raise InputError(f"output file '{target}' is a link into another folder than its data's; '{real}' is taken")
    kept, moved = _split(places, data_path)
    for path, tensor in {tensor.path: tensor for _, tensor in kept}.items():
        _check_mark(tensor, path)
    marks = {os.fspath(tensor.location): _mark(tensor) for _, tensor in kept}
    try:
        with ExitStack() as stack:
            # The model's file is entered first, so it is renamed last: it never names data that is not there yet.
            temporary = stack.enter_context(write_atomically(target))
            if moved:
                data = stack.enter_context(write_atomically(data_path))
                marks[data_path.name] = _write_data(moved, data, data_path, progress)
            for place, tensor in kept:
                place.put(tensor)
            proto = proto_of(model)
            claim_marks(proto, marks)
            check_proto(proto, target)
            if check is not None:
                check(without_external_data(proto))
            temporary.write_bytes(proto.SerializeToString(deterministic=True))
    except BaseException as error:
        for place in places:
            place.put(place.tensor)
        if isinstance(error, OSError):
            raise InputError(f"'{target}' cannot be written: {error.strerror or error}") from error
        raise
    for place in places:
        if isinstance(place.tensor, ir.ExternalTensor):
            # A mapping of the old file would keep its bytes alive.
            place.tensor.release()
    return target


def _mark(tensor: ir.ExternalTensor) -> str | None:
    """The mark that the data file of ``tensor`` had when it was read; has now, where that was not by `load_model`."""
    mark: str | None = tensor.meta[_MARK] if _MARK in tensor.meta else mark_of(tensor.path)
    return mark


def _check_mark(tensor: ir.ExternalTensor, file: str | int) -> None:
    """Checks that ``file``, the data file of ``tensor``, is the one that was read."""
    if mark_of(file) != _mark(tensor):
        raise InputError(f"data file '{tensor.path}' was replaced while its model was read; expected one that stays")


def _belongs_outside(tensor: ir.TensorProtocol) -> bool:
    if tensor.dtype == ir.DataType.STRING:
        return False
    return isinstance(tensor, ir.ExternalTensor) or tensor.nbytes > SMALL_TENSOR_BYTES


def _split(places: list[_Place], data_path: Path) -> tuple[list[tuple[_Place, ir.ExternalTensor]], list[_Place]]:
    """Tensors that stay in their data file (named from the new folder), and tensors that go to the new data file."""
    folder = data_path.parent.absolute()
    root, own_data = folder.resolve(), data_path.resolve()
    # Once for each file: a model has many tensors, and each look-up asks the file system.
    paths = dict.fromkeys(place.tensor.path for place in places if isinstance(place.tensor, ir.ExternalTensor))
    real = {path: Path(path).resolve() for path in paths}
    kept: list[tuple[_Place, ir.ExternalTensor]] = []
    own: list[tuple[_Place, ir.ExternalTensor]] = []
    moved: list[_Place] = []
    for place in places:
        tensor = place.tensor
        if not isinstance(tensor, ir.ExternalTensor) or root not in real[tensor.path].parents:
            moved.append(place)
            continue
        at = real[tensor.path]
        here = _external(tensor, at.relative_to(root).as_posix(), tensor.offset or 0, folder, _mark(tensor))
        (own if at == own_data else kept).append((place, here))
    if moved:
        # The data file is about to be written anew, so what it holds already moves with the rest.
        moved = [place for place, _ in own] + moved
    else:
        kept += own
    return kept, moved


def _external(
    tensor: ir.TensorProtocol, location: str, offset: int, folder: Path, mark: str | None
) -> ir.ExternalTensor:
    external = ir.ExternalTensor(
        location,
        offset,
        tensor.nbytes,
        tensor.dtype,
        shape=ir.Shape(tensor.shape.numpy()),
        name=tensor.name or "",
        doc_string=tensor.doc_string,
        base_dir=folder,
    )
    external.meta[_MARK] = mark
    return external


@dataclass(frozen=True)
class _Part:
    """A tensor that the new data file gets, and where: two places that hold the same tensor share one."""

    tensor: ir.TensorProtocol
    offset: int


def _write_data(places: list[_Place], temporary: Path, data_path: Path, progress: Callable[[str], None] | None) -> str:
    """Writes the tensors of ``places`` one after another, puts their new places into the model, returns the mark."""
    folder = data_path.parent.absolute()
    parts: dict[object, _Part] = {}
    offsets: list[int] = []
    end = 0
    for place in places:
        tensor = place.tensor
        # Tied weights are one tensor, or one range of a file, under several names.
        key: object = id(tensor)
        if isinstance(tensor, ir.ExternalTensor):
            key = (tensor.path, tensor.offset or 0, tensor.nbytes)
        if key not in parts:
            parts[key] = _Part(tensor, -(-end // _ALIGNMENT) * _ALIGNMENT)
            end = parts[key].offset + tensor.nbytes
        offsets.append(parts[key].offset)
    mark = _mark_of_parts(list(parts.values()))
    for place, offset in zip(places, offsets, strict=True):
        place.put(_external(place.tensor, data_path.name, offset, folder, mark))
    with ExitStack() as stack:
        file = stack.enter_context(temporary.open("wb"))
        external = [part.tensor for part in parts.values() if isinstance(part.tensor, ir.ExternalTensor)]
        # ExternalTensor.tofile would do, but it refuses files with a second hard link, which caches of models have.
        paths = dict.fromkeys(tensor.path for tensor in external)
        sources = {path: stack.enter_context(open(path, "rb")).fileno() for path in paths}
        for path, tensor in {tensor.path: tensor for tensor in external}.items():
            _check_mark(tensor, sources[path])
        total = _check_space(list(parts.values()), sources, file.fileno(), data_path)
        done = 0
        for part in parts.values():
            for written in _written(part, sources, file):
                done += written
                if progress:
                    progress(f"writing weights: {done / 1e9:.1f} of {total / 1e9:.1f} GB")
        file.seek(end)
        file.write(mark.encode())
    return mark


def _mark_of_parts(parts: Sequence[_Part]) -> str:
    sources = [
        (_mark(part.tensor), part.tensor.offset or 0, part.tensor.nbytes, part.offset)
        for part in parts
        if isinstance(part.tensor, ir.ExternalTensor)
    ]
    return new_mark(sources if len(sources) == len(parts) and all(mark for mark, *_ in sources) else ())


def _written(part: _Part, sources: Mapping[str, int], file: BinaryIO) -> Iterator[int]:
    """Writes one tensor as the iterator is consumed, and yields how many bytes were written after each piece."""
    tensor = part.tensor
    if isinstance(tensor, ir.ExternalTensor):
        try:
            yield from copy_range(sources[tensor.path], tensor.offset or 0, tensor.nbytes, file.fileno(), part.offset)
        except InputError as error:
            raise InputError(f"data file '{tensor.path}': {error}") from error
    else:
        file.seek(part.offset)
        yield file.write(tensor.tobytes())


def _check_space(parts: Sequence[_Part], sources: Mapping[str, int], target: int, data_path: Path) -> int:
    """How many bytes ``parts`` are without their holes; refused, before any is written, where the disk lacks them."""
    total = 0
    for part in parts:
        tensor = part.tensor
        if isinstance(tensor, ir.ExternalTensor):
            total += sum(size for _, size in data_ranges(sources[tensor.path], tensor.offset or 0, tensor.nbytes))
        else:
            total += tensor.nbytes
    free = shutil.disk_usage(target).free
    if total > free and not (sources and all(shares_blocks(source, target) for source in sources.values())):
        beside = "; an output in the folder of the data files it was read with needs none" if sources else ""
        raise InputError(f"data file '{data_path}' needs {total} bytes, but its disk has {free} bytes free{beside}")
    return total


def proto_of(model: ir.Model) -> onnx.ModelProto:
    """``model`` as a message.

    Raises:
        RuntimeError: a fault of whoever made ``model``: a part of it cannot be written. The text is the innermost one
            of onnx_ir's chain of errors, each of which has a part of the model in it.
    """
    try:
        return ir.to_proto(model)
    except Exception as error:  # onnx_ir raises whatever its parts raise
        innermost: BaseException = error
        while innermost.__cause__ is not None:
            innermost = innermost.__cause__
        raise RuntimeError(f"the model cannot be written: {type(innermost).__name__}: {innermost}") from error


def without_external_data(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of ``proto`` whose external tensors are inputs of the graph, for tools that would look for their files."""
    lean = onnx.ModelProto()
    lean.CopyFrom(proto)
    inputs = {value.name for value in lean.graph.input}
    for name, tensor in _take_out_external(lean.graph):
        if name not in inputs:
            lean.graph.input.append(onnx.helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
    return lean


_GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


def _take_out_external(graph: onnx.GraphProto) -> list[tuple[str, onnx.TensorProto]]:
    """Removes external initializers and Constant nodes, of inner graphs too, which may read the outer inputs."""
    found: list[tuple[str, onnx.TensorProto]] = []
    for index in reversed(range(len(graph.initializer))):
        tensor = graph.initializer[index]
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            found.append((tensor.name, onnx.TensorProto.FromString(tensor.SerializeToString())))
            del graph.initializer[index]
    for index in reversed(range(len(graph.node))):
        node = graph.node[index]
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs) if attribute.type in _GRAPHS else ():
                found += _take_out_external(inner)
            if node.op_type == "Constant" and attribute.t.data_location == onnx.TensorProto.EXTERNAL:
                found.append((node.output[0], onnx.TensorProto.FromString(attribute.t.SerializeToString())))
        if found and found[-1][0] in node.output:
            del graph.node[index]
    return found


def check_proto(proto: onnx.ModelProto, name: str | os.PathLike[str]) -> None:
    """Runs onnx.checker on ``proto`` without reading external data.

    Raises:
        InputError: the checker's complaint, on one line.
    """
    try:
        onnx.checker.check_model(without_external_data(proto))
    except onnx.checker.ValidationError as error:
        raise InputError(f"ONNX model '{os.fspath(name)}' is not valid: {_one_line(error)}") from error
