"""What assignments are compared with: samples in random order, and a cut like DIP's.

* Random: what a DistributedSampler and a loader that groups neighbours make of a batch.
* DIP-like, after the thesis' description (section 4.2.3): microbatches are random, and an encoder's are cut into
  sub-microbatches that stay within their own. The cut is an assumption: samples in order, a new piece where the old one
  would exceed the mean work of a microbatch divided by `pieces`.
"""

from collections.abc import Sequence

import numpy as np

from motet.arrays import Floats
from motet.data.assignment import BatchAssignment, Microbatch, assignment_of_replicas, split_evenly
from motet.data.sample import Sample
from motet.plan import Plan


def random_microbatches(
    num_samples: int, num_replicas: int, num_microbatches: int, seed: int
) -> list[list[Microbatch]]:
    """For each replica, microbatches of equal numbers of samples (as far as they can be divided)."""
    order = np.random.default_rng(seed).permutation(num_samples).tolist()
    return [list(split_evenly(share, num_microbatches)) for share in split_evenly(order, num_replicas)]


def random_assignment(plan: Plan, samples: Sequence[Sample], seed: int) -> BatchAssignment:
    """Raises `ValueError` if modules have different numbers of replicas."""
    return assignment_of_replicas(plan, samples, _random(plan, samples, seed))


def dip_like_assignment(
    plan: Plan, samples: Sequence[Sample], encoder_work: Floats, seed: int, *, pieces: int = 2
) -> BatchAssignment:
    """`encoder_work`: of each sample. Raises `ValueError` if modules have different numbers of replicas."""
    replicas = _random(plan, samples, seed)
    limit = float(encoder_work.sum()) / sum(map(len, replicas)) / pieces
    cut = [[piece for microbatch in each for piece in _pieces(microbatch, encoder_work, limit)] for each in replicas]
    return assignment_of_replicas(plan, samples, replicas, encoder_pieces=cut)


def _random(plan: Plan, samples: Sequence[Sample], seed: int) -> list[list[Microbatch]]:
    num_replicas = len(next(iter(plan.modules.values())).replicas)
    return random_microbatches(len(samples), num_replicas, plan.num_microbatches, seed)


def _pieces(microbatch: Microbatch, work: Floats, limit: float) -> list[Microbatch]:
    pieces: list[Microbatch] = []
    load = 0.0
    for i in microbatch:
        if pieces and load + work[i] <= limit:
            pieces[-1] += (i,)
            load += float(work[i])
        else:
            pieces.append((i,))
            load = float(work[i])
    return pieces
