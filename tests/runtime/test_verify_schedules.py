"""`motet verify` with backwards in halves, on real models: groups, sequence parallelism, tied heads, recomputation."""

from dataclasses import replace

import pytest
from distributed import run_distributed
from scenario import Scenario, verify
from split_backwards import split_at_random

from motet.schedule import program
from motet.schedule.generators import GENERATORS

SCENARIOS = [
    Scenario(llm="llama-tied", llm_pp=2, placement="colocated", items="half", frozen="audio", num_microbatches=3),
    Scenario(llm="qwen3", vision="pixtral", tp=2, sequence_parallel=True, placement="replicated", recompute=True),
    Scenario(llm="mllama", merge="cross_attention", vision="clip", llm_pp=2, placement="colocated", recompute=True),
    Scenario(llm="phi3", vision="qwen2_5_vl", dp=2, placement="replicated", packing=True, items="half"),
    Scenario(llm="llama", llm_pp=2, placement="colocated", frozen="all but projectors", num_microbatches=3),
]


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most backwards are cut in two, with their weight halves anywhere after."""
    cut = {name: split_at_random(generator, name) for name, generator in GENERATORS.items()}
    monkeypatch.setattr(program, "GENERATORS", cut)


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_halves_equal_one_process(num_ranks: int, dtype: str) -> None:
    group = [replace(scenario, dtype=dtype) for scenario in SCENARIOS if scenario.num_ranks == num_ranks]
    assert group
    comparisons = run_distributed(lambda rank: [verify(scenario) for scenario in group], num_ranks)[0]
    for scenario, comparison in zip(group, comparisons, strict=True):
        assert comparison.passed, f"{scenario}: {comparison.failures}"
