"""A sample of the campaign on b_min, and that what it takes for known is true."""

import numpy as np
import pytest

from benchmarks.known_shares import GammaWork, HugeSamples, SomeWithImages
from benchmarks.profiling_size import campaign


@pytest.mark.parametrize(
    "known",
    [GammaWork(0.3, 0.5, 5), SomeWithImages(0.3, 4.0, 0.5, 6), HugeSamples(0.05, 8)],
    ids=lambda known: type(known).__name__,
)
@pytest.mark.parametrize("n", [1, 7, 64])
def test_draws_are_as_probable_as_is_said(known, n):
    rng = np.random.default_rng(n)
    drawn = [known.draw(rng, n) for _ in range(2000)]
    probabilities = known.probabilities(n)
    assert sum(probabilities.values()) == pytest.approx(1)
    for allocation, p in probabilities.items():
        # Five standard deviations.
        assert drawn.count(allocation) / 2000 == pytest.approx(p, abs=5 * (p * (1 - p) / 2000) ** 0.5 + 1e-3)


def test_b_min_keeps_its_promise():
    outcomes = campaign(40, seed=1, every_test_alpha=False)
    assert sum(o.num_wrong for o in outcomes.values()) <= 0.05 * sum(o.num_runs for o in outcomes.values())
    assert all(o.num_found >= 0.5 * o.num_runs for o in outcomes.values())


def test_the_rule_as_published_does_not_always():
    """Heavy tails: a fresh batch differs with about 6% at many sizes, and each is one more chance to pass."""
    known = HugeSamples(0.03, 12)
    differs = [known.probabilities(2**j)[2, 1] for j in range(10)]
    assert all(p > 0.05 for p in differs)
    passes_once = 1.0 - np.prod([1 - (1 - p) ** 60 for p in differs])
    assert passes_once > 0.2
