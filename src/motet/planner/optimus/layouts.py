"""Optimus' model planner: layouts of language model and encoders on the same ranks (Feng et al., section 4.1).

For each layout of the language model (DP, PP, TP, chunks of interleaved 1F1B), the search visits all encoder layouts
whose PP and TP divide the language model's; each language model pipeline then has m = (PP x TP) / (PP_enc x TP_enc)
encoder pipelines. Layouts whose states do not fit beside the language model's are pruned; for the others the bubble
scheduler estimates the iteration time. Several encoders get the same degrees and count as one with all their kernels
(section 4.4).

Deviations: the paper takes the language model's layout as given; here all layouts within the user's limits are tried,
starting with the best without encoders. The paper's memory analysis counts states only (4.5); here activations count
too, those of the language model and of encoder microbatches between their forward and their backward.

Limits: costs are those of a typical microbatch; the language model has one all-gather at the beginning (under ZeRO-1)
and one reduction at the end; the encoder's gradients are summed after its last backward.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from math import inf
from operator import itemgetter

from motet.costs.memory import usable_bytes
from motet.errors import UserError
from motet.plan import LayerRange
from motet.planner.layouts.degrees import dp_sizes, most_stages, no_layout, tp_sizes
from motet.planner.layouts.partition import partition
from motet.planner.optimus.bubbles import BubbleSchedule, EncoderPipelines, can_take_less, schedule_bubbles
from motet.planner.optimus.timeline import Kernels, LlmPipeline, LlmTimeline, llm_timeline, stage_kernels
from motet.planner.problem import PlanningProblem

MAX_LLM_LAYOUTS = 6
"""Number of language model layouts, the best ones without encoders, that are combined with encoder layouts."""


@dataclass(frozen=True, kw_only=True)
class LlmLayout:
    dp: int
    pp: int
    tp: int
    num_chunks: int = 1
    """Chunks of each group of ranks."""


@dataclass(frozen=True, kw_only=True)
class EncoderLayout:
    pp: int
    tp: int

    def pipelines(self, llm: LlmLayout) -> int:
        """Number of encoder pipelines on each pipeline of the language model."""
        return llm.pp * llm.tp // (self.pp * self.tp)


@dataclass(frozen=True)
class Solution:
    """A layout and its bubble schedule, which `motet.planner.optimus.planner` turns into a plan."""

    problem: PlanningProblem
    llm: LlmLayout
    encoder: EncoderLayout
    timeline: LlmTimeline
    pipelines: EncoderPipelines
    schedule: BubbleSchedule
    needed_bytes: tuple[int, ...]
    """Memory of each rank, by place of the language model's pipeline."""

    @property
    def iteration_s(self) -> float:
        return self.schedule.iteration_s

    @cached_property
    def excess_bytes(self) -> int:
        return max(0, max(self.needed_bytes) - int(usable_bytes(self.problem.cluster)))


def solutions(problem: PlanningProblem) -> list[Solution]:
    """Promising solutions, the best first: those that fit by iteration time, then the others by excess memory.

    Raises `UserError` if Optimus does not apply: no encoder, or no layout within the limits."""
    check_applies(problem)
    found: list[Solution] = []
    for llm, timeline in llm_layouts(problem):
        side = LlmSide(problem, llm)
        for encoder in encoder_layouts(problem, llm):
            best_s = min((s.iteration_s for s in found if not s.excess_bytes), default=inf)
            if best_s < inf and not (
                side.states_fit(encoder) and can_take_less(timeline, side.encoder_pipelines(encoder), best_s)
            ):
                continue
            found.append(side.solve(encoder, timeline))
    if not found:
        raise no_layout(problem, "optimus")
    return sorted(found, key=lambda solution: (solution.excess_bytes, solution.iteration_s))


