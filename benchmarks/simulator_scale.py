"""How large a program the simulator takes, and how long: a million actions, 3072 and 16,384 GPUs.

Counted is the whole way from plan, batch and costs to times and memory: cut of the batch, routes, schedule, its
validation, lowering, simulation, and every rank's memory over time. Objects (spans, steps) are not made. One process on
one core, in seconds of its processor; each case several times, the median counts.

* A million actions: a chain of stages under 1F1B, a rank each, with sends and receives, nothing folded.
* GPUs: a decoder of GPT-175B's shape (96 blocks, width 12,288) on H100s, tensor parallelism 8, interleaved 1F1B, 16
  microbatches of one sequence of 2048 tokens; costs computed from the shape, gradients reduced over the replicas.
"""

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.reporting import Report
from motet.assignment.batch_assignment import BatchAssignment, contiguous_assignment
from motet.assignment.sample import Sample, Segment, kinds_of_samples
from motet.cluster import Cluster, cluster_from_dict
from motet.costs.analytic import analytic_table
from motet.costs.cost_model import CostTable
from motet.costs.iteration import IterationCosts
from motet.costs.memory import MemoryOptions
from motet.families.shape_reading.module_shapes import module_workload
from motet.plan import ModulePlan, Plan, Replica, Stage
from motet.ragged_arrays import Floats, Ints
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators import GENERATORS
from motet.schedule.lower import lower
from motet.schedule.routes import Routes, derive_routes
from motet.schedule.validate import check_complete, liveness
from motet.shapes.module_shape import ModuleWorkload
from motet.simulator.costs import Costs, UniformCosts
from motet.simulator.replica_folding import Folding, fold
from motet.simulator.simulate import SimulationResult, simulate

NUM_TOKENS = 2048
NUM_BLOCKS = 96
DECODER = {
    "model_type": "llama",
    "hidden_size": 12288,
    "intermediate_size": 32768,  # Gated: as many parameters as GPT's 4 x 12,288 without.
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 96,
    "num_key_value_heads": 96,
    "vocab_size": 51200,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, kw_only=True)
class ChainCosts(UniformCosts):
    """Each stage takes a little longer than the one before it; all answers at once."""

    def compute_seconds(self, dependencies: Dependencies) -> Floats:
        slower = 1.0 + 0.01 * dependencies.routes.cell_stage
        half = self.backward_s / 2
        return np.concatenate([slower * s for s in (self.forward_s, self.backward_s, half, half)])

    def saved_sizes(self, dependencies: Dependencies) -> Ints:
        sizes = np.array([[self.saved_bytes_per_cell], [self.half_bytes_per_cell]], dtype=np.int64)
        return np.repeat(sizes, dependencies.routes.num_cells, axis=1)

    def carried_sizes(self, dependencies: Dependencies) -> Ints:
        return np.full(2 * dependencies.routes.num_routes, self.bytes_per_message, dtype=np.int64)

    def link(self, sender: int, receiver: int) -> tuple[float, float]:
        return self.message_seconds / 2, 2 * self.bytes_per_message / self.message_seconds


class Laps:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.process_time()

    def end(self, name: str) -> None:
        now = time.process_time()
        self.seconds[name] = now - self._last
        self._last = now


def run(
    plan: Plan, samples: Sequence[Sample], make_costs: Callable[[Routes], Costs], node: Callable[[int], int] | None
) -> tuple[SimulationResult, dict[str, float]]:
    """From the plan to times and memory. `node`: alike pipelines are simulated once; None: all are."""
    laps = Laps()
    assignment: BatchAssignment = contiguous_assignment(plan, samples)
    folding: Folding | None = None
    if node is not None:
        folding = fold(plan, assignment, kinds_of_samples(samples), node)
        assignment = folding.assignment
    laps.end("cut of the batch")
    routes = derive_routes(plan, assignment, samples)
    laps.end("routes")
    costs = make_costs(routes)
    schedule = GENERATORS[plan.schedule](routes, costs.compute_s)
    laps.end("schedule")
    dependencies = Dependencies(routes)
    check_complete(schedule, dependencies)
    liveness(schedule, dependencies)
    laps.end("validation")
    program = lower(schedule, dependencies, costs.compute_s)
    laps.end("lowering")
    result = simulate(program, costs, folding=folding)
    assert result.iteration_time_s > 0
    assert result.bubble_fraction > 0
    laps.end("simulation")
    assert len(result.peak_memory_bytes) == plan.num_ranks
    laps.end("memory")
    return result, laps.seconds


def chain_plan(num_stages: int, num_microbatches: int) -> Plan:
    stages = tuple(Stage(layers=(s, s + 1), ranks=(s,)) for s in range(num_stages))
    return _plan((Replica(stages=stages),), num_stages, num_microbatches, "1f1b")


