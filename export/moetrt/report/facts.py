"""The facts of a report: what its page, its JSON and its Markdown show."""

from collections.abc import Mapping
from dataclasses import dataclass

from moetrt.report.graph import GraphFacts, GraphNode, Operand

FORMAT = "moetrt.report/1"

MAPPED, FINALIZE_ONLY, NOT_MAPPED = "mapped", "finalize only", "not mapped"
DENSE, NO_TAIL = "dense", "no tail found"
"""What a layer can be; without a tail it is known to be dense only where every expected tail was found."""

GOOD, BAD, MISSING, MEASURED = "good", "bad", "missing", "measured"
"""What a verdict can be; MEASURED is a figure that nothing was asked of."""


@dataclass(frozen=True)
class Verdict:
    """One line at the top: what was looked at, how it ended (GOOD, BAD, MISSING or MEASURED), and the figures."""

    what: str
    state: str
    text: str


@dataclass(frozen=True)
class Site:
    """One tail.

    Attributes:
        name: the plugin node's name, else the node's where it was found.
        layer: in a few words; its name where it names no layer.
        state: MAPPED, FINALIZE_ONLY or NOT_MAPPED.
        form: how the graph spelled it.
        operator: of the plugin node; None where there is none.
        dtype: of the rows, in ONNX's spelling.
        reason: what kept (a part of) it out.
        own_attributes: those that not every tail of this operator has alike.
        attributes, inputs, outputs: of the plugin node.
    """

    name: str
    layer: str
    state: str
    form: str
    operator: str | None
    dtype: str
    reason: str | None
    attributes: Mapping[str, float]
    own_attributes: Mapping[str, float]
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]

    @property
    def told_inputs(self) -> str:
        """The inputs with their dtypes and shapes, in one line."""
        return ", ".join(f"{operand.name} {operand.described}" for operand in self.inputs)


@dataclass(frozen=True)
class Layer:
    """One layer of the strip: its label, its state, and the same in a sentence."""

    label: str
    state: str
    text: str


@dataclass(frozen=True)
class Picture:
    """One tail before mapping and after: the nodes it was, the values that are constants, and the site it is now."""

    site: Site
    nodes: tuple[GraphNode, ...]
    constants: Mapping[str, str]


@dataclass(frozen=True)
class MappingFacts:
    """What the mapper did.

    Attributes:
        file: the JSON file.
        found, expected, mapped: tails; ``expected`` is None where nobody said.
        complete: whether all tails that there are were mapped.
        notes: of the mapper.
        sites: every tail.
        common: by operator: the attributes that all its tails have alike.
        common_inputs: by operator: the inputs, with shapes, where all its tails have the same.
        layers: the strip.
        layers_named: whether the file's names tell its layers; else the strip has the tails alone.
        picture: of the first tail that is mapped; None where it cannot be drawn.
        no_picture: why not.
    """

    file: str
    found: int
    expected: int | None
    mapped: int
    complete: bool
    notes: tuple[str, ...]
    sites: tuple[Site, ...]
    common: Mapping[str, Mapping[str, float]]
    common_inputs: Mapping[str, str]
    layers: tuple[Layer, ...]
    layers_named: bool
    picture: Picture | None
    no_picture: str | None


@dataclass(frozen=True)
class ModelFacts:
    """Which model.

    Attributes:
        file: the mapped file, from the report's folder.
        sha256: of it; its external data is not part of it.
        source: the PyTorch model, where a comparison said.
        source_file, source_sha256: the file before mapping.
        dtypes: of the tails' rows.
        graph: what the file says; None where it is not there any more.
    """

    file: str
    sha256: str
    source: str | None
    source_file: str | None
    source_sha256: str | None
    dtypes: tuple[str, ...]
    graph: GraphFacts | None


@dataclass(frozen=True)
class OutputParity:
    """One output of one runner against float64; None among the errors is not finite.

    Attributes:
        name, runner, dtype, shape: of the output.
        tail: the tail that it is of; None for the model's own.
        output: its name without the tail's.
        label: its name in a few words.
        passed: the verdict.
        undecided: whether it did not pass because PyTorch itself gives nothing that could be compared.
        worst, rms: the errors, over the output's root mean square.
        pytorch_worst, pytorch_rms: PyTorch's.
        unfused_worst, unfused_rms: of ONNX Runtime on the file before mapping; ``has_unfused`` says whether it was run.
        worst_tolerance, rms_tolerance: what the errors may be.
        ratio: the error over PyTorch's, in the mean square.
        index, value, pytorch, float64: the worst element.
        tokens, argmax_changed: for logits: tokens whose largest logit is another one than PyTorch's.
        nan, inf, pytorch_nan, pytorch_inf: how many elements.
        reason: where the tolerances come from, or why it failed.
    """

    name: str
    tail: str | None
    output: str
    label: str
    runner: str
    dtype: str
    shape: str
    passed: bool
    undecided: bool
    worst: float | None
    rms: float | None
    pytorch_worst: float | None
    pytorch_rms: float | None
    has_unfused: bool
    unfused_worst: float | None
    unfused_rms: float | None
    worst_tolerance: float | None
    rms_tolerance: float | None
    ratio: float | None
    index: str
    value: float | None
    pytorch: float | None
    float64: float | None
    tokens: int | None
    argmax_changed: int | None
    nan: int
    inf: int
    pytorch_nan: int
    pytorch_inf: int
    reason: str


