"""The language model's timeline in Optimus: when each pipeline stage computes, and the bubbles in between.

The pipeline runs interleaved 1F1B (Narayanan et al. 2021, section 2.2). Its iteration begins with an all-gather of
parameters and ends with a reduce-scatter of gradients (ZeRO-1). The bubbles of a stage (Optimus, section 4.2, Figure 8)
are a big one before its first computation, another one after its last, pipeline bubbles in between, and a
tensor-parallel bubble wherever one of its own kernels communicates.

The dependency points (section 4.3, Figure 12) are when the first stage begins a microbatch's forward on its first chunk
and when it ends that microbatch's backward. With the adjusted warm-up the forwards come later in the same time; it is
taken only if the iteration does not get longer.

A layer's kernels and their communication come from `motet.costs.kernels` and the cluster's links. The cost table knows
the time of a layer, not of its kernels: the time of a layer without its collectives is divided among its other kernels
in proportion to the assumed speeds.

Limits: kernels take the same time in every iteration; stages do not slow each other's links; a backward runs the
gradients of a layer's inputs before those of its weights; kernels of one device do not overlap.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from motet.costs.analytic import AnalyticCosts, default_speeds
from motet.costs.cells import LayerGradients
from motet.costs.kernels import KernelShape, layer_kernels
from motet.plan import LayerRange
from motet.planner.problem import PlanningProblem
from motet.shapes.module_shape import LayerShape


@dataclass(frozen=True, slots=True)
class Kernel:
    seconds: float
    is_communication: bool = False
    """It uses the links between tensor-parallel ranks instead of the device's compute units."""


Kernels = tuple[Kernel, ...]

Pass = tuple[int, int, int]
"""(stage of the replica, microbatch, 0 for forward or 1 for backward)."""


@dataclass(frozen=True, kw_only=True)
class LlmPipeline:
    """One data-parallel replica of the language model."""

    num_places: int
    """Number of groups of ranks; each holds every `num_places`-th stage."""
    forward: Sequence[Kernels]
    """Kernels of each stage (places times chunks) for one microbatch."""
    backward: Sequence[Kernels]
    num_microbatches: int
    all_gather_s: float = 0.0
    reduce_scatter_s: float = 0.0
    message_s: float = 0.0
    """Seconds of a message from one stage to the next."""

    @property
    def num_chunks(self) -> int:
        return len(self.forward) // self.num_places


@dataclass(frozen=True, slots=True)
class Slot:
    """A bubble of one place."""

    start_s: float
    end_s: float
    is_tensor_parallel: bool = False
    """The links are busy: only kernels that compute may run."""
    window_s: float = 0.0
    """Computation of the language model without communication after the bubble's end."""


@dataclass(frozen=True)
class LlmTimeline:
    """Times are in seconds since the beginning of the iteration."""

    slots: tuple[tuple[Slot, ...], ...]
    """Bubbles of each place in order; the first begins at 0, the last one ends with the iteration."""
    forward_points: tuple[float, ...]
    """Time at which the language model first needs each microbatch."""
    backward_points: tuple[float, ...]
    """Time at which each microbatch's gradient is available."""
    iteration_s: float
    adjusted: bool
    """The warm-up is the adjusted one."""
    passes: tuple[tuple[tuple[float, Pass], ...], ...] = ()
    """Start and pass of each place, in order."""

    def coarse(self) -> "LlmTimeline":
        """The timeline with big bubbles only, before and after all computation of a place."""
        return replace(self, slots=tuple((slots[0], slots[-1]) for slots in self.slots))


def llm_timeline(pipeline: LlmPipeline, *, adjust_warm_up: bool = True) -> LlmTimeline:
    """Raises `ValueError` if the stages do not fill the places alike."""
    if len(pipeline.forward) % pipeline.num_places or len(pipeline.backward) != len(pipeline.forward):
        raise ValueError(
            f"{len(pipeline.forward)} forward and {len(pipeline.backward)} backward stages for {pipeline.num_places} "
            "places; give equally many, a multiple of the places"
        )
    usual = _run(pipeline, forwards_per_place=2)
    if adjust_warm_up:
        adjusted = _run(pipeline, forwards_per_place=1)
        if adjusted.end_s <= usual.end_s * (1 + 1e-9):
            return _timeline(pipeline, adjusted, adjusted=True)
    return _timeline(pipeline, usual, adjusted=False)


