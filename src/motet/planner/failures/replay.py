"""Replays a trace of node failures under a policy: what is trained, what is lost, where the time goes (Figure 2.11).

A trace says when nodes join and leave; it is read from a CSV file or drawn at a rate. Three policies are compared:

* `TemplatePolicy` (Oobleck): the interrupted iteration is repeated, and missing layers are copied from peers;
* `RestartPolicy` (Varuna): a checkpoint every so many iterations stops training while it is written. When a node is
  lost, or joining nodes allow a faster grid of equal pipelines, everything restarts from the last checkpoint;
* `RedundancyPolicy` (Bamboo): every node also computes its successor's forward (`slowdown` times as long in total), so
  that it can take over. Two neighbours lost at once mean a restart.

All policies take iteration times from the same templates, so only the policies differ. Losses and arrivals of spare
nodes cost nothing. A node that joins is taken in at the end of an iteration. With a warning of `warning_s` (spot
instances) the iteration in progress is finished if there is time, and a checkpoint is written by policies that need one
and can. Limits: a change during a recovery restarts the recovery, and does not end it sooner.
"""

import csv
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from math import inf
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol

from motet.cluster.pipelines_on_nodes import nodes_of_pipelines
from motet.errors import UserError
from motet.named_files import read_text
from motet.plan import Plan
from motet.planner.reconfiguration.reconfigure import reconfigure_below
from motet.planner.reconfiguration.shard_map import Copy
from motet.planner.reconfiguration.state_owners import OwnedStates, initial_owners
from motet.planner.templates.pipelines import Template, Templates, build_plan, iteration_s, min_max_counts

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class Change:
    """Nodes that leave and join at one moment."""

    time_s: float
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()


def read_trace(path: Path) -> list[Change]:
    """Reads a trace, ordered by time: lines of milliseconds, `add` or `remove`, and the node's name (Bamboo's format,
    without a header). Events of the same millisecond form one change. Raises `UserError` naming the wrong line."""
    try:
        rows = list(csv.reader(read_text(path).splitlines()))
    except OSError as error:
        raise UserError(
            f"--failures: {path} cannot be read ({error.strerror}); give a trace, or a rate like 6h"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"--failures: {path} is not text; give a trace, or a rate like 6h") from None
    events = [_event(path, number, row) for number, row in enumerate(rows, start=1) if row]
    if not events:
        raise UserError(f"--failures: {path} is empty; give lines like 60000,add,node1")
    present: set[str] = set()
    changes = []
    for time_s, group in groupby(sorted(events, key=lambda event: event[0]), key=lambda event: event[0]):
        before = set(present)
        for _, number, kind, node in group:
            if (node in present) == (kind == "add"):
                state = "is there already" if kind == "add" else "is not there"
                raise UserError(f"--failures: {path}, line {number}: {kind} {node}, but it {state}")
            (present.add if kind == "add" else present.remove)(node)
        changes.append(Change(time_s, tuple(sorted(before - present)), tuple(sorted(present - before))))
    return changes


def max_concurrent_nodes(changes: Sequence[Change]) -> int:
    """Returns the largest number of nodes that are present at once."""
    return max(accumulate(len(change.joined) - len(change.lost) for change in changes))


def _event(path: Path, number: int, row: Sequence[str]) -> tuple[float, int, str, str]:
    try:
        time_ms, kind, node = (cell.strip() for cell in row)
        time_s = float(time_ms) / 1000
    except ValueError:
        time_s, kind, node = -1.0, "", ""
    if kind not in ("add", "remove") or not node or not 0 <= time_s < inf:
        raise UserError(
            f"--failures: {path}, line {number}: {','.join(row)!r} is not MILLISECONDS,add|remove,NODE, "
            "such as 60000,remove,node3"
        )
    return time_s, number, kind, node


