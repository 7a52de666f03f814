"""Each family of `moetrt.models` taken through all steps, and what came out judged by what its config says."""

import dataclasses
import inspect
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode

from moetrt import backends, models
from moetrt.capture import export
from moetrt.engine import build_engine
from moetrt.errors import InputError, MoetrtError
from moetrt.mapping import map_file
from moetrt.mapping_report import Site
from moetrt.parity import OutputParity, compare
from moetrt.quiet import quiet
from moetrt.source import Source, load_source
from moetrt.spec import FINALIZE_ADD, FINALIZE_ADD_RMS_NORM, OPERATORS

DTYPES = ("fp32", "bf16", "fp16")

SHAPES = ((3, 13), (2, 70))
"""Sizes of the dynamic dimensions on which ONNX Runtime is compared; a model with only one has the last of each."""

_SEED = 1
_NOT_SHOWN = ("eps", "programmatic_dependent_launch")
"""Attributes that say nothing of a family."""


@dataclass(frozen=True)
class Variant:
    """A family in one dtype.

    Attributes:
        sites: every tail that the mapper found.
        parity: the output that says most, for each of `SHAPES`.
        excess: of every output of these, that its error is more than rounding in another order makes, though it passes.
        plugin_layers: of the engine that was built with the plugin.
        native_plugin_layers: of the engine that was built from the same file without it.
    """

    sites: tuple[Site, ...]
    parity: tuple[OutputParity, ...]
    excess: tuple[str, ...]
    plugin_layers: int
    native_plugin_layers: int

    @property
    def mapped(self) -> int:
        """How many tails have become a plugin node, with their norm or without."""
        return sum(site.operator is not None for site in self.sites)

    @property
    def agrees(self) -> bool:
        """Whether ONNX Runtime agrees with PyTorch on all shapes."""
        return bool(self.parity) and all(output.passed for output in self.parity)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The optional inputs that the plugin nodes have."""
        optional = {spec.name for operator in OPERATORS.values() for spec in operator.optional_inputs}
        return tuple(dict.fromkeys(name for site in self.sites for name in site.inputs if name in optional))

    @property
    def attributes(self) -> tuple[str, ...]:
        """The attributes of the plugin nodes that are not the operator's defaults, such as ``residual_scale 0.22``."""
        found = []
        for site in self.sites:
            operator = OPERATORS.get(site.operator or "")
            defaults = {spec.name: spec.default for spec in operator.attributes} if operator else {}
            found += [
                f"{name} {value:g}"
                for name, value in site.attributes.items()
                if name not in _NOT_SHOWN and value != defaults[name]
            ]
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class Family:
    """A family's row: what its config and modules say, and what came out in each dtype.

    Attributes:
        name: of the factory in `moetrt.models`.
        model: the class.
        layers: of the model.
        moe_layers: how many of them are MoE layers.
        other_norm: what the model has, by its modules, in place of the operator's residual add and RMSNorm; None where
            it has just these.
        new_experts: for each MoE layer, how many experts the compared tokens hit that the example had missed.
        variants: by dtype.
        error: what ended the run early.
    """

    name: str
    model: str = ""
    layers: int = 0
    moe_layers: int = 0
    other_norm: str | None = None
    new_experts: tuple[int, ...] = ()
    variants: Mapping[str, Variant] = dataclasses.field(default_factory=dict)
    error: str | None = None

    @property
    def ok(self) -> bool:
        return not self.problems()

    def problems(self) -> list[str]:
        """Where the row is not as it should be, in words."""
        if self.error is not None:
            return [self.error]
        found = []
        if self.moe_layers < 2:
            found.append(f"{self.moe_layers} MoE layers; a family is tried with 2 or more")
        if len(self.new_experts) != self.moe_layers or not all(self.new_experts):
            found.append(
                f"the compared tokens hit {list(self.new_experts)} experts that the example missed; at least one in "
                f"each of {self.moe_layers} MoE layers is wanted"
            )
        for dtype, variant in self.variants.items():
            found += [f"{dtype}: {problem}" for problem in self._problems_of(variant)]
        return found

    def _problems_of(self, variant: Variant) -> Iterator[str]:
        counts = {
            "tails found": len(variant.sites),
            "tails mapped": variant.mapped,
            "plugin layers": variant.plugin_layers,
        }
        for what, count in counts.items():
            if count != self.moe_layers:
                yield f"{count} {what}, for {self.moe_layers} MoE layers"
        if variant.native_plugin_layers:
            yield f"{variant.native_plugin_layers} plugin layers in the engine without the plugin"
        for site in variant.sites:
            if self.other_norm is None:
                if not site.matched or site.operator != FINALIZE_ADD_RMS_NORM.name:
                    yield f"'{site.name}' {site.became}"
            elif site.operator != FINALIZE_ADD.name:
                yield f"'{site.name}' became {site.operator or 'nothing'}; the model has {self.other_norm}"
            elif self.other_norm not in (site.reason or ""):
                yield f"'{site.name}' declined its norm without naming {self.other_norm}: {site.reason}"
        if len(variant.parity) != len(SHAPES):
            yield f"compared on {len(variant.parity)} shapes; {len(SHAPES)} are wanted"
        for output in variant.parity:
            if not output.passed:
                yield f"ONNX Runtime and PyTorch differ: {output.lines()[0]}; {output.reason}"
        yield from variant.excess

    def as_dict(self) -> dict[str, Any]:
        """The row for JSON."""
        return dataclasses.asdict(self) | {"ok": self.ok, "problems": self.problems()}


