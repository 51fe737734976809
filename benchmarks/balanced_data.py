"""How even do assignments make microbatches, how much shorter is the iteration, and how long does planning take?

The configuration is the thesis' (section 4.7.1, Table 4.3): Qwen2.5-VL's vision tower and Llama 3.2 on 64 A40s, 4
replicas, 8 stages of 2 devices, 4 samples in a microbatch, 512 in the global batch. One plan for all assignments of a
data set, except for DIP's and those that say "same ranks": there encoder and language model stand both on all 8 stages.
Stages are cut from a whole batch's mean, so that only the assignment differs. Schedules stay within the devices' memory
where they can (`WITHIN_MEMORY`). Samples are those of `uneven_data.py`, costs are computed, iterations
are simulated. Samples are packed without seeing each other, so works add up.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median

import numpy as np

from benchmarks.greedy_ratios import worst_ratios
from benchmarks.reporting import Report
from benchmarks.thesis_batches import NUM_MICROBATCHES, NUM_REPLICAS, Batch, Works, planned, simulated
from benchmarks.uneven_data import DATA_SETS, SEED
from motet.assignment.batch_assignment import BatchAssignment
from motet.balancing.disttrain import reordered_assignment
from motet.balancing.entrain import (
    ReplicaRule,
    by_encoder_then_llm,
    defer,
    deferring_assignment,
    evenly_on_both,
    plan_deferrals,
)
from motet.balancing.policies import assign, dip_like_assignment, random_assignment
from motet.balancing.sample_work import SampleWork
from motet.plan import Edge, ModulePlan, Plan, Replica, Stage


@dataclass(frozen=True)
class Outcome:
    spread_s: Mapping[str, float]
    """Standard deviation of the forward time of a module's microbatches, all stages added up."""
    iteration_s: float
    lower_bound_s: float
    """Lower bound of this plan under this assignment."""
    peak_bytes: int
    """Peak bytes of the device that needs most."""
    num_microbatches: float
    """Mean over replicas, of the language model."""


Cut = tuple[BatchAssignment, Mapping[str, Sequence[Sequence[Sequence[int]]]]]
"""The assignment, and the microbatches of each module and replica whose evenness is measured: of the encoder those of
one turn, what stays and what is deferred together."""


def _alike(assignment: BatchAssignment) -> Cut:
    return assignment, assignment.microbatches


def _random(plan: Plan, batch: Batch, work: Works) -> Cut:
    return _alike(random_assignment(plan, batch.problem.samples, seed=0))


def _reordered(plan: Plan, batch: Batch, work: Works) -> Cut:
    forward = {name: each.forward_s for name, each in work.items()}
    backward = {name: each.backward_s for name, each in work.items()}
    return _alike(reordered_assignment(plan, batch.problem.samples, forward, backward))


def _dip_like(plan: Plan, batch: Batch, work: Works) -> Cut:
    return _alike(dip_like_assignment(plan, batch.problem.samples, work["vision"].total_s, seed=0))


def _deferred(
    plan: Plan, batch: Batch, work: Works, *, replica_rule: ReplicaRule = evenly_on_both, fewer: bool = False
) -> Cut:
    totals = {name: each.total_s for name, each in work.items()}
    deferrals = plan_deferrals(plan, totals, replica_rule=replica_rule, rule=partial(defer, fewer=fewer))
    assignment = deferring_assignment(plan, batch.problem.samples, deferrals, totals)
    return assignment, {**assignment.microbatches, "vision": [each.encoder for each in deferrals]}


@dataclass(frozen=True)
class Method:
    schedule: str
    assign: Callable[[Plan, Batch, Works], Cut]
    same_ranks: bool = False


_fewer = partial(_deferred, fewer=True)
METHODS: Mapping[str, Method] = {
    "random": Method("1f1b", _random),
    "DistTrain": Method("1f1b", _reordered),
    "DistTrain, eager": Method("eager_1f1b", _reordered),
    "DistTrain, same ranks, zero-bubble": Method("zero_bubble_h2", _reordered, same_ranks=True),
    "DIP-like": Method("dip", _dip_like, same_ranks=True),
    "deferral": Method("1f1b", _deferred),
    "deferral, eager": Method("eager_1f1b", _deferred),
    "deferral, thesis' replica rule, eager": Method("eager_1f1b", partial(_deferred, replica_rule=by_encoder_then_llm)),
    "deferral, same ranks, zero-bubble": Method("zero_bubble_h2", _deferred, same_ranks=True),
    "deferral, K_eff": Method("1f1b", _fewer),
    "deferral, K_eff, eager": Method("eager_1f1b", _fewer),
    "deferral, K_eff, same ranks, zero-bubble": Method("zero_bubble_h2", _fewer, same_ranks=True),
}
IN_QUESTION = ("deferral, eager", "deferral, K_eff, eager", "deferral, K_eff, same ranks, zero-bubble")
"""Cases that are compared with the goals."""


Outcomes = Mapping[str, Sequence[Outcome]]
"""By method, of the same batches."""


