"""The report on one model, put together from the JSON files that the commands left.

Data flows one way: `moetrt.report.files` finds the files, this makes one `Report` of them, and `moetrt.report.pages`
writes that as HTML, JSON and Markdown.
"""

import datetime
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx

from moetrt.bench import result
from moetrt.errors import InputError
from moetrt.external_data import check_marks
from moetrt.files import file_sha256
from moetrt.json_files import Field
from moetrt.mapping_report import MAPPED_FORM
from moetrt.onnx_files import read_proto
from moetrt.profiles import ENDS, profile_text
from moetrt.provenance import versions
from moetrt.report.facts import (
    BAD,
    DENSE,
    FINALIZE_ONLY,
    GOOD,
    MAPPED,
    MEASURED,
    MISSING,
    NO_TAIL,
    NOT_MAPPED,
    BenchFacts,
    BenchPoint,
    EngineFacts,
    Layer,
    LengthParity,
    MappingFacts,
    MissingPart,
    ModelFacts,
    OutputParity,
    ParityFacts,
    Picture,
    Provenance,
    Report,
    Site,
    Spread,
    TailParity,
    Timing,
    Verdict,
)
from moetrt.report.files import (
    BENCH,
    COMMANDS,
    ENGINE,
    EXPORT,
    MAPPING,
    PARITY,
    NamedModel,
    ReportFile,
    find_files,
    only_model,
)
from moetrt.report.graph import (
    LayerKey,
    Operand,
    constants,
    externals,
    graph_facts,
    layer_label,
    layer_of,
    layers_of,
    replaced_nodes,
    shape_text,
)


def make_report(folder: str | os.PathLike[str]) -> Report:
    """Puts together what the JSON files in ``folder`` say.

    Raises:
        InputError: the folder holds no such file, one is cut off or of another version, two are of different models,
            the mapped model is another file by now, or there are two mapping reports.
        InputTypeError: ``folder`` is no path.
    """
    files = find_files(folder)
    place = Path(folder)
    named = only_model(files)
    graph = read_proto(named.path) if named is not None and named.path.is_file() else None
    if named is not None and graph is not None:
        check_marks(graph, named.path)
    of = {kind: [file for file in files if file.kind == kind] for kind in COMMANDS}
    if len(of[MAPPING]) > 1:
        raise InputError(
            f"'{of[MAPPING][0].path}' and '{of[MAPPING][1].path}' are both mapping reports; a report is of one mapping"
        )
    of[EXPORT] = [file for file in of[EXPORT] if _was_mapped(file, of[MAPPING])]
    mapping = next((_mapping(file, graph) for file in of[MAPPING]), None)
    parity = tuple(map(_parity, of[PARITY]))
    benchmarks = tuple(map(_bench, of[BENCH]))
    engines = tuple(sorted(map(_engine, of[ENGINE]), key=lambda engine: not engine.plugin_library))
    model = None
    if named is not None:
        sources = [*(facts.source for facts in parity), *(file.content["source"].of(str) for file in of[EXPORT])]
        source = next(iter(sources), None)
        model = _model(named, place, graph, mapping, of[MAPPING], source)
    return Report(
        title=model.source or model.file if model is not None else str(folder),
        created=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        folder=str(folder),
        versions=versions("jinja2"),
        verdicts=(
            _mapping_verdict(mapping),
            _parity_verdict(parity),
            _engine_verdict(engines),
            _bench_verdict(benchmarks),
        ),
        model=model,
        mapping=mapping,
        parity=parity,
        benchmarks=benchmarks,
        engines=engines,
        missing=_missing(place, named, of),
        provenance=tuple(_provenance(file) for kind in of for file in of[kind]),
    )


def _was_mapped(export: ReportFile, mappings: Sequence[ReportFile]) -> bool:
    """Whether the mapped model was made from this export, as far as a mapping report tells.

    Raises:
        InputError: the file was exported anew and not mapped since.
    """
    exported = export.unmapped
    for mapping in mappings:
        mapped = mapping.unmapped
        if exported is None or mapped is None or mapped.path != exported.path:
            return False
        if mapped.sha256 != exported.sha256:
            raise InputError(
                f"'{exported.path}' was exported anew after '{mapping.path}' was written: its SHA-256 was "
                f"{mapped.sha256[:12]}..., '{export.path}' has {exported.sha256[:12]}...; map it again"
            )
    return True


