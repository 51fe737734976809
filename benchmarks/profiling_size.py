"""Does Entrain's b_min keep its promise? 1000 runs of Algorithm 2 on distributions for which it is known how probable a
batch's allocation is to differ: the share of runs that end at a size where it does so with more than 5%.

The thesis' rule tests each size at the same confidence; motet's spends it over the doublings.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from benchmarks.known_shares import random_distributions
from benchmarks.reporting import Report
from motet.errors import UserError
from motet.planner.entrain.profiling_size import num_trials, stable_profiling_size

ALPHA = P_ERROR = 0.05
LARGEST_SIZE = 2**13


@dataclass(frozen=True)
class Outcome:
    num_runs: int
    num_found: int
    """Runs that ended with a size; others lie too near to where the allocation changes."""
    num_wrong: int
    """Number of those where a fresh batch differs with probability > 5%."""
    median_size: float

    @property
    def wrong_share(self) -> float:
        return self.num_wrong / self.num_runs


def campaign(num_runs: int, seed: int, *, every_test_alpha: bool) -> Mapping[str, Outcome]:
    """By family; `num_runs` in each. The same cases for both rules."""
    rng, result = np.random.default_rng(seed), {}
    for family, make in random_distributions(rng).items():
        cases = [make() for _ in range(num_runs)]
        draws = np.random.default_rng([seed, len(result)])
        sizes, wrong = [], 0
        for case in cases:
            try:
                found = stable_profiling_size(
                    partial(case.draw, draws),
                    alpha=ALPHA,
                    p_error=P_ERROR,
                    largest_size=LARGEST_SIZE,
                    every_test_alpha=every_test_alpha,
                )
            except UserError:
                continue
            sizes.append(found.num_samples)
            differs = 1 - case.probabilities(found.num_samples).get(found.allocation, 0.0)
            wrong += differs > P_ERROR
        result[family] = Outcome(num_runs, len(sizes), wrong, median(sizes))
    return result


def main(arguments: Sequence[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000, help="in each family")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    report = Report("profiling-size", "Does b_min keep its promise?")
    report.add(
        f"{options.runs} runs in each family, seed {options.seed}; confidence {1 - ALPHA:.0%}, error {P_ERROR:.0%}, so "
        f"k = {num_trials(ALPHA, P_ERROR)} for a single test. Sizes up to {LARGEST_SIZE}."
    )
    rows = []
    for rule, every_test_alpha in (("thesis: each size at 5%", True), ("motet: 5% over all sizes", False)):
        outcomes = campaign(options.runs, options.seed, every_test_alpha=every_test_alpha)
        for family, outcome in outcomes.items():
            share = f"{outcome.wrong_share:.1%}"
            rows.append((rule, family, outcome.num_found, f"{outcome.median_size:g}", outcome.num_wrong, share))
        num_wrong = sum(outcome.num_wrong for outcome in outcomes.values())
        num_found = sum(outcome.num_found for outcome in outcomes.values())
        rows.append((rule, "all", num_found, "", num_wrong, f"{num_wrong / options.runs / len(outcomes):.1%}"))
    report.table(("rule", "distribution", "runs with a b_min", "median b_min", "wrong", "share of all runs"), rows)
    return report


if __name__ == "__main__":
    main().write()