def measure(batch: Batch, method: str) -> Outcome:
    chosen = METHODS[method]
    plan = replace(batch.colocated if chosen.same_ranks else batch.apart, schedule=chosen.schedule)
    work = batch.work(plan)
    assignment, microbatches = chosen.assign(plan, batch, work)
    replicas = [simulated(batch, plan, assignment, r) for r in range(NUM_REPLICAS)]
    return Outcome(
        {name: _spread_s(microbatches[name], each) for name, each in work.items()},
        *map(max, zip(*replicas, strict=True)),
        mean(len(cut) for cut in assignment.microbatches["language_model"]),
    )


def _spread_s(replicas: Sequence[Sequence[Sequence[int]]], work: SampleWork) -> float:
    """Over the microbatches of a replica; of the replicas the root of the mean square."""
    seconds = work.forward_s.sum(axis=1)
    variances = [np.var([seconds[list(m)].sum() for m in microbatches]) for microbatches in replicas]
    return float(np.sqrt(np.mean(variances)))


def planning_s(num_samples: int, num_replicas: int) -> float:
    """CPU seconds of one plan of deferrals on log-normal works, the median of several batches."""

    def replicas(first_rank: int) -> tuple[Replica, ...]:
        return tuple(Replica(stages=(Stage(layers=(0, 1), ranks=(first_rank + r,)),)) for r in range(num_replicas))

    plan = Plan(
        modules={
            "vision": ModulePlan(kind="encoder", num_layers=1, replicas=replicas(0)),
            "language_model": ModulePlan(
                kind="language_model", num_layers=1, replicas=replicas(num_replicas), loss_weight=1.0
            ),
        },
        edges=(Edge(source="vision", target="language_model"),),
        num_microbatches=NUM_MICROBATCHES,
    )
    seconds = []
    for batch in range(7):
        rng = np.random.default_rng((SEED, batch))
        work = {name: rng.lognormal(0, 0.9, num_samples) for name in plan.modules}
        start = time.process_time()
        plan_deferrals(plan, work)
        seconds.append(time.process_time() - start)
    return median(seconds)


def planning_from_metadata_s(num_samples: int, num_replicas: int) -> float:
    """CPU seconds from the metadata of a batch to its cut: each sample's work on each stage, too."""
    batch = planned("3b", "SynthChartNet", 0, num_samples=num_samples, num_replicas=num_replicas)
    plan = replace(batch.apart, assignment="entrain")
    seconds = []
    for _ in range(7):
        start = time.process_time()
        assign(plan, batch.problem.samples, workloads=batch.workloads, table=batch.problem.table)
        seconds.append(time.process_time() - start)
    return median(seconds)