# ------------------------------------------------------------------------------------------------------------- mapping


def _mapping(file: ReportFile, graph: onnx.ModelProto | None) -> MappingFacts:
    content = file.content
    sites = [_site(entry) for entry in content["sites"].entries()]
    found, expected = content["found"].count(), content["expected"].or_none(int)
    mapped = sum(site.state == MAPPED for site in sites)
    content["found"].agree(len(sites), "its sites")
    content["mapped"].agree(mapped, "its sites")
    complete = mapped == found == (found if expected is None else expected) and (found > 0 or expected == 0)
    content["complete"].agree(complete, "its sites and what was expected")
    operators = [operator for operator in dict.fromkeys(site.operator for site in sites) if operator]
    common = {operator: _common(sites, operator) for operator in operators}
    common_inputs = {}
    for operator in operators:
        told = {site.told_inputs for site in sites if site.operator == operator}
        if len(told) == 1:
            common_inputs[operator] = told.pop()
    sites = [
        replace(site, own_attributes=_without(site.attributes, common.get(site.operator or "", {}))) for site in sites
    ]
    layers, named = _layers(sites, graph, complete=expected == found)
    picture, no_picture = _picture(file, sites, graph)
    return MappingFacts(
        file=file.path.name,
        found=found,
        expected=expected,
        mapped=mapped,
        complete=complete,
        notes=_texts(content["notes"]),
        sites=tuple(sites),
        common=common,
        common_inputs=common_inputs,
        layers=layers,
        layers_named=named,
        picture=picture,
        no_picture=no_picture,
    )


def _site(entry: Field) -> Site:
    inputs, outputs = _operands(entry["inputs"]), _operands(entry["outputs"])
    matched, operator, name = entry["matched"].of(bool), entry["operator"].or_none(str), entry["name"].of(str)
    if matched and operator is None:
        entry["operator"].take("the operator of a tail that is matched")
    return Site(
        name=name,
        layer=layer_label(name),
        state=MAPPED if matched else FINALIZE_ONLY if operator else NOT_MAPPED,
        form=entry["form"].of(str),
        operator=operator,
        dtype=next((operand.dtype for operand in inputs if operand.name == "gemm2_permuted"), "?"),
        reason=entry["reason"].or_none(str),
        attributes={name: value.of(float) for name, value in entry["attributes"].items().items()},
        own_attributes={},
        inputs=inputs,
        outputs=outputs,
    )


def _operands(entries: Field) -> tuple[Operand, ...]:
    return tuple(
        Operand(
            name,
            entry["value"].or_none(str) or "",
            entry["dtype"].or_none(str) or "?",
            shape_text(None if entry["shape"].value is None else map(_dim, entry["shape"].entries())),
        )
        for name, entry in entries.items().items()
    )


def _dim(entry: Field) -> int | str | None:
    return entry.or_none(str) if isinstance(entry.value, str | None) else entry.count()


def _texts(entries: Field) -> tuple[str, ...]:
    return tuple(entry.of(str) for entry in entries.entries())


def _common(sites: Sequence[Site], operator: str) -> dict[str, float]:
    """The attributes that all tails of an operator have alike."""
    of = [site.attributes for site in sites if site.operator == operator]
    return {name: value for name, value in of[0].items() if all(other.get(name) == value for other in of)}


def _without(attributes: Mapping[str, float], common: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in attributes.items() if name not in common}


