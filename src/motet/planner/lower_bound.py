"""Lower bound of the iteration time over all plans and schedules of a problem, by relaxation.

It holds for all plans on the problem's devices in which every module has one tensor-parallel size, one context-parallel
size and one number of replicas, out of given sets, and no module shards its parameters. Stages, groups (own, shared,
interleaved, with copies, some devices unused) and schedules (backwards split or not) are arbitrary; the batch is
assigned by `problem.assignment`. With `mixed`, stages of one module may differ in tensor parallelism: every layer then
has the best of the sizes for each of the sums below, and 3 does not apply.

If encoders may run ahead (`problem.run_ahead`), nothing waits for the forwards of their frozen leading layers, which
have neither head nor tail.

Relaxed: messages, reductions and exchanges of context-parallel groups take no time; memory counts as one sum of static
bytes over all devices; ranks may interrupt and divide work arbitrarily. Tensor-parallel groups lie within nodes, as
their costs assume. Kept:

1. Work. A rank works from the time when its first layer's input can exist (head) to the time that must follow its last
   action (tail). tp x cp x replicas ranks hold a layer, so not every rank can begin with layer 0: over D ranks heads
   add up to at least those of the D earliest places. D x T >= work + heads + tails that weight gradients cannot fill.
   The same holds for any of the layers by themselves: other work only delays theirs. It tells more where early layers
   have less work than the others' wait. Ranks beyond those that all microbatches together can occupy, each in one layer
   at a time, wait until a first backward can begin; and at the end, once no forward can begin any more, they have
   nothing but weight gradients. At each time only modules count that can have begun, or that others do not yet follow.
2. A layer is indivisible: T >= head + all of its work on its rank + tail.
3. Whole layers in windows. Of any set of layers, a rank's share lies between the head and the tail of one of them, its
   first one, so it has at most as many units of work as this window has, where only whole units of each layer count
   (for any unit: a dual feasible function of bin packing, Fekete and Schepers 2001). As many ranks can have a layer as
   their first one as hold it, so the D widest windows must have room for the units of all layers. With equal blocks as
   units this says, for example, that of k x D + 1 of them some rank has k + 1, and not only ranks of the first blocks.
   This requires replicas with equal work.
4. After all that, the optimizer's step and, where the optimizer's state is sharded, the gather of new parameters, each
   at least the mean over all ranks. A gather takes the bandwidth of the best placement of its ranks on nodes.

The bound is the least over all combinations of sizes, of which there are few; each is the maximum of the first
three, plus the fourth.

If the batch is cut evenly and a module has one replica for each share of it, its microbatches are known, padding
included. Otherwise loads are summed sample by sample (`Estimator.lower_bound_batch_times`). Plans whose replicas take
different numbers of microbatches (`replica_microbatches`) are not covered.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from heapq import merge
from itertools import pairwise, product
from math import gcd, inf
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from motet.costs.communication import gather_s_per_byte
from motet.costs.estimator import LayerTime
from motet.costs.memory import usable_bytes
from motet.planner.layouts.degrees import cp_sizes, dp_sizes, largest_ep, tp_sizes
from motet.planner.problem import PlanningProblem
from motet.ragged_arrays import Bools, Floats, Ints

NUM_SPREAD = 6
"""Layers, evenly spread, at whose heads and tails the bound from some layers' work begins and ends."""
NUM_UNITS = 6
"""Different layers, those with most work, whose work is a unit of the bound from whole layers in windows."""
PARTS = range(1, 17)
"""Into how many units such a layer is divided."""
RELATIVE = 1e-9
"""Precision of the bound from whole layers in windows."""
_ALL = slice(None)


class _Layers(NamedTuple):
    """All layers of the model under one combination of sizes, an entry for each; of several tensor-parallel sizes, the
    weakest bound."""

    num_holders: Ints
    device_s: Floats
    """Work on all ranks that hold it together."""
    device_weight_s: Floats
    work_s: Floats
    """Work on each rank that holds it."""
    weight_s: Floats
    head_s: Floats
    tail_s: Floats
    firsts: Ints
    """Place of each module's first layer."""
    alike: Bools
    """Whether all ranks that hold it have as much work for it."""
    crowd: "_Crowd"


