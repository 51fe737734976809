"""DistTrain's reordering of samples (section 6): over replicas (Algorithm 2) and of microbatches (Algorithm 3).

Mended:
* Algorithm 2 sorts ascending, which loses the bound of 4/3; greedy partition is longest first. Groups are cut into
  microbatches of equal numbers of samples, so a group takes no more than its number of them.
* Algorithm 3's loop picks too many: after the first microbatch and the p - 1 kept for the end, the first interval takes
  p - 1 (or what is left), every later one a single one.
* GETINTERVAL: an action begins when its rank is free and what it reads has arrived. Here the orders of the actual
  schedule (`GENERATORS`) run on that rule, with positions instead of microbatches; an interval is the time for which
  the first rank would wait for a backward if forwards not placed yet took none there. Elsewhere they take the mean of
  what is left, which matters for interleaved stages only: in 1F1B no backward of an interval waits for them.

Assumed: within a replica samples keep the order in which they come, as the paper orders groups only. The size of a
microbatch is its time on all stages, because here the language model's varies too. A generator's stages follow the
language model's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from motet.assignment.batch_assignment import (
    BatchAssignment,
    Microbatch,
    assignment_of_shares,
    microbatches_of_shares,
    split_evenly,
)
from motet.assignment.sample import Sample, Segment
from motet.plan import ModulePlan, Plan, Replica, Stage, module_order
from motet.ragged_arrays import Floats
from motet.schedule.action import Kind


def balanced_groups(
    sizes: Floats, num_groups: int, *, equal_counts: bool = True, shares: Sequence[int] | None = None
) -> list[list[int]]:
    """Algorithm 2: the largest sample first, each to the group with the least. Indices of samples.

    `equal_counts`: no group gets more samples than ceil(number of samples / number of groups).
    `shares`: of each group, where they are to differ (its number of microbatches, in unlike pipelines)."""
    shares = shares or (1,) * num_groups
    groups: list[list[int]] = [[] for _ in shares]
    loads = [0.0 for _ in shares]
    most = -(-len(sizes) // sum(shares)) if equal_counts else len(sizes)
    for i in np.argsort(-sizes, kind="stable").tolist():
        open_groups = [g for g, share in enumerate(shares) if len(groups[g]) < most * share]
        g = min(open_groups, key=lambda g: loads[g] / shares[g])
        groups[g].append(i)
        loads[g] += float(sizes[i])
    return groups


def reordered(forward_s: Floats, backward_s: Floats, num_devices: int) -> list[int]:
    """Algorithm 3: the order of microbatches. `forward_s`, `backward_s`: [microbatch, stage] seconds; stage s stands on
    device s mod `num_devices`: 1F1B if there are as many, interleaved 1F1B (VPP) if there are more.

    Raises `ValueError` if the devices do not divide the stages."""
    num_microbatches, num_stages = forward_s.shape
    if num_stages % num_devices:
        raise ValueError(f"reordering: {num_stages} stages cannot be dealt evenly to {num_devices} devices")
    clock = _Clock(_orders(num_devices, num_stages // num_devices, num_microbatches))
    # The smallest last, to be popped.
    left = np.argsort(-(forward_s.sum(axis=1) + backward_s.sum(axis=1)), kind="stable").tolist()
    order = [left.pop()] if left else []
    rear = [left.pop() for _ in range(min(num_devices - 1, len(left)))]
    on_first = forward_s[:, ::num_devices].sum(axis=1)
    while left:
        seconds = np.zeros((2, num_microbatches, num_stages))
        others = left + rear
        seconds[:, len(order) :] = [[forward_s[others].mean(axis=0)], [backward_s[others].mean(axis=0)]]
        seconds[0, len(order) :, ::num_devices] = 0.0
        seconds[:, : len(order)] = [forward_s[order], backward_s[order]]
        interval = clock.interval(seconds, len(order))
        closest = min(left, key=lambda m: abs(float(on_first[m]) - interval))
        left.remove(closest)
        order.append(closest)
    return order + rear


@dataclass(frozen=True, slots=True)
class _Step:
    """An action at a place of the order: whichever microbatch stands there."""

    is_backward: bool
    stage: int
    position: int


@cache
def _orders(num_devices: int, num_chunks: int, num_microbatches: int) -> tuple[tuple[_Step, ...], ...]:
    """Steps of each device in order, from the schedule's own generator."""
    from motet.schedule.generators import GENERATORS
    from motet.schedule.routes import derive_routes

    num_stages = num_devices * num_chunks
    stages = tuple(Stage(layers=(s, s + 1), ranks=(s % num_devices,)) for s in range(num_stages))
    module = ModulePlan(
        kind="language_model",
        num_layers=num_stages,
        replicas=(Replica(stages=stages),),
        trainable=((0, num_stages),),
        loss_weight=1.0,
    )
    plan = Plan(modules={"chain": module}, edges=(), num_microbatches=num_microbatches)
    samples = [Sample(str(i), {"chain": (Segment(1),)}) for i in range(num_microbatches)]
    assignment = BatchAssignment({"chain": (tuple((i,) for i in range(num_microbatches)),)})
    generator = GENERATORS["1f1b" if num_chunks == 1 else "interleaved_1f1b"]
    schedule = generator(derive_routes(plan, assignment, samples))
    return tuple(
        tuple(_Step(action.kind is Kind.BACKWARD, action.cell.stage, action.cell.microbatch) for action in actions)
        for actions in schedule.ranks
    )


