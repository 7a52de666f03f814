"""Runs cases with every tactic, to be started under compute-sanitizer: python -m tests.gpu.sanitized LIBRARY.

Each tensor is an allocation of its own (PYTORCH_NO_CUDA_MEMORY_CACHING=1), so that an access beside it is seen. Exit
code 1 where a number is wrong.
"""

import signal
import sys

import torch

from moetrt.cuda_op import kernel_params
from moetrt.library import load_plugin_library
from tests.operator_cases import Case, make_case
from tests.plugins.host.host_kernel import Judge
from tests.plugins.operator_runs import gold_shape, wrong_entries

SEED = 1

SECONDS = 45
"""So long one tool may take: two of them are to leave time for the other tests in `benchmarks.gpu_check`."""


def cases() -> list[Case]:
    """Small, and yet each tactic's whole code: tiles, batches of rows, a second chunk of routes, absent operands."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    return [
        wrong_entries(bf16, SEED),
        make_case(tokens=3, top_k=8, hidden=7168, dtype=bf16, gate=True, seed=SEED),
        make_case(tokens=3, top_k=22, hidden=2688, stride=2816, dtype=bf16, seed=SEED),
        make_case(tokens=2, top_k=70, rows=30, hidden=1032, dtype=fp16, seed=SEED),
        make_case(tokens=5, top_k=3, hidden=515, dtype=fp32, gate=True, seed=SEED),
        make_case(tokens=2, top_k=3, hidden=16648, dtype=bf16, seed=SEED),
        make_case(tokens=600, top_k=2, hidden=256, dtype=fp32, norm=False, seed=SEED),
        make_case(tokens=4, hidden=512, dtype=fp16, mapped=False, shared=False, residual=False, seed=SEED),
    ]


def main(path: str) -> int:
    """Returns the exit code."""
    library = load_plugin_library(path)
    torch.zeros(1, device="cuda")
    device = library.current_device()
    wrong = 0
    for number, case in enumerate(cases()):
        judge = Judge(case)
        complete = case.spec.complete(case.attributes)
        inputs = {name: tensor.cuda() for name, tensor in case.tensors.items()}
        like = torch.full(gold_shape(case), float("nan"), dtype=case.tensors["gemm2_permuted"].dtype)
        outputs = {name: like.cuda() for name in case.spec.outputs}
        params = kernel_params(case.spec, inputs, complete, outputs)
        for tactic, name in library.tactics(params, device).items():
            library.moe_finalize(params, torch.cuda.current_stream().cuda_stream, tactic=tactic)
            torch.cuda.synchronize()
            found = tuple(output.cpu().reshape(-1, output.shape[-1]) for output in outputs.values())
            faults = judge.faults(found)
            wrong += len(faults)
            print(f"case {number}, {name}: {faults or 'right'}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    # Ends by itself where the tool that started it is ended first.
    signal.alarm(SECONDS + 5)
    sys.exit(main(sys.argv[1]))