def _layers(sites: Sequence[Site], graph: onnx.ModelProto | None, *, complete: bool) -> tuple[tuple[Layer, ...], bool]:
    keys = layers_of(graph) if graph is not None else []
    by_key: dict[LayerKey, list[Site]] = {}
    rest: list[Site] = []
    for site in sites:
        key = layer_of(site.name)
        if key is None or not keys:
            rest.append(site)
        else:
            by_key.setdefault(key, []).append(site)
    stacks = list(dict.fromkeys(stack for stack, _ in [*keys, *by_key]))
    cells = []
    for key in sorted({*keys, *by_key}, key=lambda key: (stacks.index(key[0]), key[1])):
        label = str(key[1]) if len(stacks) == 1 else f"{key[0]}.{key[1]}"
        here = by_key.get(key, [])
        if not here:
            state = DENSE if complete else NO_TAIL
            cells.append(Layer(label, state, f"Layer {label}: {state}"))
        for site in here:
            cells.append(Layer(label, site.state, f"Layer {label}: {_told(site)}"))
    cells += [Layer(str(number), site.state, f"{site.name}: {_told(site)}") for number, site in enumerate(rest, 1)]
    return tuple(cells), bool(keys)


def _told(site: Site) -> str:
    operator = f", {site.operator}" if site.operator else ""
    return f"{site.state}{operator}{f' ({site.reason})' if site.reason else ''}"


def _picture(
    file: ReportFile, sites: Sequence[Site], graph: onnx.ModelProto | None
) -> tuple[Picture | None, str | None]:
    new = [site for site in sites if site.form != MAPPED_FORM]
    site = next((site for state in (MAPPED, FINALIZE_ONLY) for site in new if site.state == state), None)
    source = _source_model(file)
    if site is None:
        mapped = any(site.operator for site in sites)
        return None, (
            "The tails were plugin nodes before mapping, as the contract exports them, so there is no picture of one."
            if mapped
            else "No tail was mapped, so there is no picture of one."
        )
    if graph is None or source is None:
        return None, "The mapped file is not there any more, so there is no picture of a tail."
    name, sha256 = source
    path = Path(os.path.normpath(file.path.parent / name))
    if not path.is_file():
        return None, f"The file before mapping, {path.name}, is not there any more, so there is no picture of a tail."
    if file_sha256(path) != sha256:
        return None, f"The file {path.name} is another one than was mapped, so there is no picture of a tail."
    before = read_proto(path)
    nodes = replaced_nodes(before, graph, [operand.value for operand in site.outputs])
    if not nodes:
        return None, "The file before mapping spells its tails within functions, so there is no picture of one."
    return Picture(site, nodes, constants(before, externals(nodes))), None


def _source_model(file: ReportFile) -> tuple[str, str] | None:
    """The path and the SHA-256 sum of the file before mapping."""
    source = file.content["source_model"]
    return None if source.value is None else (source["file"].file(), source["sha256"].sha256())


def _model(
    named: NamedModel,
    place: Path,
    graph: onnx.ModelProto | None,
    mapping: MappingFacts | None,
    files: Sequence[ReportFile],
    source: str | None,
) -> ModelFacts:
    before = _source_model(files[0]) if files else None
    return ModelFacts(
        file=os.path.relpath(named.path, place),
        sha256=named.sha256,
        source=source,
        source_file=before[0] if before else None,
        source_sha256=before[1] if before else None,
        # A router's site has no rows.
        dtypes=tuple(dict.fromkeys(site.dtype for site in mapping.sites if site.dtype != "?")) if mapping else (),
        graph=graph_facts(graph, named.path) if graph is not None else None,
    )


# -------------------------------------------------------------------------------------------------------------- parity


def _parity(file: ReportFile) -> ParityFacts:
    content = file.content
    outputs = tuple(_output(entry) for entry in content["outputs"].entries())
    tails = tuple(_tail(entry) for entry in content["tails"].entries())
    lengths = tuple(_length(entry) for entry in content["lengths"].entries())
    same = all(tail.passed for tail in tails) and all(length.passed for length in lengths)
    passed = bool(outputs) and all(output.passed for output in outputs) and same
    differs = any(_off(output) for output in outputs) or not same
    undecided = any(output.undecided for output in outputs) and not differs
    content["passed"].agree(passed, "its outputs, tails and lengths")
    content["undecided"].agree(undecided, "its outputs, tails and lengths")
    return ParityFacts(
        file=file.path.name,
        source=content["source"].of(str),
        how=content["how"].of(str),
        seed=content["seed"].or_none(int),
        inputs=_shapes(content["inputs"]),
        passed=passed,
        undecided=undecided,
        cause=content["cause"].or_none(str),
        notes=_texts(content["notes"]),
        outputs=outputs,
        tails=tails,
        lengths=lengths,
        ties=_ties(content["ties"]),
    )


