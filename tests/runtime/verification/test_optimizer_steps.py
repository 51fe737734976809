"""Steps of the optimizer against a plain loop, with images absent on odd steps."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from distributed import run_distributed
from one_process import perturb
from sampling import in_campaigns
from scenario import PLACEHOLDERS, Scenario, ScenarioBatch

from motet.families.capabilities import FEATURES, SHOWN_EQUAL
from motet.models.from_run_file import plain_nodes
from motet.models.materialize import float64_throughout
from motet.runtime.assembly import build_engine
from motet.runtime.verification.optimizer_steps import StepsComparison, compare_steps

TWO = Scenario(dp=2, placement="shared", num_samples=4, num_microbatches=1, frozen="audio")
SHARDED = replace(TWO, fully_sharded=True, sharded_replicas=2)
CASES = {
    "replicas": TWO,
    "replicas that share parameters": SHARDED,
    "pipeline": replace(TWO, llm_pp=2, num_microbatches=2),
    "pipeline of replicas that share parameters": replace(SHARDED, llm_pp=2, llm="llama-tied", num_samples=8),
    "tensor and sequence parallel": replace(TWO, dp=1, llm="qwen3", tp=2, sequence_parallel=True),
    "context parallel and sharded": replace(TWO, dp=1, cp=2, encoder_cp=2, fully_sharded=True),
    "split backward": replace(TWO, llm_pp=2, num_microbatches=2, schedule="zero_bubble_h1"),
    "cross-attention": replace(TWO, merge="cross_attention", llm="mllama"),
}
USUAL = ("replicas that share parameters",)

CORRECTED = Scenario(
    llm="deepseek_v3",
    placement="shared",
    num_samples=6,
    num_microbatches=2,
    frozen="audio",
    router_bias_update_rate=0.01,
)
CORRECTIONS = {
    "group, two stages": replace(CORRECTED, tp=2, ep=2, llm_pp=2, sequence_parallel=True, placement="replicated"),
    "replicas that exchange tokens": replace(CORRECTED, dp=2, ep=2, num_samples=3),
    "replicas that share parameters": replace(CORRECTED, llm="glm4_moe", dp=2, fully_sharded=True, sharded_replicas=2),
    "cut widths, recomputed": replace(CORRECTED, llm="glm4_moe", tp=2, recompute=True),
    "packed, split backward": replace(
        CORRECTED, llm_pp=2, packing=True, schedule="zero_bubble_h1", placement="replicated"
    ),
    "shared tokens": replace(CORRECTED, llm="glm4_moe", cp=2),
}
"""Corrections of routers' scores, by the counts of all ranks."""


def stepped(scenario: Scenario, num_steps: int, **train: Any) -> StepsComparison | None:
    config = scenario.config()
    config = config.model_copy(update={"train": config.train.model_copy(update=train)})
    batches = [
        ScenarioBatch(replace(scenario, items="none" if step % 2 else "mixed"), config) for step in range(num_steps)
    ]
    with float64_throughout():
        engine = build_engine(config, scenario.plan(config), torch.device("cpu"))
        perturb(engine)
        return compare_steps(engine, config, batches, lambda: plain_nodes(config, PLACEHOLDERS))


@pytest.mark.parametrize("name", [*USUAL, *in_campaigns(n for n in CASES if n not in USUAL)])
def test_steps_equal_a_plain_loop(name: str) -> None:
    scenario = CASES[name]
    found = run_distributed(lambda rank: stepped(scenario, 4), scenario.num_ranks, timeout=300)[0]
    assert found.failures == []
    assert found.losses_distributed == pytest.approx(found.losses_reference, rel=1e-9)


@pytest.mark.parametrize(
    "name",
    ["replicas that exchange tokens", *in_campaigns(n for n in CORRECTIONS if n != "replicas that exchange tokens")],
)
def test_corrections_of_routers_equal_a_plain_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = CORRECTIONS[name]
    monkeypatch.setitem(SHOWN_EQUAL, scenario.llm, frozenset(FEATURES))  # Their own tests ask for probes.
    found = run_distributed(lambda rank: stepped(scenario, 3), scenario.num_ranks, timeout=300)[0]
    assert found.failures == []
    assert found.losses_distributed == pytest.approx(found.losses_reference, rel=1e-9)


def test_gradients_of_zero_move_what_no_sample_reaches() -> None:
    found = run_distributed(lambda rank: stepped(TWO, 3, update_unreached=True), 2)[0]
    assert found.max_weight_rel_err > 1e-3
    assert found.worst_weight.startswith("vision.")
    assert "after 3 steps of the optimizer" in found.failures[0]