def check_applies(problem: PlanningProblem) -> None:
    """Raises `UserError` unless all encoders, and nothing else, enter one module."""
    if len(problem.sinks) != 1 or not problem.sources:
        raise UserError("parallel.planner: optimus needs encoders and one module that they enter; give another planner")
    for edge in problem.edges:
        if edge.target != problem.sinks[0]:
            raise UserError(
                f"parallel.planner: optimus needs encoders that enter {problem.sinks[0]} themselves, but {edge.source} "
                f"enters {edge.target}; give another planner"
            )


def encoder_layouts(problem: PlanningProblem, llm: LlmLayout) -> Iterator[EncoderLayout]:
    """Layouts whose degrees divide the language model's, those with fewest stages and widest groups first."""
    sizes = set.intersection(*(set(tp_sizes(problem, name)) for name in problem.sources))
    most = min(most_stages(problem, name) for name in problem.sources)
    for pp in (pp for pp in range(1, min(llm.pp, most) + 1) if llm.pp % pp == 0):
        for tp in sorted(sizes, reverse=True):
            if llm.tp % tp == 0:
                yield EncoderLayout(pp=pp, tp=tp)


def llm_layouts(problem: PlanningProblem) -> list[tuple[LlmLayout, LlmTimeline]]:
    """The best layouts of the language model with their timelines, the fastest first, those that exceed memory last.

    Layouts whose lower bound exceeds the best ones are skipped."""
    found: list[tuple[int, float, int, LlmLayout, LlmTimeline]] = []
    sides = sorted(((side.least_s(), i, side) for i, side in enumerate(_llm_sides(problem))), key=itemgetter(0, 1))
    for bound_s, i, side in sides:
        fitting = sorted(iteration_s for excess, iteration_s, *_ in found if not excess)
        if len(fitting) >= MAX_LLM_LAYOUTS and bound_s >= fitting[MAX_LLM_LAYOUTS - 1]:
            break
        timeline = side.timeline()
        excess = max(0, max(side.needed_bytes(timeline)) - int(usable_bytes(problem.cluster)))
        found.append((excess, timeline.iteration_s, i, side.layout, timeline))
    return [(layout, timeline) for *_, layout, timeline in sorted(found, key=itemgetter(0, 1, 2))[:MAX_LLM_LAYOUTS]]


def _llm_sides(problem: PlanningProblem) -> Iterator["LlmSide"]:
    name = problem.sinks[0]
    for dp, tp in product(dp_sizes(problem), tp_sizes(problem, name)):
        if problem.num_devices % (dp * tp) == 0:
            pp = problem.num_devices // (dp * tp)
            most = most_stages(problem, name) // pp
            for num_chunks in _powers_of_two(most if pp > 1 else min(most, 1)):
                yield LlmSide(problem, LlmLayout(dp=dp, pp=pp, tp=tp, num_chunks=num_chunks))


def _powers_of_two(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length())]