def duration_s(text: str) -> float | None:
    """Parses `90s`, `10m`, `6h` or `1.5d` to seconds; None for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    return float(match[1]) * UNITS[match[2]] if match and float(match[1]) > 0 else None


def draw_changes(
    num_nodes: int, mean_s: float, end_s: float, *, seed: int = 0, back_after_s: float | None = None
) -> list[Change]:
    """Draws a trace: all nodes join at the start, then a random node is lost every `mean_s` on average (a Poisson
    process). `back_after_s`: a lost node returns after so long on average; None: never."""
    return list(_drawn(num_nodes, mean_s, end_s, Random(seed), back_after_s))


def _drawn(num_nodes: int, mean_s: float, end_s: float, random: Random, back_after_s: float | None) -> Iterator[Change]:
    present = [f"node{i}" for i in range(num_nodes)]
    yield Change(0.0, (), tuple(present))
    away: list[tuple[float, str]] = []
    now = random.expovariate(1 / mean_s)
    while True:
        due = min(away, default=None)
        if due is not None and due[0] < now:
            if due[0] >= end_s:
                return
            away.remove(due)
            present.append(due[1])
            yield Change(due[0], (), (due[1],))
            continue
        if now >= end_s:
            return
        if present:
            node = present.pop(random.randrange(len(present)))
            yield Change(now, (node,), ())
            if back_after_s is not None:
                away.append((now + random.expovariate(1 / back_after_s), node))
        elif not away:
            return
        now += random.expovariate(1 / mean_s)


KINDS = ("training", "redone", "saving", "recovery", "waiting")
"""Kinds of time: iterations that count; iterations that were lost; writing checkpoints; from a change until iterations
continue; too few nodes."""


@dataclass(frozen=True, kw_only=True)
class PolicyState:
    """How training continues after a change."""

    iteration_s: float
    """Infinite: too few nodes."""
    pause_s: float
    """Seconds from the change until the next iteration begins."""
    from_checkpoint: bool = False
    """Iterations since the last checkpoint are lost."""
    is_uninterrupted: bool = False
    """Only spare nodes came or left: the iteration in progress continues."""
    num_idle: int = 0
    """Nodes that are present and compute nothing."""
    num_nodes: int = 0


class Policy(Protocol):
    """Decides how training continues after each change."""

    checkpoint_every: int
    """Iterations; 0: no checkpoints."""
    save_s: float
    """Seconds for which a checkpoint stops training."""

    def change(self, lost: Sequence[str], joined: Sequence[str], *, warned: bool) -> PolicyState: ...


@dataclass
class Usage:
    """The result of a replay."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    """By kind of time."""
    iterations: float = 0.0
    """Iterations that count."""
    idle_node_s: float = 0.0
    """Node-seconds of spares, and of all nodes while there are too few."""
    node_s: float = 0.0
    num_changes: int = 0
    num_restarts: int = 0
    """Restarts from a checkpoint."""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


def replay(changes: Sequence[Change], end_s: float, policy: Policy, *, warning_s: float = 0.0) -> Usage:
    """Replays the trace from its first change to `end_s`."""
    run = _Run(policy, warning_s, changes[0].time_s)
    lost: list[str] = []
    joined: list[str] = []
    for i, change in enumerate(changes):
        if change.time_s >= end_s:
            break
        lost += change.lost
        joined += change.joined
        at_s = run.advance_to_change(change.time_s, has_losses=bool(lost))
        if not lost and i + 1 < len(changes) and at_s > changes[i + 1].time_s:
            continue  # Nodes that join before the iteration ends are part of the next change.
        run.advance(min(at_s, end_s))
        if at_s >= end_s:
            break
        run.change(lost, joined)
        lost, joined = [], []
    run.advance(end_s)
    run.finish()
    return run.usage


class _Run:
    def __init__(self, policy: Policy, warning_s: float, start_s: float) -> None:
        self.policy, self.warning_s = policy, warning_s
        self.now_s = start_s
        self.ready_s = start_s
        """Time at which iterations continue."""
        self.current = PolicyState(iteration_s=inf, pause_s=0.0)
        self.unsaved = 0
        """Complete iterations since the last checkpoint."""
        self.unsaved_s = 0.0
        self.partial_s = 0.0
        """Seconds spent on the iteration or checkpoint in progress."""
        self.usage = Usage()

    def advance_to_change(self, time_s: float, *, has_losses: bool) -> float:
        """Returns when a change takes effect: losses at once, or, after a warning, at the end of an iteration that ends
        in time; nodes that only join, at the end of an iteration. Advances until that is known."""
        time_s = max(time_s, self.now_s)
        known_s = max(time_s - (self.warning_s if has_losses else 0.0), self.now_s)
        if self.current.iteration_s == inf or known_s < self.ready_s:
            return time_s
        self.advance(known_s)
        every = self.policy.checkpoint_every
        is_saving = every and self.unsaved >= every
        ends_s = known_s + self.current.iteration_s - self.partial_s + (self.policy.save_s if is_saving else 0.0)
        return ends_s if not has_losses or ends_s <= time_s else time_s

    def advance(self, time_s: float) -> None:
        """Advances to `time_s` without a change."""
        if time_s <= self.now_s:
            return
        usage, seconds = self.usage, time_s - self.now_s
        usage.node_s += seconds * self.current.num_nodes
        if self.current.iteration_s == inf:
            usage.seconds["waiting"] += seconds
            usage.idle_node_s += seconds * self.current.num_nodes
            self.now_s = time_s
            return
        usage.idle_node_s += seconds * self.current.num_idle
        begins = min(max(self.now_s, self.ready_s), time_s)
        usage.seconds["recovery"] += begins - self.now_s
        self._train(time_s - begins)
        self.now_s = time_s

    def _train(self, seconds: float) -> None:
        period, every = self.current.iteration_s, self.policy.checkpoint_every
        left = self.partial_s + seconds
        if every and not self.unsaved:
            # All complete cycles of iterations and a checkpoint at once.
            cycle_s = every * period
            num_cycles = int(left / (cycle_s + self.policy.save_s))
            self.usage.iterations += num_cycles * every
            self.usage.seconds["training"] += num_cycles * cycle_s
            self.usage.seconds["saving"] += num_cycles * self.policy.save_s
            left -= num_cycles * (cycle_s + self.policy.save_s)
        while True:
            if every and self.unsaved >= every:
                if left < self.policy.save_s:
                    break
                left -= self.policy.save_s
                self.usage.seconds["saving"] += self.policy.save_s
                self._keep()
            step = every - self.unsaved if every else inf
            done = min(int(left / period + 1e-9), step)
            if done == 0:
                break
            self.unsaved += int(done)
            self.unsaved_s += done * period
            left -= done * period
            if not every:
                self._keep()
        self.partial_s = max(0.0, left)

    def _keep(self) -> None:
        """Counts the unsaved iterations as done."""
        self.usage.iterations += self.unsaved
        self.usage.seconds["training"] += self.unsaved_s
        self.unsaved, self.unsaved_s = 0, 0.0

    def finish(self) -> None:
        """Counts what is trained but not yet in a checkpoint."""
        self._keep()
        self.usage.seconds["training"] += self.partial_s
        if self.partial_s:
            self.usage.iterations += self.partial_s / self.current.iteration_s

    def change(self, lost: Sequence[str], joined: Sequence[str]) -> None:
        usage = self.usage
        usage.num_changes += 1
        was_running = self.current.iteration_s < inf
        # A leaving node sends what it holds once its last iteration has ended.
        in_time = self.warning_s > 0 and self.partial_s < 1e-6
        self.current = self.policy.change(lost, joined, warned=not lost or in_time)
        if self.current.is_uninterrupted:
            return
        usage.seconds["redone"] += self.partial_s
        self.partial_s = 0.0
        pause_s = self.current.pause_s
        if self.current.from_checkpoint and was_running:
            usage.num_restarts += 1
            if self.unsaved and (not lost or 0 < self.warning_s >= self.policy.save_s):
                pause_s += self.policy.save_s
                self._keep()
            usage.seconds["redone"] += self.unsaved_s
            self.unsaved, self.unsaved_s = 0, 0.0
        elif self.current.iteration_s == inf:
            self._keep()  # Training saved before it stopped.
        # An interrupted start or load still has to finish.
        self.ready_s = max(self.now_s + pause_s, self.ready_s if was_running else 0.0)


Combine = Callable[[int], Sequence[int]]
"""Total number of nodes -> numbers of nodes of the pipelines to start with."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Durations of the parts of recoveries, in seconds."""

    detect_s: float = 1.0
    """Until a loss without warning is noticed."""
    rebuild_s: float = 2.0
    """Making process groups of surviving processes."""
    start_s: float = 30.0
    """Starting all processes: imports, process groups, the model."""
    load_s: float = 0.0
    """Loading the last checkpoint."""
    save_s: float = 0.0
    """Writing a checkpoint while training waits."""
    bytes_per_s: float = inf
    """Bandwidth of one rank's link, for copies."""