class _Clock:
    def __init__(self, orders: tuple[tuple[_Step, ...], ...]) -> None:
        self.orders = orders
        self.num_stages = 1 + max(step.stage for steps in orders for step in steps)
        first = orders[0]
        self.gaps_of_position: list[list[int]] = [[] for _ in range(1 + max(step.position for step in first))]
        """Indices on the first device of the backwards that follow each position's forwards there."""
        following = len(first)
        for place in reversed(range(len(first))):
            if first[place].is_backward:
                following = place
            elif following < len(first):
                self.gaps_of_position[first[place].position].append(following)

    def interval(self, seconds: Floats, num_placed: int) -> float:
        """Interval that the next position's forwards on the first device have to fill; an interval that several
        unplaced forwards share is divided among them."""
        gaps = self.gaps_of_position[num_placed]
        waits = self._waits(seconds.tolist(), set(gaps))
        total = 0.0
        for gap in gaps:
            shared, place = 0, gap - 1
            while place >= 0 and not self.orders[0][place].is_backward:
                shared += self.orders[0][place].position >= num_placed
                place -= 1
            total += waits[gap] / shared
        return total

    def _waits(self, seconds: list[list[list[float]]], places: set[int]) -> dict[int, float]:
        """Waiting time of the first device at each of these places."""
        ends: dict[tuple[bool, int, int], float] = {}
        free = [0.0] * len(self.orders)
        at = [0] * len(self.orders)
        waits: dict[int, float] = {}
        while len(waits) < len(places):
            for device, steps in enumerate(self.orders):
                while at[device] < len(steps):
                    step = steps[at[device]]
                    ready = self._ready(step, ends)
                    if ready is None:
                        break
                    if device == 0 and at[0] in places:
                        waits[at[0]] = max(0.0, ready - free[0])
                    free[device] = max(free[device], ready) + seconds[step.is_backward][step.position][step.stage]
                    ends[step.is_backward, step.stage, step.position] = free[device]
                    at[device] += 1
        return waits

    def _ready(self, step: _Step, ends: Mapping[tuple[bool, int, int], float]) -> float | None:
        """Time at which the step's input is available; None if it is not known yet."""
        if not step.is_backward:
            return ends.get((False, step.stage - 1, step.position)) if step.stage else 0.0
        if step.stage == self.num_stages - 1:
            return ends.get((False, step.stage, step.position))
        return ends.get((True, step.stage + 1, step.position))


def reordered_assignment(
    plan: Plan,
    samples: Sequence[Sample],
    forward_s: Mapping[str, Floats],
    backward_s: Mapping[str, Floats],
) -> BatchAssignment:
    """Both algorithms. `forward_s`, `backward_s`: by module seconds [sample, stage] (`motet.balancing.sample_work`)."""
    chain = [name for name in module_order(plan) if plan.modules[name].copy_of is None]
    forward = np.concatenate([forward_s[name] for name in chain], axis=1)
    backward = np.concatenate([backward_s[name] for name in chain], axis=1)
    num_devices = len({stage.ranks for name in chain for stage in plan.modules[name].replicas[0].stages})
    if forward.shape[1] % num_devices:
        num_devices = forward.shape[1]  # Stages share devices in another way: as if each had its own.
    shares: list[list[Microbatch]] = []
    counts = microbatches_of_shares(plan)
    groups = balanced_groups((forward + backward).sum(axis=1), len(counts), shares=counts)
    for group, count in zip(groups, counts, strict=True):
        microbatches = [m for m in split_evenly(sorted(group), count) if m]
        if microbatches:
            forwards, backwards = (
                np.array([s[list(m)].sum(axis=0) for m in microbatches]) for s in (forward, backward)
            )
            microbatches = [microbatches[m] for m in reordered(forwards, backwards, num_devices)]
        shares.append(microbatches)
    work = {name: (forward_s[name] + backward_s[name]).sum(axis=1).tolist() for name in chain}
    return assignment_of_shares(plan, samples, shares, work=work)
