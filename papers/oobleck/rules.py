"""The rules by which the authors' simulator made Tables 2.2 and 2.4, replayed: not a model of a cluster, and not ours.

Written anew from the rules of Oobleck's artifact (SymbioticLab/Oobleck, branch sosp23-artifact, tools/simulator); its
inputs are in `papers.oobleck.artifact`. Our own replay is `papers.oobleck.replay_model`. Rules that no cluster follows:

* Failures come at exactly regular intervals, the 15th ends the run, and a run lasts until its last finished iteration.
* Iterations go on on all nodes, the lost one included, until a restart or reconfiguration is over; those that end
  until then count. Only the one in progress at that moment is dropped.
* Varuna writes a checkpoint after the first iteration that ends after a loss, so also of what is trained during its
  restart.
* A checkpoint is complete twice its time after the iteration: training waits for the first half. Whether a loss cuts it
  off is not asked of times: it fails if in the array of the binary heap of events some loss is before it. So one that
  no loss is near to may fail, by where it comes to lie.
* One that fails takes the last 10 iterations along (2 without costs), whatever is in earlier checkpoints; if there are
  fewer, also the first ones of those to come.
* Where a restart begins while another one is under way, training begins when the first is over, and stops until the
  next loss when the second is. It happens once: GPT-3 6.7b's first start takes longer than the first 10 minutes.
* Bamboo's iterations take 1.5 times as long after any loss, also of a node that computes nothing, until its pipelines
  are built anew, which follows an iteration after a loss of one that does.

What comes of it, with the artifact's speeds: all rows of Oobleck and Varuna within 0.01 samples/s; Bamboo's within 3%.
Those hang on which nodes compute, and so on the order in which the heap yields 30 nodes that come at once.
Limit: Bamboo's losses must be so far apart that its pipelines are whole before the next one.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heappop, heappush

from papers.oobleck.artifact import (
    BERT_RESTART_S,
    BERT_START_S,
    DEPTH,
    INTERVALS_S,
    LOST,
    READY_S,
    SLOWDOWN,
)
from papers.oobleck.published import (
    FREE,
    FREE_EVERY,
    MODELS,
    NUM_NODES,
    RENDEZVOUS_S,
    SAVE_EVERY,
    THROUGHPUT,
    WITHOUT_CHECKPOINTS,
    Model,
)

TOLERANCE, MOST_TRIALS = 2e-3, 8
"""Tolerance and number of trials of the calibration."""


class Kind(IntEnum):
    """Kinds of events; those of one millisecond come in this order."""

    ADDED = 1
    LOST = 2
    READY = 3
    RESTARTED = 4
    ITERATED = 5
    SAVED = 6


@dataclass(order=True, slots=True)
class Event:
    """Equal ones are not told apart: the heap decides which comes first."""

    time_ms: int
    kind: Kind
    about: int = field(compare=False, default=0)
    """A node, or for an iteration the restart that began it."""


class Run:
    """One run until the last loss; as it is, Oobleck's."""

    def __init__(self, model: Model, period: str, speeds: Sequence[float]) -> None:
        """`speeds`: samples per second on 30, 29, ... nodes. `period`: a key of `INTERVALS_S`."""
        interval_ms = _ms(INTERVALS_S[period])
        self.model, self.speeds = model, speeds
        self.events = [Event(0, Kind.ADDED, node) for node in range(1, NUM_NODES + 1)]
        self.events += [Event((i + 1) * interval_ms, Kind.LOST, node) for i, node in enumerate(LOST[period])]
        self.end_ms = self.events[-1].time_ms
        self.start_ms = self.recovery_ms = _ms(model.copy_s)
        self.nodes: list[int] = []
        """That are there, as they came."""
        self.ready: list[int] = []
        """The same, as they became ready."""
        self.is_restarting = False
        self.num_restarts = 0
        self.iteration_ms = 0
        self.num_iterations = 0
        self.went_on_ms = 0
        """When the last iteration, and a checkpoint after it, ended."""
        self.spans_ms: list[tuple[int, int]] = []
        """Spans of finished iterations, each including what preceded it."""
        self.rates: list[float] = []
        """Samples per second in each span; 0: lost. May be longer: a failed checkpoint loses spans to come, too."""

    def samples_per_s(self) -> float:
        """From the first iteration's begin to the last one's end."""
        while (event := heappop(self.events)).time_ms < self.end_ms:
            self.handle(event)
        if not self.spans_ms:
            return 0.0
        counted = sum((end - begin) * rate for (begin, end), rate in zip(self.spans_ms, self.rates, strict=False))
        return counted / (self.spans_ms[-1][1] - self.spans_ms[0][0])

    def handle(self, event: Event) -> None:
        now_ms = event.time_ms
        match event.kind:
            case Kind.ADDED:
                self.nodes.append(event.about)
                self.push(now_ms + _ms(READY_S), Kind.READY, event.about)
            case Kind.READY:
                if not self.ready:
                    self.is_restarting = True
                    self.push(now_ms + self.start_ms, Kind.RESTARTED)
                self.ready.append(event.about)
            case Kind.LOST:
                self.nodes.remove(event.about)
                self.lose(now_ms, event.about)
            case Kind.RESTARTED:
                self.num_restarts += 1
                if self.is_restarting:
                    self.is_restarting = False
                    self.restart(now_ms)
            case Kind.ITERATED:
                if event.about == self.num_restarts:
                    self.iterated(now_ms)

    def push(self, time_ms: int, kind: Kind, about: int = 0) -> None:
        heappush(self.events, Event(time_ms, kind, about))

    def lose(self, now_ms: int, node: int) -> None:
        self.is_restarting = True
        self.push(now_ms + self.recovery_ms, Kind.RESTARTED)

    def restart(self, now_ms: int) -> None:
        if self.num_restarts == 1:
            self.went_on_ms = now_ms
        self.iteration_ms = int(self.model.global_batch / self.speeds[NUM_NODES - len(self.nodes)] * 1000)
        self.begin(now_ms)

    def begin(self, now_ms: int) -> None:
        self.push(now_ms + self.iteration_ms, Kind.ITERATED, self.num_restarts)

    def iterated(self, now_ms: int) -> None:
        self.count(now_ms)
        self.begin(now_ms)

    def count(self, now_ms: int) -> None:
        self.num_iterations += 1
        self.spans_ms.append((self.went_on_ms, now_ms))
        self.rates.append(self.model.global_batch * 1000 / (now_ms - self.went_on_ms))
        self.went_on_ms = now_ms


