"""`motet verify` of every schedule on the plans that it is made for, and of halves anywhere, on real models.

Stages are unequal, one encoder is frozen, and the last half of the samples has neither images nor sounds.
"""

from dataclasses import replace

import pytest
from one_process import check_together
from sampling import in_campaigns
from scenario import Scenario, ScenarioBatch
from split_backwards import split_at_random

from motet.assignment.batch_assignment import contiguous_assignment
from motet.schedule import program
from motet.schedule.action import Kind
from motet.schedule.generators import CONTRASTING, GENERATORS, SPLIT_BACKWARDS
from motet.schedule.routes import derive_routes

CHAIN = Scenario(llm_pp=2, llm_cuts=(2,), frozen="audio", items="half", num_microbatches=5)
ROUND = replace(CHAIN, llm_pp=4, llm_cuts=(1, 2, 4), llm_places=(0, 1, 0, 1))
THERE_AND_BACK = replace(ROUND, llm_places=(0, 1, 1, 0))
SHARED = replace(ROUND, placement="shared", encoder_pp=2, dp=2)
PLANS = {
    "interleaved_1f1b": ROUND,
    "interleaved_1f1b_adjusted": ROUND,
    "zero_bubble_v": THERE_AND_BACK,
    "bubble_filling": SHARED,
    "critical_path": SHARED,
    "dip": SHARED,
}
"""By schedule, where it is not a chain of ranks with encoders beside."""

HALVES = [
    Scenario(llm="llama-tied", llm_pp=2, placement="colocated", items="half", frozen="audio", num_microbatches=3),
    Scenario(llm="qwen3", vision="pixtral", tp=2, sequence_parallel=True, placement="replicated", recompute=True),
    Scenario(llm="mllama", merge="cross_attention", vision="clip", llm_pp=2, placement="colocated", recompute=True),
    Scenario(llm="phi3", vision="qwen2_5_vl", dp=2, placement="replicated", packing=True, items="half"),
    Scenario(llm="llama", llm_pp=2, placement="colocated", frozen="all but projectors", num_microbatches=3),
]


def test_every_schedule_is_another_one_on_its_plan() -> None:
    """Else a schedule that falls back to another's order would show nothing."""
    kinds = {}
    for name, generate in GENERATORS.items():
        if name in CONTRASTING:  # tests/schedule/generators/test_distmm_pipe.py
            continue
        scenario = PLANS.get(name, CHAIN)
        config = scenario.config()
        plan, samples = scenario.plan(config), ScenarioBatch(scenario, config).samples
        routes = derive_routes(plan, contiguous_assignment(plan, samples), samples)
        ranks = generate(routes).ranks
        assert (ranks == GENERATORS["1f1b"](routes).ranks) == (name == "1f1b"), name
        kinds[name] = {action.kind for actions in ranks for action in actions}
    assert {name for name, found in kinds.items() if Kind.WEIGHT in found} == SPLIT_BACKWARDS


@pytest.mark.parametrize(
    ("dtype", "first", "step"),
    [
        ("float64", 0, 1),
        *in_campaigns([("float32", 0, 1), ("bfloat16", 0, 1)]),
    ],
)
def test_every_schedule_equals_one_process(dtype: str, first: int, step: int) -> None:
    scenarios = [replace(PLANS.get(name, CHAIN), schedule=name) for name in GENERATORS if name not in CONTRASTING]
    assert {scenario.num_ranks for scenario in scenarios} == {4}
    check_together([replace(scenario, dtype=dtype) for scenario in scenarios[first::step]])


@pytest.mark.parametrize(
    ("dtype", "number"), [("float64", 3), *in_campaigns([("float64", len(HALVES)), ("bfloat16", len(HALVES))])]
)
def test_halves_equal_one_process(dtype: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most backwards are cut in two, with their weight halves anywhere after."""
    cut = {name: split_at_random(generator, name) for name, generator in GENERATORS.items()}
    monkeypatch.setattr(program, "GENERATORS", cut)
    check_together([replace(scenario, dtype=dtype) for scenario in HALVES[:number]])
