"""The operator's cases, and their way through the plugin's own enqueue as TensorRT would go it.

On a GPU ("cuda"), or on the process's memory ("cpu") where the library's kernel is the host build.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from tests.operator_cases import Case, make_case
from tests.plugins.driver import Driver, Plugin
from tests.plugins.host.host_kernel import Judge

MAP = "expanded_idx_to_permuted_idx"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

CASES: dict[str, dict[str, Any]] = {
    "all operands": {"hidden": 512, "gate": True},
    "case03 weights, gate and gamma in the rows' dtype": {"hidden": 256, "gate": True, "like_rows": True},
    "case04 scaled, with shared": {"hidden": 256, "routed_scaling_factor": 2.5},
    "case04 scaled, without shared": {"hidden": 256, "routed_scaling_factor": 2.5, "shared": False},
    "case05 weights applied before": {"hidden": 256, "apply_expert_weights": 0},
    "case06 half of the routes absent": {"tokens": 40, "hidden": 256, "absent": 0.5},
    "case06 all routes absent": {"hidden": 256, "absent": 1.0},
    "case10 one token": {"tokens": 1, "top_k": 8, "hidden": 4096},
    "case10 one route": {"top_k": 1, "hidden": 256},
    "case10 32 routes": {"top_k": 32, "hidden": 256},
    "case10 more rows than routes": {"rows": 100, "hidden": 256},
    "case10 fewer rows than routes": {"rows": 5, "hidden": 256},
    "case10 no map": {"mapped": False, "hidden": 256},
    "case12 padded rows": {"hidden": 2688, "stride": 2816},
    "case14 one plus gamma": {"hidden": 256, "weight_bias": 1.0},
    "case15 rounded before gamma": {"hidden": 256, "weight_before_cast": 0},
    "case35 512 experts, 22 routes": {"tokens": 4, "top_k": 22, "rows": 4096, "hidden": 2688},
    "both scales": {"hidden": 256, "gate": True, "residual_scale": 0.22, "combine_scale": -1.75},
    "rows alone": {"hidden": 256, "shared": False, "residual": False},
    "finalize and add": {"hidden": 256, "norm": False, "gate": True},
    "finalize": {"hidden": 256, "norm": False, "shared": False},
    "leading dimensions": {"hidden": 256, "leading": (2, 3)},
    "more tokens than run at once": {"tokens": 3000, "top_k": 4, "hidden": 1024},
    "DeepSeek-V3": {"tokens": 33, "top_k": 8, "hidden": 7168},
} | {
    f"case11 H={hidden}": {"tokens": 3, "top_k": 2, "hidden": hidden, "gate": True}
    for hidden in (1, 7, 66, 1000, 2048, 2880, 3584, 5120, 8192, 16384, 16392, 20000)
}  # fmt: skip


def case_named(name: str, dtype: torch.dtype, seed: int) -> Case:
    """One of `CASES` with numbers of its own."""
    options = dict(CASES[name])
    if options.pop("like_rows", False):
        options |= {"weights_dtype": dtype, "gate_dtype": dtype, "gamma_dtype": dtype}
    return make_case(**options, dtype=dtype, seed=seed)


def wrong_entries(dtype: torch.dtype, seed: int) -> Case:
    """cases.md 8: every kind of map entry that names no row, and tokens whose entries are all right."""
    case = make_case(tokens=7, top_k=2, hidden=256, dtype=dtype, seed=seed)
    rows = len(case.tensors["gemm2_permuted"])
    case.tensors[MAP][:5, 1] = torch.tensor([rows, rows + 1, 2**31 - 1, -2, -(2**31)])
    return case


class Guarded:
    """A tensor between two guards, moved from a 16-byte boundary by ``shift`` elements."""

    GUARD = 1024

    def __init__(self, like: torch.Tensor, shift: int, device: str, fill: float | None = None) -> None:
        first = self.GUARD + shift
        last = first + like.numel()
        self.memory = torch.full((last + self.GUARD,), 77, dtype=like.dtype, device=device)
        self.tensor = self.memory[first:last].view(like.shape)
        if fill is None:
            self.tensor.copy_(like)
        else:
            self.tensor.fill_(fill)
        self.around = (self.memory[:first], self.memory[last:])

    def untouched(self) -> bool:
        return all(bool((part == 77).all()) for part in self.around)


class Prepared:
    """A case on a device, with the plugin that TensorRT would have made of its node."""

    def __init__(
        self, driver: Driver, case: Case, *, device: str = "cuda", shift: int = 0, **attributes: float
    ) -> None:
        self.device = device
        present = {entry.flag: int(entry.name in case.tensors) for entry in case.spec.optional_inputs}
        values: Mapping[str, Any] = {**present, **case.attributes, **attributes}
        plugin = driver.create(case.spec.name, values)
        assert plugin is not None
        names = [entry.name for entry in case.spec.inputs if entry.name in case.tensors]
        self.inputs = [Guarded(case.tensors[name], 0 if name == MAP else shift, device).tensor for name in names]
        self.shapes = [tuple(tensor.shape) for tensor in self.inputs]
        self.types = [str(tensor.dtype).removeprefix("torch.") for tensor in self.inputs]
        assert plugin.configure(self.shapes, self.shapes, self.types)
        self.tactics = plugin.tactics()
        self.plugin: Plugin = plugin.attach()
        like = torch.empty(gold_shape(case), dtype=case.tensors["gemm2_permuted"].dtype)
        # Poisoned: what the kernel leaves out must not look like a result.
        self.guarded = [Guarded(like, shift, device, math.nan) for _ in case.spec.outputs]

    @property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Where they were written."""
        return tuple(each.tensor for each in self.guarded)

    def enqueue(self, tactic: int | None = None) -> None:
        """Starts the kernel on PyTorch's current stream."""
        if tactic is not None:
            self.plugin.set_tactic(tactic)
        assert self.plugin.on_shape_change(self.shapes, self.types)
        assert self.plugin.enqueue(
            self.shapes,
            self.types,
            [tensor.data_ptr() for tensor in self.inputs],
            [tensor.data_ptr() for tensor in self.outputs],
            torch.cuda.current_stream().cuda_stream if self.device == "cuda" else None,
        )

    def results(self, tactic: int | None = None) -> tuple[torch.Tensor, ...]:
        """Runs it and waits; the outputs on the CPU, as [T, H]."""
        for output in self.outputs:
            output.fill_(math.nan)
        self.enqueue(tactic)
        if self.device == "cuda":
            torch.cuda.synchronize()
        assert all(each.untouched() for each in self.guarded), "written beside an output"
        return tuple(output.cpu().reshape(-1, output.shape[-1]) for output in self.outputs)


def check(
    driver: Driver, case: Case, *, device: str = "cuda", shift: int = 0, **attributes: float
) -> list[tuple[torch.Tensor, ...]]:
    """Runs the case with the default tactic and with every one that the plugin offers; fails where one is wrong.

    Returns:
        What each gave, on the CPU.
    """
    prepared = Prepared(driver, case, device=device, shift=shift, **attributes)
    judge = Judge(case)
    found = []
    for tactic in (None, *prepared.tactics):
        outputs = prepared.results(tactic)
        assert judge.faults(outputs) == [], f"tactic {tactic}"
        found.append(outputs)
    return found


def gold_shape(case: Case) -> tuple[int, ...]:
    """The outputs' shape."""
    for name in ("residual", "shared_output"):
        if name in case.tensors:
            return tuple(case.tensors[name].shape)
    last = case.tensors["gamma" if "gamma" in case.tensors else "gemm2_permuted"].shape[-1]
    return (len(case.tensors["expert_weights"]), last)
