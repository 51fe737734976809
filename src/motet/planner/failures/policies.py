"""Who trains what after each change, under three policies: the states behind `motet.planner.failures.replay`.

All three get their iteration times from the same templates, so that only the policies differ. A grid of Varuna's has
D equal pipelines of P nodes, the fastest for the nodes that are there; the rest is idle. Bamboo's grid is the same with
slower iterations: each node computes its successor's forward too (`slowdown` times as long in all).
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from motet.plan import Plan
from motet.planner.failures.replay import Membership
from motet.planner.reconfiguration.holdings import Copy
from motet.planner.reconfiguration.optimizer_state import KeptStates, first_keepers
from motet.planner.reconfiguration.reconfigure import reconfigure_below
from motet.planner.templates.pipeline_sizes import new_sizes
from motet.planner.templates.pipelines import (
    Template,
    Templates,
    build_plan,
    iteration_s,
    min_max_counts,
    nodes_of_pipelines,
)

Combine = Callable[[int], Sequence[int]]
"""Number of nodes -> the pipelines' numbers of nodes to start with."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """What recoveries are made of, in seconds."""

    detect_s: float = 1.0
    """Until a loss without warning is noticed."""
    rebuild_s: float = 2.0
    """Groups of the processes that stay."""
    start_s: float = 30.0
    """All processes anew: imports, groups, the model."""
    load_s: float = 0.0
    """The last checkpoint."""
    save_s: float = 0.0
    """A checkpoint, while training waits."""
    bytes_per_s: float = inf
    """Of one rank's link, for copies."""


