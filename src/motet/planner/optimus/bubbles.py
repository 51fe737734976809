"""Optimus' bubble scheduler: encoder kernels in the language model's bubbles (Feng et al., sections 4.2 and 4.3).

The language model's timeline is fixed. Encoder kernels that cannot begin early enough in its bubbles run before it (the
iteration begins `lead_s` earlier), and those that remain at its end run after it. Kernels are placed in order, each in
the first bubble with room after its input is available. Tensor-parallel bubbles take only kernels that compute; kernels
that communicate run in big and pipeline bubbles, or while the language model computes. Microbatches stay in order.

Deviations from Algorithm 2, which moves whole microbatches of the critical pipeline from the big bubbles inwards for
every partition of the microbatches:

* Forwards are placed as early as possible in one pass. No partition lets a pipeline end a forward earlier, so the
  least `lead_s` is that at which the i-th earliest end of all pipelines meets the i-th dependency point (global
  ordering), and the partition follows from it instead of being enumerated. Backwards use the remaining bubbles.
* The assignment of microbatches to pipelines is then improved: by enumeration if there are few, else by single moves
  away from the pipeline that ends last (the paper's findCritical).
* Backward times are not sorted by themselves: the forward order fixes which pipeline a microbatch belongs to, and its
  backward must run there (the paper's text sorts both).

Limits: kernels do not slow each other; messages between encoder and language model take `message_s` and use no link of
others; placement is greedy: a later microbatch never overtakes an earlier one of its pipeline, and in a
pipeline of several stages a backward may wait for a forward that was not urgent.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import merge
from itertools import product
from math import inf

from motet.planner.optimus.timeline import Kernels, LlmTimeline

TOLERANCE = 1e-4
"""Precision of the lead, as a share of the language model's iteration."""
MAX_ENUMERATED = 128
"""Number of assignments of microbatches to pipelines up to which all are tried."""
MAX_MOVES = 24
"""Otherwise, number of successive moves of one microbatch without gain after which the search ends."""
_EPSILON = 1e-12


class KernelRun:
    """Kernels in order, which may be cut at any of their bounds."""

    def __init__(self, kernels: Kernels) -> None:
        self.num_kernels = len(kernels)
        self.bounds = [0.0]
        for kernel in kernels:
            self.bounds.append(self.bounds[-1] + kernel.seconds)
        self.next_communication = [len(kernels)] * (len(kernels) + 1)
        """For each kernel, the first one from there on that communicates."""
        for i in range(len(kernels) - 1, -1, -1):
            self.next_communication[i] = i if kernels[i].is_communication else self.next_communication[i + 1]

    @property
    def seconds(self) -> float:
        return self.bounds[-1]


@dataclass(frozen=True)
class EncoderPipelines:
    """The encoder pipelines on the places of one language model pipeline.

    Pipeline i has its stages on places[i % len(places)]: those with the same places are `copies` of one another, on
    different ranks of the places' tensor-parallel groups."""

    places: tuple[tuple[int, ...], ...]
    copies: int
    forward: tuple[Kernels, ...]
    """Kernels of each stage for one microbatch of the language model; those of several encoders follow each other."""
    backward: tuple[Kernels, ...]
    """Empty where nothing is trainable."""
    opening_s: float = 0.0
    """Time until the encoder's own parameters are gathered."""
    closing_s: float = 0.0
    """Reduction of its gradients, after its last backward and after the language model's reduction."""
    message_s: float = 0.0
    """Seconds of a message from an encoder stage to the next, and between encoder and language model."""

    @property
    def num_pipelines(self) -> int:
        return len(self.places) * self.copies

    @cached_property
    def forward_runs(self) -> tuple[KernelRun, ...]:
        return tuple(map(KernelRun, self.forward))

    @cached_property
    def backward_runs(self) -> tuple[KernelRun, ...]:
        return tuple(map(KernelRun, self.backward))

    @cached_property
    def seconds(self) -> float:
        """Forward and backward of one microbatch on all stages."""
        return sum(run.seconds for run in (*self.forward_runs, *self.backward_runs))


@dataclass(frozen=True)
class Placement:
    """One microbatch's forward or backward on one stage of its encoder pipeline."""

    start_s: float
    end_s: float


