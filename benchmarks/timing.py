"""Times calls in CUDA graph replays; in a dry run it only makes them."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

WARM_UP_CALLS = 2
REPEATS = 7
LEAST_SECONDS = 2e-3
"""One timed stretch of replays takes at least as long, so that an event's resolution does not count."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of `REPEATS` stretches, the fastest and the slowest."""

    median: float
    fastest: float
    slowest: float


class GraphTimer:
    """Times on a CUDA device. A graph holds one call for each set of buffers, so that a replay walks through them all
    and finds nothing of its last round in the L2 cache, where the sets together are larger than it."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def time(self, calls: Sequence[Call]) -> Timing | None:
        """Seconds of one call, as the calls follow each other in a graph."""
        with torch.cuda.stream(self.stream):
            for call in calls[:WARM_UP_CALLS]:
                call()
            self.stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Not torch.cuda.graph: it collects garbage and empties the allocator's cache each time, for 0.1 s and more.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                for call in calls:
                    call()
            finally:
                graph.capture_end()
            graph.replay()
            rounds = max(1, math.ceil(LEAST_SECONDS / self._seconds(graph, 1)))
            stretches = [self._seconds(graph, rounds) / (rounds * len(calls)) for _ in range(REPEATS)]
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
    """Makes every call once and times none."""

    def time(self, calls: Sequence[Call]) -> Timing | None:
        """None: nothing was measured."""
        for call in calls:
            call()
        return None
