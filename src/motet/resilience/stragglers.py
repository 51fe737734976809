"""Ranks that compute more slowly than others that do the same. They are told of, and nothing else is done.

The peers of a rank are the ranks with the same layers, in other replicas. They may have other numbers of microbatches,
so what is compared is the time of one action, over the last steps.

Limits: a rank without peers (pipelines may be cut unlike) is not judged. Ranks of one tensor- or context-parallel group
wait for each other inside their computation, so where one is slow all of them are. Of two peers, the slower one is
named. It imports no torch.
"""

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
    """The same, median over the peers."""

    def __str__(self) -> str:
        others = f"rank{'s' * (len(self.peers) > 1)} {', '.join(map(str, self.peers))}"
        return (
            f"rank {self.rank} is slow: an action takes it {1e3 * self.action_s:.3g} ms, {others} with the same layers "
            f"{1e3 * self.peers_s:.3g} ms (medians of {WINDOW} steps)"
        )


class StragglerWatch:
    """Looks every `WINDOW` steps. `ratio`: who takes more than so many times as long as its peers is slow.

    `gather`: collective, a number of every rank."""

    def __init__(self, plan: Plan, ratio: float, gather: Callable[[float], Sequence[float]]) -> None:
        self._plan, self._ratio, self._gather = plan, ratio, gather
        self._action_s: list[float] = []
        self._told: frozenset[int] = frozenset()

    def after_step(self, spans: Iterable[Span]) -> list[Straggler]:
        """Collective: who has become slow; the same on every rank. `spans`: of this rank, in the last step."""
        self._action_s.append(action_s(spans))
        if len(self._action_s) < WINDOW:
            return []
        everyone = self._gather(median(self._action_s))
        self._action_s.clear()
        slow = find_stragglers(self._plan, everyone, self._ratio)
        new = [straggler for straggler in slow if straggler.rank not in self._told]
        self._told = frozenset(straggler.rank for straggler in slow)
        return new


def action_s(spans: Iterable[Span]) -> float:
    """Mean seconds of a compute action; 0 if there was none."""
    times = [span.end - span.start for span in spans if span.kind in set(Kind)]
    return fmean(times) if times else 0.0


def find_stragglers(plan: Plan, seconds: Sequence[float], ratio: float) -> list[Straggler]:
    """`seconds`: by rank, of an action; 0 of those that computed nothing, which are left out."""
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
    """The same of ranks that do the same. Samples are packed in all stages if tokens are shared out in one."""
    return frozenset(
        (name, stage.layers, stage.tp_size, stage.cp_size, plan.modules[name].replicas[r].shares_context)
        for name, r, _, stage in plan.stages_of_rank(rank)
    )
