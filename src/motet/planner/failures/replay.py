"""A trace of failures replayed under a policy: what is trained, what is lost, where the time goes (Figure 2.11).

Three ways to live with failures:

* templates (`members.TemplateMembers`): the interrupted iteration is redone, layers are copied from peers;
* restart from checkpoint (Varuna; `members.GridMembers`): a checkpoint every so many iterations stops the training
  while it is written; when a node is lost, or those that joined make a faster grid of equal pipelines, all is started
  again from the last one;
* redundant computation (Bamboo; `members.RedundantMembers`): every node also computes what its successor does, so that
  it takes over; two neighbours lost at once mean a restart.

Spare nodes come and go without a trace. A node that joins is taken in at the end of an iteration. With a warning of
`warning_s` (spot instances) the iteration in progress is finished if there is time, and a checkpoint is written by
those who need one and can.
Limits: iterations take what the templates say; a change during a recovery begins it anew, and does not end it sooner.
"""

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from math import inf
from pathlib import Path
from random import Random
from typing import Protocol

from motet.errors import UserError

# When nodes come and go: traces of failures and spot instances, read from a file or drawn at a rate.
#
# A trace is a CSV file without a header: milliseconds, `add` or `remove`, and the node's name (Bamboo's format, in
# which it published traces of spot instances). What happens in the same millisecond happens at once.


UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class Change:
    """What happens at one moment."""

    time_s: float
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()


def read_trace(path: Path) -> list[Change]:
    """In the order of time. Raises `UserError` naming the line that is wrong."""
    try:
        rows = list(csv.reader(path.read_text().splitlines()))
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


def most_nodes(changes: Sequence[Change]) -> int:
    """That are there at once, at some moment."""
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
    """Seconds of `90s`, `10m`, `6h` or `1.5d`; None for what is none of these."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    return float(match[1]) * UNITS[match[2]] if match and float(match[1]) > 0 else None


def draw_changes(
    num_nodes: int, mean_s: float, end_s: float, *, seed: int = 0, back_after_s: float | None = None
) -> list[Change]:
    """All nodes at the beginning, then one is lost every `mean_s` on average (a Poisson process), each as likely as any
    other. `back_after_s`: a lost node comes back after so long on average; None: never."""
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
"""Where time goes: iterations that count; such that were lost; checkpoints; from a change until iterations go on; too
few nodes."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """After a change."""

    iteration_s: float
    """Infinite: too few nodes."""
    pause_s: float
    """From the change until the next iteration begins."""
    from_checkpoint: bool = False
    """What was not in a checkpoint is lost."""
    goes_on: bool = False
    """Only spare nodes came or went: not even the iteration in progress is touched."""
    num_idle: int = 0
    """Nodes that are there and compute nothing."""
    num_nodes: int = 0


class Members(Protocol):
    """A policy's state: who trains what."""

    checkpoint_every: int
    """Iterations; 0: none."""
    save_s: float
    """That a checkpoint stops the training."""

    def change(self, lost: Sequence[str], joined: Sequence[str], *, warned: bool) -> Membership: ...