def interleaved_plan(num_groups: int, num_chunks: int, tp_size: int, num_replicas: int, num_microbatches: int) -> Plan:
    """Stage s of a replica stands on its group s mod `num_groups`; the first has the embedding, the last the head."""
    num_stages = num_groups * num_chunks
    bounds = [0, *(1 + NUM_BLOCKS * (s + 1) // num_stages for s in range(num_stages - 1)), NUM_BLOCKS + 2]
    replicas = []
    for r in range(num_replicas):
        stages = []
        for s in range(num_stages):
            first_rank = (r * num_groups + s % num_groups) * tp_size
            ranks = tuple(range(first_rank, first_rank + tp_size))
            stages.append(Stage(layers=(bounds[s], bounds[s + 1]), ranks=ranks, tp_size=tp_size))
        replicas.append(Replica(stages=tuple(stages)))
    return _plan(tuple(replicas), NUM_BLOCKS + 2, num_microbatches, "interleaved_1f1b")


def _plan(replicas: tuple[Replica, ...], num_layers: int, num_microbatches: int, schedule: str) -> Plan:
    llm = ModulePlan(
        kind="language_model",
        num_layers=num_layers,
        replicas=replicas,
        trainable=((0, num_layers),),
        loss_weight=1.0,
    )
    return Plan(modules={"llm": llm}, edges=(), num_microbatches=num_microbatches, schedule=schedule)


def batch(num_samples: int) -> list[Sample]:
    layouts = {"llm": (Segment(NUM_TOKENS),)}
    return [Sample(f"sample{i}", layouts, {"llm": NUM_TOKENS}) for i in range(num_samples)]


def decoder_costs(cluster: Cluster) -> Callable[[Routes, Sequence[Sample]], Costs]:
    workloads: dict[str, ModuleWorkload] = {"llm": module_workload(DECODER)}
    table: CostTable = analytic_table(workloads, cluster, dtype="bfloat16", dtype_bytes=2, tp_sizes=(8,))
    memory = MemoryOptions(activation_bytes=2, zero1=True)
    return lambda routes, samples: IterationCosts(
        routes, samples, workloads=workloads, table=table, cluster=cluster, memory=memory
    )


def main(arguments: Sequence[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actions", type=int, default=1_000_000)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args(arguments)

    report = Report("simulator-scale", "How large a program the simulator takes")
    report.add((__doc__ or "").partition("\n\n")[2].strip())
    cases: list[tuple[str, float, Callable[[], tuple[SimulationResult, dict[str, float]]]]] = []
    for num_stages in (8, 64):
        plan = chain_plan(num_stages, options.actions // (2 * num_stages))
        samples = batch(plan.num_microbatches)
        costs = ChainCosts(message_seconds=0.1, bytes_per_message=1000, saved_bytes_per_cell=5000)
        cases.append((f"chain of {num_stages}", 3.0, lambda p=plan, s=samples, c=costs: run(p, s, lambda _: c, None)))
    for num_groups, num_chunks, num_replicas, goal_s in ((8, 12, 48, 0.3), (16, 6, 128, 1.0)):
        plan = interleaved_plan(num_groups, num_chunks, 8, num_replicas, 16)
        samples = batch(16 * num_replicas)
        cluster = cluster_from_dict({"num_devices": plan.num_ranks, "device": "h100", "devices_per_node": 8})
        make = decoder_costs(cluster)
        case = lambda p=plan, s=samples, m=make, c=cluster: run(p, s, lambda routes: m(routes, s), c.node)  # noqa: E731
        name = f"{plan.num_ranks} GPUs: PP {num_groups}, V {num_chunks}, TP 8, DP {num_replicas}"
        cases.append((name, goal_s, case))

    rows, columns = [], ["case", "actions", "messages", "iteration", "idle", "median", "quickest", "goal"]
    parts: dict[str, list[dict[str, float]]] = {}
    for name, goal_s, case in cases:
        parts[name] = []
        for _ in range(options.repetitions):
            gc.collect()
            result, laps = case()
            parts[name].append(laps)
        totals = [sum(laps.values()) for laps in parts[name]]
        program = result.program
        rows.append(
            [
                name,
                f"{len(program.actions):,}",
                f"{len(program.message_link):,}",
                f"{result.iteration_time_s:.4g} s",
                f"{result.bubble_fraction:.1%}",
                f"{statistics.median(totals):.3f} s",
                f"{min(totals):.3f} s",
                f"{goal_s} s{'' if options.actions == 1_000_000 or 'GPUs' in name else ' (at 1,000,000)'}",
            ]
        )
        del result, program
    report.table(columns, rows)
    report.add("Medians of the parts, in milliseconds:")
    names = list(parts[cases[0][0]][0])
    report.table(
        ["case", *names],
        [
            [name, *(f"{1e3 * statistics.median(laps[part] for laps in of_case):.1f}" for part in names)]
            for name, of_case in parts.items()
        ],
    )
    return report


if __name__ == "__main__":
    main().write()