def family_names() -> list[str]:
    """The factories of `moetrt.models`, in alphabetical order."""
    return sorted(
        name
        for name, value in vars(models).items()
        if inspect.isfunction(value)
        and value.__module__ == models.__name__
        and not name.startswith("_")
        and value is not models.randomized
    )


def run_families(names: Sequence[str] = (), *, dtypes: Sequence[str] = DTYPES, jobs: int = 1) -> Iterator[Family]:
    """Takes families through all steps.

    Args:
        names: as of `family_names`; all where empty.
        dtypes: of `DTYPES`.
        jobs: how many families to run at a time, each in a process of its own where there is more than one.

    Yields:
        Each row when it is done.

    Raises:
        InputError: an unknown name or dtype, or fewer jobs than 1.
    """
    known = family_names()
    for name in names:
        if name not in known:
            raise InputError(f"there is no family '{name}'; there are {', '.join(known)}")
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise InputError(f"the dtype was '{dtype}'; {', '.join(DTYPES)} are taken")
    if jobs < 1:
        raise InputError(f"the jobs were {jobs}; 1 or more is taken")
    chosen = list(dict.fromkeys(names)) or known
    # Makes the link that TensorRT-RTX's parser needs once, before several processes would.
    backends.choose(backends.TENSORRT_RTX)
    if jobs == 1 or len(chosen) == 1:
        for name in chosen:
            yield run_family(name, dtypes=dtypes)
        return
    # Not forked: torch and TensorRT have threads by now.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(run_family, name, dtypes=tuple(dtypes)) for name in chosen]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def run_family(name: str, *, dtypes: Sequence[str] = DTYPES) -> Family:
    """Takes one family through all steps; what a step refuses ends up in the row.

    Args:
        name: as of `family_names`.
        dtypes: of `DTYPES`.
    """
    row = Family(name)
    try:
        for dtype in dtypes:
            with quiet():
                source = _narrowed(load_source(f"{models.__name__}:{name}", dtype=dtype))
            if not row.variants:
                row = _said_by_the_model(name, source)
            row = dataclasses.replace(row, variants={**row.variants, dtype: _run(source)})
    except MoetrtError as error:
        return dataclasses.replace(row, error=f"{dtype}: {error}")
    return row


def _narrowed(source: Source) -> Source:
    """The source with the same token at every place of its example, so that the example misses most experts."""
    narrow = {}
    for name, tensor in source.example_inputs.items():
        first = tensor
        for dim in source.dynamic_shapes.get(name, {}):
            first = first.narrow(dim, 0, 1)
        narrow[name] = first.expand_as(tensor).contiguous()
    return dataclasses.replace(source, example_inputs=narrow)