def main(arguments: list[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-sets", nargs="+", choices=DATA_SETS, default=list(DATA_SETS))
    parser.add_argument("--batches", type=int, default=3, help="global batches of each data set")
    parser.add_argument("--model", choices=("1b", "3b"), default="3b", help="the language model")
    parser.add_argument("--cases", type=int, default=100, help="small random cases for every greedy's worst ratio")
    options = parser.parse_args(arguments)
    report = Report("balanced-data", "Even microbatches: deferral against random order, DistTrain's order and DIP-like")
    assert __doc__ is not None
    report.add(__doc__)
    report.add(
        f"Llama 3.2 {options.model}, {options.batches} batches of each data set (`uneven_data.py`, seed {SEED}), "
        "everything recomputed, so that it fits into 48 GB. Medians over the batches; spreads are standard deviations "
        "of a microbatch's forward time over the microbatches of a replica; replicas are simulated one at a time and "
        "the slowest counts, without the sums of gradients, as in the thesis."
    )
    found = {name: _add_data_set(report, options.model, name, options.batches) for name in options.data_sets}
    _add_goals(report, found)
    report.add(
        "## Planning\n\nCPU time of `plan_deferrals`, 32 microbatches a replica, log-normal works; and of all that "
        "lies between the metadata and the cut (`assign`), of SynthChartNet."
    )
    limits = {(512, 4): 10, (8192, 64): 100}
    rows = [
        (n, dp, *(f"{1e3 * measure(n, dp):.1f}" for measure in (planning_s, planning_from_metadata_s)), limit)
        for (n, dp), limit in limits.items()
    ]
    report.table(("samples", "replicas", "deferrals ms", "from metadata ms", "target"), rows)
    report.add(
        f"## Greedy assignments against the best\n\nWorst ratio in {options.cases} cases of 3 to 7 samples on 2 "
        "or 3 groups, log-normal works. Subset sums and the matching are exact, as tests show."
    )
    ratios = worst_ratios(options.cases, SEED)
    report.table(("what", "worst ratio"), [(name, f"{ratio:.3f}") for name, ratio in ratios.items()])
    return report


def _add_goals(report: Report, found: Mapping[str, Outcomes]) -> None:
    report.add(
        "## Against the goals\n\nOn the most variable set spreads 8 times (encoder) and 4 times (language model) lower "
        "than in random order, and an iteration 1.25 times as fast as in DistTrain's order under 1F1B; on no set a "
        "slower one; less than 5% above the lower bound in the median."
    )
    rows = []
    for method in IN_QUESTION:
        variable = max(found.values(), key=lambda each: median(o.spread_s["vision"] for o in each["random"]))
        gains, eager_gains = (
            [_median_ratio(each[order], each[method], lambda o: o.iteration_s) for each in found.values()]
            for order in ("DistTrain", "DistTrain, eager")
        )
        above = [o.iteration_s / o.lower_bound_s - 1 for each in found.values() for o in each[method]]
        rows.append(
            (
                method,
                f"{_median_ratio(variable['random'], variable[method], lambda o: o.spread_s['vision']):.1f}x",
                f"{_median_ratio(variable['random'], variable[method], lambda o: o.spread_s['language_model']):.1f}x",
                f"{_median_ratio(variable['DistTrain'], variable[method], lambda o: o.iteration_s):.3f}x",
                f"{min(gains):.3f}x",
                f"{min(eager_gains):.3f}x",
                f"{median(above):.1%}",
            )
        )
    columns = (
        "encoder",
        "language model",
        "iteration",
        "least on any set",
        "the same against eager",
        "above the bound",
    )
    report.table(("assignment", *columns), rows)
    report.add(
        "Where one sample outweighs several microbatches, K leaves a spread that no assignment reduces (the least "
        "possible stands above), and K_eff makes all microbatches as large as the heaviest sample: even, but fewer, "
        "so that filling and draining a chain of 8 stages takes longer. On the same ranks a chain has the same stages "
        "twice, half as long each, and weight halves fill most of what is left, so that K_eff reaches both goals. "
        "That speed is the schedule's and the placement's: DistTrain's order gains as much from them (its line in "
        "each table), and beside it deferral is what makes microbatches even. The bound lets weight halves wait at no "
        "cost in memory. On the most variable set that is what keeps the schedule away from it: given ten times the "
        "memory, K_eff on the same ranks comes to 4.3% above it there, with one of the batches."
    )


def _median_ratio(above: Sequence[Outcome], below: Sequence[Outcome], value: Callable[[Outcome], float]) -> float:
    return median(value(a) / value(b) for a, b in zip(above, below, strict=True))


def _add_data_set(report: Report, model: str, data_set: str, num_batches: int) -> Outcomes:
    batches = [planned(model, data_set, batch) for batch in range(num_batches)]
    work = [batch.work(batch.apart) for batch in batches]
    shares = np.concatenate([w["vision"].total_s / sum(each.total_s for each in w.values()) for w in work])
    stages = [len(module.replicas[0].stages) for module in batches[0].apart.modules.values()]
    least = {name: median(_least_spread_s(w[name]) for w in work) for name in work[0]}
    report.add(
        f"## {data_set}\n\n{stages[0]} encoder and {stages[1]} language-model stages. The encoder's share of a "
        f"sample's work: {16 * shares.mean():.2f} of 16 devices, standard deviation {16 * shares.std():.2f}. Samples "
        "cannot be divided: with 32 microbatches in each replica, no assignment has a smaller spread over all of them "
        f"than {1e3 * least['vision']:.1f} ms (encoder) and {1e3 * least['language_model']:.1f} ms (language model)."
    )
    outcomes = {method: [measure(batch, method) for batch in batches] for method in METHODS}

    def typical(method: str, value: Callable[[Outcome], float]) -> float:
        return median(map(value, outcomes[method]))

    rows = []
    for method in METHODS:
        spreads = [
            (typical(method, lambda o: o.spread_s[name]), typical("random", lambda o: o.spread_s[name]))  # noqa: B023
            for name in work[0]
        ]
        gains = [d.iteration_s / o.iteration_s for d, o in zip(outcomes["DistTrain"], outcomes[method], strict=True)]
        rows.append(
            (
                method,
                *(f"{1e3 * own:.1f} ({random / own:.1f}x)" for own, random in spreads),
                f"{typical(method, lambda o: o.num_microbatches):.1f}",
                f"{typical(method, lambda o: o.iteration_s):.3f}",
                f"{median(gains):.3f} ({min(gains):.3f} to {max(gains):.3f})",
                f"{typical(method, lambda o: o.iteration_s / o.lower_bound_s - 1):.1%}",
                f"{typical(method, lambda o: o.peak_bytes / 2**30):.0f}",
            )
        )
    report.table(
        (
            "assignment",
            "encoder ms (random / it)",
            "LLM ms (random / it)",
            "microbatches",
            "iteration s",
            "DistTrain's / it",
            "above lower bound",
            "peak GiB",
        ),
        rows,
    )
    return outcomes


def _least_spread_s(work: SampleWork) -> float:
    """The heaviest samples alone, the others spread evenly over the remaining microbatches."""
    seconds = -np.sort(-work.forward_s.sum(axis=1))
    count, total = NUM_REPLICAS * NUM_MICROBATCHES, float(seconds.sum())
    heavy: list[float] = []
    while seconds[len(heavy)] > (total - sum(heavy)) / (count - len(heavy)):
        heavy.append(float(seconds[len(heavy)]))
    rest = [(total - sum(heavy)) / (count - len(heavy))] * (count - len(heavy))
    return float(np.std([*heavy, *rest]))


if __name__ == "__main__":
    main().write()
