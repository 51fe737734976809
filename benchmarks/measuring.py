"""Times alternatives in turn, in one run, so that what disturbs the machine meets all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

Blocks = Mapping[str, Sequence[Sequence[float]]]
"""For each alternative, block after block, the seconds of each step."""


def measure_in_turn(
    alternatives: Mapping[str, Callable[[], object]],
    *,
    num_blocks: int,
    steps_per_block: int,
    warm_up: int = 2,
    between_steps: Callable[[], object] = lambda: None,
) -> dict[str, list[list[float]]]:
    """A block of the first, one of the second, ..., and again. Collective; every rank gets the same numbers.

    A step's time is from a barrier to the end on the slowest rank. `between_steps` is not timed.
    The order within a round turns, so that nobody always comes after the same one.
    """
    for run in alternatives.values():
        for _ in range(warm_up):
            between_steps()
            run()
    names = list(alternatives)
    blocks: dict[str, list[list[float]]] = {name: [] for name in names}
    for b in range(num_blocks):
        for name in names[b % len(names) :] + names[: b % len(names)]:
            blocks[name].append([_step_s(alternatives[name], between_steps) for _ in range(steps_per_block)])
    for name in names:
        slowest = torch.tensor(blocks[name], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        blocks[name] = slowest.tolist()
    return blocks


def _step_s(run: Callable[[], object], between_steps: Callable[[], object]) -> float:
    between_steps()
    dist.barrier()
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        if len(values) < 2:
            return Spread(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(median, low, high)

    def text(self, scale: float = 1.0, digits: int = 1) -> str:
        return f"{self.median * scale:.{digits}f} ({self.low * scale:.{digits}f} .. {self.high * scale:.{digits}f})"


def seconds(blocks: Blocks, name: str) -> Spread:
    return Spread.of([step for block in blocks[name] for step in block])


def ratio(blocks: Blocks, name: str, other: str) -> Spread:
    """Ratio of the block medians of `name` to those of `other` in the same round."""
    pairs = zip(blocks[name], blocks[other], strict=True)
    return Spread.of([statistics.median(a) / statistics.median(b) for a, b in pairs])