class Varuna(Run):
    """All starts again from the last checkpoint."""

    def __init__(self, model: Model, period: str, speeds: Sequence[float], *, every: int, save_s: float) -> None:
        super().__init__(model, period, speeds)
        self.every, self.save_ms = every, _ms(save_s)
        self.start_ms = self.recovery_ms = _ms(model.restart_s)
        if model.name == "BERT-Large":
            self.start_ms = _ms(BERT_START_S - model.save_s)
        self.saved_ms = -1
        self.has_lost = False

    def lose(self, now_ms: int, node: int) -> None:
        self.has_lost = True
        num_kept = bisect_left(self.spans_ms, (self.saved_ms,))
        self.rates[num_kept:] = [0.0] * len(self.rates[num_kept:])
        super().lose(now_ms, node)

    def restart(self, now_ms: int) -> None:
        super().restart(now_ms)
        if self.model.name == "BERT-Large":
            self.recovery_ms = _ms(BERT_RESTART_S[NUM_NODES - len(self.nodes)] - self.model.save_s)

    def iterated(self, now_ms: int) -> None:
        self.count(now_ms)
        if self.has_lost or self.num_iterations % self.every == 0:
            self.has_lost = False
            self.went_on_ms += self.save_ms
            if self.save_ms:
                self.push(self.went_on_ms + self.save_ms, Kind.SAVED)
            if self.is_cut_off():
                self.num_iterations = max(0, self.num_iterations - self.every)
                self.rates[-self.every :] = [0.0] * self.every
            else:
                self.saved_ms = self.went_on_ms
        self.begin(self.went_on_ms)

    def is_cut_off(self) -> bool:
        kinds = [event.kind for event in self.events]
        return Kind.SAVED in kinds and Kind.LOST in kinds[: kinds.index(Kind.SAVED)]


