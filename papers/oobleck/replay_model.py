"""Replays of Oobleck's evaluation: models of equal layers on 30 nodes of one GPU, under its three systems.

Iteration times have the shape that our templates give. The overall speed of a system, one number for each model and
system, is calibrated on the rows with a failure every 6 hours alone. The seconds of a checkpoint, a restart and a
reconfiguration, and the sizes of batches, are those of the authors' artifact (`papers.oobleck.published`). Nodes fail
at random (a Poisson process: "on average" as often, thesis 2.2.3), or at regular intervals, as in the artifact. As
there, a run begins with the first iteration and ends with the 15th loss; numbers are means over runs.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property

from motet.planner.failures.replay import (
    Change,
    Policy,
    RedundancyPolicy,
    RestartPolicy,
    Times,
    Usage,
    draw_changes,
    replay,
)
from motet.planner.templates.pipelines import Template, Templates, best_combinations, combination_s, template_sizes
from motet.planner.templates.stage_mapping import ChainCosts, MappingProblem, map_stages
from papers.oobleck.published import (
    FREE_EVERY,
    HOURS,
    NUM_NODES,
    RENDEZVOUS_S,
    SAVE_EVERY,
    Model,
)
from papers.oobleck.size_policy import SizePolicy

FAILURES = 1
"""f, which the thesis does not give for its experiments."""
DEVICE_BYTES = 40e9
STATE_BYTES_PER_PARAMETER = 16
"""Parameter, gradient and two moments in 4 bytes each."""
NUM_LOSSES = 15
NUM_RUNS = {HOURS["6h"]: 32, HOURS["1h"]: 64, HOURS["10m"]: 1000}
"""Every 10 minutes, half of the runs of GPT-3 6.7b with Varuna get nothing done: the mean needs many."""
NUM_OOBLECK_RUNS = 250
"""At most: its runs differ by 5 to 9%."""
NUM_REGULAR_RUNS = 16
"""They differ in which nodes are lost."""


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
        num_microbatches=num_microbatches(model) // (FAILURES + 1),
        device_bytes=DEVICE_BYTES,
    )
    found = {n: best for n in range(1, model.num_layers + 1) if (best := map_stages(problem, n)) is not None}
    sizes = [n for n in template_sizes(NUM_NODES, FAILURES, min(found)) if n in found]
    by_nodes = {
        n: Template(num_nodes=n, replicas={}, fill_s=found[n].fill_s, slowest_s=found[n].slowest_s) for n in sizes
    }
    return Templates(failures=FAILURES, devices_per_node=1, by_nodes=by_nodes)


def scaled(model: Model, layer_s: float) -> Templates:
    unit = unit_templates(model)
    by_nodes = {
        n: Template(num_nodes=n, replicas={}, fill_s=t.fill_s * layer_s, slowest_s=t.slowest_s * layer_s)
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
    regular: bool = False
    """Failures come at regular intervals, not at random."""
    free: bool = False
    """Checkpoints cost nothing and are taken more often (Table 2.4)."""

    def members(self) -> Policy:
        """For one replay. They put new lists in the place of old ones, so what was computed before is shared."""
        return copy(self._members)

    @cached_property
    def _members(self) -> Policy:
        model, by_nodes = self.model, scaled(self.model, self.layer_s).by_nodes
        if self.kind == "Oobleck":
            unit_s = _iteration_s(model)
            return SizePolicy(
                scaled(model, self.layer_s),
                _combine(model),
                lambda sizes: unit_s(tuple(sorted(sizes))) * self.layer_s,
                self.times,
                NUM_NODES,
                model_bytes=0.0,
            )
        if self.kind == "Bamboo":
            total = -(-model.global_batch // model.redundant_microbatch)
            return RedundancyPolicy(by_nodes, total, self.times, NUM_NODES, SAVE_EVERY, 0.0)
        every, save_s = (FREE_EVERY, 0.0) if self.free else (SAVE_EVERY, model.save_s)
        return RestartPolicy(by_nodes, num_microbatches(model), self.times, NUM_NODES, every, save_s)

    @property
    def times(self) -> Times:
        """All count from the failure; copies and loading are part of them."""
        model = self.model
        if self.kind == "Oobleck":
            return Times(rebuild_s=model.copy_s, start_s=model.restart_s, detect_s=0.0)
        if self.kind == "Bamboo":
            return Times(rebuild_s=model.take_over_s, start_s=model.take_over_s + RENDEZVOUS_S, detect_s=0.0)
        return Times(start_s=model.restart_s, detect_s=0.0)

    def samples_per_s(self, changes: Sequence[Change], end_s: float, warning_s: float = 0.0) -> float:
        usage = replay(changes, end_s, self.members(), warning_s=warning_s)
        return usage.iterations * self.model.global_batch / usage.total_s

    def under_failures(self, mean_s: float) -> float:
        """Samples per second: the mean over runs, each from its first iteration on."""
        rates = []
        runs = _losing_half(mean_s, self.regular)
        for changes, end_s in runs[:NUM_OOBLECK_RUNS] if self.kind == "Oobleck" else runs:
            iterations = replay(self._started(changes), end_s, self.members()).iterations
            rates.append(iterations * self.model.global_batch / end_s)
        return sum(rates) / len(rates)

    def _started(self, changes: Sequence[Change]) -> list[Change]:
        """The nodes come so early that training begins at second 0."""
        return [replace(changes[0], time_s=-self.times.start_s), *changes[1:]]

    def usage(self, mean_s: float) -> Usage:
        """Shares of one run's time (Figure 2.11)."""
        changes, end_s = _losing_half(mean_s, self.regular)[0]
        return replay(changes, end_s, self.members())


