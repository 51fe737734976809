"""What assignments are compared with: samples in random order, and a cut like DIP's.

* Random: what a DistributedSampler and a loader that groups neighbours make of a batch.
* DIP-like, after the thesis' description (section 4.2.3): microbatches are random, and an encoder's are cut into
  sub-microbatches that stay within their own. The cut is an assumption: samples in order, a new piece where the old one
  would exceed the mean work of a microbatch divided by `pieces`.
"""

from collections.abc import Sequence

import numpy as np

from motet.assignment.batch_assignment import BatchAssignment, Microbatch, assignment_of_shares, cut_evenly
from motet.assignment.sample import Sample
from motet.plan import Plan
from motet.ragged_arrays import Floats


def random_microbatches(plan: Plan, num_samples: int, seed: int) -> list[tuple[Microbatch, ...]]:
    """For each share, microbatches of equal numbers of samples (as far as they can be divided)."""
    return cut_evenly(plan, np.random.default_rng(seed).permutation(num_samples).tolist())


def random_assignment(plan: Plan, samples: Sequence[Sample], seed: int) -> BatchAssignment:
    return assignment_of_shares(plan, samples, random_microbatches(plan, len(samples), seed))


def dip_like_assignment(
    plan: Plan, samples: Sequence[Sample], encoder_work: Floats, seed: int, *, pieces: int = 2
) -> BatchAssignment:
    """`encoder_work`: of each sample."""
    shares = random_microbatches(plan, len(samples), seed)
    limit = float(encoder_work.sum()) / sum(map(len, shares)) / pieces
    cut = [[piece for microbatch in each for piece in _pieces(microbatch, encoder_work, limit)] for each in shares]
    return assignment_of_shares(plan, samples, shares, encoder_pieces=cut)


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
