"""DistMM's adaptive partition (section 5.1), and the estimates that its load balancer compares (section 5.2).

A *unit* is one tower, several towers that share their ranks, or a decoder that reads a tower. Its partitions are tried
in the paper's order: data parallelism if it fits, tensor parallelism within a node, pipelines over nodes. The first one
that fits on some number of devices and its successors (`NUM_PARTITIONS`) are considered; the paper takes the first.

The time of a choice is that of DistMM-Pipe: (batches x K + stages - 1) turns of the slowest stage, the sum of gradients
and the optimizer step. Its memory consists of static bytes and of K + stages - 1 microbatches, all of which wait for a
batch-sync; with recomputed features, of their inputs and one graph.

A decoder and the tower that it reads form one pipeline. Because a unit does not know the layout of the other one, the
other one counts as one stage with turns of equal length, at which the load balancer aims: both take one more turn, and
the tower's ranks hold one more microbatch. The decoder itself waits for no batch-sync and holds as much as under 1F1B.

Limits: messages between stages and the batch-sync are not in the estimate; simulation decides in the end.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from math import inf
from typing import NamedTuple

import numpy as np

from motet.costs.cost_model import Quadratic, total
from motet.costs.memory import usable_bytes
from motet.planner.distmm.towers import decoders
from motet.planner.layouts.degrees import tp_sizes
from motet.planner.layouts.partition import partition, stage_costs
from motet.planner.problem import PlanningProblem
from motet.ragged_arrays import Bools, Floats, Ints

NUM_PARTITIONS = 3


class Partition(NamedTuple):
    tp: int
    pp: int

    @property
    def num_devices(self) -> int:
        """Devices of one replica."""
        return self.tp * self.pp


@dataclass(frozen=True)
class Choices:
    """Possible layouts of a unit, one per row."""

    devices: Ints
    seconds: Floats
    tp: Ints
    pp: Ints
    dp: Ints
    per_batch: Ints
    """K: a replica's microbatches in one contrastive batch."""
    recomputes: Bools
    """The backward recomputes features."""

    def take(self, rows: Bools | Ints) -> "Choices":
        return Choices(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def __len__(self) -> int:
        return len(self.devices)

    def best_by_devices(self, num_devices: int) -> tuple[Floats, Ints]:
        """The least seconds for each number of devices from 0 on, infinite without a row, and the row."""
        seconds, rows = np.full(num_devices + 1, inf), np.zeros(num_devices + 1, dtype=np.int64)
        order = np.argsort(-self.seconds, kind="stable")
        order = order[self.devices[order] <= num_devices]
        seconds[self.devices[order]] = self.seconds[order]
        rows[self.devices[order]] = order
        return seconds, rows


def unit_choices(
    problem: PlanningProblem,
    towers: tuple[str, ...],
    *,
    may_recompute: bool = True,
    partitions: Iterable[Partition] | None = None,
    num_partitions: int = NUM_PARTITIONS,
    computation_only: bool = False,
) -> Choices:
    """The layouts that fit into memory, of the first `num_partitions` partitions with any.

    `partitions`: None: the paper's. `computation_only`: seconds exclude the sum of gradients and the optimizer step, as
    in the paper's load balancer."""
    found: list[Choices] = []
    for degrees in _partitions(problem, towers) if partitions is None else partitions:
        choices = _choices(problem, towers, degrees, may_recompute, computation_only)
        if len(choices) or found:
            found.append(choices)
        if len(found) == num_partitions:
            break
    if not found:
        found = [
            _choices(problem, towers, Partition(1, 1), may_recompute, computation_only).take(
                np.zeros(0, dtype=np.int64)
            )
        ]
    return Choices(**{f.name: np.concatenate([getattr(c, f.name) for c in found]) for f in fields(Choices)})


def _partitions(problem: PlanningProblem, towers: tuple[str, ...]) -> Iterator[Partition]:
    """The partitions in the paper's order."""
    sizes, most = tp_sizes_within_nodes(problem, towers), most_stages(problem, towers)
    yield from (Partition(size, 1) for size in sizes)
    for pp in range(2, most + 1):
        if sizes and Partition(sizes[-1], pp).num_devices <= problem.num_devices:
            yield Partition(sizes[-1], pp)


def tp_sizes_within_nodes(problem: PlanningProblem, towers: Sequence[str]) -> list[int]:
    """Tensor-parallel sizes within a node that all these towers may have."""
    common = set.intersection(*(set(tp_sizes(problem, name)) for name in towers))
    return [size for size in sorted(common) if size <= problem.cluster.devices_per_node]


def most_stages(problem: PlanningProblem, towers: Sequence[str]) -> int:
    return min(problem.modules[name].max_stages or problem.modules[name].workload.num_layers for name in towers)


def _choices(
    problem: PlanningProblem,
    towers: tuple[str, ...],
    degrees: Partition,
    may_recompute: bool,
    computation_only: bool,
) -> Choices:
    batch_size = -(-len(problem.samples) // problem.num_contrastive_batches)
    most = min(problem.num_devices // degrees.num_devices, batch_size)
    dp, per_batch, recomputes = (
        axis.ravel()
        for axis in np.meshgrid(
            np.arange(1, most + 1),
            np.array([1 << i for i in range(batch_size.bit_length())]),  # Other counts differ little.
            np.array([False, True][: 1 + (may_recompute and towers[0] in problem.towers)]),
            indexing="ij",
        )
    )
    samples = -(-batch_size // dp)
    sensible = (per_batch <= samples) & ((per_batch > 1) | ~recomputes)
    dp, per_batch, recomputes, samples = (x[sensible] for x in (dp, per_batch, recomputes, samples))
    size = -(-samples // per_batch)
    estimates = [_Estimate(problem, name, degrees) for name in towers]
    own = decoders(problem)
    read = {edge.source for edge in problem.edges if edge.target in own}
    chained = [estimate for name, estimate in zip(towers, estimates, strict=True) if name in own or name in read]
    turns = problem.num_contrastive_batches * per_batch + degrees.pp - 1
    seconds = turns * sum(e.turn_s(size, recomputes) for e in estimates)
    seconds = seconds + sum(e.turn_s(size, recomputes) for e in chained)
    if not computation_only:
        seconds = seconds + sum(e.reduce_s(dp) + e.optimizer_s(dp) for e in estimates)
    if towers[0] in problem.towers:
        held = per_batch + degrees.pp - 1 + bool(chained)
    else:
        held = np.full_like(per_batch, degrees.pp)
    held = np.minimum(held, problem.num_contrastive_batches * per_batch)
    needed = sum(e.static_bytes(dp) + e.saved_bytes(size, held, recomputes) for e in estimates)
    fits = needed <= usable_bytes(problem.cluster)
    tp, pp = (np.full(len(dp), n) for n in degrees)
    every = Choices(dp * degrees.num_devices, np.asarray(seconds), tp, pp, dp, per_batch, recomputes)
    return every.take(np.asarray(fits, dtype=bool))


class _Estimate:
    """Seconds and bytes of one tower under a partition, on the stage that has most of them."""

    def __init__(self, problem: PlanningProblem, name: str, degrees: Partition) -> None:
        self.problem, self.estimator, (self.tp, self.pp) = problem, problem.estimator, degrees
        self.load = self.estimator.mean_sample_load(name)
        passes = self.estimator.layer_passes(name, self.tp)
        self.forward = total(layer.forward for layer in passes)
        self.backward = total(layer.backward for layer in passes)
        self.trains = any(needs.any for needs in problem.gradients[name])
        costs = problem.table.of(name, self.tp).layers
        times = [layer.forward.plus(layer.passes(True, True).backward).seconds(self.load) for layer in costs]
        stages = partition(times, self.pp)
        self.time_share = max(stage_costs(times, stages)) / sum(times)
        self.trained = np.array(stage_costs(self.estimator.num_trainable(name, tp=self.tp), stages))
        self.static = np.array(stage_costs(self.estimator.static_bytes(name, self.tp), stages))
        self.graph_bytes = max(stage_costs(self.estimator.saved_bytes_of_load(name, self.load, tp=self.tp), stages))
        self.boundary_bytes = 0.0
        if self.pp > 1:
            self.boundary_bytes = self.estimator.boundary_bytes(name, stages[0][1], self.load)

    def turn_s(self, size: Ints, recomputes: Bools) -> Floats:
        """A microbatch's forward and backward on the slowest stage."""
        forward, backward = (self._seconds(cost, size) for cost in (self.forward, self.backward))
        again = np.where(recomputes & self.trains, forward, 0.0)
        seconds: Floats = (forward + backward + again) * self.time_share
        return seconds

    def _seconds(self, cost: Quadratic, size: Ints) -> Floats:
        linear = sum(a * b for a, b in zip(cost[1:-1], self.load[:-1], strict=True))
        return np.asarray(cost.constant + size * linear + size.astype(float) ** 2 * cost[-1] * self.load.tokens**2)

    def reduce_s(self, dp: Ints) -> Floats:
        """The sum of gradients over the replicas."""
        num_bytes = float(self.trained.max()) * self.problem.memory.summed_bytes
        stride = self.tp * self.pp
        sizes, places = np.unique(dp, return_inverse=True)
        seconds = [
            self.estimator.all_reduce_seconds(range(0, size * stride, stride), num_bytes) for size in sizes.tolist()
        ]
        return np.array(seconds)[places]

    def optimizer_s(self, dp: Ints) -> Floats:
        return np.asarray(self.problem.table.optimizer_s_per_parameter * self.trained.max() * self._kept_share(dp))

    def _kept_share(self, dp: Ints) -> Floats:
        """The share of the optimizer state on each of `dp` ranks (`MemoryOptions.num_keepers`)."""
        memory = self.problem.memory
        return np.minimum(1.0, memory.state_copies / dp) if memory.zero1 else np.ones(len(dp))

    def static_bytes(self, dp: Ints) -> Floats:
        state = np.outer(1 - self._kept_share(dp), self.problem.memory.state_bytes * self.trained)
        return np.asarray((self.static - state).max(axis=1))

    def saved_bytes(self, size: Ints, held: Ints, recomputes: Bools) -> Floats:
        """`held`: microbatches that wait for their backwards."""
        if not self.trains:
            return np.zeros(len(size))
        graph = size * self.graph_bytes
        return np.asarray(np.where(recomputes, held * size * self.boundary_bytes + graph, held * graph))