def num_microbatches(model: Model) -> int:
    return -(-model.global_batch // model.microbatch)


@cache
def _combine(model: Model) -> Callable[[int], Sequence[int]]:
    templates, total = unit_templates(model), num_microbatches(model)

    @cache
    def combine(num_nodes: int) -> tuple[int, ...]:
        return best_combinations(templates.by_nodes, num_nodes, FAILURES, total, most=1)[0]

    return combine


@cache
def _iteration_s(model: Model) -> Callable[[tuple[int, ...]], float]:
    """Seconds of an iteration with layers of one second."""
    templates, total = unit_templates(model), num_microbatches(model)
    return cache(lambda sizes: combination_s(templates.by_nodes, sizes, total) if len(sizes) <= total else float("inf"))


@cache
def _losing_half(mean_s: float, regular: bool) -> list[tuple[list[Change], float]]:
    """Runs until half of the nodes are lost. That last loss costs nothing: nobody restarts."""
    runs = []
    for seed in range(NUM_REGULAR_RUNS if regular else NUM_RUNS[mean_s]):
        drawn = draw_changes(NUM_NODES, mean_s, float("inf"), seed=seed)[: NUM_LOSSES + 1]
        changes = [replace(change, time_s=i * mean_s) for i, change in enumerate(drawn)] if regular else drawn
        runs.append((changes, changes[-1].time_s))
    return runs


def template_speeds(model: Model, kind: str) -> list[float]:
    """Samples per second on 30, 29, ... 15 nodes as one after another is lost, with layers of one second."""
    members = System(kind, model, 1.0).members()
    changes, _ = _losing_half(HOURS["6h"], True)[0]
    return [model.global_batch / members.change(c.lost, c.joined, warned=False).iteration_s for c in changes]


def calibrated(system: System, published: float) -> System:
    """Scales the speed such that a failure every 6 hours gives the published throughput."""
    for _ in range(12):
        ratio = system.under_failures(HOURS["6h"]) / published
        system = replace(system, layer_s=system.layer_s * ratio)
        if abs(ratio - 1) < 1e-4:
            break
    return system