def _length(entry: Field) -> LengthParity:
    outputs = tuple(_output(output) for output in entry["outputs"].entries())
    failure, lost, cause = (entry[name].or_none(str) for name in ("failure", "not_measured", "cause"))
    passed = failure is None and not any(map(_off, outputs))
    entry["passed"].agree(passed, "its outputs and failure")
    wrong = next((f"{output.label}: {output.reason}" for output in outputs if _off(output)), None)
    return LengthParity(
        sizes=", ".join(f"{name}={size.count()}" for name, size in entry["sizes"].items().items()),
        passed=passed,
        measured=bool(outputs) and not all(output.undecided for output in outputs),
        outputs=outputs,
        text=cause or failure or wrong or lost or "",
        ties=_ties(entry["ties"]),
    )


def _ties(field: Field) -> int:
    return sum(entry["tokens"].count() for entry in field.entries())


def _off(output: OutputParity) -> bool:
    """Whether an output differs: one of which nothing can be compared does not."""
    return not output.passed and not output.undecided


def _tail(entry: Field) -> TailParity:
    name = entry["name"].of(str)
    errors = {output: error.or_none(float) for output, error in entry["error"].items().items()}
    passed, tolerance = entry["passed"].of(bool), entry["tolerance"].of(float)
    if passed and not all(_within(error, tolerance) for error in errors.values()):
        entry["passed"].agree(False, "its error and tolerance")
    return TailParity(
        name=name,
        label=layer_label(name),
        operator=entry["operator"].of(str),
        passed=passed,
        errors=errors,
        tolerance=tolerance,
        cause=entry["cause"].or_none(str),
    )


def _within(error: float | None, tolerance: float | None) -> bool:
    return error is not None and tolerance is not None and error <= tolerance


def _measured_within(output: OutputParity) -> bool:
    return _within(output.worst, output.worst_tolerance) and _within(output.rms, output.rms_tolerance)


def _output(entry: Field) -> OutputParity:
    name, tail, shape = entry["name"].of(str), entry["tail"].or_none(str), entry["shape"].sizes()
    unfused, worst, tolerance = entry["unfused"], entry["worst_element"], entry["tolerance"]
    has_unfused = unfused.value is not None
    index = [place.count() for place in worst["index"].entries()]
    output = name.removeprefix(tail).lstrip("./") if tail else name
    found = OutputParity(
        name=name,
        tail=tail,
        output=output,
        label=f"{layer_label(tail)} {output}" if tail else output,
        runner=entry["runner"].of(str),
        dtype=entry["dtype"].of(str),
        shape=shape_text(shape),
        passed=entry["passed"].of(bool),
        undecided=entry["undecided"].of(bool),
        worst=entry["worst"].or_none(float),
        rms=entry["rms"].or_none(float),
        pytorch_worst=entry["pytorch"]["worst"].or_none(float),
        pytorch_rms=entry["pytorch"]["rms"].or_none(float),
        has_unfused=has_unfused,
        unfused_worst=unfused["worst"].or_none(float) if has_unfused else None,
        unfused_rms=unfused["rms"].or_none(float) if has_unfused else None,
        worst_tolerance=tolerance["worst"].or_none(float),
        rms_tolerance=tolerance["rms"].or_none(float),
        ratio=entry["ratio"].or_none(float),
        index=f"[{', '.join(map(str, index))}]" if index else "",
        value=worst["runner"].or_none(float),
        pytorch=worst["pytorch"].or_none(float),
        float64=worst["float64"].or_none(float),
        tokens=entry["tokens"].or_none(int),
        argmax_changed=entry["argmax_changed"].or_none(int),
        nan=entry["nan"].count(),
        inf=entry["inf"].count(),
        pytorch_nan=entry["pytorch_nan"].count(),
        pytorch_inf=entry["pytorch_inf"].count(),
        reason=entry["reason"].of(str),
    )
    if (found.tokens is None) != (found.argmax_changed is None):
        entry["argmax_changed"].take("a whole number where there are tokens, else null")
    # An output without an element has no error and passes.
    if found.passed and not _measured_within(found) and 0 not in shape:
        entry["passed"].agree(False, "its errors and tolerance")
    if found.passed and found.undecided:
        entry["undecided"].agree(False, "that it passed")
    return found


