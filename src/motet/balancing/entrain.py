"""Entrain's assignment (thesis sections 4.3, 4.5.1 and 4.5.2, Algorithm 4): samples to replicas, to microbatches whose
encoder work is even, and some of their language-model work to the next microbatch, so that this is even too.

An encoder's microbatch from which samples are deferred stands in the `BatchAssignment` as two, one after the other:
what stays and what is deferred. Each is one graph of its own, so the backward of what stays waits for nothing (4.5.3).
The language model's microbatches are the thesis': what stays of an overloaded one, then the underloaded one that
follows it, with what was deferred.

Deviations:
* K_eff (`fewer`) is not the default. It makes microbatches very even, but where one sample is as heavy as several
  microbatches, so few are left that filling and draining the pipeline costs more than evenness gains
  (benchmarks/balanced_data.py). Where it is asked for, it replaces K after line 3 everywhere and is each replica's own;
  without encoder work it is K.
* Pairs are not in arbitrary order: the heaviest stand in the middle, where ranks have other work to do meanwhile, the
  lightest at both ends.
* Line 4 leaves open where high LLM work begins: here the coarse samples are those that together do half of it.
* Of an odd number of microbatches the middle one stays alone, at the end.
* Without encoder work, greedy assignment balances LLM work: there is nothing else to balance.
* `evenly_on_both` is our replica rule. The thesis' (`by_encoder_then_llm`) tracks LLM work only.

Where modules have unequal numbers of replicas, what is said of a replica here is said of a share of the batch, and each
microbatch is dealt out then (`assignment_of_shares`).

Limits: works are taken to add up (padding does not). Several encoders are merged into one (section 4.5): their work is
added up.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np

from motet.assignment.batch_assignment import BatchAssignment, Microbatch, assignment_of_shares, microbatches_of_shares
from motet.assignment.sample import Sample
from motet.plan import Plan
from motet.ragged_arrays import Bools, Floats, Ints

# Pairing of microbatches and deferral within a pair (section 4.5.2), in three steps on numbers: for each pair of an
# overloaded and an underloaded microbatch the subset of the former whose work is nearest to half their difference; the
# larger of the two sums after the move, (4.3); a matching whose largest such sum is smallest.
#
# Deviations. Subsets of up to `MAX_EXACT` samples are tried all at once instead of on a grid, so that the nearest sum
# is exact; larger microbatches go through the thesis' table of rounded sums, whose error is at most a step per sample.
# The subset may be empty, so (4.3) never exceeds the overloaded microbatch's own work, every microbatch that could stay
# alone can also be paired, and T* is that of a perfect matching. Among the matchings that reach T*, which the thesis
# picks arbitrarily, this takes the one with the smallest sum of squares: the most even.

MAX_EXACT = 10
"""Samples in a microbatch all of whose subsets are tried."""
NUM_GRID_STEPS = 2048
"""Number of units into which the sum of a larger microbatch is divided."""


def nearest_subsets(items: Floats, targets: Floats) -> tuple[Bools, Floats]:
    """For each target the subset (perhaps empty) whose sum is nearest to it, as [target, item], and that sum; ties go
    to the smaller sum. Exact for up to `MAX_EXACT` items."""
    masks, sums = _all_sums(items) if len(items) <= MAX_EXACT else _rounded_sums(items)
    by_sum = np.argsort(sums, kind="stable")
    sums = sums[by_sum]
    above = np.minimum(np.searchsorted(sums, targets), len(sums) - 1)
    below = np.maximum(above - 1, 0)
    nearest = np.where(targets - sums[below] <= sums[above] - targets, below, above)
    return masks[by_sum[nearest]], sums[nearest]


@cache
def _all_masks(num_items: int) -> tuple[Bools, Floats]:
    """The same as truth values and as numbers."""
    masks = (np.arange(2**num_items)[:, None] >> np.arange(num_items)) & 1
    return masks.astype(bool), masks.astype(np.float64)


def _all_sums(items: Floats) -> tuple[Bools, Floats]:
    masks, numbers = _all_masks(len(items))
    return masks, numbers @ items


def _rounded_sums(items: Floats) -> tuple[Bools, Floats]:
    """One subset for every sum that can be reached on the grid, with its true sum."""
    total = float(items.sum())
    steps = np.rint(items * (NUM_GRID_STEPS / total)).astype(np.int64) if total else np.zeros(len(items), np.int64)
    size = int(steps.sum()) + 1
    last = np.full(size, -1)
    """Item that first reached each sum; its other items are those of the sum without it."""
    last[0] = len(items)
    for item, step in enumerate(steps.tolist()):
        reached = last[: size - step] != -1
        new = np.flatnonzero(reached & (last[step:] == -1)) + step
        last[new] = item
    reachable = np.flatnonzero(last != -1)
    masks = np.zeros((len(reachable), len(items)), dtype=bool)
    left = reachable.copy()
    while (rows := np.flatnonzero(left)).size:
        taken = last[left[rows]]
        masks[rows, taken] = True
        left[rows] -= steps[taken]
    return masks, masks @ items


@dataclass(frozen=True, eq=False)
class Matching:
    partner: Ints
    """Underloaded partner of each overloaded microbatch."""
    bottleneck: float
    """T*: the largest work of any microbatch afterwards."""


def bottleneck_matching(after: Floats, alone: Floats, squares: Floats) -> Matching:
    """`after` [i, j]: (4.3) of the pair. `alone` [i]: i's work without deferral; at or below T* it needs no partner.
    `squares` [i, j]: what the pair adds to the sum of squares; it decides between matchings of the same T*.

    Raises `ValueError` if the numbers of overloaded and underloaded microbatches differ."""
    from scipy.optimize import linear_sum_assignment  # Takes most of a second to import.

    if after.shape != (len(alone), len(alone)):
        raise ValueError(f"{len(alone)} overloaded microbatches, but pairs of {after.shape}; give equal numbers")
    if not len(alone):
        return Matching(np.zeros(0, dtype=np.int64), 0.0)
    candidates = np.unique(np.concatenate([after.ravel(), alone]))
    # Every one of them needs a partner within T, or is within T by itself.
    least = np.minimum(after.min(axis=1), alone).max()
    low, high = int(np.searchsorted(candidates, least)), len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if _matches(after, alone, float(candidates[middle])):
            high = middle
        else:
            low = middle + 1
    bottleneck = float(candidates[low])
    forbidden = ~_allowed(after, alone, bottleneck)
    # Dearer than all the others together, so that it is never taken where it can be helped.
    cost = np.where(forbidden, 1.0 + squares.max() * len(alone) * 2, squares)
    _, partner = linear_sum_assignment(cost)
    return Matching(partner.astype(np.int64), bottleneck)


def _allowed(after: Floats, alone: Floats, limit: float) -> Bools:
    return (after <= limit) | (alone <= limit)[:, None]


def _matches(after: Floats, alone: Floats, limit: float) -> bool:
    from scipy.optimize import linear_sum_assignment  # Takes most of a second to import.

    forbidden = ~_allowed(after, alone, limit)
    rows, columns = linear_sum_assignment(forbidden)
    return not forbidden[rows, columns].any()


@dataclass(frozen=True, eq=False)
class Pair:
    """Indices into the microbatches that were given."""

    overloaded: int
    underloaded: int
    deferred: tuple[int, ...]
    """Places in the overloaded microbatch of the samples that move to the underloaded one."""


@dataclass(frozen=True, eq=False)
class Pairing:
    pairs: tuple[Pair, ...]
    unpaired: int | None
    """The middle one of an odd number of microbatches, which is nearest to balanced."""
    bottleneck: float


def pair_and_defer(works: Sequence[Floats]) -> Pairing:
    """`works`: for each microbatch, its samples' work."""
    totals = np.array([work.sum() for work in works])
    order = np.argsort(-totals, kind="stable")
    half = len(works) // 2
    over, under = order[:half], order[len(works) - half :]
    subsets = [nearest_subsets(works[i], (totals[i] - totals[under]) / 2) for i in over.tolist()]
    moved = np.array([sums for _, sums in subsets]).reshape(half, half)
    left, grown = totals[over][:, None] - moved, totals[under] + moved
    matching = bottleneck_matching(np.maximum(left, grown), totals[over], left**2 + grown**2)
    pairs = tuple(
        Pair(int(over[i]), int(under[j]), tuple(np.flatnonzero(subsets[i][0][j]).tolist()))
        for i, j in enumerate(matching.partner.tolist())
    )
    unpaired = int(order[half]) if len(works) % 2 else None
    alone = totals[unpaired] if unpaired is not None else 0.0
    return Pairing(pairs, unpaired, max(matching.bottleneck, float(alone)))