class _Phase(NamedTuple):
    """A part of the begin or of the end of an iteration, in which few modules can work."""

    seconds: float
    most_busy: int
    """Ranks that all microbatches occupy, each in one layer at a time."""


class _Crowd(NamedTuple):
    """What limits how many ranks can work at the begin and at the end of an iteration."""

    begin: list[_Phase]
    """Until a backward can begin."""
    end: list[_Phase]
    """After the last forward, the last part first; weight gradients are not limited."""

    @property
    def forward_s(self) -> float:
        return sum(phase.seconds for phase in self.begin)


class Size(NamedTuple):
    """Sizes of one module."""

    tp: tuple[int, ...]
    """Tensor-parallel sizes, of which each layer has one."""
    cp: int
    num_replicas: int

    def num_holders(self, tp: int) -> int:
        """Number of ranks that hold a layer of this tensor-parallel size, or a shard of it."""
        return tp * self.cp * self.num_replicas


Sizes = Mapping[str, Size]


def problem_lower_bound_s(
    problem: PlanningProblem,
    *,
    num_replicas: Mapping[str, Sequence[int]] | None = None,
    tp: Mapping[str, Sequence[int]] | None = None,
    cp: Mapping[str, Sequence[int]] | None = None,
    mixed: bool = False,
    gathers: bool = True,
    at_most_s: float = inf,
) -> float:
    """Lower bound in seconds; infinite if no combination can fit into memory.

    `num_replicas`, `tp`, `cp`: sizes that plans may have, by module; None: the problem's. `mixed`: stages of a module
    may differ in tensor parallelism. `gathers`: False: plans without a sharded optimizer's state are bounded too, with
    the memory of a sharded one. `at_most_s`: returned where the bound is not below it, which takes less time to find
    out."""
    modules, least_s = _Modules(problem, gathers=gathers and problem.memory.zero1), at_most_s - problem.program_s
    for choices in _choices(problem, num_replicas, tp, cp, mixed):
        least_s = _least_of(problem, modules, choices, least_s)
    return least_s + problem.program_s


def _choices(
    problem: PlanningProblem,
    num_replicas: Mapping[str, Sequence[int]] | None,
    tp: Mapping[str, Sequence[int]] | None,
    cp: Mapping[str, Sequence[int]] | None,
    mixed: bool,
) -> Iterator[list[list[Size]]]:
    """For each module, sizes whose combinations are all to be bounded."""
    # By default, all modules have the same number of replicas.
    for dps in [(dp,) for dp in dp_sizes(problem)] if num_replicas is None else [None]:
        yield [
            [
                Size(*size)
                for size in product(
                    _choices_of_tp(tp[name] if tp else tp_sizes(problem, name), mixed),
                    sorted(set(cp[name] if cp else cp_sizes(problem, name))),
                    dps or sorted(set((num_replicas or {})[name])),
                )
                if min(size[0]) * size[1] * size[2] <= problem.num_devices
            ]
            for name in problem.modules
        ]


def _choices_of_tp(sizes: Sequence[int], mixed: bool) -> list[tuple[int, ...]]:
    ordered = sorted(set(sizes))
    return [tuple(ordered)] if mixed else [(tp,) for tp in ordered]


def _least_of(
    problem: PlanningProblem, modules: "_Modules", choices: Sequence[Sequence[Size]], least_s: float
) -> float:
    """The least bound of all combinations that fit into memory, or `least_s`."""
    if not all(choices):
        return least_s
    # The first module's sizes are gone through one by one, those of the others together: there may be millions.
    (first, own), *others = zip(problem.modules, choices, strict=True)
    batches = [_Batch(modules, [(first, [size]), *others]).combinations(least_s) for size in own]
    for weaker_s, sizes in merge(*batches, key=itemgetter(0)):
        if weaker_s >= least_s:
            break
        layers, fixed_s = _layers(modules, sizes), _fixed_s(problem, modules, sizes)
        busy_s = max(_indivisible(layers), _work(problem, layers))
        for bound_s in (_work_of_some, _in_windows):
            if busy_s + fixed_s < least_s:
                busy_s = bound_s(problem, layers, busy_s, least_s - fixed_s)
        least_s = min(least_s, busy_s + fixed_s)
    return least_s