def passes_in_order(
    num_places: int, num_chunks: int, num_microbatches: int, place: int, forwards_per_place: int
) -> list[Pass]:
    """The passes of one place, as `motet.schedule.generators.interleaved_1f1b` orders them for plans.

    `forwards_per_place`: by how many forwards the warm-up grows from one place to the one before; 2 is Megatron-LM's,
    1 the adjusted one. With one chunk it is 1F1B. Where the places do not divide the microbatches, runs of microbatches
    through one chunk are longer.
    """
    num_runs = max(1, num_microbatches // num_places)
    bounds = pairwise(num_microbatches * i // num_runs for i in range(num_runs + 1))
    forwards: dict[int, Pass] = {}
    backwards: dict[int, Pass] = {}
    longest = 0
    for first, last in bounds:
        num_turns = max(last - first, num_places)
        longest = max(longest, num_turns)
        for chunk in range(num_chunks):
            stage, back = chunk * num_places + place, (num_chunks - 1 - chunk) * num_places + place
            for microbatch in range(first, last):
                turn = first * num_chunks + chunk * num_turns + microbatch - first
                forwards[turn], backwards[turn] = (stage, microbatch, 0), (back, microbatch, 1)
    per_place = forwards_per_place if num_chunks > 1 else 1
    warm_up = (num_chunks - 1) * longest + per_place * (num_places - 1 - place)
    turns = ((forwards.get(turn), backwards.get(turn - warm_up)) for turn in range(max(forwards) + warm_up + 1))
    return [this for pair in turns for this in pair if this is not None]


@dataclass(frozen=True)
class _Run:
    passes: list[list[tuple[float, Pass]]]
    """For each place, (start, pass) in order."""
    ends: dict[Pass, float]
    end_s: float


def _run(pipeline: LlmPipeline, forwards_per_place: int) -> _Run:
    """Each place computes its passes in order, each as soon as its input is available."""
    places, num_stages = pipeline.num_places, len(pipeline.forward)
    durations = [
        [sum(kernel.seconds for kernel in kernels) for kernels in way] for way in (pipeline.forward, pipeline.backward)
    ]
    waiting = [
        passes_in_order(places, pipeline.num_chunks, pipeline.num_microbatches, place, forwards_per_place)[::-1]
        for place in range(places)
    ]
    free = [pipeline.all_gather_s] * places
    ends: dict[Pass, float] = {}
    passes: list[list[tuple[float, Pass]]] = [[] for _ in range(places)]
    active = set(range(places))
    while active:
        place = active.pop()
        while waiting[place]:
            stage, microbatch, kind = this = waiting[place][-1]
            start = free[place]
            if kind == 0 and stage > 0:
                source: Pass | None = (stage - 1, microbatch, 0)
            elif kind == 1:
                source = (stage, microbatch, 0) if stage == num_stages - 1 else (stage + 1, microbatch, 1)
            else:
                source = None
            if source is not None:
                if source not in ends:
                    break
                message_s = pipeline.message_s if source[0] != stage and places > 1 else 0.0
                start = max(start, ends[source] + message_s)
            waiting[place].pop()
            passes[place].append((start, this))
            free[place] = ends[this] = start + durations[kind][stage]
            # Places that may have waited for this pass.
            active.add((place + 1) % places)
            active.add((place - 1) % places)
    assert not any(waiting), "the order of the passes is cyclic"
    return _Run(passes, ends, max(free) + pipeline.reduce_scatter_s)


def _timeline(pipeline: LlmPipeline, run: _Run, *, adjusted: bool) -> LlmTimeline:
    patterns = [[_bubble_pattern(kernels) for kernels in way] for way in (pipeline.forward, pipeline.backward)]
    slots = []
    for passes in run.passes:
        of_place: list[Slot] = []
        bubble_start = 0.0
        for start, this in passes:
            stage, _, kind = this
            bubbles, leading_s = patterns[kind][stage]
            if start > bubble_start + 1e-12 or not of_place:
                of_place.append(Slot(bubble_start, start, window_s=leading_s))
            of_place += [Slot(start + a, start + b, True, window) for a, b, window in bubbles]
            bubble_start = run.ends[this]
        of_place.append(Slot(bubble_start, run.end_s))
        slots.append(tuple(of_place))
    starts = {this: start for start, this in run.passes[0]}
    return LlmTimeline(
        slots=tuple(slots),
        forward_points=tuple(starts[0, i, 0] for i in range(pipeline.num_microbatches)),
        backward_points=tuple(run.ends[0, i, 1] for i in range(pipeline.num_microbatches)),
        iteration_s=run.end_s,
        adjusted=adjusted,
        passes=tuple(map(tuple, run.passes)),
    )


def _bubble_pattern(kernels: Kernels) -> tuple[list[tuple[float, float, float]], float]:
    """The tensor-parallel bubbles of a pass as (start, end, computation after it), and the computation before them.

    Communication kernels that follow one another are one bubble."""
    bubbles: list[list[float]] = []
    leading_s = now = 0.0
    for kernel in kernels:
        end = now + kernel.seconds
        if kernel.is_communication:
            if bubbles and bubbles[-1][1] == now:
                bubbles[-1][1] = end
            else:
                bubbles.append([now, end, 0.0])
        elif bubbles:
            bubbles[-1][2] += kernel.seconds
        else:
            leading_s += kernel.seconds
        now = end
    return [(start, end, window) for start, end, window in bubbles], leading_s


class StageKernels(NamedTuple):
    """Kernels of each stage for a typical microbatch of the language model."""

    forward: list[Kernels]
    backward: list[Kernels]


def stage_kernels(problem: PlanningProblem, name: str, tp: int, dp: int, stages: Sequence[LayerRange]) -> StageKernels:
    """The kernels of these stages. `dp`: data parallelism of the language model."""
    assumed = _assumed_costs(problem)
    load = problem.estimator.typical_load(name, dp)
    known: dict[tuple[LayerShape, LayerGradients, float, float], tuple[Kernels, Kernels]] = {}
    layers = []
    for i, (layer, time) in enumerate(
        zip(problem.estimator.workloads[name].layers, problem.estimator.layer_times(name, tp, dp), strict=True)
    ):
        gradients = problem.gradients[name][i]
        key = (layer, gradients, time.forward_s, time.backward_s)
        if key not in known:
            shapes = layer_kernels(
                layer,
                tp_size=tp,
                element_bytes=problem.memory.activation_bytes,
                residual_bytes=problem.memory.activation_bytes,
                charge=assumed.software.charge(is_causal=problem.modules[name].workload.kind == "language_model"),
            )
            backward = shapes.backward(
                gradients.input_gradient,
                gradients.weight_gradient,
            )

            def in_order(kernels: Sequence[KernelShape], total_s: float) -> Kernels:
                seconds = [assumed.kernel(kernel, tp_size=tp).seconds(load) for kernel in kernels]
                return _scaled(seconds, [kernel.kind == "communication" for kernel in kernels], total_s)

            known[key] = (
                in_order(shapes.forward, time.forward_s),
                in_order(backward, time.backward_s),
            )
        layers.append(known[key])
    return StageKernels(
        [tuple(k for forward, _ in layers[first:last] for k in forward) for first, last in stages],
        [tuple(k for _, backward in reversed(layers[first:last]) for k in backward) for first, last in stages],
    )


def _assumed_costs(problem: PlanningProblem) -> AnalyticCosts:
    device, size = problem.cluster.device, problem.memory.activation_bytes
    dtype = "bfloat16" if size == 2 and "bfloat16" in device.peak_flops else next(iter(device.peak_flops))
    return AnalyticCosts(
        cluster=problem.cluster,
        dtype=dtype,
        message_bytes=problem.memory.activation_bytes,
        speeds=default_speeds(device),
    )


def _scaled(seconds: Sequence[float], communicates: Sequence[bool], total_s: float) -> Kernels:
    """Kernels of `total_s` in total, in which collectives keep their time as far as possible."""
    collective_s = sum(s for s, flag in zip(seconds, communicates, strict=True) if flag)
    computed_s = sum(seconds) - collective_s
    if not total_s:
        return ()
    if not sum(seconds):
        return (Kernel(total_s),)
    of_collectives = min(1.0, total_s / collective_s) if collective_s else 0.0
    of_others = (total_s - of_collectives * collective_s) / computed_s if computed_s else 0.0
    if not computed_s:
        of_collectives = total_s / collective_s
    kernels = (
        Kernel(s * (of_collectives if flag else of_others), flag) for s, flag in zip(seconds, communicates, strict=True)
    )
    return tuple(kernel for kernel in kernels if kernel.seconds)