@dataclass(frozen=True)
class BubbleSchedule:
    """Times as in the language model's timeline; negative ones are in the lead."""

    lead_s: float
    iteration_s: float
    """Includes the lead and everything after the language model's iteration."""
    owner: tuple[int, ...]
    """The encoder pipeline of each of the language model's microbatches."""
    forwards: tuple[tuple[Placement, ...], ...]
    """[microbatch][stage of the pipeline]"""
    backwards: tuple[tuple[Placement, ...], ...]
    efficiency: float
    """Share of the encoder's kernel time in the language model's bubbles (Table 7)."""

    def counts(self, num_pipelines: int) -> tuple[int, ...]:
        """Number of microbatches of each encoder pipeline."""
        return tuple(self.owner.count(p) for p in range(num_pipelines))


class _Lane:
    """The bubbles of one encoder stage's ranks, and the part of each that is used."""

    def __init__(self, bubbles: "_Bubbles", lead_s: float) -> None:
        self.bubbles = bubbles
        self.free = bubbles.starts.copy()
        self.windows = bubbles.windows.copy()
        self.free[0] = -lead_s
        self.first = 0
        self.before_s = self.after_s = 0.0
        """Time used in the first bubble including the lead, and after the language model's iteration."""

    def place(self, run: KernelRun, release_s: float) -> Placement:
        """Places the kernels in order, none before `release_s`. The last bubble is unlimited."""
        ends, partial, free, windows = self.bubbles.ends, self.bubbles.partial, self.free, self.windows
        bounds, next_communication, num_kernels = run.bounds, run.next_communication, run.num_kernels
        last = len(ends) - 1
        i = self.first
        if ends[i] < release_s:
            i = bisect_right(ends, release_s, i, last)
        position, begun, now = 0, None, max(release_s, free[i])
        while position < num_kernels:
            begin = free[i] if free[i] > now else now
            done = bounds[position]
            if partial[i]:
                to = (
                    bisect_right(bounds, done + ends[i] - begin + _EPSILON, position, next_communication[position] + 1)
                    - 1
                )
            else:
                to = bisect_right(bounds, done + ends[i] - begin + _EPSILON, position) - 1
            if to > position:
                now = begin + bounds[to] - done
                begun = begin if begun is None else begun
                if i == 0:
                    self.before_s += now - begin
                elif i == last:
                    self.after_s += max(0.0, now - max(begin, self.bubbles.iteration_s))
                position, free[i] = to, now
                if position == num_kernels:
                    break
            if next_communication[position] == position and ends[i] >= now:
                # While the language model computes.
                spent = self.bubbles.windows[i] - windows[i]
                while next_communication[position] == position < num_kernels:
                    seconds = bounds[position + 1] - bounds[position]
                    if seconds > windows[i] + _EPSILON:
                        break
                    begin = ends[i] + spent
                    begun = begin if begun is None else begun
                    windows[i] -= seconds
                    spent += seconds
                    position += 1
                    now = ends[i] + spent
                if position == num_kernels:
                    break
            i += 1
        self.first = i
        return Placement(now if begun is None else begun, now)


class _Bubbles:
    """A place's slots as columns. The last one has no end, for kernels after the iteration."""

    def __init__(self, timeline: LlmTimeline, place: int) -> None:
        slots = timeline.slots[place]
        self.starts = [slot.start_s for slot in slots]
        self.ends = [slot.end_s for slot in slots[:-1]] + [inf]
        self.partial = [slot.is_tensor_parallel for slot in slots]
        self.windows = [slot.window_s for slot in slots]
        self.first_s = slots[0].end_s
        self.iteration_s = timeline.iteration_s


def schedule_bubbles(timeline: LlmTimeline, encoder: EncoderPipelines) -> BubbleSchedule:
    """The schedule with the shortest iteration found."""
    return _Scheduler(timeline, encoder).best()


def can_take_less(timeline: LlmTimeline, encoder: EncoderPipelines, iteration_s: float) -> bool:
    """Whether the forwards alone allow an iteration below `iteration_s`, which is much faster than scheduling."""
    lead_s = iteration_s - timeline.iteration_s - encoder.closing_s
    return lead_s > 0 and _Scheduler(timeline, encoder).earliest_owner_lateness(lead_s) <= _EPSILON


