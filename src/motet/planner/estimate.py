"""Time and memory of a layout without simulating it: closed forms, to decide which layouts are worth a simulation.

Limits: the fill of the pipeline plus (microbatches - 1) x the slowest stage; messages, reductions, the optimizer's step
and shared cores are left out; memory is parameters and what the schedule keeps of typical microbatches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from motet.costs.memory import RESERVE, saved_layer_bytes, static_layer_bytes
from motet.planner.explicit import Placement
from motet.planner.partition import stage_costs
from motet.planner.problem import Degrees, PlanningProblem

Cut = Callable[[PlanningProblem, str, Degrees], tuple[int, ...]]
"""(problem, module, degrees) -> layers of each stage."""


@dataclass(frozen=True)
class StageEstimate:
    """One stage of a module, on each of its ranks."""

    num_layers: int
    seconds: float
    """Forward and backward of a typical microbatch."""
    static_bytes: int
    saved_bytes: int
    """For each microbatch in flight."""


class Estimates:
    """Remembers what it has computed."""

    def __init__(self, problem: PlanningProblem, cut: Cut) -> None:
        self.problem, self.cut = problem, cut
        self._stages: dict[tuple[str, Degrees], list[StageEstimate]] = {}
        self._layer_bytes: dict[tuple[str, int, int], tuple[list[int], list[int]]] = {}

    def stages(self, name: str, degrees: Degrees) -> list[StageEstimate]:
        key = (name, degrees)
        if key not in self._stages:
            sizes = self.cut(self.problem, name, degrees)
            cut = list(pairwise([sum(sizes[:s]) for s in range(len(sizes) + 1)]))
            times = [time.total_s for time in self.problem.layer_times(name, degrees.tp, degrees.dp)]
            static, saved = self._bytes_of_layers(name, degrees.tp, degrees.dp)
            self._stages[key] = [
                StageEstimate(size, seconds, sum(static[first:last]), sum(saved[first:last]))
                for size, seconds, (first, last) in zip(sizes, stage_costs(times, cut), cut, strict=True)
            ]
        return self._stages[key]

    def _bytes_of_layers(self, name: str, tp: int, dp: int) -> tuple[list[int], list[int]]:
        if (name, tp, dp) not in self._layer_bytes:
            problem, module = self.problem, self.problem.modules[name]
            load = problem.typical_load(name, dp)
            static, saved = [], []
            for index, (layer, needs) in enumerate(zip(module.workload.layers, problem.gradients[name], strict=True)):
                static.append(
                    static_layer_bytes(
                        layer,
                        trainable=module.is_trainable(index),
                        tp_size=tp,
                        num_holders=dp,
                        options=problem.memory,
                    )
                )
                saved.append(
                    saved_layer_bytes(
                        layer,
                        load,
                        input_gradient=needs.input_gradient,
                        weight_gradient=needs.weight_gradient,
                        recompute=name in problem.recompute,
                        tp_size=tp,
                        options=problem.memory,
                    )
                )
            self._layer_bytes[name, tp, dp] = static, saved
        return self._layer_bytes[name, tp, dp]

    def seconds(self, degrees: Mapping[str, Degrees], placement: Placement) -> float:
        """Of one iteration."""
        sources, sinks = self._chains(degrees, placement)
        times = [[sum(stage.seconds for stage in rank) for rank in chain] for chain in (*sources, *sinks)]
        fill = max((sum(chain) for chain in times[: len(sources)]), default=0.0) + max(map(sum, times[len(sources) :]))
        return fill + (self.problem.num_microbatches - 1) * max(max(chain) for chain in times)

    def excess_bytes(self, degrees: Mapping[str, Degrees], placement: Placement) -> float:
        """By how much the fullest rank exceeds its memory; 0 if all fit."""
        problem = self.problem
        sources, sinks = self._chains(degrees, placement)
        behind = max(len(chain) for chain in sinks)
        fullest = 0
        for chain, after in [*((c, behind) for c in sources), *((c, 0) for c in sinks)]:
            for s, rank in enumerate(chain):
                in_flight = problem.num_microbatches
                if problem.schedule != "gpipe":
                    in_flight = min(in_flight, len(chain) - s + after)
                needed = sum(stage.static_bytes + in_flight * stage.saved_bytes for stage in rank)
                fullest = max(fullest, needed)
        return max(0.0, fullest - problem.cluster.device.memory_bytes * (1 - RESERVE))

    def _chains(
        self, degrees: Mapping[str, Degrees], placement: Placement
    ) -> tuple[list[list[list[StageEstimate]]], list[list[list[StageEstimate]]]]:
        """For encoders and for what they enter: chains of ranks (of groups of them), each with the stages it holds."""
        problem = self.problem
        sources = [self.stages(name, degrees[name]) for name in problem.sources]
        sinks = [_alone(self.stages(name, degrees[name])) for name in problem.sinks]
        if placement == "colocated" and sources:
            return [[list(stages) for stages in zip(*sources, strict=True)]], sinks
        if placement == "replicated":
            copies = [stage for chain in sources for stage in chain]
            return [], [[[*copies, *rank] for rank in chain] for chain in sinks]
        return [_alone(chain) for chain in sources], sinks


def _alone(stages: Sequence[StageEstimate]) -> list[list[StageEstimate]]:
    return [[stage] for stage in stages]