class ReplicaRule(Protocol):
    def __call__(
        self, encoder_work: Floats, llm_work: Floats, num_replicas: int, shares: Sequence[int] | None = None
    ) -> list[list[int]]:
        """Each replica's samples. `shares`: of each replica, where they are to differ."""


def by_encoder_then_llm(
    encoder_work: Floats, llm_work: Floats, num_replicas: int, shares: Sequence[int] | None = None
) -> list[list[int]]:
    """Section 4.3: heaviest for the encoder first, each to the replica with the least LLM work so far."""
    shares = shares or (1,) * num_replicas
    replicas: list[list[int]] = [[] for _ in shares]
    loads = [(0.0, r) for r in range(num_replicas)]
    work = llm_work.tolist()
    for i in np.argsort(-encoder_work, kind="stable").tolist():
        load, r = loads[0]
        replicas[r].append(i)
        heapq.heapreplace(loads, (load + work[i] / shares[r], r))
    return replicas


def evenly_on_both(
    encoder_work: Floats, llm_work: Floats, num_replicas: int, shares: Sequence[int] | None = None
) -> list[list[int]]:
    """The samples with the largest share of either module's work first, each to the replica where the larger of the two
    shares, with it, is the smallest: list scheduling on two machines at once."""
    encoder, llm = (work / (work.sum() or 1.0) for work in (encoder_work, llm_work))
    sizes = np.array(shares or (1,) * num_replicas, dtype=np.float64)
    are_alike = bool((sizes == sizes[0]).all())
    replicas: list[list[int]] = [[] for _ in range(num_replicas)]
    encoder_load, llm_load = np.zeros(num_replicas), np.zeros(num_replicas)
    larger, with_llm = np.empty(num_replicas), np.empty(num_replicas)
    order = np.argsort(-np.maximum(encoder, llm), kind="stable")
    for i, e, w in zip(order.tolist(), encoder[order].tolist(), llm[order].tolist(), strict=True):
        np.maximum(np.add(encoder_load, e, out=larger), np.add(llm_load, w, out=with_llm), out=larger)
        r = int((larger if are_alike else larger / sizes).argmin())
        replicas[r].append(i)
        encoder_load[r] += e
        llm_load[r] += w
    return replicas