@dataclass(frozen=True)
class TailParity:
    """One tail against the nodes that it replaced, in float64.

    Attributes:
        name, label: the tail, and it in a few words.
        operator: of its node.
        passed: the verdict.
        errors: by output: the root mean square difference over the output's; None is not finite.
        tolerance: what they may be.
        cause: what explains a failure best.
    """

    name: str
    label: str
    operator: str
    passed: bool
    errors: Mapping[str, float | None]
    tolerance: float
    cause: str | None


@dataclass(frozen=True)
class LengthParity:
    """The whole model at another length, end to end.

    Attributes:
        sizes: of the dynamic dimensions, in words.
        passed: the verdict.
        measured: whether the two sides gave something to compare.
        outputs: of ONNX Runtime.
        text: why it differs, or was not measured; empty otherwise.
        ties: tokens whose experts rounding decides.
    """

    sizes: str
    passed: bool
    measured: bool
    outputs: tuple[OutputParity, ...]
    text: str
    ties: int


@dataclass(frozen=True)
class ParityFacts:
    """One comparison: what was run, on what, and what came out.

    Attributes:
        file: the JSON file.
        source: the PyTorch model.
        how: what was run, in one line.
        seed: of the inputs.
        inputs: their names and sizes.
        passed: the verdict.
        undecided: whether it did not pass because of undecided outputs alone.
        cause: what is off first and what explains it; None where nothing is, or nothing is known.
        notes: what was not run and why.
        outputs: every output of every runner.
        tails: every tail against the nodes that it replaced; empty where there was no file before mapping.
        lengths: other lengths.
        ties: tokens whose experts rounding decides, which both sides chose alike.
    """

    file: str
    source: str
    how: str
    seed: int | None
    inputs: str
    passed: bool
    undecided: bool
    cause: str | None
    notes: tuple[str, ...]
    outputs: tuple[OutputParity, ...]
    tails: tuple[TailParity, ...]
    lengths: tuple[LengthParity, ...]
    ties: int


@dataclass(frozen=True)
class Spread:
    """A figure over the repeats: the median, and the interquartile range (None for a single run).

    ``high`` is the figure with the layers counted that tails share with other nodes, where that makes it another.
    """

    median: float
    iqr: float | None
    high: float | None = None


@dataclass(frozen=True)
class Timing:
    """The plugin and the native layers at one point: milliseconds, native over plugin, and the floor of the bytes.

    ``native`` and ``ratio`` are None where no native layer was found for a tail.
    """

    name: str
    plugin: Spread
    native: Spread | None
    ratio: Spread | None
    floor_ms: float | None
    floor_share: float | None


@dataclass(frozen=True)
class BenchPoint:
    """One profile point: its shapes, times end to end and in the tails, and the tails' share of the layers' time."""

    shapes: str
    end_to_end: Timing
    all_tails: Timing
    tails: tuple[Timing, ...]
    plugin_share: Spread
    native_share: Spread | None


@dataclass(frozen=True)
class BenchFacts:
    """One benchmark; ``bandwidth`` is in bytes a second, None where it is not known."""

    file: str
    tool: str
    device: str | None
    tensorrt: str | None
    repeats: int
    statistics: str
    bandwidth: float | None
    bandwidth_source: str
    points: tuple[BenchPoint, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class EngineFacts:
    """One engine, as its description has it; ``plugin_library`` is None for one that was built without the plugin."""

    file: str
    engine: str
    sha256: str
    backend: str
    version: str
    targets: tuple[str, ...]
    layers: int
    plugin_layers: tuple[str, ...]
    plugin_library: str | None
    plugin_library_sha256: str | None
    profile: str
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Provenance:
    """A JSON file that the report was made of: the command that makes it again (None: from Python), versions, hash."""

    file: str
    format: str
    sha256: str
    command: str | None
    versions: Mapping[str, str]


@dataclass(frozen=True)
class MissingPart:
    """What the report has no figures of, and the command that would make them."""

    what: str
    command: str


@dataclass(frozen=True)
class Report:
    """All that the page shows.

    Attributes:
        title: the model in a few words.
        created: when, UTC.
        folder: what was reported on, as it was given.
        versions: of what made the report.
        verdicts: the figures that matter, first.
        model: None where no file names one.
        mapping: None where there is no mapping report.
        parity, benchmarks, engines: one for each file.
        missing: what there is nothing of.
        provenance: every file that was read, in the order of the work.
    """

    title: str
    created: str
    folder: str
    versions: Mapping[str, str]
    verdicts: tuple[Verdict, ...]
    model: ModelFacts | None
    mapping: MappingFacts | None
    parity: tuple[ParityFacts, ...]
    benchmarks: tuple[BenchFacts, ...]
    engines: tuple[EngineFacts, ...]
    missing: tuple[MissingPart, ...]
    provenance: tuple[Provenance, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing that was looked at fell short."""
        return all(verdict.state != BAD for verdict in self.verdicts)
