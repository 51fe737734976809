"""Replicas that share parameters (FSDP over data parallelism): `motet verify`, and what stays in memory."""

from dataclasses import replace

import pytest
from one_process import check
from sampling import in_campaigns
from scenario import Scenario

SHARED = Scenario(fully_sharded=True, placement="shared", dp=2, sharded_replicas=2, num_samples=8)
CASES = {
    "two replicas, two stages": replace(SHARED, llm_pp=2),
    "language model alone": replace(SHARED, items="none", llm_pp=2),
    "two stages, tied, recomputed": replace(SHARED, llm="llama-tied", llm_pp=2, recompute=True),
    "split backward": replace(SHARED, llm_pp=2, schedule="zero_bubble_h1"),
}
USUAL = ("two replicas, two stages",)


@pytest.mark.parametrize("name", [*USUAL, *in_campaigns(n for n in CASES if n not in USUAL)])
def test_equals_one_process(name: str) -> None:
    check(CASES[name])
