"""Times calls in CUDA graph replays; in a dry run it only makes them."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]
Hook = Callable[[Any], None]

LEAST_CALLS = 16
"""A graph holds at least as many, so that the gap between two replays does not count."""
REPEATS = 7
LEAST_SECONDS = 2e-3
"""One timed stretch of replays takes at least as long, so that an event's resolution does not count."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of `REPEATS` stretches, the fastest and the slowest."""

    median: float
    fastest: float
    slowest: float


def _nothing(result: object) -> None:
    """Neither prepares nor looks at anything."""


class GraphTimer:
    """Times on a CUDA device. A graph holds one call for each set of buffers, so that a replay walks through them all
    and finds nothing of its last round in the L2 cache, where the sets together are larger than it. A few sets are
    walked through several times."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def time(self, calls: Sequence[Call], prepare: Hook = _nothing, accept: Hook = _nothing) -> Timing | None:
        """Seconds of one call, as the calls follow each other in a graph.

        Args:
            calls: one for each set of buffers.
            prepare: is given what the last call returned, before the first replay: there it poisons the outputs.
            accept: is given the same after the last replay, and raises where the replays left something wrong.
        """
        calls = [*calls] * math.ceil(LEAST_CALLS / len(calls))
        # What made the operands ran on another stream, which the timer's own does not wait for.
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            # All of them: a call that compiles or allocates anew for some set must not do so while captured.
            for call in calls:
                call()
            self.stream.synchronize()
            # With a memory pool of its own: one that is kept dies with the last graph in it.
            graph = torch.cuda.CUDAGraph()
            # Not torch.cuda.graph: it collects garbage and empties the allocator's cache each time, for 0.1 s and more.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for call in calls:
                    result = call()
            finally:
                graph.capture_end()
            prepare(result)
            graph.replay()
            rounds = max(1, math.ceil(LEAST_SECONDS / self._seconds(graph, 1)))
            stretches = [self._seconds(graph, rounds) / (rounds * len(calls)) for _ in range(REPEATS)]
            accept(result)
            self.stream.synchronize()
        graph.reset()
        return Timing(statistics.median(stretches), min(stretches), max(stretches))

    def _seconds(self, graph: torch.cuda.CUDAGraph, rounds: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(rounds):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3


class DryTimer:
    """Makes every call twice and times none."""

    def time(self, calls: Sequence[Call], prepare: Hook = _nothing, accept: Hook = _nothing) -> Timing | None:
        """None: nothing was measured."""
        for call in calls:
            result = call()
        prepare(result)
        for call in calls:
            result = call()
        accept(result)
        return None
