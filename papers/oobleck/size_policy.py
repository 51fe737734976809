"""Oobleck's template policy by numbers of nodes alone, fast enough for many long traces."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from motet.planner.failures.replay import Combine, PolicyState, Times
from motet.planner.reconfiguration.reconfigure import resize_pipelines
from motet.planner.templates.pipelines import Templates


@dataclass
class SizePolicy:
    """Ours by numbers of nodes alone, for many long traces: every pipeline loses nodes as they are spread, and copying
    takes as long as one node's share of the model does. Never restores: it does not know whether a layer is lost. Waits
    below (f + 1) n0 nodes, as Oobleck does."""

    templates: Templates
    combine: Combine
    iteration_s: Callable[[Sequence[int]], float]
    """Seconds of an iteration of pipelines on so many nodes each; infinite if they cannot be run."""
    times: Times
    max_nodes: int
    model_bytes: float
    checkpoint_every: int = 0
    save_s: float = 0.0
    pipelines: dict[str, int] = field(default_factory=dict)
    """For each node in use, its pipeline."""
    waiting: list[str] = field(default_factory=list)

    def change(self, lost: Sequence[str], joined: Sequence[str], *, warned: bool) -> PolicyState:
        self.waiting = [node for node in (*self.waiting, *joined) if node not in lost]
        if self.pipelines and not joined and self.pipelines.keys().isdisjoint(lost):
            return self._running(0.0, is_uninterrupted=True)
        before = self._sizes(self.pipelines, max(self.pipelines.values(), default=-1) + 1)
        stay = {node: pipeline for node, pipeline in self.pipelines.items() if node not in lost}
        taken = self.waiting[: self.max_nodes - len(stay)]
        if len(stay) + len(taken) < self.templates.min_total_nodes:
            self.waiting, self.pipelines = [*stay, *self.waiting], {}
            return PolicyState(iteration_s=inf, pause_s=0.0, num_nodes=len(self.waiting))
        if not before:
            sizes, used = dict(enumerate(self.combine(len(taken)))), len(taken)
            pause_s = self.times.start_s + self.times.load_s
        else:
            sizes, _, spares = resize_pipelines(
                before,
                self._sizes(stay, len(before)),
                len(taken),
                fewest=self.templates.min_nodes,
                most=self.templates.max_nodes,
                num_needed=self.templates.failures + 1,
                estimate=self.iteration_s,
            )
            used = len(taken) - min(spares, len(taken))
            share_bytes = self.model_bytes / self.templates.min_nodes
            pause_s = self.times.rebuild_s + share_bytes / self.times.bytes_per_s
            pause_s += 0.0 if warned else self.times.detect_s
        self.pipelines = self._filled(list(sizes.values()), list(sizes), stay, taken[:used])
        self.waiting = [*(node for node in stay if node not in self.pipelines), *self.waiting[used:]]
        return self._running(pause_s)

    def _running(self, pause_s: float, *, is_uninterrupted: bool = False) -> PolicyState:
        return PolicyState(
            iteration_s=self.iteration_s(self._sizes(self.pipelines, max(self.pipelines.values()) + 1)),
            pause_s=pause_s,
            is_uninterrupted=is_uninterrupted,
            num_idle=len(self.waiting),
            num_nodes=len(self.pipelines) + len(self.waiting),
        )

    def _sizes(self, pipelines: Mapping[str, int], num_pipelines: int) -> list[int]:
        counts = Counter(pipelines.values())
        return [counts[r] for r in range(num_pipelines)]

    def _filled(
        self, sizes: Sequence[int], numbers: Sequence[int], stay: Mapping[str, int], joined: Sequence[str]
    ) -> dict[str, int]:
        """Nodes stay in their pipelines as far as those keep them; the others fill what is free."""
        free = dict(zip(numbers, sizes, strict=True))
        place = {number: r for r, number in enumerate(numbers)}
        filled: dict[str, int] = {}
        others = list(joined)
        for node, number in stay.items():
            if free.get(number, 0):
                free[number] -= 1
                filled[node] = place[number]
            else:
                others.append(node)
        for number, count in free.items():
            for _ in range(count):
                filled[others.pop()] = place[number]
        return filled
