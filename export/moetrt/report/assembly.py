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
from typing import Any

import onnx

from moetrt.errors import InputError
from moetrt.files import file_sha256
from moetrt.mapping_report import MAPPED_FORM
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
from moetrt.report.files import BENCH, ENGINE, MAPPING, PARITY, NamedModel, ReportFile, find_files, only_model
from moetrt.report.graph import (
    LayerKey,
    Operand,
    constants,
    externals,
    graph_facts,
    layer_label,
    layer_of,
    layers_of,
    read_graph,
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
    graph = read_graph(named.path) if named is not None and named.path.is_file() else None
    of = {kind: [file for file in files if file.kind == kind] for kind in (MAPPING, PARITY, ENGINE, BENCH)}
    if len(of[MAPPING]) > 1:
        raise InputError(
            f"'{of[MAPPING][0].path}' and '{of[MAPPING][1].path}' are both mapping reports; a report is of one mapping"
        )
    mapping = next((file.built(lambda file: _mapping(file, graph)) for file in of[MAPPING]), None)
    parity = tuple(file.built(_parity) for file in of[PARITY])
    benchmarks = tuple(file.built(_bench) for file in of[BENCH])
    engines = tuple(sorted((file.built(_engine) for file in of[ENGINE]), key=lambda engine: not engine.plugin_library))
    model = None
    if named is not None:
        source = next((facts.source for facts in parity), None)
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
        provenance=tuple(file.built(_provenance) for kind in of for file in of[kind]),
    )


# ------------------------------------------------------------------------------------------------------------- mapping


def _mapping(file: ReportFile, graph: onnx.ModelProto | None) -> MappingFacts:
    content = file.content
    sites = [_site(entry) for entry in content["sites"]]
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
    layers, named = _layers(sites, graph, complete=content["expected"] == content["found"])
    picture, no_picture = _picture(file, sites, graph)
    return MappingFacts(
        file=file.path.name,
        found=content["found"],
        expected=content["expected"],
        mapped=content["mapped"],
        complete=content["complete"],
        notes=tuple(content["notes"]),
        sites=tuple(sites),
        common=common,
        common_inputs=common_inputs,
        layers=layers,
        layers_named=named,
        picture=picture,
        no_picture=no_picture,
    )


def _site(entry: Mapping[str, Any]) -> Site:
    inputs, outputs = _operands(entry["inputs"]), _operands(entry["outputs"])
    state = MAPPED if entry["matched"] else FINALIZE_ONLY if entry["operator"] else NOT_MAPPED
    return Site(
        name=entry["name"],
        layer=layer_label(entry["name"]),
        state=state,
        form=entry["form"],
        operator=entry["operator"],
        dtype=next((operand.dtype for operand in inputs if operand.name == "gemm2_permuted"), "?"),
        reason=entry["reason"],
        attributes=dict(entry["attributes"]),
        own_attributes={},
        inputs=inputs,
        outputs=outputs,
    )


def _operands(entries: Mapping[str, Mapping[str, Any]]) -> tuple[Operand, ...]:
    return tuple(
        Operand(name, entry["value"] or "", entry["dtype"] or "?", shape_text(entry["shape"]))
        for name, entry in entries.items()
    )


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
    source = file.content["source_model"]
    if site is None:
        mapped = any(site.operator for site in sites)
        return None, (
            "The tails were plugin nodes before mapping, as the contract exports them, so there is no picture of one."
            if mapped
            else "No tail was mapped, so there is no picture of one."
        )
    if graph is None or source is None:
        return None, "The mapped file is not there any more, so there is no picture of a tail."
    path = Path(os.path.normpath(file.path.parent / source["file"]))
    if not path.is_file():
        return None, f"The file before mapping, {path.name}, is not there any more, so there is no picture of a tail."
    if file_sha256(path) != source["sha256"]:
        return None, f"The file {path.name} is another one than was mapped, so there is no picture of a tail."
    before = read_graph(path)
    nodes = replaced_nodes(before, graph, [operand.value for operand in site.outputs])
    if not nodes:
        return None, "The file before mapping spells its tails within functions, so there is no picture of one."
    return Picture(site, nodes, constants(before, externals(nodes))), None


def _model(
    named: NamedModel,
    place: Path,
    graph: onnx.ModelProto | None,
    mapping: MappingFacts | None,
    files: Sequence[ReportFile],
    source: str | None,
) -> ModelFacts:
    before = files[0].content["source_model"] if files else None
    return ModelFacts(
        file=os.path.relpath(named.path, place),
        sha256=named.sha256,
        source=source,
        source_file=before["file"] if before else None,
        source_sha256=before["sha256"] if before else None,
        # A router's site has no rows.
        dtypes=tuple(dict.fromkeys(site.dtype for site in mapping.sites if site.dtype != "?")) if mapping else (),
        graph=graph_facts(graph, named.path) if graph is not None else None,
    )


# -------------------------------------------------------------------------------------------------------------- parity


def _parity(file: ReportFile) -> ParityFacts:
    content = file.content
    return ParityFacts(
        file=file.path.name,
        source=content["source"],
        how=content["how"],
        seed=content["seed"],
        inputs=_shapes(content["inputs"]),
        passed=content["passed"],
        undecided=content["undecided"],
        cause=content["cause"],
        notes=tuple(content["notes"]),
        outputs=tuple(_output(entry) for entry in content["outputs"]),
        tails=tuple(
            TailParity(
                name=tail["name"],
                label=layer_label(tail["name"]),
                operator=tail["operator"],
                passed=tail["passed"],
                errors=dict(tail["error"]),
                tolerance=tail["tolerance"],
                cause=tail["cause"],
            )
            for tail in content["tails"]
        ),
    )


