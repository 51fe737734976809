"""Finds ranks that compute more slowly than others with the same work. They are reported; what is done is the caller's.

The peers of a rank are the ranks with the same layers in other replicas. They may have other numbers of microbatches,
so the time of one action over the last steps is compared.

Limits: a rank without peers (pipelines may be cut differently) is not judged. Ranks of one tensor- or context-parallel
group, and replicas that share parameters, wait for each other inside their computation, so if one is slow, all of them
are. Of two peers, the slower one is reported. It imports no torch.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from motet.plan import Plan
from motet.schedule.action import Kind
from motet.timeline import Span

WINDOW = 10
"""Steps."""


@dataclass(frozen=True)
class Straggler:
    rank: int
    action_s: float
    """Mean time of an action, median over the last steps."""
    peers: tuple[int, ...]
    peers_s: float
    """The same, as the median over the peers."""

    def __str__(self) -> str:
        others = f"rank{'s' * (len(self.peers) > 1)} {', '.join(map(str, self.peers))}"
        return (
            f"rank {self.rank} is slow: an action takes it {1e3 * self.action_s:.3g} ms, {others} with the same layers "
            f"{1e3 * self.peers_s:.3g} ms (medians of {WINDOW} steps)"
        )


class StragglerWatch:
    """Compares ranks every `WINDOW` steps. `ratio`: a rank is slow if it takes more than this times as long as its
    peers. `gather`: gathers a number from every rank (collective)."""

    def __init__(self, plan: Plan, ratio: float, gather: Callable[[float], Sequence[float]]) -> None:
        self._plan, self._ratio, self._gather = plan, ratio, gather
        self._action_s: list[float] = []
        self._since: dict[int, float] = {}
        """By rank that is slow, when it was first found so, by `time.monotonic()`."""

    def after_step(self, spans: Iterable[Span]) -> list[Straggler]:
        """Returns the ranks that have become slow, the same on every rank; collective. `spans`: this rank's, of the
        last step."""
        self._action_s.append(action_s(spans))
        if len(self._action_s) < WINDOW:
            return []
        everyone = self._gather(median(self._action_s))
        self._action_s.clear()
        slow = find_stragglers(self._plan, everyone, self._ratio)
        new = [straggler for straggler in slow if straggler.rank not in self._since]
        now = time.monotonic()
        self._since = {straggler.rank: self._since.get(straggler.rank, now) for straggler in slow}
        return new

    def slow_s(self, rank: int) -> float:
        """Seconds since a rank was first found slow, and at every look since; 0 if it is not."""
        return time.monotonic() - self._since[rank] if rank in self._since else 0.0


def action_s(spans: Iterable[Span]) -> float:
    """Returns the mean seconds of a compute action; 0 if there was none."""
    times = [span.end - span.start for span in spans if span.kind in set(Kind)]
    return fmean(times) if times else 0.0


def find_stragglers(plan: Plan, seconds: Sequence[float], ratio: float) -> list[Straggler]:
    """Returns the slow ranks. `seconds`: of an action, by rank; ranks with 0 computed nothing and are left out."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for rank in range(plan.num_ranks):
        if seconds[rank] > 0:
            groups[_work_of(plan, rank)].append(rank)
    found = []
    for ranks in groups.values():
        for rank in ranks:
            peers = tuple(other for other in ranks if other != rank)
            if peers and seconds[rank] > ratio * (peers_s := median(seconds[other] for other in peers)):
                found.append(Straggler(rank, seconds[rank], peers, peers_s))
    return sorted(found, key=lambda straggler: straggler.rank)


def _work_of(plan: Plan, rank: int) -> Hashable:
    """Returns a value that is equal for ranks with equal work. Samples are packed in all stages if one stage has
    context parallelism."""
    return frozenset(
        (name, stage.layers, stage.tp_size, stage.cp_size, plan.modules[name].replicas[r].shares_context)
        for name, r, _, stage in plan.stages_of_rank(rank)
    )
