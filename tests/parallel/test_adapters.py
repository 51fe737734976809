"""Adapters (LoRA) in stages that are cut, against peft in one process of plain transformers."""

from dataclasses import replace

import pytest
from one_process import check
from scenario import Scenario

LORA = Scenario(lora=("language_model",), frozen="audio", placement="colocated")
CASES = {
    "pipeline and tensor parallelism": replace(LORA, placement="shared", llm_pp=2, tp=2),
}


@pytest.mark.parametrize("name", list(CASES))
def test_equals_peft(name: str) -> None:
    check(CASES[name])