@dataclass
class TemplateMembers:
    """Ours, with everything that `reconfigure_below` decides, as in a training. After it has come to a stop, it starts
    again from its last checkpoint when there are (f + 1) n0 nodes."""

    like: Plan
    templates: Templates
    combine: Combine
    num_microbatches: int
    times: Times
    most_nodes: int
    stops_below_guarantee: bool = False
    """With too few nodes to survive f failures it saves and stops; else it goes on."""
    checkpoint_every: int = 0
    save_s: float = 0.0
    """Checkpoints are written beside the training."""
    plan: Plan | None = None
    kept: KeptStates | None = None
    """With ZeRO-1, which ranks keep which of the optimizer's states."""
    order: list[str] = field(default_factory=list)
    """Nodes, by their place in the plan."""
    waiting: list[str] = field(default_factory=list)
    steps: dict[str, int] = field(default_factory=dict)
    """How often each kind of step was taken."""

    def change(self, lost: Sequence[str], joined: Sequence[str], *, warned: bool) -> Membership:
        self.waiting = [node for node in (*self.waiting, *joined) if node not in lost]
        if self.plan is None:
            return self._start()
        places = [place for place, node in enumerate(self.order) if node in lost]
        if not places and not joined:
            return self._running(0.0, goes_on=True)
        stay = [node for node in self.order if node not in lost]
        taken = self.waiting[: self.most_nodes - len(stay)]
        result, too_few = reconfigure_below(
            self.plan,
            self.templates,
            lost=() if warned else places,
            leaving=places if warned else (),
            num_joined=len(taken),
            kept=self.kept,
        )
        restore = result.outcome == "restore" or (result.plan is None and not warned)
        if result.plan is None or (too_few and self.stops_below_guarantee):
            self.plan, self.waiting, self.order = None, [*stay, *self.waiting], []
            return Membership(iteration_s=inf, pause_s=0.0, from_checkpoint=restore, num_nodes=len(self.waiting))
        for step in result.steps:
            self.steps[step.kind] = self.steps.get(step.kind, 0) + 1
        used = len(taken) - result.num_spares
        size, self.plan, self.kept = self.templates.devices_per_node, result.plan, result.kept
        here = [self.order[rank // size] for rank in result.old_ranks[::size] if rank is not None]
        placed = result.plan.num_ranks // size - used
        left_out = [node for node in here[placed:] if node in stay]
        self.order, self.waiting = [*here[:placed], *taken[:used]], [*left_out, *self.waiting[used:]]
        pause_s = self.times.rebuild_s + (0.0 if warned else self.times.detect_s)
        pause_s += self.times.load_s if restore else self._copy_s(result.copies)
        return self._running(pause_s, from_checkpoint=restore)

    def _copy_s(self, copies: Sequence[Copy]) -> float:
        """Until the busiest rank has sent or received all of its own."""
        sent: dict[int, float] = defaultdict(float)
        received: dict[int, float] = defaultdict(float)
        for copy in copies:
            sent[copy.source] += copy.num_bytes
            received[copy.target] += copy.num_bytes
        return max((*sent.values(), *received.values()), default=0.0) / self.times.bytes_per_s

    def _start(self) -> Membership:
        if len(self.waiting) < self.templates.least_total:
            return Membership(iteration_s=inf, pause_s=0.0, num_nodes=len(self.waiting))
        self.order, self.waiting = self.waiting[: self.most_nodes], self.waiting[self.most_nodes :]
        sizes = self.combine(len(self.order))
        chosen = [self.templates.by_nodes[n] for n in sizes]
        self.plan = build_plan(self.like, self.templates, sizes, min_max_counts(chosen, self.num_microbatches))
        self.kept = first_keepers(self.plan, self.templates)
        return self._running(self.times.start_s + self.times.load_s, from_checkpoint=True)

    def _running(self, pause_s: float, *, from_checkpoint: bool = False, goes_on: bool = False) -> Membership:
        assert self.plan is not None
        sizes = [len(nodes) for nodes in nodes_of_pipelines(self.plan, self.templates.devices_per_node)]
        chosen = [self.templates.by_nodes[n] for n in sizes]
        return Membership(
            iteration_s=iteration_s(chosen, self.plan.replica_microbatches),
            pause_s=pause_s,
            from_checkpoint=from_checkpoint,
            goes_on=goes_on,
            num_idle=len(self.waiting),
            num_nodes=len(self.order) + len(self.waiting),
        )


@dataclass
class SizeMembers:
    """Ours by numbers of nodes alone, for many long traces: every pipeline loses nodes as they are spread, and copying
    takes as long as one node's share of the model does. Never restores: it does not know whether a layer is lost. Waits
    below (f + 1) n0 nodes, as Oobleck does."""

    templates: Templates
    combine: Combine
    iteration_s: Callable[[Sequence[int]], float]
    """Of pipelines on so many nodes each; infinite if they cannot be run."""
    times: Times
    most_nodes: int
    model_bytes: float
    checkpoint_every: int = 0
    save_s: float = 0.0
    pipelines: dict[str, int] = field(default_factory=dict)
    """For each node in use, its pipeline."""
    waiting: list[str] = field(default_factory=list)

    def change(self, lost: Sequence[str], joined: Sequence[str], *, warned: bool) -> Membership:
        self.waiting = [node for node in (*self.waiting, *joined) if node not in lost]
        if self.pipelines and not joined and self.pipelines.keys().isdisjoint(lost):
            return self._running(0.0, goes_on=True)
        before = self._sizes(self.pipelines, max(self.pipelines.values(), default=-1) + 1)
        stay = {node: pipeline for node, pipeline in self.pipelines.items() if node not in lost}
        taken = self.waiting[: self.most_nodes - len(stay)]
        if len(stay) + len(taken) < self.templates.least_total:
            self.waiting, self.pipelines = [*stay, *self.waiting], {}
            return Membership(iteration_s=inf, pause_s=0.0, num_nodes=len(self.waiting))
        if not before:
            sizes, used = dict(enumerate(self.combine(len(taken)))), len(taken)
            pause_s = self.times.start_s + self.times.load_s
        else:
            sizes, _, spares = new_sizes(
                before,
                self._sizes(stay, len(before)),
                len(taken),
                fewest=self.templates.fewest_nodes,
                most=self.templates.most_nodes,
                num_needed=self.templates.failures + 1,
                estimate=self.iteration_s,
            )
            used = len(taken) - min(spares, len(taken))
            share_bytes = self.model_bytes / self.templates.fewest_nodes
            pause_s = self.times.rebuild_s + share_bytes / self.times.bytes_per_s
            pause_s += 0.0 if warned else self.times.detect_s
        self.pipelines = self._filled(list(sizes.values()), list(sizes), stay, taken[:used])
        self.waiting = [*(node for node in stay if node not in self.pipelines), *self.waiting[used:]]
        return self._running(pause_s)

    def _running(self, pause_s: float, *, goes_on: bool = False) -> Membership:
        return Membership(
            iteration_s=self.iteration_s(self._sizes(self.pipelines, max(self.pipelines.values()) + 1)),
            pause_s=pause_s,
            goes_on=goes_on,
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


class Grid(NamedTuple):
    """Equal pipelines."""

    depth: int
    """Nodes of each; 0: no grid can be made."""
    width: int
    iteration_s: float

    @property
    def num_nodes(self) -> int:
        return self.depth * self.width


NO_GRID = Grid(0, 0, inf)


@dataclass
class GridMembers:
    """Varuna's: all starts again from a checkpoint, on the fastest grid, after a loss in the grid and wherever nodes
    that join make a faster one. Spare nodes come and go as they like."""

    templates: Mapping[int, Template]
    num_microbatches: int
    times: Times
    most_nodes: int
    checkpoint_every: int
    save_s: float
    slowdown: float = 1.0
    nodes: list[str] = field(default_factory=list)
    """The first of them are the grid's."""
    grid: Grid = NO_GRID
    grids: dict[int, Grid] = field(default_factory=dict)
    """The fastest for each number of nodes, as far as they were asked for; may be shared by many replays."""

    def change(self, lost: Sequence[str], joined: Sequence[str], *, warned: bool) -> Membership:
        is_hit = not set(lost).isdisjoint(self.nodes[: self.grid.num_nodes])
        self.nodes = [node for node in (*self.nodes, *joined) if node not in lost]
        best = self._best_grid()
        if self.grid.depth and not is_hit and best.iteration_s >= self.grid.iteration_s:
            return self._running(0.0, goes_on=True)
        self.grid = best
        pause_s = self.times.start_s + self.times.load_s + (0.0 if warned else self.times.detect_s)
        return self._running(pause_s, from_checkpoint=True)

    def _best_grid(self) -> Grid:
        num_nodes = min(len(self.nodes), self.most_nodes)
        if num_nodes not in self.grids:
            self.grids[num_nodes] = best_grid(self.templates, num_nodes, self.num_microbatches)
        return self.grids[num_nodes]

    def _running(self, pause_s: float, *, from_checkpoint: bool = False, goes_on: bool = False) -> Membership:
        return Membership(
            iteration_s=self.grid.iteration_s * self.slowdown,
            pause_s=pause_s,
            from_checkpoint=from_checkpoint,
            goes_on=goes_on,
            num_idle=len(self.nodes) - self.grid.num_nodes,
            num_nodes=len(self.nodes),
        )


@dataclass
class RedundantMembers(GridMembers):
    """Bamboo's: a lost node's predecessor takes over; two neighbours lost at once are a restart. Pipelines have two
    nodes at least: with one there is no predecessor."""

    def __post_init__(self) -> None:
        self.templates = {num_nodes: template for num_nodes, template in self.templates.items() if num_nodes > 1}

    def change(self, lost: Sequence[str], joined: Sequence[str], *, warned: bool) -> Membership:
        depth = self.grid.depth
        gone = [place for place, node in enumerate(self.nodes[: self.grid.num_nodes]) if node in lost]
        neighbours = any((place + 1 if place % depth < depth - 1 else place - depth + 1) in gone for place in gone)
        membership = super().change(lost, joined, warned=warned)
        if membership.goes_on or neighbours or not depth:
            return membership
        return self._running(self.times.rebuild_s + (0.0 if warned else self.times.detect_s))


def best_grid(templates: Mapping[int, Template], num_nodes: int, num_microbatches: int) -> Grid:
    """The fastest grid of equal pipelines, as many of a depth as there are nodes and microbatches for."""
    best = NO_GRID
    for depth, template in templates.items():
        width = min(num_nodes // depth, num_microbatches)
        if width:
            found = Grid(depth, width, template.iteration_s(-(-num_microbatches // width)))
            best = min(best, found, key=lambda grid: grid.iteration_s)
    return best