@dataclass
class TemplatePolicy:
    """Pipeline templates, with all decisions of `reconfigure_below`, as in a training. After a stop, training starts
    again from its last checkpoint when there are (f + 1) n0 nodes."""

    like: Plan
    templates: Templates
    combine: Combine
    num_microbatches: int
    times: Times
    max_nodes: int
    stops_below_guarantee: bool = False
    """Saves and stops with too few nodes to survive f failures; else training continues."""
    checkpoint_every: int = 0
    save_s: float = 0.0
    """0: checkpoints are written asynchronously."""
    plan: Plan | None = None
    owned: OwnedStates | None = None
    """Ranks that own each optimizer state under ZeRO-1."""
    order: list[str] = field(default_factory=list)
    """Nodes by their place in the plan."""
    waiting: list[str] = field(default_factory=list)
    steps: dict[str, int] = field(default_factory=dict)
    """Number of reconfiguration steps of each kind."""

    def change(self, lost: Sequence[str], joined: Sequence[str], *, warned: bool) -> PolicyState:
        self.waiting = [node for node in (*self.waiting, *joined) if node not in lost]
        if self.plan is None:
            return self._start()
        places = [place for place, node in enumerate(self.order) if node in lost]
        if not places and not joined:
            return self._running(0.0, is_uninterrupted=True)
        stay = [node for node in self.order if node not in lost]
        taken = self.waiting[: self.max_nodes - len(stay)]
        result, too_few = reconfigure_below(
            self.plan,
            self.templates,
            lost=() if warned else places,
            leaving=places if warned else (),
            num_joined=len(taken),
            owned=self.owned,
        )
        restore = result.outcome == "restore" or (result.plan is None and not warned)
        if result.plan is None or (too_few and self.stops_below_guarantee):
            self.plan, self.waiting, self.order = None, [*stay, *self.waiting], []
            return PolicyState(iteration_s=inf, pause_s=0.0, from_checkpoint=restore, num_nodes=len(self.waiting))
        for step in result.steps:
            self.steps[step.kind] = self.steps.get(step.kind, 0) + 1
        used = len(taken) - result.num_spares
        size, self.plan, self.owned = self.templates.devices_per_node, result.plan, result.owned
        here = [self.order[rank // size] for rank in result.old_ranks[::size] if rank is not None]
        placed = result.plan.num_ranks // size - used
        left_out = [node for node in here[placed:] if node in stay]
        self.order, self.waiting = [*here[:placed], *taken[:used]], [*left_out, *self.waiting[used:]]
        pause_s = self.times.rebuild_s + (0.0 if warned else self.times.detect_s)
        pause_s += self.times.load_s if restore else self._copy_s(result.copies)
        return self._running(pause_s, from_checkpoint=restore)

    def _copy_s(self, copies: Sequence[Copy]) -> float:
        """Seconds until the busiest rank has sent and received everything."""
        sent: dict[int, float] = defaultdict(float)
        received: dict[int, float] = defaultdict(float)
        for copy in copies:
            sent[copy.source] += copy.num_bytes
            received[copy.target] += copy.num_bytes
        return max((*sent.values(), *received.values()), default=0.0) / self.times.bytes_per_s

    def _start(self) -> PolicyState:
        if len(self.waiting) < self.templates.min_total_nodes:
            return PolicyState(iteration_s=inf, pause_s=0.0, num_nodes=len(self.waiting))
        self.order, self.waiting = self.waiting[: self.max_nodes], self.waiting[self.max_nodes :]
        sizes = self.combine(len(self.order))
        chosen = [self.templates.by_nodes[n] for n in sizes]
        self.plan = build_plan(self.like, self.templates, sizes, min_max_counts(chosen, self.num_microbatches))
        self.owned = initial_owners(self.plan, self.templates)
        return self._running(self.times.start_s + self.times.load_s, from_checkpoint=True)

    def _running(self, pause_s: float, *, from_checkpoint: bool = False, is_uninterrupted: bool = False) -> PolicyState:
        assert self.plan is not None
        sizes = [len(nodes) for nodes in nodes_of_pipelines(self.plan, self.templates.devices_per_node)]
        chosen = [self.templates.by_nodes[n] for n in sizes]
        return PolicyState(
            iteration_s=iteration_s(chosen, self.plan.replica_microbatches),
            pause_s=pause_s,
            from_checkpoint=from_checkpoint,
            is_uninterrupted=is_uninterrupted,
            num_idle=len(self.waiting),
            num_nodes=len(self.order) + len(self.waiting),
        )


class Grid(NamedTuple):
    """`width` equal pipelines of `depth` nodes; depth 0: no grid is possible."""

    depth: int
    width: int
    iteration_s: float

    @property
    def num_nodes(self) -> int:
        return self.depth * self.width


NO_GRID = Grid(0, 0, inf)


@dataclass
class RestartPolicy:
    """Varuna's policy: restarts from a checkpoint, on the fastest grid, after a loss in the grid and whenever joining
    nodes allow a faster grid."""

    templates: Mapping[int, Template]
    num_microbatches: int
    times: Times
    max_nodes: int
    checkpoint_every: int
    save_s: float
    slowdown: float = 1.0
    nodes: list[str] = field(default_factory=list)
    """The grid's nodes first, then the idle ones."""
    grid: Grid = NO_GRID
    grids: dict[int, Grid] = field(default_factory=dict)
    """Cache of the fastest grid by number of nodes; may be shared by many replays."""

    def change(self, lost: Sequence[str], joined: Sequence[str], *, warned: bool) -> PolicyState:
        is_hit = not set(lost).isdisjoint(self.nodes[: self.grid.num_nodes])
        self.nodes = [node for node in (*self.nodes, *joined) if node not in lost]
        num_nodes = min(len(self.nodes), self.max_nodes)
        if num_nodes not in self.grids:
            self.grids[num_nodes] = best_grid(self.templates, num_nodes, self.num_microbatches)
        best = self.grids[num_nodes]
        if self.grid.depth and not is_hit and best.iteration_s >= self.grid.iteration_s:
            return self._running(0.0, is_uninterrupted=True)
        self.grid = best
        pause_s = self.times.start_s + self.times.load_s + (0.0 if warned else self.times.detect_s)
        return self._running(pause_s, from_checkpoint=True)

    def _running(self, pause_s: float, *, from_checkpoint: bool = False, is_uninterrupted: bool = False) -> PolicyState:
        return PolicyState(
            iteration_s=self.grid.iteration_s * self.slowdown,
            pause_s=pause_s,
            from_checkpoint=from_checkpoint,
            is_uninterrupted=is_uninterrupted,
            num_idle=len(self.nodes) - self.grid.num_nodes,
            num_nodes=len(self.nodes),
        )


@dataclass
class RedundancyPolicy(RestartPolicy):
    """Bamboo's policy: a lost node's predecessor takes over; two neighbours lost at once mean a restart. Pipelines have
    at least two nodes: with one there is no predecessor."""

    def __post_init__(self) -> None:
        self.templates = {num_nodes: template for num_nodes, template in self.templates.items() if num_nodes > 1}

    def change(self, lost: Sequence[str], joined: Sequence[str], *, warned: bool) -> PolicyState:
        depth = self.grid.depth
        gone = [place for place, node in enumerate(self.nodes[: self.grid.num_nodes]) if node in lost]
        neighbours = any((place + 1 if place % depth < depth - 1 else place - depth + 1) in gone for place in gone)
        state = super().change(lost, joined, warned=warned)
        if state.is_uninterrupted or neighbours or not depth:
            return state
        return self._running(self.times.rebuild_s + (0.0 if warned else self.times.detect_s))


def best_grid(templates: Mapping[int, Template], num_nodes: int, num_microbatches: int) -> Grid:
    """Returns the fastest grid of equal pipelines, with as many as there are nodes and microbatches for."""
    best = NO_GRID
    for depth, template in templates.items():
        width = min(num_nodes // depth, num_microbatches)
        if width:
            found = Grid(depth, width, template.iteration_s(-(-num_microbatches // width)))
            best = min(best, found, key=lambda grid: grid.iteration_s)
    return best
