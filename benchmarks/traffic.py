"""Prints the bytes that a MoE tail must move, and those that its unfused forms move (moetrt.traffic).

python -m benchmarks.traffic --model deepseek-v3 --tokens 1024 --bandwidth 4.8
python -m benchmarks.traffic -T 64 -K 8 -H 7168 --dtype bf16 --shared --bandwidth 4.8
"""

import argparse
import sys
from collections.abc import Sequence

from benchmarks.models import ModelSize, check_number, model_named
from moetrt.console import Output
from moetrt.errors import InputError, MoetrtError
from moetrt.traffic import Tail, bytes_moved, ways


def tail_of(model: ModelSize, tokens: int) -> Tail:
    """The tail of one of the model sizes, in bf16, all routes on this rank."""
    return Tail(
        tokens,
        model.top_k,
        model.hidden,
        weights_dtype="fp32" if model.float32_weights else "bf16",
        shared=model.shared,
        gate=model.gate,
        scaled=model.routed_scaling_factor != 1,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        tail = _tail(options)
        if options.bandwidth is not None:
            check_number("--bandwidth", options.bandwidth, 1e-6, 1e6)
        _print(tail, options.bandwidth, kernels=options.kernels)
    except MoetrtError as error:
        print(f"moetrt: error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traffic", description="The bytes of a MoE tail.")
    parser.add_argument("--model", help="a model size instead of the sizes and operands below")
    parser.add_argument("-T", "--tokens", type=int, default=1024, help="tokens (1024)")
    parser.add_argument("-K", "--top-k", type=int, default=8, help="routes of a token (8)")
    parser.add_argument("-H", "--hidden", type=int, default=7168, help="hidden size (7168)")
    parser.add_argument("--routes", type=int, help="how many of the T*K routes are on this rank (all)")
    parser.add_argument("--dtype", default="bf16", help="of rows and outputs: bf16, fp16 or fp32 (bf16)")
    for name in ("weights", "gate", "gamma"):
        parser.add_argument(f"--{name}-dtype", help=f"of {name}: --dtype's or fp32 (--dtype's)")
    parser.add_argument("--shared", action="store_true", help="a shared expert's output is added")
    parser.add_argument("--gate", action="store_true", help="it has a sigmoid gate")
    parser.add_argument("--no-map", dest="mapped", action="store_false", help="rows lie in the order of the tokens")
    parser.add_argument("--no-residual", dest="residual", action="store_false", help="nothing is added before the norm")
    parser.add_argument("--no-norm", dest="norm", action="store_false", help="MoEFinalizeAdd: no residual, no RMSNorm")
    parser.add_argument("--scaled", action="store_true", help="routed_scaling_factor is a step of eager PyTorch")
    parser.add_argument("--bandwidth", type=float, help="TB/s (10^12 bytes a second), reads and writes together")
    parser.add_argument("--kernels", action="store_true", help="also every kernel of every way")
    return parser


def _tail(options: argparse.Namespace) -> Tail:
    if options.model is not None:
        own = ("top_k", "hidden", "dtype", "routes", "shared", "gate", "mapped", "residual", "norm", "scaled")
        defaults = _parser().parse_args([])
        for name in (*own, "weights_dtype", "gate_dtype", "gamma_dtype"):
            if getattr(options, name) != getattr(defaults, name):
                raise InputError(f"--model {options.model} was given with another {name}; a model has its own")
        return tail_of(model_named(options.model), options.tokens)
    return Tail(
        options.tokens,
        options.top_k,
        options.hidden,
        options.dtype,
        *(getattr(options, f"{name}_dtype") or options.dtype for name in ("weights", "gate", "gamma")),
        mapped=options.mapped,
        shared=options.shared,
        gate=options.gate,
        residual=options.residual and options.norm,
        norm=options.norm,
        scaled=options.scaled,
        routes=options.routes,
    )


def _print(tail: Tail, bandwidth: float | None, *, kernels: bool) -> None:
    output = Output()
    output.line(f"T={tail.tokens} K={tail.top_k} H={tail.hidden} {tail.dtype}: {', '.join(_operands(tail))}")
    least = bytes_moved(ways(tail)["fused"])
    columns = ["way", "kernels", "bytes", "a token", "to fused"]
    if bandwidth is not None:
        columns.append(f"floor at {bandwidth:g} TB/s")
    rows: list[list[str]] = []
    for name, way in ways(tail).items():
        rows.append(_row(name, str(len(way)), bytes_moved(way), tail, least, bandwidth))
        if kernels:
            rows += [_row(f"  {kernel.name}", "", kernel.moved, tail, least, bandwidth) for kernel in way]
    output.table(columns, rows)


def _row(name: str, count: str, moved: int, tail: Tail, least: int, bandwidth: float | None) -> list[str]:
    row = [name, count, f"{moved:,}", f"{moved / max(tail.tokens, 1):,.0f}", f"{moved / least:.2f}" if least else "-"]
    return row if bandwidth is None else [*row, f"{moved / bandwidth * 1e-6:.2f} us"]


def _operands(tail: Tail) -> list[str]:
    names = {"map": tail.mapped, "shared": tail.shared, "gate": tail.gate, "residual": tail.residual, "norm": tail.norm}
    return [name for name, given in names.items() if given] or ["rows and weights alone"]


if __name__ == "__main__":
    sys.exit(main())