def _shapes(shapes: Field) -> str:
    return ", ".join(
        f"{name} {'x'.join(map(str, shape.sizes())) or 'scalar'}" for name, shape in shapes.items().items()
    )


# --------------------------------------------------------------------------------------------------------- benchmarks


def _bench(file: ReportFile) -> BenchFacts:
    content = file.content
    repeats, bandwidth = content["repeats"].count(), content["bandwidth"]["bytes_per_second"].or_none(float)
    return BenchFacts(
        file=file.path.name,
        tool=content["tool"].of(str),
        device=content["device"].or_none(str),
        tensorrt=_versions(content).get("TensorRT"),
        repeats=repeats,
        statistics=content["statistics"].of(str),
        bandwidth=bandwidth,
        bandwidth_source=content["bandwidth"]["source"].of(str),
        points=tuple(_point(entry, repeats, bandwidth) for entry in content["points"].entries()),
        notes=_texts(content["notes"]),
    )


def _point(entry: Field, repeats: int, bandwidth: float | None) -> BenchPoint:
    share = entry["share_in_tails"]
    end_to_end, _ = _timing(entry["end_to_end"], repeats)
    return BenchPoint(
        shapes=_shapes(entry["shapes"]),
        end_to_end=end_to_end,
        all_tails=_timing_of_tails(entry["all_tails"], repeats, bandwidth),
        tails=tuple(_timing_of_tails(tail, repeats, bandwidth) for tail in entry["tails"].entries()),
        plugin_share=_told_spread(_range(share["plugin"], repeats)),
        native_share=None if share["native"].value is None else _told_spread(_range(share["native"], repeats)),
    )


def _timing(entry: Field, repeats: int) -> tuple[Timing, float]:
    """The times without a floor; and the plugin's, with all layers that are its own or shared, milliseconds."""
    plugin = _range(entry["plugin_ms"], repeats)
    if min(plugin.low.runs) <= 0:
        entry["plugin_ms"].take("a time above 0 in each repeat")
    native = ratio = None
    if entry["native_ms"].value is None:
        entry["ratio"].agree(None, "the native times that were not found")
    else:
        native, ratio = _range(entry["native_ms"], repeats), _range(entry["ratio"], repeats)
        for end, over, under in (("low", native.low, plugin.high), ("high", native.high, plugin.low)):
            for run, above, below in zip(entry["ratio"][end]["runs"].entries(), over.runs, under.runs, strict=True):
                run.agree(above / below, "native_ms and plugin_ms")
    timing = Timing(
        name=entry["name"].of(str),
        plugin=_told_spread(plugin),
        native=None if native is None else _told_spread(native),
        ratio=None if ratio is None else _told_spread(ratio),
        floor_ms=None,
        floor_share=None,
    )
    return timing, plugin.high.median


def _timing_of_tails(entry: Field, repeats: int, bandwidth: float | None) -> Timing:
    timing, plugin_ms = _timing(entry, repeats)
    size = entry["floor"]["bytes"].or_none(int)
    floor_ms = None if size is None or bandwidth is None else size / bandwidth * 1e3
    entry["floor"]["ms"].agree(floor_ms, "its bytes and the bandwidth")
    if floor_ms is None:
        return timing
    entry["floor"]["of_plugin_time"].agree(floor_ms / plugin_ms, "the floor and plugin_ms")
    return replace(timing, floor_ms=floor_ms, floor_share=floor_ms / plugin_ms)