class _Scheduler:
    def __init__(self, timeline: LlmTimeline, encoder: EncoderPipelines) -> None:
        self.timeline, self.encoder = timeline, encoder
        self.bubbles = [_Bubbles(timeline, place) for place in range(len(timeline.slots))]
        self.points = timeline.forward_points
        self.num_microbatches = len(self.points)

    def best(self) -> BubbleSchedule:
        lead_s = self._least_lead(self.earliest_owner_lateness)
        owner = self._earliest_owner(self._forward_ends(lead_s))
        best = self._complete(owner, lead_s)
        unavoidable_s = self.timeline.iteration_s + self.encoder.closing_s
        if best.iteration_s <= unavoidable_s * (1 + TOLERANCE):
            return best
        if len(self.encoder.places) ** self.num_microbatches <= MAX_ENUMERATED and self.encoder.copies == 1:
            every = product(range(self.encoder.num_pipelines), repeat=self.num_microbatches)
            return min((self._with_owner(o) for o in every), key=lambda schedule: schedule.iteration_s)
        return self._improve(best)

    # Forwards ---------------------------------------------------------------------------------------------------------

    def _forward_ends(self, lead_s: float, num_each: Sequence[int] | None = None) -> list[list[float]]:
        """Earliest ends of the forwards of each pipeline with different places."""
        result = []
        for i, places in enumerate(self.encoder.places):
            lanes = [_Lane(self.bubbles[place], lead_s) for place in places]
            limit = self.num_microbatches if num_each is None else num_each[i]
            ends: list[float] = []
            while len(ends) < limit and (not ends or ends[-1] <= self.points[-1] + _EPSILON):
                ends.append(self._forward(lanes, lead_s)[-1].end_s)
            result.append(ends)
        return result

    def _forward(self, lanes: Sequence[_Lane], lead_s: float) -> tuple[Placement, ...]:
        release_s = self.encoder.opening_s - lead_s
        placements = []
        for lane, run in zip(lanes, self.encoder.forward_runs, strict=True):
            placements.append(lane.place(run, release_s))
            release_s = placements[-1].end_s + self.encoder.message_s
        return tuple(placements)

    def _in_order(self, ends: Sequence[Sequence[float]]) -> Iterator[tuple[float, int]]:
        """(end, pipeline) of all pipelines, the earliest first."""
        num_places = len(self.encoder.places)
        return merge(
            *(
                [(end, copy * num_places + i) for end in ends[i]]
                for copy in range(self.encoder.copies)
                for i in range(num_places)
            )
        )

    def _earliest_owner(self, ends: Sequence[Sequence[float]]) -> tuple[int, ...]:
        """Global ordering: the i-th microbatch belongs to the pipeline with the i-th earliest end."""
        owner = [pipeline for _, (_, pipeline) in zip(self.points, self._in_order(ends), strict=False)]
        assert len(owner) == self.num_microbatches
        return tuple(owner)

    def earliest_owner_lateness(self, lead_s: float) -> float:
        ends = [end for _, (end, _) in zip(self.points, self._in_order(self._forward_ends(lead_s)), strict=False)]
        if len(ends) < self.num_microbatches:
            # Pipelines stopped after the last point, so there are too few ends before it.
            return max(ends) - self.points[-1] if ends else inf
        return max(end + self.encoder.message_s - point for end, point in zip(ends, self.points, strict=True))

    def _lateness(self, owner: Sequence[int], lead_s: float) -> float:
        num_places = len(self.encoder.places)
        counts = [owner.count(p) for p in range(self.encoder.num_pipelines)]
        num_each = [max(counts[i::num_places]) for i in range(num_places)]
        ends = self._forward_ends(lead_s, num_each)
        turn = [0] * self.encoder.num_pipelines
        latest = -inf
        for pipeline, point in zip(owner, self.points, strict=True):
            done = ends[pipeline % num_places]
            if turn[pipeline] >= len(done):
                return max(latest, done[-1] - self.points[-1])
            latest = max(latest, done[turn[pipeline]] + self.encoder.message_s - point)
            turn[pipeline] += 1
        return latest

    def _least_lead(self, lateness: Callable[[float], float]) -> float:
        """The least lead with which nothing is late. Lateness decreases by at least the growth of the lead."""
        late = lateness(0.0)
        if late <= _EPSILON:
            return 0.0
        low, high = 0.0, late
        while (late := lateness(high)) > _EPSILON:
            low, high = high, high + max(late, TOLERANCE * self.timeline.iteration_s)
        while high - low > TOLERANCE * self.timeline.iteration_s:
            middle = (low + high) / 2
            if lateness(middle) <= _EPSILON:
                high = middle
            else:
                low = middle
        return high

    # Whole schedules --------------------------------------------------------------------------------------------------

    def _with_owner(self, owner: Sequence[int]) -> BubbleSchedule:
        return self._complete(owner, self._least_lead(lambda lead_s: self._lateness(owner, lead_s)))

    def _complete(self, owner: Sequence[int], lead_s: float) -> BubbleSchedule:
        """The schedule with forwards as early as possible, then backwards in the remaining bubbles."""
        encoder, num_places = self.encoder, len(self.encoder.places)
        forwards: list[tuple[Placement, ...]] = [()] * self.num_microbatches
        backwards = forwards.copy()
        outside_s = 0.0
        end_s = self.timeline.iteration_s
        for pipeline in range(encoder.num_pipelines):
            places = encoder.places[pipeline % num_places]
            owned = [i for i, p in enumerate(owner) if p == pipeline]
            lanes = [_Lane(self.bubbles[place], lead_s) for place in places]
            for i in owned:
                forwards[i] = self._forward(lanes, lead_s)
            for lane in lanes:
                lane.first = 0
            for i in owned:
                backwards[i] = self._backward(lanes, self.timeline.backward_points[i])
                if backwards[i]:
                    end_s = max(end_s, max(placement.end_s for placement in backwards[i]))
            for lane in lanes:
                outside_s += max(0.0, lane.before_s - lane.bubbles.first_s) + lane.after_s
        total_s = encoder.seconds * self.num_microbatches
        return BubbleSchedule(
            lead_s=lead_s,
            iteration_s=lead_s + end_s + encoder.closing_s,
            owner=tuple(owner),
            forwards=tuple(forwards),
            backwards=tuple(backwards),
            efficiency=1 - outside_s / total_s if total_s else 1.0,
        )

    def _backward(self, lanes: Sequence[_Lane], point_s: float) -> tuple[Placement, ...]:
        if not any(run.num_kernels for run in self.encoder.backward_runs):
            return ()
        release_s = point_s + self.encoder.message_s
        placements: list[Placement] = []
        for lane, run in zip(reversed(lanes), reversed(self.encoder.backward_runs), strict=True):
            placements.append(lane.place(run, release_s))
            release_s = placements[-1].end_s + self.encoder.message_s
        return tuple(reversed(placements))

    def _improve(self, best: BubbleSchedule) -> BubbleSchedule:
        """Moves microbatches from the pipeline that ends last to others while that shortens the iteration."""
        tried, without_gain = {best.owner}, 0
        while without_gain < MAX_MOVES:
            for owner in self._moves(best):
                if owner in tried:
                    continue
                tried.add(owner)
                if self._lateness(owner, best.lead_s) > _EPSILON:
                    without_gain += 1
                    continue
                candidate = self._complete(owner, best.lead_s)
                if candidate.iteration_s < best.iteration_s - _EPSILON:
                    best, without_gain = candidate, 0
                    break
                without_gain += 1
                if without_gain >= MAX_MOVES:
                    break
            else:
                break
        return best

    def _moves(self, schedule: BubbleSchedule) -> Iterator[tuple[int, ...]]:
        ends = [0.0] * self.encoder.num_pipelines
        for owner, placements in zip(schedule.owner, schedule.backwards, strict=True):
            ends[owner] = max([ends[owner], *(placement.end_s for placement in placements)])
        critical = max(range(len(ends)), key=ends.__getitem__)
        others = sorted((p for p in range(len(ends)) if p != critical), key=ends.__getitem__)
        owned = [i for i, p in enumerate(schedule.owner) if p == critical]
        for other in others:
            for i in reversed(owned):
                yield (*schedule.owner[:i], other, *schedule.owner[i + 1 :])