class LlmSide:
    """One layout of the language model, and its combination with encoder layouts."""

    def __init__(self, problem: PlanningProblem, layout: LlmLayout) -> None:
        self.problem, self.layout = problem, layout
        self.name = problem.sinks[0]
        self.stages = cut(problem, self.name, layout.tp, layout.dp, layout.pp * layout.num_chunks)

    def least_s(self) -> float:
        """Lower bound of the iteration: a place's computation, and that of earlier places before and after it."""
        times = self.problem.estimator.layer_times(self.name, self.layout.tp, self.layout.dp)
        seconds = [sum(times[i].total_s for i in range(*stage)) for stage in self.stages]
        places = self.layout.pp
        before = accumulate(seconds[: places - 1], initial=0.0)
        return max(
            self.problem.num_microbatches * sum(seconds[place::places]) + others_s
            for place, others_s in zip(range(places), before, strict=True)
        )

    def timeline(self) -> LlmTimeline:
        layout, problem = self.layout, self.problem
        forward, backward = stage_kernels(problem, self.name, layout.tp, layout.dp, self.stages)
        all_gather_s, reduce_scatter_s = self._collectives()
        return llm_timeline(
            LlmPipeline(
                num_places=layout.pp,
                forward=forward,
                backward=backward,
                num_microbatches=problem.num_microbatches,
                all_gather_s=all_gather_s,
                reduce_scatter_s=reduce_scatter_s,
                message_s=self._message_s(self.name, layout.tp),
            )
        )

    def solve(self, encoder: EncoderLayout, timeline: LlmTimeline) -> Solution:
        pipelines = self.encoder_pipelines(encoder)
        schedule = schedule_bubbles(timeline, pipelines)
        needed = self._needed_with(encoder, timeline, schedule)
        return Solution(self.problem, self.layout, encoder, timeline, pipelines, schedule, needed)

    def encoder_pipelines(self, encoder: EncoderLayout) -> EncoderPipelines:
        problem, layout = self.problem, self.layout
        forward: list[Kernels] = [()] * encoder.pp
        backward: list[Kernels] = [()] * encoder.pp
        for name in problem.sources:
            stages = cut(problem, name, encoder.tp, layout.dp, encoder.pp)
            there, back = stage_kernels(problem, name, encoder.tp, layout.dp, stages)
            forward = [a + b for a, b in zip(forward, there, strict=True)]
            backward = [b + a for a, b in zip(backward, back, strict=True)]
        return EncoderPipelines(
            places=tuple(tuple(range(first, first + encoder.pp)) for first in range(0, layout.pp, encoder.pp)),
            copies=layout.tp // encoder.tp,
            forward=tuple(forward),
            backward=tuple(backward),
            closing_s=self._encoder_reduction_s(encoder),
            message_s=max(self._message_s(name, layout.tp) for name in problem.sources),
        )

    # Seconds ----------------------------------------------------------------------------------------------------------

    def _message_s(self, name: str, tp: int) -> float:
        """A message from one place to the next, at the end of a module's block."""
        problem, layout = self.problem, self.layout
        if layout.pp == 1:
            return 0.0
        estimator = problem.estimator
        load = estimator.typical_load(name, layout.dp)
        num_bytes = estimator.boundary_bytes(name, 1, load, num_row_shares=tp)
        return estimator.link(0, tp).seconds(num_bytes)

    def _collectives(self) -> tuple[float, float]:
        """Seconds of the all-gather before and the reduction after the iteration, at the place with most bytes."""
        of_layers = self.problem.estimator.gradient_bytes(self.name, tp=self.layout.tp)
        most = max(sum(sum(of_layers[a:b]) for a, b in stages) for stages in self._stages_of_places())
        seconds = self._all_reduce_s(self.layout.dp, self.layout.pp * self.layout.tp, most)
        if not self.problem.memory.zero1:
            return 0.0, seconds
        # Replicas that keep a state need no new parameters, but the whole gradient.
        lacking = (self.layout.dp - self.problem.memory.num_keepers(self.layout.dp)) / max(1, self.layout.dp - 1)
        return lacking * seconds / 2, (1 - lacking / 2) * seconds

    def _encoder_reduction_s(self, encoder: EncoderLayout) -> float:
        seconds = 0.0
        for name in self.problem.sources:
            stages = cut(self.problem, name, encoder.tp, self.layout.dp, encoder.pp)
            of_layers = self.problem.estimator.gradient_bytes(name, tp=encoder.tp)
            most = max(sum(of_layers[a:b]) for a, b in stages)
            num_replicas = self.layout.dp * encoder.pipelines(self.layout)
            seconds += self._all_reduce_s(num_replicas, encoder.pp * encoder.tp, most)
        return seconds

    def _all_reduce_s(self, num_ranks: int, stride: int, num_bytes: float) -> float:
        return self.problem.estimator.all_reduce_seconds(range(0, num_ranks * stride, stride), num_bytes)

    # Bytes ------------------------------------------------------------------------------------------------------------

    def _stages_of_places(self) -> list[Sequence[LayerRange]]:
        return [self.stages[place :: self.layout.pp] for place in range(self.layout.pp)]

    def needed_bytes(self, timeline: LlmTimeline) -> tuple[int, ...]:
        """Memory of the language model alone at each place: states and the peak of activations."""
        layout = self.layout
        saved = self._activations(self.name, self.stages, layout.tp)
        needed = []
        for place, stages in enumerate(self._stages_of_places()):
            held = peak = 0
            for _, (stage, _, kind) in timeline.passes[place]:
                held += -saved[stage] if kind else saved[stage]
                peak = max(peak, held)
            needed.append(peak + sum(self._states(self.name, stages, layout.tp, layout.dp)))
        return tuple(needed)

    def states_fit(self, encoder: EncoderLayout) -> bool:
        """Whether the states of encoders and language model fit into memory together (section 4.5)."""
        layout = self.layout
        states = [sum(self._states(self.name, stages, layout.tp, layout.dp)) for stages in self._stages_of_places()]
        return all(
            own + of_encoder <= int(usable_bytes(self.problem.cluster))
            for own, of_encoder in zip(states, self._encoder_states(encoder), strict=True)
        )

    def _encoder_states(self, encoder: EncoderLayout) -> list[int]:
        """States of the encoders at each place of the language model."""
        of_stage = [0] * encoder.pp
        num_replicas = self.layout.dp * encoder.pipelines(self.layout)
        for name in self.problem.sources:
            stages = cut(self.problem, name, encoder.tp, self.layout.dp, encoder.pp)
            states = self._states(name, stages, encoder.tp, num_replicas)
            of_stage = [a + b for a, b in zip(of_stage, states, strict=True)]
        return of_stage * (self.layout.pp // encoder.pp)

    def _needed_with(self, encoder: EncoderLayout, timeline: LlmTimeline, schedule: BubbleSchedule) -> tuple[int, ...]:
        """Memory with encoders: the sum of both peaks, which need not coincide."""
        saved = [0] * encoder.pp
        for name in self.problem.sources:
            stages = cut(self.problem, name, encoder.tp, self.layout.dp, encoder.pp)
            saved = [a + b for a, b in zip(saved, self._activations(name, stages, encoder.tp), strict=True)]
        num_chains = self.layout.pp // encoder.pp
        in_flight = [[0] * encoder.pp for _ in range(num_chains)]
        for pipeline in range(encoder.pipelines(self.layout)):
            most = in_flight[pipeline % num_chains]
            for s, peak in enumerate(_most_in_flight(schedule, pipeline, encoder.pp)):
                most[s] = max(most[s], peak)
        activations = [count * size for chain in in_flight for count, size in zip(chain, saved, strict=True)]
        own = self.needed_bytes(timeline)
        return tuple(map(sum, zip(own, self._encoder_states(encoder), activations, strict=True)))

    def _states(self, name: str, stages: Sequence[LayerRange], tp: int, num_replicas: int) -> list[int]:
        """Static bytes of each stage."""
        of_layers = self.problem.estimator.static_bytes(name, tp, num_replicas)
        return [sum(of_layers[first:last]) for first, last in stages]

    def _activations(self, name: str, stages: Sequence[LayerRange], tp: int) -> list[int]:
        """Bytes that each stage saves for a microbatch."""
        of_layers = self.problem.estimator.saved_bytes(name, tp, self.layout.dp)
        return [sum(of_layers[first:last]) for first, last in stages]


def _most_in_flight(schedule: BubbleSchedule, pipeline: int, num_stages: int) -> list[int]:
    """Maximal number of an encoder pipeline's microbatches in flight on each stage."""
    result = []
    for s in range(num_stages):
        events: list[tuple[float, int]] = []
        for owner, forward, backward in zip(schedule.owner, schedule.forwards, schedule.backwards, strict=True):
            if owner == pipeline and backward:
                events += [(forward[s].start_s, 1), (backward[s].end_s, -1)]
        held = most = 0
        for _, change in sorted(events):
            held += change
            most = max(most, held)
        result.append(most)
    return result


def cut(problem: PlanningProblem, name: str, tp: int, dp: int, num_stages: int) -> tuple[LayerRange, ...]:
    """The partition into stages with the fastest slowest stage."""
    return partition(problem.estimator.layer_seconds(name, tp, dp), num_stages)