def _range(entry: Field, repeats: int) -> result.Range:
    bounds = []
    for end in ("low", "high"):
        bound = result.Spread(tuple(run.of(float) for run in entry[end]["runs"].entries()))
        if not bound.runs or len(bound.runs) != repeats:
            entry[end]["runs"].take(f"a figure of each of {repeats} repeats")
        entry[end]["median"].agree(bound.median, "its runs")
        entry[end]["iqr"].agree(bound.iqr, "its runs")
        bounds.append(bound)
    found = result.Range(*bounds)
    entry["exact"].agree(found.exact, "its bounds")
    return found


def _told_spread(found: result.Range) -> Spread:
    return Spread(found.low.median, found.low.iqr, None if found.exact else found.high.median)


# ------------------------------------------------------------------------------------------------------------- engines


def _engine(file: ReportFile) -> EngineFacts:
    content = file.content
    engine, built = file.path.parent / content["engine"].file(), content["engine_sha256"].sha256()
    if engine.is_file() and (found := file_sha256(engine)) != built:
        raise InputError(
            f"'{engine}' is another file than when '{file.path}' was written: its SHA-256 is {found[:12]}..., "
            f"it was {built[:12]}...; build it again"
        )
    layers, plugin_layers = content["layer_count"].count(), _texts(content["plugin_layers"])
    library, sha256 = content["plugin_library"], content["plugin_library_sha256"]
    if len(plugin_layers) > layers:
        content["layer_count"].take(f"a number that holds the {len(plugin_layers)} of plugin_layers")
    if library.value is None:
        if plugin_layers:
            library.take(f"the name of the library that serves the {len(plugin_layers)} of plugin_layers")
        sha256.agree(None, "plugin_library, which is null,")
    return EngineFacts(
        file=file.path.name,
        engine=content["engine"].file(),
        sha256=built,
        backend=content["backend"].of(str),
        version=content["version"].of(str),
        targets=_texts(content["targets"]),
        layers=layers,
        plugin_layers=plugin_layers,
        plugin_library=None if library.value is None else library.file(),
        plugin_library_sha256=None if library.value is None else sha256.sha256(),
        profile="; ".join(f"{name} {_profile(entry)}" for name, entry in content["profile"].items().items()),
        warnings=_texts(content["warnings"]),
    )


def _profile(entry: Field) -> str:
    low, best, high = bounds = tuple(entry[end].sizes() for end in ENDS)
    ranks = {len(shape) for shape in bounds}
    if len(ranks) > 1 or not all(a <= b <= c for a, b, c in zip(low, best, high, strict=True)):
        entry.take("min, opt and max of one rank, none above the next")
    return profile_text((low, best, high))


def _provenance(file: ReportFile) -> Provenance:
    return Provenance(
        file=file.path.name,
        format=file.content["format"].of(str),
        sha256=file_sha256(file.path),
        command=file.content["command"].or_none(str),
        versions=_versions(file.content),
    )


def _versions(content: Field) -> dict[str, str]:
    return {name: version.of(str) for name, version in content["versions"].items().items()}


# ------------------------------------------------------------------------------------------------------------ verdicts


def _mapping_verdict(mapping: MappingFacts | None) -> Verdict:
    if mapping is None:
        return Verdict("Mapping", MISSING, "No mapping report.")
    expected = "" if mapping.expected is None else f" ({mapping.expected} expected)"
    text = f"{mapping.mapped} of {_count(mapping.found, 'tail')} mapped to one plugin node each{expected}."
    return Verdict("Mapping", GOOD if mapping.complete else BAD, text)


