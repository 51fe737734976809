"""Messages between tensor-parallel stages: each rank sends its share of the rows."""

from dataclasses import replace

import pytest
from one_process import check, check_together
from sampling import in_campaigns
from scenario import Scenario

TP2 = Scenario(llm_pp=2, tp=2, placement="shared", encoder_pp=2, items="half")
CASES = {
    "whole sequences": TP2,
    "sequence parallel": replace(TP2, sequence_parallel=True, schedule="zero_bubble_h1"),
    "packed, recomputed": replace(TP2, sequence_parallel=True, packing=True, recompute=True),
}
USUAL = ("whole sequences", "sequence parallel")


def test_equals_one_process() -> None:
    check_together([CASES[name] for name in USUAL])


@pytest.mark.parametrize("name", in_campaigns(name for name in CASES if name not in USUAL))
def test_other_layouts_equal_one_process(name: str) -> None:
    check(CASES[name])