@dataclass
class Usage:
    """What came of it."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    iterations: float = 0.0
    """That count."""
    idle_node_s: float = 0.0
    """Of nodes that are there and compute nothing: spares, and all while there are too few."""
    node_s: float = 0.0
    num_changes: int = 0
    num_restarts: int = 0
    """From a checkpoint."""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


def replay(changes: Sequence[Change], end_s: float, members: Members, *, warning_s: float = 0.0) -> Usage:
    """From the first change to `end_s`."""
    run = _Run(members, warning_s, changes[0].time_s)
    lost: list[str] = []
    joined: list[str] = []
    for i, change in enumerate(changes):
        if change.time_s >= end_s:
            break
        lost += change.lost
        joined += change.joined
        at_s = run.go_on_until_change(change.time_s, has_losses=bool(lost))
        if not lost and i + 1 < len(changes) and at_s > changes[i + 1].time_s:
            continue  # The nodes that wait for the iteration's end are part of the next change.
        run.until(min(at_s, end_s))
        if at_s >= end_s:
            break
        run.change(lost, joined)
        lost, joined = [], []
    run.until(end_s)
    run.finish()
    return run.usage


class _Run:
    def __init__(self, members: Members, warning_s: float, start_s: float) -> None:
        self.members, self.warning_s = members, warning_s
        self.now_s = start_s
        self.ready_s = start_s
        """When iterations go on."""
        self.current = Membership(iteration_s=inf, pause_s=0.0)
        self.unsaved = 0
        """Whole iterations since the last checkpoint."""
        self.unsaved_s = 0.0
        self.partial_s = 0.0
        """Of the iteration or checkpoint in progress."""
        self.usage = Usage()

    def go_on_until_change(self, time_s: float, *, has_losses: bool) -> float:
        """When a change is acted on: losses at once, or, after a warning, when an iteration ends in time; what only
        joins, at the end of an iteration. Goes on until that is known."""
        time_s = max(time_s, self.now_s)
        known_s = max(time_s - (self.warning_s if has_losses else 0.0), self.now_s)
        if self.current.iteration_s == inf or known_s < self.ready_s:
            return time_s
        self.until(known_s)
        every = self.members.checkpoint_every
        is_saving = every and self.unsaved >= every
        ends_s = known_s + self.current.iteration_s - self.partial_s + (self.members.save_s if is_saving else 0.0)
        return ends_s if not has_losses or ends_s <= time_s else time_s

    def until(self, time_s: float) -> None:
        """Time goes on without a change."""
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
        period, every = self.current.iteration_s, self.members.checkpoint_every
        left = self.partial_s + seconds
        if every and not self.unsaved:
            left = self._train_cycles(left, every * period, every)
        while True:
            if every and self.unsaved >= every:
                if left < self.members.save_s:
                    break
                left -= self.members.save_s
                self._saved()
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

    def _train_cycles(self, left: float, unsaved_s: float, every: int) -> float:
        """All at once what ends with a checkpoint. Returns the time that is left."""
        num_cycles = int(left / (unsaved_s + self.members.save_s))
        self.usage.iterations += num_cycles * every
        self.usage.seconds["training"] += num_cycles * unsaved_s
        self.usage.seconds["saving"] += num_cycles * self.members.save_s
        return left - num_cycles * (unsaved_s + self.members.save_s)

    def _saved(self) -> None:
        self.usage.seconds["saving"] += self.members.save_s
        self._keep()

    def _keep(self) -> None:
        self.usage.iterations += self.unsaved
        self.usage.seconds["training"] += self.unsaved_s
        self.unsaved, self.unsaved_s = 0, 0.0

    def finish(self) -> None:
        """What is trained but not yet in a checkpoint counts, at the end."""
        self._keep()
        self.usage.seconds["training"] += self.partial_s
        if self.partial_s:
            self.usage.iterations += self.partial_s / self.current.iteration_s

    def change(self, lost: Sequence[str], joined: Sequence[str]) -> None:
        usage = self.usage
        usage.num_changes += 1
        was_running = self.current.iteration_s < inf
        # A node that leaves hands over what it holds when its last iteration has ended.
        in_time = self.warning_s > 0 and self.partial_s < 1e-6
        self.current = self.members.change(lost, joined, warned=not lost or in_time)
        if self.current.goes_on:
            return
        usage.seconds["redone"] += self.partial_s
        self.partial_s = 0.0
        pause_s = self.current.pause_s
        if self.current.from_checkpoint and was_running:
            usage.num_restarts += 1
            if self.unsaved and (not lost or 0 < self.warning_s >= self.members.save_s):
                pause_s += self.members.save_s
                self._keep()
            usage.seconds["redone"] += self.unsaved_s
            self.unsaved, self.unsaved_s = 0, 0.0
        elif self.current.iteration_s == inf:
            self._keep()  # Saved before it stopped.
        # What was being started or loaded still has to be.
        self.ready_s = max(self.now_s + pause_s, self.ready_s if was_running else 0.0)
