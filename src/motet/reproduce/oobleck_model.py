"""Oobleck's evaluation as replays: models of equal layers on 30 nodes of one GPU, under its three systems.

Iteration times have the shape that our templates give; how fast a system is on the whole, one number for each model and
system, and what a checkpoint costs are calibrated on the rows with a failure every 6 hours alone. Failures come at
random (a Poisson process) until fewer than 15 nodes remain; means over `NUM_RUNS` runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from motet.reproduce.oobleck_published import HOURS, NUM_NODES, Model
from motet.resilience.combinations import best_combinations, combination_s, template_sizes
from motet.resilience.failures import Change, draw_changes
from motet.resilience.members import GridMembers, RedundantMembers, SizeMembers, Times
from motet.resilience.pipelines import Template, Templates
from motet.resilience.replay import Members, Usage, replay
from motet.resilience.stage_mapping import ChainCosts, MappingProblem, map_stages

FAILURES = 1
"""f, which the thesis does not give for its experiments."""
DEVICE_BYTES = 40e9
STATE_BYTES_PER_PARAMETER = 16
"""Parameter, gradient and two moments in 4 bytes each."""
LINK_BYTES_PER_S = 200e9 / 8
REBUILD_S = 5.0
START_S = 30.0
NUM_RUNS = 32
VARUNA_EVERY, FREE_EVERY = 10, 2
"""Iterations between checkpoints."""


@cache
def unit_templates(model: Model) -> Templates:
    """Each layer takes one second for a microbatch; n0 follows from memory with recomputed activations."""
    static = model.num_parameters * STATE_BYTES_PER_PARAMETER / model.num_layers
    saved = 4.0 * model.microbatch * model.sequence_length * model.hidden_size
    layers = range(model.num_layers)
    problem = MappingProblem(
        modules={
            "model": ChainCosts(
                seconds={1: [1.0 for _ in layers]},
                static_bytes={1: [static for _ in layers]},
                saved_bytes={1: [saved for _ in layers]},
            )
        },
        devices_per_node=1,
        num_microbatches=model.global_batch // model.microbatch // (FAILURES + 1),
        device_bytes=DEVICE_BYTES,
    )
    found = {n: best for n in range(1, model.num_layers + 1) if (best := map_stages(problem, n)) is not None}
    sizes = [n for n in template_sizes(NUM_NODES, FAILURES, min(found)) if n in found]
    by_nodes = {
        n: Template(num_nodes=n, replicas={}, first_s=found[n].fill_s, slowest_s=found[n].slowest_s) for n in sizes
    }
    return Templates(failures=FAILURES, devices_per_node=1, by_nodes=by_nodes)


def scaled(model: Model, layer_s: float) -> Templates:
    unit = unit_templates(model)
    by_nodes = {
        n: Template(num_nodes=n, replicas={}, first_s=t.first_s * layer_s, slowest_s=t.slowest_s * layer_s)
        for n, t in unit.by_nodes.items()
    }
    return Templates(failures=FAILURES, devices_per_node=1, by_nodes=by_nodes)


def planning_problem(num_layers: int, devices_per_node: int) -> MappingProblem:
    """Table 2.3's: equal layers, tensor parallelism that gains less than it has devices, 4 microbatches for a stage."""
    return MappingProblem(
        modules={
            "model": ChainCosts(
                seconds={
                    size: [1 / size + (0.03 * (1 + size**0.5 / 4) if size > 1 else 0.0)] * num_layers
                    for size in (1, 2, 4, 8)
                    if size <= devices_per_node
                }
            )
        },
        devices_per_node=devices_per_node,
        num_microbatches=None,
    )


@dataclass(frozen=True)
class System:
    """One of the three on one model, calibrated or to be calibrated."""

    kind: str
    """Oobleck, Varuna or Bamboo."""
    model: Model
    layer_s: float
    """Seconds of a layer for a microbatch."""
    save_s: float = 0.0
    load_s: float = 0.0
    every: int = VARUNA_EVERY

    def members(self) -> Members:
        model, templates = self.model, scaled(self.model, self.layer_s)
        total = model.global_batch // model.microbatch
        times = Times(rebuild_s=REBUILD_S, start_s=START_S, load_s=self.load_s, bytes_per_s=LINK_BYTES_PER_S)
        if self.kind == "Oobleck":
            model_bytes = model.num_parameters * STATE_BYTES_PER_PARAMETER
            unit_s = _iteration_s(model)
            return SizeMembers(
                templates,
                _combine(model),
                lambda sizes: unit_s(tuple(sorted(sizes))) * self.layer_s,
                times,
                NUM_NODES,
                model_bytes,
            )
        policy = {"Varuna": GridMembers, "Bamboo": RedundantMembers}[self.kind]
        return policy(templates.by_nodes, total, times, NUM_NODES, self.every, self.save_s)

    def samples_per_s(self, changes: Sequence[Change], end_s: float, warning_s: float = 0.0) -> float:
        usage = replay(changes, end_s, self.members(), warning_s=warning_s)
        return usage.iterations * self.model.global_batch / usage.total_s

    def under_failures(self, mean_s: float) -> float:
        """Mean over runs."""
        runs = [self.samples_per_s(changes, end_s) for changes, end_s in _losing_half(mean_s)]
        return sum(runs) / len(runs)

    def usage(self, mean_s: float) -> Usage:
        """Of one run: Figure 2.11."""
        changes, end_s = _losing_half(mean_s)[0]
        return replay(changes, end_s, self.members())


@cache
def _combine(model: Model) -> Callable[[int], Sequence[int]]:
    templates = unit_templates(model)
    total = model.global_batch // model.microbatch

    @cache
    def combine(num_nodes: int) -> tuple[int, ...]:
        return best_combinations(templates.by_nodes, num_nodes, FAILURES, total, most=1)[0]

    return combine


@cache
def _iteration_s(model: Model) -> Callable[[tuple[int, ...]], float]:
    """With layers of one second."""
    templates = unit_templates(model)
    total = model.global_batch // model.microbatch
    return cache(lambda sizes: combination_s(templates.by_nodes, sizes, total) if len(sizes) <= total else float("inf"))


@cache
def _losing_half(mean_s: float) -> list[tuple[list[Change], float]]:
    """Runs that end when fewer than half of the nodes remain."""
    runs = []
    for seed in range(NUM_RUNS):
        changes = draw_changes(NUM_NODES, mean_s, float("inf"), seed=seed)
        end = next(i for i in range(len(changes)) if NUM_NODES - i < NUM_NODES // 2)
        # The last failure belongs to the run: what was not saved then is lost.
        runs.append((changes[: end + 1], changes[end].time_s + 1e-6))
    return runs


def calibrated(system: System, published: float) -> System:
    """As fast that a failure every 6 hours gives the published throughput."""
    for _ in range(12):
        ratio = system.under_failures(HOURS["6h"]) / published
        system = replace(system, layer_s=system.layer_s * ratio)
        if abs(ratio - 1) < 1e-4:
            break
    return system