def effective_microbatches(encoder_work: Floats, num_microbatches: int) -> int:
    """K_eff (line 3): no more microbatches than there would be if all were as heavy as the heaviest sample."""
    largest = float(encoder_work.max(initial=0.0))
    if largest == 0:
        return num_microbatches
    return min(num_microbatches, int(encoder_work.sum() / largest * (1 + 1e-12)))


def stratified_microbatches(encoder_work: Floats, llm_work: Floats, num_microbatches: int) -> list[list[int]]:
    """Section 4.5.1: coarse samples, then fine ones, each heaviest for the encoder first, to the microbatch with the
    least encoder work so far. Indices into the given samples; microbatches may be empty."""
    work = encoder_work if encoder_work.any() else llm_work
    is_coarse = _is_coarse(llm_work)
    microbatches: list[list[int]] = [[] for _ in range(num_microbatches)]
    loads = [(0.0, 0.0, m) for m in range(num_microbatches)]
    works, llm_works = work.tolist(), llm_work.tolist()
    for i in np.lexsort((-work, ~is_coarse)).tolist():
        load, llm_load, m = loads[0]
        microbatches[m].append(i)
        # Ties (samples without a modality) go to the one with less LLM work.
        heapq.heapreplace(loads, (load + works[i], llm_load + llm_works[i], m))
    return microbatches


def _is_coarse(llm_work: Floats) -> np.ndarray:
    by_work = np.argsort(-llm_work, kind="stable")
    before = np.cumsum(llm_work[by_work]) - llm_work[by_work]
    coarse = np.zeros(len(llm_work), dtype=bool)
    coarse[by_work] = before < llm_work.sum() / 2
    return coarse