def _said_by_the_model(name: str, source: Source) -> Family:
    config = getattr(getattr(source.module, "module", source.module), "config", None)
    layers, moe_layers = layer_counts(config)
    example = _chosen_experts(source, source.example_inputs)
    compared: list[set[int]] = [set() for _ in example]
    for sizes in _sizes(source):
        for layer, chosen in zip(compared, _chosen_experts(source, source.make_inputs(_SEED, **sizes)), strict=True):
            layer |= chosen
    return Family(
        name,
        model=source.description,
        layers=layers,
        moe_layers=moe_layers,
        other_norm=_other_norm(source.module, config),
        new_experts=tuple(len(now - before) for now, before in zip(compared, example, strict=True)),
    )


def _other_norm(module: torch.nn.Module, config: Any) -> str | None:
    if any(isinstance(part, torch.nn.LayerNorm) for part in module.modules()):
        return "LayerNorm"
    if any(name.endswith("post_mlp_layernorm") for name, _ in module.named_modules()):  # Afmoe
        return "sandwich norm"
    return "hyper-connections" if hasattr(config, "hc_mult") else None  # DeepSeek-V4


def layer_counts(config: Any) -> tuple[int, int]:
    """How many layers a model has by its config, and how many of them are MoE layers: each field a family's own way."""
    config = config.get_text_config()
    layers = range(config.num_hidden_layers)
    if getattr(config, "moe_layers", None):  # Llama-4
        return len(layers), len(config.moe_layers)
    if getattr(config, "expert_layer_period", None):  # Jamba
        return len(layers), sum(i % config.expert_layer_period == config.expert_layer_offset for i in layers)
    if getattr(config, "decoder_sparse_step", None):  # Qwen
        skipped = config.mlp_only_layers
        return len(layers), sum((i + 1) % config.decoder_sparse_step == 0 and i not in skipped for i in layers)
    if getattr(config, "num_dense_layers", None):  # Afmoe
        return len(layers), len(layers) - config.num_dense_layers
    return len(layers), len(layers) - getattr(config, "first_k_dense_replace", 0)  # DeepSeek, GLM


def _sizes(source: Source) -> list[dict[str, int]]:
    symbols = list(source.example_sizes)
    return [dict(zip(reversed(symbols), reversed(shape), strict=False)) for shape in SHAPES]


class _TopK(TorchFunctionMode):
    """Keeps what each topk chose."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen: list[set[int]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        if function in (torch.topk, torch.Tensor.topk):
            self.chosen.append(set(result[1].flatten().tolist()))
        return result


def _chosen_experts(source: Source, inputs: Mapping[str, torch.Tensor]) -> list[set[int]]:
    """The experts that PyTorch chooses for ``inputs``, layer by layer.

    They are what an experts module is called with (tokens, indices, weights); in a model without such modules, what
    its routers' topk gives.
    """
    called: list[set[int]] = []

    def look(_: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if len(args) == 3 and all(isinstance(arg, torch.Tensor) for arg in args):
            _, index, weights = args
            if index.dtype == torch.int64 and index.shape == weights.shape and weights.is_floating_point():
                called.append(set(index.flatten().tolist()))

    hooks = [module.register_forward_pre_hook(look) for module in source.module.modules()]
    topk = _TopK()
    try:
        with torch.no_grad(), topk:
            source.module(*inputs.values())
    finally:
        for hook in hooks:
            hook.remove()
    return called or topk.chosen


def _run(source: Source) -> Variant:
    with tempfile.TemporaryDirectory(prefix="moetrt-families-") as name:
        mapped = Path(name, "mapped.onnx")
        exported = export(source, name)
        report = map_file(exported.model_path, mapped)
        reports = [compare(mapped, source, seed=_SEED, sizes=sizes) for sizes in _sizes(source)]
        excess = [f"{output.name}: {output.excess}" for one in reports for output in one.outputs if output.excess]

        def plugin_layers(library: Literal[True] | None) -> int:
            engine = Path(name, "model.engine")
            built = build_engine(mapped, engine, backend=backends.TENSORRT_RTX, plugin_library=library)
            return len(built.plugin_layers)

        return Variant(
            sites=tuple(report.sites),
            parity=tuple(one.worst for one in reports),
            excess=tuple(excess),
            plugin_layers=plugin_layers(True),
            native_plugin_layers=plugin_layers(None),
        )


def default_jobs() -> int:
    """As many as there are processors for this process."""
    return len(os.sched_getaffinity(0))