class Bamboo(Run):
    """A lost node's predecessor takes over; after the iteration all pipelines are built anew."""

    def __init__(self, model: Model, period: str, speeds: Sequence[float]) -> None:
        super().__init__(model, period, speeds)
        self.start_ms, self.recovery_ms = _ms(RENDEZVOUS_S), _ms(model.take_over_s)
        self.stages: dict[int, list[int]] = {}
        """For each node that computes, its stages, counted through all pipelines."""
        self.lost_ms: int | None = None
        """If the iteration in progress is to last longer because of a loss."""
        self.is_slow = False

    def restart(self, now_ms: int) -> None:
        order = self.ready if self.num_restarts == 1 else self.nodes
        num_stages = len(order) // DEPTH * DEPTH
        self.stages = {node: [stage] for stage, node in enumerate(order[:num_stages])}
        self.is_slow = False
        super().restart(now_ms)

    def lose(self, now_ms: int, node: int) -> None:
        for stage in self.stages.pop(node, []):
            before = stage - 1 if stage % DEPTH else stage + DEPTH - 1
            next(stages for stages in self.stages.values() if before in stages).append(stage)
        if not self.is_slow:
            self.is_slow, self.lost_ms = True, now_ms
            self.iteration_ms = int(self.iteration_ms * SLOWDOWN)

    def iterated(self, now_ms: int) -> None:
        if self.lost_ms is not None:
            more_ms = int((now_ms - self.lost_ms) * (SLOWDOWN - 1))
            self.lost_ms = None
            self.push(now_ms + more_ms, Kind.ITERATED, self.num_restarts)
            return
        self.count(now_ms)
        if any(len(stages) > 1 for stages in self.stages.values()):
            super().lose(now_ms, 0)
        else:
            self.begin(now_ms)


def under_rules(model: Model, kind: str, period: str, speeds: Sequence[float]) -> float:
    """Samples per second of one system, with `speeds` on 30, 29, ... 15 nodes."""
    if kind == "Oobleck":
        return Run(model, period, speeds).samples_per_s()
    if kind == "Bamboo":
        return Bamboo(model, period, speeds).samples_per_s()
    every, save_s = (FREE_EVERY, 0.0) if kind == FREE else (SAVE_EVERY, model.save_s)
    return Varuna(model, period, speeds, every=every, save_s=save_s).samples_per_s()


def calibrated_speeds(model: Model, kind: str, speeds: Sequence[float]) -> Sequence[float]:
    """All times one factor, with which a failure every 6 hours gives the published number, or as nearly as was found: a
    run's throughput jumps where a checkpoint fails or no longer does."""
    wanted = THROUGHPUT[model.name][kind][0]
    tried = []
    for _ in range(MOST_TRIALS):
        ratio = under_rules(model, kind, "6h", speeds) / wanted
        tried.append((abs(ratio - 1), speeds))
        if tried[-1][0] <= TOLERANCE:
            break
        speeds = [speed / ratio for speed in speeds]
    return min(tried)[1]


def throughputs(speeds: Mapping[tuple[str, str], Sequence[float]]) -> dict[tuple[str, str], list[float]]:
    """Samples per second every 6 hours, 1 hour and 10 minutes by model and system, from `speeds` that are calibrated
    first. Varuna without costs of checkpoints is as fast as with them."""
    found: dict[tuple[str, str], list[float]] = {}
    for model in MODELS:
        for kind in THROUGHPUT[model.name]:
            fitted = calibrated_speeds(model, kind, speeds[model.name, kind])
            same = (kind, FREE) if kind == "Varuna" and model.name in WITHOUT_CHECKPOINTS else (kind,)
            for what in same:
                found[model.name, what] = [under_rules(model, what, period, fitted) for period in INTERVALS_S]
    return found


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