@dataclass(frozen=True, slots=True)
class Deferral:
    """One replica's microbatches, in the order in which they are executed."""

    encoder: tuple[Microbatch, ...]
    deferred: tuple[Microbatch, ...]
    """Samples of each microbatch whose LLM work is done one microbatch later."""

    @property
    def language_model(self) -> tuple[Microbatch, ...]:
        result = []
        waiting: Microbatch = ()
        for samples, deferred in zip(self.encoder, self.deferred, strict=True):
            result.append((*waiting, *(i for i in samples if i not in deferred)))
            waiting = deferred
        assert not waiting, "samples are deferred past the last microbatch"
        return tuple(result)

    @property
    def encoder_pieces(self) -> tuple[Microbatch, ...]:
        """Encoder microbatches cut into the samples that stay and those that are deferred."""
        pieces = []
        for samples, deferred in zip(self.encoder, self.deferred, strict=True):
            pieces.append(tuple(i for i in samples if i not in deferred))
            if deferred:
                pieces.append(deferred)
        return tuple(pieces)


def defer(
    members: Sequence[int], encoder_work: Floats, llm_work: Floats, num_microbatches: int, *, fewer: bool = False
) -> Deferral:
    """Lines 3 to 15 for one replica's samples. `members`: indices into the works, which are of the whole batch.
    `fewer`: K_eff microbatches instead of K."""
    own = np.array(members, dtype=np.int64)
    encoder, llm = encoder_work[own], llm_work[own]
    count = effective_microbatches(encoder, num_microbatches) if fewer else num_microbatches
    microbatches = stratified_microbatches(encoder, llm, count)
    pairing = pair_and_defer([llm[m] for m in microbatches])
    total = [float((encoder + llm)[m].sum()) for m in microbatches]
    lightest_first = sorted(pairing.pairs, key=lambda pair: total[pair.overloaded] + total[pair.underloaded])
    order, deferred = [], []
    for pair in (*lightest_first[::2], *reversed(lightest_first[1::2])):
        moving = {microbatches[pair.overloaded][place] for place in pair.deferred}
        order += [pair.overloaded, pair.underloaded]
        deferred += [moving, set()]
    if pairing.unpaired is not None:
        order.append(pairing.unpaired)
        deferred.append(set())
    return Deferral(
        tuple(tuple(own[microbatches[m]].tolist()) for m in order),
        tuple(tuple(own[sorted(moving)].tolist()) for moving in deferred),
    )


def balance(members: Sequence[int], encoder_work: Floats, llm_work: Floats, num_microbatches: int) -> Deferral:
    """Microbatches of one replica's samples that are even on both kinds of work, without deferral; arguments as for
    `defer`. The lightest stand at both ends."""
    own = np.array(members, dtype=np.int64)
    encoder, llm = encoder_work[own], llm_work[own]
    microbatches = evenly_on_both(encoder, llm, num_microbatches)
    lightest_first = sorted(microbatches, key=lambda m: float((encoder + llm)[m].sum()))
    order = (*lightest_first[::2], *reversed(lightest_first[1::2]))
    return Deferral(tuple(tuple(own[m].tolist()) for m in order), ((),) * num_microbatches)


def plan_deferrals(
    plan: Plan,
    work: Mapping[str, Floats],
    *,
    replica_rule: ReplicaRule = evenly_on_both,
    rule: Callable[[Sequence[int], Floats, Floats, int], Deferral] = defer,
) -> list[Deferral]:
    """Algorithm 4, for each share of the batch, or another `rule` for a replica's microbatches. `work`: for each module
    the seconds of each sample of the global batch (`motet.balancing.sample_work`); that of all encoders is added up,
    and so is that of all other modules."""
    total = {True: np.zeros(len(next(iter(work.values())))), False: np.zeros(len(next(iter(work.values()))))}
    for name, seconds in work.items():
        total[plan.modules[name].kind == "encoder"] += seconds
    encoder_work, llm_work = total[True], total[False]
    counts = microbatches_of_shares(plan)
    shares = replica_rule(encoder_work, llm_work, len(counts), counts)
    return [rule(share, encoder_work, llm_work, count) for share, count in zip(shares, counts, strict=True)]


def deferring_assignment(
    plan: Plan, samples: Sequence[Sample], deferrals: Sequence[Deferral], work: Mapping[str, Floats]
) -> BatchAssignment:
    """Assignment with these deferrals; other modules than encoders are cut as the language model. `work`: see
    `plan_deferrals`."""
    return assignment_of_shares(
        plan,
        samples,
        [each.language_model for each in deferrals],
        encoder_pieces=[each.encoder_pieces for each in deferrals],
        work={name: seconds.tolist() for name, seconds in work.items()},
    )