class _Modules:
    """Remembered sums over a module's layers at each size, as many combinations share them."""

    def __init__(self, problem: PlanningProblem, *, gathers: bool) -> None:
        self.problem, self._gathers = problem, gathers
        self._static_bytes: dict[tuple[str, Size], int] = {}
        self._num_updated: dict[tuple[str, Size], int] = {}
        self._gather_s: dict[tuple[str, Size], float] = {}
        self._batch_s: dict[tuple[str, Size, bool], tuple[Floats, Floats, Floats, Floats]] = {}
        self._microbatch_s: dict[tuple[str, Size], tuple[Floats, Floats]] = {}
        self._least_s: dict[tuple[str, Size, bool], tuple[float, float]] = {}
        self.entries = {
            name: [(edge.source, min(edge.layers)) for edge in problem.edges if edge.target == name]
            for name in problem.modules
        }
        """The modules that enter each module, and the first layer that each of them enters."""
        self.order = _in_order(problem)
        self.is_row = self._is_row()
        """Whether all modules that read nothing enter one module at its first layer, and the others follow in a row."""
        self.has_backward = {
            name: np.array([needs.any for needs in problem.gradients[name]]) for name in problem.modules
        }

    def _is_row(self) -> bool:
        sources = [name for name in self.order if not self.entries[name]]
        row = [name for name in self.order if self.entries[name]]
        expected = [sources, *([name] for name in row)]
        return all(
            sorted(self.entries[name]) == sorted((before, 0) for before in expected[place])
            for place, name in enumerate(row)
        )

    def batch_s(self, name: str, size: Size, *, alone: bool) -> tuple[Floats, Floats, Floats, Floats]:
        """Seconds of each layer for the whole batch: of all ranks that hold it together, and of each of them; both
        followed by the part of it that computes weight gradients."""
        key = (name, size, alone)
        if key not in self._batch_s:
            of_sizes = [_least_totals(self.problem, name, size, tp, alone=alone) for tp in size.tp]
            total = np.array([[time.total_s for time in times] for times in of_sizes])
            weight = np.array([[time.weight_s for time in times] for times in of_sizes])
            ranks = size.cp * np.array(size.tp, dtype=float)[:, None]
            self._batch_s[key] = (
                (ranks * total).min(axis=0),
                (ranks * weight).max(axis=0),
                total.min(axis=0) / size.num_replicas,
                weight.max(axis=0) / size.num_replicas,
            )
        return self._batch_s[key]

    def microbatch_s(self, name: str, size: Size) -> tuple[Floats, Floats]:
        """Least seconds of each layer for one microbatch between others that it waits for: of its forward, and of its
        backward without the weight gradients."""
        if (name, size) not in self._microbatch_s:
            problem, estimator = self.problem, self.problem.estimator
            num_cut = size.num_replicas * problem.num_microbatches
            smallest = max(1, len(problem.samples) // num_cut) if problem.cuts_evenly else 1
            of_sizes = [estimator.lower_bound_microbatch_times(name, tp, smallest, cp=size.cp) for tp in size.tp]
            forward_s = np.array([[time.forward_s for time in times] for times in of_sizes]).min(axis=0)
            forward_s[: self.num_ahead(name)] = 0.0
            self._microbatch_s[name, size] = (
                forward_s,
                np.array([[time.backward_s - time.weight_s for time in times] for times in of_sizes]).min(axis=0),
            )
        return self._microbatch_s[name, size]

    def num_ahead(self, name: str) -> int:
        """Number of a module's leading layers for whose forwards nothing has to wait, as they may run in the iteration
        before."""
        module = self.problem.modules[name]
        if not self.problem.run_ahead or module.workload.kind != "encoder" or self.entries[name]:
            return 0
        return next((i for i, trains in enumerate(module.trainable_layers) if trains), module.workload.num_layers)

    def least_s(self, name: str, size: Size, *, alone: bool) -> tuple[float, float]:
        """The work on all ranks together, and the bound from indivisible layers for the module by itself."""
        key = (name, size, alone)
        if key not in self._least_s:
            forward, back = self.microbatch_s(name, size)
            device_s, _, work_s, weight_s = self.batch_s(name, size, alone=alone)
            after = np.where(self.has_backward[name], _before(back), 0.0)
            indivisible_s = _before(forward) + work_s + np.maximum(0.0, after - weight_s)
            self._least_s[key] = float(device_s.sum()), float(indivisible_s.max())
        return self._least_s[key]

    def static_bytes(self, name: str, size: Size) -> int:
        """Parameters, gradients and moments, on all ranks together."""
        if (name, size) not in self._static_bytes:
            each = [
                self.problem.estimator.static_bytes(
                    name, tp, size.num_replicas, cp=size.cp, ep=largest_ep(self.problem, name, tp, size.num_replicas)
                )
                for tp in size.tp
            ]
            self._static_bytes[name, size] = sum(
                min(size.num_holders(tp) * num_bytes for tp, num_bytes in zip(size.tp, layer, strict=True))
                for layer in zip(*each, strict=True)
            )
        return self._static_bytes[name, size]

    def num_updated(self, name: str, size: Size) -> int:
        """Parameters that optimizers update, on all ranks together."""
        if (name, size) not in self._num_updated:
            each = [
                [
                    tp * n
                    for n in self.problem.estimator.num_trainable(
                        name, tp=tp, ep=largest_ep(self.problem, name, tp, size.num_replicas)
                    )
                ]
                for tp in size.tp
            ]
            self._num_updated[name, size] = sum(map(min, zip(*each, strict=True)))
        return self.problem.memory.num_keepers(size.cp * size.num_replicas) * self._num_updated[name, size]

    def gather_s(self, name: str, size: Size) -> float:
        """Seconds of all ranks together for gathers of new parameters, as `IterationCosts.gather_s` has them."""
        # Where replicas differ in tensor parallelism, pieces are gathered in an order that is not known here.
        if not self._gathers or len(size.tp) > 1:
            return 0.0
        if (name, size) not in self._gather_s:
            memory, (tp,), num_ranks = self.problem.memory, size.tp, size.cp * size.num_replicas
            ep = largest_ep(self.problem, name, tp, size.num_replicas)
            num_bytes = memory.parameter_bytes * sum(self.problem.estimator.num_trainable(name, tp=tp, ep=ep))
            cluster = self.problem.estimator.cluster  # With measured links.
            s_per_byte = gather_s_per_byte(cluster, num_ranks, max(1, cluster.devices_per_node // tp))
            share = (num_ranks - memory.num_keepers(num_ranks)) / max(1, num_ranks - 1)
            self._gather_s[name, size] = size.num_holders(tp) * num_bytes * s_per_byte * share
        return self._gather_s[name, size]


def _least_totals(problem: PlanningProblem, name: str, size: Size, tp: int, *, alone: bool) -> list[LayerTime]:
    return problem.estimator.lower_bound_batch_times(name, tp, size.num_replicas, cp=size.cp, alone=alone)


class _Batch:
    """Combinations of sizes that fit into memory."""

    def __init__(self, modules: _Modules, choices: Sequence[tuple[str, Sequence[Size]]]) -> None:
        self._choices = choices
        problem, shape = modules.problem, [len(sizes) for _, sizes in choices]

        def spread(axis: int, values: Sequence[float]) -> Floats:
            """The values of one module's sizes, so that they meet those of all other modules."""
            return np.array(values).reshape([-1 if i == axis else 1 for i in range(len(shape))])

        static = sum(
            spread(axis, [float(modules.static_bytes(name, size)) for size in sizes])
            for axis, (name, sizes) in enumerate(choices)
        )
        replicas = [spread(axis, [size.num_replicas for size in sizes]) for axis, (_, sizes) in enumerate(choices)]
        num_shares = np.gcd.reduce(np.broadcast_arrays(*replicas))
        share_s, alone_s = np.zeros(shape), np.zeros(shape)
        for axis, (name, sizes) in enumerate(choices):
            is_alone = np.broadcast_to(replicas[axis] == num_shares, shape)
            for alone in (False, True):
                if (is_alone == alone).any():
                    work_s, own_s = zip(*(modules.least_s(name, size, alone=alone) for size in sizes), strict=True)
                    share_s += np.where(is_alone == alone, spread(axis, work_s), 0.0)
                    alone_s = np.maximum(alone_s, np.where(is_alone == alone, spread(axis, own_s), 0.0))
        least_s = np.maximum(share_s / problem.num_devices, alone_s)
        fits = np.broadcast_to(static <= problem.num_devices * usable_bytes(problem.cluster), shape)
        places = np.flatnonzero(fits)
        least_s = least_s.reshape(-1)[places]
        order = np.argsort(least_s, kind="stable")
        self._least_s = least_s[order]
        self._places = np.unravel_index(places[order], shape)

    def combinations(self, below_s: float) -> Iterator[tuple[float, Sizes]]:
        """The combinations of which a weaker bound, which is fast to compute, is below a limit, in its order: each
        device's part of all the work, and modules by themselves."""
        number = int(np.searchsorted(self._least_s, below_s))
        for least_s, *places in zip(
            self._least_s[:number].tolist(), *(own[:number].tolist() for own in self._places), strict=True
        ):
            yield least_s, {name: sizes[place] for (name, sizes), place in zip(self._choices, places, strict=True)}


def _layers(modules: _Modules, sizes: Sizes) -> _Layers:
    # The number of shares of the batch, as `motet.assignment.batch_assignment.num_shares` defines it.
    num_shares = gcd(*(size.num_replicas for size in sizes.values()))
    heads, tails, crowd = _heads_and_tails(modules, sizes)
    columns, alike = [], []
    for name, size in sizes.items():
        seconds = modules.batch_s(name, size, alone=size.num_replicas == num_shares)
        holders = np.full(len(seconds[0]), size.num_holders(max(size.tp)))
        columns.append((holders, *seconds, heads[name], tails[name]))
        alike.append(np.full(len(seconds[0]), _replicas_work_alike(modules.problem, size)))
    holders, device_s, device_weight_s, work_s, weight_s, head_s, tail_s = map(
        np.concatenate, zip(*columns, strict=True)
    )
    firsts = np.cumsum([0, *(len(heads[name]) for name in sizes)])[:-1]
    return _Layers(
        holders, device_s, device_weight_s, work_s, weight_s, head_s, tail_s, firsts, np.concatenate(alike), crowd
    )


def _heads_and_tails(modules: _Modules, sizes: Sizes) -> tuple[dict[str, Floats], dict[str, Floats], _Crowd]:
    """Returns the least time before the first action of each layer, and after its last, by module."""
    one = {name: modules.microbatch_s(name, size) for name, size in sizes.items()}
    heads: dict[str, Floats] = {}
    backs: dict[str, Floats] = {}
    for name in modules.order:
        for found, of_layer in ((heads, 0), (backs, 1)):
            own = one[name][of_layer]
            before = _before(own)
            begin = before.copy()
            for source, first in modules.entries[name]:
                end = found[source][-1] + one[source][of_layer][-1]
                begin[first:] = np.maximum(begin[first:], end + before[first:] - before[first])
            found[name] = begin
    lossy = [name for name in sizes if modules.problem.modules[name].loss_weight] or list(sizes)
    forward_s, backward_s = (
        min(float(found[name][-1] + one[name][of_layer][-1]) for name in lossy)
        for found, of_layer in ((heads, 0), (backs, 1))
    )
    # A module works from the time when its first layer can, and until the time that must follow its last backward.
    begins = {name: float(heads[name][0]) for name in sizes}
    ends = {name: float(backs[name][own].min()) for name, own in modules.has_backward.items() if own.any()}
    crowd = _Crowd(_phases(modules, sizes, begins, forward_s), _phases(modules, sizes, ends, backward_s))
    return heads, _tails(modules, one, backs), crowd


def _phases(modules: _Modules, sizes: Sizes, since_s: Mapping[str, float], until_s: float) -> list[_Phase]:
    """`since_s`: when each module can work at the earliest; others cannot before `until_s`."""
    times = sorted({0.0, *(seconds for seconds in since_s.values() if seconds < until_s), until_s})
    return [
        _Phase(to - time, _most_busy(modules, sizes, {name for name, since in since_s.items() if since <= time}))
        for time, to in pairwise(times)
    ]


def _most_busy(modules: _Modules, sizes: Sizes, working: Set[str]) -> int:
    """The most ranks that can be in forwards at once, if only some modules can be. A microbatch is in one layer of a
    module at a time. A sample is in one of the modules of a row at a time, of which each reads the one before; modules
    that read nothing run beside each other."""
    problem, num_samples = modules.problem, len(modules.problem.samples)
    number = {
        name: min(num_samples, size.num_replicas * problem.num_microbatches) if problem.cuts_evenly else num_samples
        for name, size in sizes.items()
    }
    ranks = {name: max(size.tp) * size.cp * (name in working) for name, size in sizes.items()}
    of_all = sum(number[name] * ranks[name] for name in sizes)
    # Beside the batch's own microbatches there may be those of the next batch.
    ahead = [name for name in sizes if modules.num_ahead(name)]
    if ahead:
        return of_all + sum(number[name] * max(sizes[name].tp) * sizes[name].cp for name in ahead)
    if not modules.is_row:
        return of_all
    # Actions that run at once have different samples; with equally many replicas, different microbatches.
    at_once = num_samples if len(set(number.values())) > 1 else next(iter(number.values()))
    beside = sum(ranks[name] for name in sizes if not modules.entries[name])
    return min(of_all, at_once * max([beside, *(ranks[name] for name in sizes if modules.entries[name])]))


def _tails(
    modules: _Modules, one: Mapping[str, tuple[Floats, Floats]], backs: Mapping[str, Floats]
) -> dict[str, Floats]:
    """Tails: a backward is followed by those of earlier layers; a forward without one, by everything it feeds."""
    targets: dict[str, list[tuple[str, int]]] = {}
    for target, sources in modules.entries.items():
        for source, first in sources:
            targets.setdefault(source, []).append((target, first))
    rest: dict[str, Floats] = {}
    tails: dict[str, Floats] = {}
    for name in reversed(modules.order):
        forward, back = one[name]
        both = forward + back
        follow = max((rest[target][first] for target, first in targets.get(name, [])), default=0.0)
        rest[name] = follow + np.cumsum(both[::-1])[::-1]
        tails[name] = np.where(modules.has_backward[name], backs[name], rest[name] - both)
        tails[name][: modules.num_ahead(name)] = 0.0
    return tails


def _before(seconds: Floats) -> Floats:
    """The sum of all earlier layers, for each layer."""
    return np.concatenate([[0.0], np.cumsum(seconds[:-1])])


def _in_order(problem: PlanningProblem) -> list[str]:
    order: list[str] = []
    remaining = list(problem.modules)
    while remaining:
        name = next(m for m in remaining if not any(e.target == m and e.source in remaining for e in problem.edges))
        remaining.remove(name)
        order.append(name)
    return order


class _Earliest:
    """The sum of the n smallest values, where each occurs as often as it has places."""

    def __init__(self, values: Floats, num_places: Ints) -> None:
        order = np.argsort(values, kind="stable")
        self.ends = np.concatenate([[0], np.cumsum(num_places[order])])
        self._sums = np.concatenate([[0.0], np.cumsum(values[order] * num_places[order])])

    def __call__(self, numbers: Floats) -> Floats:
        return np.interp(numbers, self.ends, self._sums)

    def number_at(self, total: float) -> float:
        """The n at which the sum reaches `total`, or the number of places."""
        return float(np.interp(total, self._sums, self.ends))


class _Work:
    """The bound from work. Ranks without a layer do not work; others may stay unused if that is faster."""

    def __init__(self, problem: PlanningProblem, layers: _Layers, some: Bools | slice = _ALL) -> None:
        """`some`: the layers whose work counts; ranks that hold none of them do no work that counts."""
        self._work, self.weight_s = layers.device_s[some].sum(), layers.device_weight_s[some].sum()
        self.num_holders = layers.num_holders[some]
        self.head_s, self.tail_s = layers.head_s[some], layers.tail_s[some]
        self.most = min(problem.num_devices, int(self.num_holders.sum()))

    def seconds(
        self, before: Callable[[Floats], Floats], after: Callable[[Floats], Floats], breaks: list[Floats]
    ) -> float:
        """`before`, `after`: what a number of ranks wait for together at the begin and at the end. `breaks`: numbers
        between which these are linear."""
        # Between these numbers of ranks the numerator is linear, so the quotient is least at one of them.
        numbers = np.concatenate([[1.0, self.most], *breaks])
        numbers = np.unique(np.concatenate([np.floor(numbers), np.ceil(numbers)]))
        numbers = numbers[(numbers >= 1) & (numbers <= self.most)]
        waiting = before(numbers) + np.maximum(0.0, after(numbers) - self.weight_s)
        return float(((self._work + waiting) / numbers).min())

    def with_heads_and_tails(self) -> float:
        heads, tails = _Earliest(self.head_s, self.num_holders), _Earliest(self.tail_s, self.num_holders)
        filled = np.array([tails.number_at(self.weight_s)])
        return self.seconds(heads, tails, [heads.ends, tails.ends, filled])


def _work(problem: PlanningProblem, layers: _Layers) -> float:
    """The bound from the work of all layers."""
    work, crowd = _Work(problem, layers), layers.crowd
    # What ranks wait for at the begin and what they wait for at the end are added up, so they must not overlap.
    after_s = max(0.0, _indivisible(layers) - crowd.forward_s)
    late_tails = _Earliest(np.minimum(layers.tail_s, after_s), layers.num_holders)

    def crowded(phases: Sequence[_Phase]) -> Callable[[Floats], Floats]:
        return lambda numbers: sum(
            (np.maximum(0.0, numbers - phase.most_busy) * phase.seconds for phase in phases), np.zeros(len(numbers))
        )

    begin, end = crowded(crowd.begin), crowded(crowd.end)
    full = np.unique([1, work.most, *(phase.most_busy for phase in (*crowd.begin, *crowd.end))]).astype(float)
    filled = np.array([np.interp(work.weight_s, end(full), full)])
    late_filled = np.array([late_tails.number_at(work.weight_s)])
    return max(
        work.with_heads_and_tails(),
        work.seconds(begin, late_tails, [full, late_tails.ends, late_filled]),
        work.seconds(begin, end, [full, filled]),
    )


def _work_of_some(problem: PlanningProblem, layers: _Layers, from_s: float, to_s: float) -> float:
    """The bound from the work of only those layers that begin late and are followed by much: the others could use ranks
    only while these wait, and for no longer than their own work takes. `from_s`: a bound that is known."""
    return max(from_s, *(_Work(problem, layers, some).with_heads_and_tails() for some in _late(layers)))


def _late(layers: _Layers) -> Iterator[Bools]:
    """Sets of layers that begin late and are followed by much; the first one has all layers."""
    least_heads, least_tails = (_thresholds(values, layers.firsts) for values in (layers.head_s, layers.tail_s))
    for least_head, least_tail in product(least_heads, least_tails):
        some = (layers.head_s >= least_head) & (layers.tail_s >= least_tail)
        if some.any():
            yield some


def _thresholds(values: Floats, firsts: Ints) -> list[float]:
    """The values of each module's first two layers (the first may be an embedding, with little work), the two least of
    all, and those of layers evenly spread among all others. Without the least: many ranks may hold a layer that nothing
    follows (a projector of a replica's own), but its work is little."""
    distinct = np.unique(values)
    spread = distinct[np.linspace(0, len(distinct) - 1, NUM_SPREAD).astype(int)]
    seconds = values[np.minimum(firsts + 1, len(values) - 1)]
    thresholds: list[float] = np.unique([*values[firsts], *seconds, *distinct[:2], *spread]).tolist()
    return thresholds


def _indivisible(layers: _Layers) -> float:
    after = np.maximum(0.0, layers.tail_s - layers.weight_s)
    return float((layers.head_s + layers.work_s + after).max())


class _Windows(NamedTuple):
    """Units of work, and the ranks' windows that must have room for them; both for several sizes of a unit."""

    waiting_s: Floats
    """How much shorter each kind of window is than the iteration."""
    num_windows: Ints
    """Number of windows of each kind."""
    unit_s: Floats
    num_units: Floats

    def are_too_short(self, seconds: float) -> Bools:
        """Whether an iteration of `seconds` leaves no room for the units, for each size of a unit."""
        num_fitting = np.floor(np.maximum(0.0, seconds - self.waiting_s)[:, None] / self.unit_s)
        too_short: Bools = self.num_units > self.num_windows @ num_fitting
        return too_short


def _in_windows(problem: PlanningProblem, layers: _Layers, from_s: float, to_s: float) -> float:
    """The bound from whole layers in windows, between a bound that is known and `to_s`, which is enough."""
    for some in _late(layers):
        for windows in _windows(problem, layers, some & layers.alike):
            too_short = windows.are_too_short(from_s * (1 + RELATIVE))
            if not too_short.any():
                continue
            windows = windows._replace(unit_s=windows.unit_s[too_short], num_units=windows.num_units[too_short])
            enough_s = from_s
            while windows.are_too_short(enough_s).any():
                if enough_s >= to_s:
                    return to_s
                from_s, enough_s = enough_s, min(2 * enough_s, to_s)
            while enough_s - from_s > RELATIVE * from_s:
                middle_s = (from_s + enough_s) / 2
                if windows.are_too_short(middle_s).any():
                    from_s = middle_s
                else:
                    enough_s = middle_s
    return from_s


def _windows(problem: PlanningProblem, layers: _Layers, some: Bools) -> Iterator[_Windows]:
    """The windows of the ranks' first layers, where layers are ordered by their heads, or of their last ones, where
    they are ordered by their tails. What computes weight gradients needs no window before the tail."""
    if not some.any():
        return
    head_s, tail_s, num_holders = layers.head_s[some], layers.tail_s[some], layers.num_holders[some]
    work_s, weight_s = layers.work_s[some], layers.weight_s[some]
    nothing_s = np.zeros(len(tail_s))
    for item_s, after_s in ((work_s - weight_s, tail_s), *([(work_s, nothing_s)] if weight_s.any() else [])):
        unit_s = _units(item_s)
        num_units = num_holders.astype(float) @ np.floor(item_s[:, None] / unit_s)
        for first_s, second_s in ((head_s, after_s), (after_s, head_s)):
            order = np.argsort(first_s, kind="stable")
            # A rank's other layers come later in this order, so their second value is at least the least of those.
            waiting_s = first_s[order] + np.minimum.accumulate(second_s[order][::-1])[::-1]
            holders = num_holders[order]
            num_windows = np.clip(problem.num_devices - (np.cumsum(holders) - holders), 0, holders)
            yield _Windows(waiting_s, num_windows, unit_s, num_units)


def _units(item_s: Floats) -> Floats:
    """Sizes of units: parts of the layers that have most work together."""
    values, numbers = np.unique(item_s, return_counts=True)
    most = np.argsort(-values * numbers, kind="stable")[:NUM_UNITS]
    # Slightly smaller, so that rounding takes no unit from a layer.
    return np.array([value / part for value in values[most] if value > 0 for part in PARTS]) * (1 - RELATIVE)


def _replicas_work_alike(problem: PlanningProblem, size: Size) -> bool:
    """Whether all ranks that hold a layer have as much work for it."""
    if len(size.tp) > 1:
        return False
    if size.num_replicas == 1:
        return True
    return problem.cuts_evenly and len(problem.samples) % size.num_replicas == 0 and not any(problem.sample_kinds)


def _fixed_s(problem: PlanningProblem, modules: _Modules, sizes: Sizes) -> float:
    """The optimizer's step if all ranks updated equally many parameters, and the mean gather of new ones."""
    updated = sum(modules.num_updated(name, size) for name, size in sizes.items())
    gather_s = sum(modules.gather_s(name, size) for name, size in sizes.items())
    return problem.estimator.optimizer_seconds(updated / problem.num_devices) + gather_s / problem.num_devices
