"""`motet verify` for mixtures of experts whose experts are distributed over ranks."""

import pytest
from one_process import check_together
from scenario import Scenario
from tiny_language_models import MIXTURES

DISTRIBUTED = tuple(family for family in MIXTURES if family != "llama4")
"""Llama 4's experts are not told which tokens are theirs."""

GROUP = Scenario(tp=2, ep=2, placement="replicated")
REPLICAS = Scenario(dp=2, ep=2, placement="replicated")


def test_two() -> None:
    check_together([Scenario(llm="mixtral", dp=2, ep=2, placement="replicated"), Scenario(llm="gpt_oss", dp=2, ep=2, placement="replicated"),])

def test_four() -> None:
    check_together([Scenario(llm="qwen3_moe", dp=2, ep=4, tp=2, sequence_parallel=True, placement="replicated"), Scenario(llm="qwen3_moe", dp=2, ep=2, llm_pp=2, placement="replicated"),])