def _parity_verdict(parity: Sequence[ParityFacts]) -> Verdict:
    outputs = [output for facts in parity for output in facts.outputs]
    if not parity:
        return Verdict("Parity", MISSING, "Not compared.")
    good = all(facts.passed for facts in parity)
    off = [output for output in outputs if _off(output)]
    undecided = [output for output in outputs if output.undecided]
    wrong = [tail for facts in parity for tail in facts.tails if not tail.passed]
    against = f"({', '.join(dict.fromkeys(output.runner for output in outputs))}, against float64)"
    total = _count(len(outputs), "output")
    told = []
    beyond = [output for output in off if not _measured_within(output)]
    if beyond:
        told.append(f"{len(beyond)} of {total} out of tolerance {against}")
    if odd := [output for output in off if _measured_within(output)]:
        told.append(f"{len(odd)} of {total} within tolerance and still not passed: {odd[0].reason}")
    if undecided:
        told.append(f"{len(undecided)} of {total} could not be compared: PyTorch gives nothing finite there")
    if not told:
        told.append(f"{total} within tolerance {against}" if outputs else "No output was compared")
    lost = {o.name: o.pytorch_nan + o.pytorch_inf for o in outputs if not o.tail and not o.undecided}
    told += [
        f"{_count(n, 'element')} of {name} could not be measured: NaN or Inf in PyTorch too"
        for name, n in lost.items()
        if n
    ]
    lengths = [length for facts in parity for length in facts.lengths]
    if odd_lengths := [length.sizes for length in lengths if not length.passed]:
        told.append(f"Out of tolerance at {'; '.join(odd_lengths)}")
    if same := [length.sizes for length in lengths if length.passed and length.measured]:
        told.append(f"Within tolerance at {'; '.join(same)} too")
    if unknown := [length.sizes for length in lengths if length.passed and not length.measured]:
        told.append(f"Not measured at {'; '.join(unknown)}")
    if ties := sum(facts.ties + sum(length.ties for length in facts.lengths) for facts in parity):
        told.append(f"{_count(ties, 'tie')} of experts, at which both sides chose alike")
    if wrong:
        told.append(f"{_count(len(wrong), 'tail')} other than what was replaced, {wrong[0].label} first")
    return Verdict("Parity", GOOD if good else BAD, f"{'. '.join(told)}.")


def _engine_verdict(engines: Sequence[EngineFacts]) -> Verdict:
    if not engines:
        return Verdict("Engines", MISSING, "None built.")
    told = [
        f"{engine.engine} has {_count(len(engine.plugin_layers), 'plugin layer')}"
        if engine.plugin_library
        else f"{engine.engine} was built without the plugin"
        for engine in engines
    ]
    good = all(engine.plugin_layers or not engine.plugin_library for engine in engines)
    return Verdict("Engines", GOOD if good else BAD, "; ".join(told) + ".")


def _bench_verdict(benchmarks: Sequence[BenchFacts]) -> Verdict:
    points = [point for facts in benchmarks for point in facts.points]
    if not points:
        return Verdict("Benchmarks", MISSING, "Not run.")
    whole = _times([point.end_to_end.ratio for point in points])
    tails = _times([point.all_tails.ratio for point in points])
    in_tails = "; in the tails they were not found" if tails is None else f" and {tails} in the tails"
    return Verdict(
        "Benchmarks",
        MEASURED,
        f"Native layers take {whole} the plugin's time end to end{in_tails}, over "
        f"{_count(len(points), 'profile point')}.",
    )


def _times(found: Sequence[Spread | None]) -> str | None:
    ratios = [ratio for ratio in found if ratio is not None]
    if not ratios:
        return None
    low = min(ratio.median for ratio in ratios)
    high = max(ratio.median if ratio.high is None else ratio.high for ratio in ratios)
    return f"{low:.2f} times" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f} times"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _missing(place: Path, named: NamedModel | None, of: Mapping[str, Sequence[ReportFile]]) -> tuple[MissingPart, ...]:
    model = str(place / os.path.relpath(named.path, place)) if named is not None else "MAPPED.onnx"
    folder = str(place)
    parts = {
        MAPPING: ("mapping report", ["moetrt", "map", "MODEL.onnx", "-o", model, "--report", f"{folder}/mapping.json"]),
        PARITY: ("comparison", ["moetrt", "compare", model, "--against", "SOURCE", "--json", f"{folder}/parity.json"]),
        ENGINE: ("engine", ["moetrt", "build", model, "-o", f"{folder}/model.engine"]),
        BENCH: ("benchmark", ["moetrt", "bench", model, "-o", folder]),
    }
    return tuple(MissingPart(what, shlex.join(words)) for kind, (what, words) in parts.items() if not of[kind])