def _output(entry: Mapping[str, Any]) -> OutputParity:
    tail, unfused, worst = entry["tail"], entry["unfused"], entry["worst_element"]
    name = entry["name"]
    output = name.removeprefix(tail).lstrip("./") if tail else name
    return OutputParity(
        name=name,
        tail=tail,
        output=output,
        label=f"{layer_label(tail)} {output}" if tail else output,
        runner=entry["runner"],
        dtype=entry["dtype"],
        shape=shape_text(entry["shape"]),
        passed=entry["passed"],
        undecided=entry["undecided"],
        worst=entry["worst"],
        rms=entry["rms"],
        pytorch_worst=entry["pytorch"]["worst"],
        pytorch_rms=entry["pytorch"]["rms"],
        has_unfused=unfused is not None,
        unfused_worst=unfused["worst"] if unfused else None,
        unfused_rms=unfused["rms"] if unfused else None,
        worst_tolerance=entry["tolerance"]["worst"],
        rms_tolerance=entry["tolerance"]["rms"],
        ratio=entry["ratio"],
        index=f"[{', '.join(map(str, worst['index']))}]" if worst["index"] else "",
        value=worst["runner"],
        pytorch=worst["pytorch"],
        float64=worst["float64"],
        tokens=entry["tokens"],
        argmax_changed=entry["argmax_changed"],
        nan=entry["nan"],
        inf=entry["inf"],
        pytorch_nan=entry["pytorch_nan"],
        pytorch_inf=entry["pytorch_inf"],
        reason=entry["reason"],
    )


def _shapes(shapes: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{name} {'x'.join(map(str, shape)) or 'scalar'}" for name, shape in shapes.items())


# --------------------------------------------------------------------------------------------------------- benchmarks


def _bench(file: ReportFile) -> BenchFacts:
    content = file.content
    return BenchFacts(
        file=file.path.name,
        tool=content["tool"],
        device=content["device"],
        tensorrt=content["versions"].get("TensorRT"),
        repeats=content["repeats"],
        statistics=content["statistics"],
        bandwidth=content["bandwidth"]["bytes_per_second"],
        bandwidth_source=content["bandwidth"]["source"],
        points=tuple(
            BenchPoint(
                shapes=_shapes(point["shapes"]),
                end_to_end=_timing(point["end_to_end"]),
                all_tails=_timing(point["all_tails"]),
                tails=tuple(_timing(tail) for tail in point["tails"]),
                plugin_share=_spread(point["share_in_tails"]["plugin"]),
                native_share=_spread_or_none(point["share_in_tails"]["native"]),
            )
            for point in content["points"]
        ),
        notes=tuple(content["notes"]),
    )


def _timing(entry: Mapping[str, Any]) -> Timing:
    floor = entry.get("floor") or {}
    return Timing(
        name=entry["name"],
        plugin=_spread(entry["plugin_ms"]),
        native=_spread_or_none(entry["native_ms"]),
        ratio=_spread_or_none(entry["ratio"]),
        floor_ms=floor.get("ms"),
        floor_share=floor.get("of_plugin_time"),
    )


def _spread_or_none(entry: Mapping[str, Any] | None) -> Spread | None:
    return None if entry is None else _spread(entry)


def _spread(entry: Mapping[str, Any]) -> Spread:
    low, high = entry["low"], entry["high"]
    return Spread(low["median"], low["iqr"], None if entry["exact"] else high["median"])


# ------------------------------------------------------------------------------------------------------------- engines


def _engine(file: ReportFile) -> EngineFacts:
    content = file.content
    return EngineFacts(
        file=file.path.name,
        engine=content["engine"],
        sha256=content["engine_sha256"],
        backend=content["backend"],
        version=content["version"],
        targets=tuple(content["targets"]),
        layers=content["layer_count"],
        plugin_layers=tuple(content["plugin_layers"]),
        plugin_library=content["plugin_library"],
        plugin_library_sha256=content["plugin_library_sha256"],
        profile="; ".join(
            f"{name} {' / '.join('x'.join(map(str, bounds[which])) for which in ('min', 'opt', 'max'))}"
            for name, bounds in content["profile"].items()
        ),
        warnings=tuple(content["warnings"]),
    )


def _provenance(file: ReportFile) -> Provenance:
    command = file.content["command"]
    return Provenance(
        file=file.path.name,
        format=file.content["format"],
        sha256=file_sha256(file.path),
        command=None if command is None else str(command),
        versions={str(name): str(version) for name, version in file.content["versions"].items()},
    )


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
    failed = [output for output in outputs if not output.passed]
    good = all(facts.passed for facts in parity)
    runners = ", ".join(dict.fromkeys(output.runner for output in outputs))
    if good:
        text = f"{_count(len(outputs), 'output')} within tolerance ({runners}, against float64)."
        lost = {o.name: o.pytorch_nan + o.pytorch_inf for o in outputs if not o.tail}
        for name, count in lost.items():
            if count:
                text += f" Not measured: {_count(count, 'element')} of {name}, NaN or Inf in PyTorch too."
    elif all(facts.passed or facts.undecided for facts in parity):
        text = f"Of {len(failed)} of {_count(len(outputs), 'output')} nothing could be compared: not finite in PyTorch."
    else:
        text = f"{len(failed)} of {_count(len(outputs), 'output')} out of tolerance ({runners}, against float64)."
    wrong = [tail for facts in parity for tail in facts.tails if not tail.passed]
    if wrong:
        text += f" {_count(len(wrong), 'tail')} other than what was replaced, {wrong[0].label} first."
    return Verdict("Parity", GOOD if good else BAD, text)


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
