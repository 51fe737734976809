"""`motet verify` of every way to cut a batch, alone and in drawn combinations with what else moves samples: deferral,
reordering, packing under a limit, units of unequal data parallelism, halves of backwards, frozen parts, missing
modalities.

`MOTET_ASSIGNMENT_DRAWS` sets the number of drawn scenarios, `MOTET_FUZZ_SEED` their seed; a failure says its scenario.
"""

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest
from distributed import run_distributed
from scenario import Scenario, verify

from motet.data.assignments import ASSIGNMENTS

MAX_RANKS = 6
SEED = os.environ.get("MOTET_FUZZ_SEED", "5")

ALONE = [
    *(
        Scenario(llm_pp=2, num_microbatches=3, num_samples=11, assignment=name, schedule=schedule, frozen="audio")
        for name in ASSIGNMENTS
        for schedule in ("1f1b", "eager_1f1b", "zero_bubble_h1")
    ),
    Scenario(llm_pp=2, num_microbatches=2, num_samples=9, assignment="entrain", packing=True, max_packed_tokens=150),
    Scenario(units=(1, 1, 2), num_samples=9, assignment="entrain", items="one"),
]


def assert_equal_to_one_process(scenarios: Sequence[Scenario], dtype: str) -> None:
    for num_ranks in sorted({scenario.num_ranks for scenario in scenarios}):
        group = [replace(s, dtype=dtype) for s in scenarios if s.num_ranks == num_ranks]
        timeout = 120 + 5 * len(group)
        comparisons = run_distributed(lambda rank: [verify(s) for s in group], num_ranks, timeout=timeout)[0]  # noqa: B023
        for scenario, comparison in zip(group, comparisons, strict=True):
            assert comparison.passed, f"{scenario}: {comparison.failures}"


@pytest.mark.slow
def test_every_assignment_equals_one_process() -> None:
    assert_equal_to_one_process(ALONE, "float64")
