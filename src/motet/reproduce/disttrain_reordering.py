"""DistTrain's Figure 18 beside ours: what reordering samples brings, simulated on the plan that its planner makes.

The paper's distribution of images is a picture; here images per sample are log-normal, rounded, 1 to 8, about 4 in the
mean, with a fixed seed. The order of samples decides everything: the batch is cut in the order in which it comes.

* Within microbatches (Algorithm 2): samples are spread over the language model's replicas so that none has much more
  work: longest first, to the group with the least, equal numbers in each. (Printed ascending, which loses the bound.)
* Between microbatches (Algorithm 3): the smallest first, the smallest p - 1 of the rest at the end, and between them
  those whose forward fits the interval that it fills best: first p - 1 that fill the time until the first backward
  returns, then for each backward one that fills what the slowest stage's period leaves beside it.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from statistics import mean

import numpy as np

from motet.data.assignment_disttrain import balanced_groups
from motet.data.sample import Sample
from motet.plan import Plan
from motet.planner.disttrain import disttrain
from motet.planner.evaluate import evaluate
from motet.planner.problem import PlanningProblem
from motet.reproduce.disttrain_problems import problem, sample_with
from motet.reproduce.tables import Row, Table

CASES = {"9B": (96, 128, 32, (1, 2, 4, 8)), "15B": (96, 64, 32, (1, 2, 4)), "72B": (98, 40, 40, (1,))}
"""Devices, global batch, microbatches, data-parallel sizes: up to 98 GPUs, batches as in section 8.2."""
PUBLISHED_GAIN = (1.03, 1.11)
SPREAD, MEDIAN, MOST = 0.6, 3.5, 8
NUM_RANDOM_ORDERS = 3


def between_microbatches(
    sizes: Sequence[float], num_stages: int, *, forward_s: float, backward_s: float, period_s: float, return_s: float
) -> list[int]:
    """The order of microbatches. `forward_s`, `backward_s`: of the first stage, per unit of size; `period_s`: of the
    slowest stage; `return_s`: from the end of the first forward to the first backward."""
    left = sorted(range(len(sizes)), key=lambda i: sizes[i])
    order = [left.pop(0)]
    num_rear = min(num_stages - 1, len(left))
    rear, left = left[:num_rear], left[num_rear:]

    def take_closest(seconds: float) -> None:
        closest = min(left, key=lambda i: abs(forward_s * sizes[i] - seconds))
        left.remove(closest)
        order.append(closest)

    to_fill = return_s
    for k in range(min(num_stages - 1, len(left))):
        take_closest(to_fill / (num_stages - 1 - k))
        to_fill -= forward_s * sizes[order[-1]]
    backward = 0
    while left:
        take_closest(max(0.0, period_s - backward_s * sizes[order[backward]]))
        backward += 1
    return order + rear


@cache
def gains(size: str) -> tuple[float, float]:
    """Random order's iteration over the reordered one's, and over that of samples that are all alike."""
    num_devices, batch, num_microbatches, dp_sizes = CASES[size]
    alike = problem(size, num_devices, batch, num_microbatches, dp_sizes=dp_sizes)
    plan = disttrain(alike)
    rng = np.random.default_rng(0)
    drawn = np.clip(np.round(rng.lognormal(np.log(MEDIAN), SPREAD, batch)), 1, MOST)
    counts = [int(count) for count in drawn]
    random_s = mean(_iteration_s(alike, plan, rng.permutation(counts).tolist()) for _ in range(NUM_RANDOM_ORDERS))
    reordered_s = _iteration_s(alike, plan, _reordered(alike, plan, counts))
    # Images cannot be divided: the nearest to all alike is a mixture of the two whole numbers around the mean.
    low, share = divmod(mean(counts), 1)
    even = [int(low) + (int((i + 1) * share) > int(i * share)) for i in range(batch)]
    return random_s / reordered_s, random_s / _iteration_s(alike, plan, even)


def _iteration_s(alike: PlanningProblem, plan: Plan, counts: Sequence[int]) -> float:
    samples: list[Sample] = [sample_with(alike, i, count) for i, count in enumerate(counts)]
    return evaluate(replace(alike, samples=tuple(samples)), plan).iteration_time_s


def _reordered(alike: PlanningProblem, plan: Plan, counts: Sequence[int]) -> list[int]:
    replicas = {name: len(module.replicas) for name, module in plan.modules.items()}
    depth = sum(len(module.replicas[0].stages) for module in plan.modules.values())
    times = {
        name: alike.layer_times(name, module.replicas[0].stages[0].tp_size, replicas[name])
        for name, module in plan.modules.items()
    }
    first = times["vision"][: plan.modules["vision"].replicas[0].stages[0].layers[1]]
    per_microbatch = len(counts) // (replicas["language_model"] * plan.num_microbatches)
    images = mean(counts) * per_microbatch
    slowest = max(
        sum(time.total_s for time in times[name][slice(*stage.layers)])
        for name, module in plan.modules.items()
        for stage in module.replicas[0].stages
    )
    all_s = sum(time.total_s for each in times.values() for time in each)
    result: list[int] = []
    for group in balanced_groups(np.array(counts), replicas["language_model"]):
        # A microbatch of several samples: again longest first, to the one with the least.
        microbatches = balanced_groups(np.array([counts[i] for i in group]), plan.num_microbatches)
        order = between_microbatches(
            [sum(counts[group[i]] for i in members) for members in microbatches],
            depth,
            forward_s=sum(time.forward_s for time in first) / images,
            backward_s=sum(time.backward_s for time in first) / images,
            period_s=slowest,
            return_s=all_s - sum(time.total_s for time in first),
        )
        result += [counts[group[i]] for m in order for i in microbatches[m]]
    return result


def reordering_table() -> Table:
    rows = []
    by_size = {size: gains(size) for size in CASES}
    ours = [gain for gain, _ in by_size.values()]
    assumptions = (
        f"images per sample log-normal, spread {SPREAD}, 1 to {MOST}; motet's analytic costs; 1F1B; "
        "microbatches of one sample"
    )
    for which, published, value in zip(("least", "most"), PUBLISHED_GAIN, (min(ours), max(ours)), strict=True):
        rows.append(Row(f"gain over random order, {which}", published, value, "nothing", True, assumptions))
    for size, (gain, headroom) in by_size.items():
        rows.append(Row(f"gain over random order, MLLM-{size}", None, gain, "nothing", False, assumptions))
        rows.append(Row(f"gain if samples were alike, MLLM-{size}", None, headroom, "nothing", False, assumptions))
    return Table(
        "Figure 18: reordering samples",
        tuple(rows),
        notes=(
            "The paper's data are not printed, and how uneven they are decides the gain. The last rows say what any "
            "order could gain at most. Published gains are larger for smaller models; ours are largest for 72B, whose "
            "generator makes images of 1024 x 1024, so that its work varies most from sample to sample."
        ),
    )
