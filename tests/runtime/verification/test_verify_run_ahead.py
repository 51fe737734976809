"""`motet verify` of encoders that run ahead: the batch's encoder outputs come from the iteration before."""

from dataclasses import replace

import pytest
from one_process import Before, check_together
from scenario import Scenario, ScenarioBatch

from motet.config import RunConfig
from motet.runtime.engine import Engine
from motet.runtime.next_batch import NextBatch
from motet.runtime.verification.verify import DRAW_KEY

CHAIN = Scenario(llm_pp=2, frozen="all but language model", run_ahead=True)
PROJECTORS = replace(CHAIN, frozen="all but projectors", llm_pp=1)
"""The plan cuts encoders before their projectors."""
SCENARIOS = {
    "frozen encoders": CHAIN,
    "one of two encoders": replace(CHAIN, frozen="audio", items="half"),
    "one sample with images": replace(CHAIN, items="one", num_microbatches=4),
    "trained projectors behind": PROJECTORS,
    "on the language model's ranks": replace(CHAIN, placement="shared", schedule="bubble_filling"),
    "copies": replace(CHAIN, placement="replicated"),
    "packed": replace(CHAIN, packing=True, llm_pp=1, placement="colocated"),
    "recomputed": replace(CHAIN, recompute=True, recompute_features=True, llm_pp=1, placement="colocated"),
    "replicas": replace(CHAIN, dp=2, llm_pp=1, placement="colocated"),
    "unequal replicas": replace(CHAIN, units=(1, 1, 2), llm_pp=1),
    "deferral": replace(CHAIN, assignment="entrain", num_microbatches=3, llm_pp=1),
    "tensor parallel": replace(CHAIN, tp=2, llm_pp=1, placement="colocated", llm="qwen3", sequence_parallel=True),
    "context parallel": replace(CHAIN, encoder_cp=2, llm_pp=1, cp=2, packing=True, placement="colocated"),
    "context parallel in stages": replace(
        PROJECTORS, encoder_pp=2, encoder_cps=(2, 1), encoder_cuts=(2,), placement="colocated", packing=True
    ),
    "cross-attention": replace(CHAIN, llm="mllama", merge="cross_attention", vision="clip", placement="colocated"),
}


def ahead(first: int) -> Before:
    def run_before(engine: Engine, config: RunConfig, batch: ScenarioBatch) -> None:
        other = ScenarioBatch(batch.scenario, config, first)
        engine.run(other, seed=(0, 1), following=NextBatch(batch, DRAW_KEY))

    return run_before


@pytest.mark.parametrize("names", [list(SCENARIOS)[i::3] for i in range(3)], ids=str)
def test_outputs_of_the_iteration_before_give_the_gradients_of_one_process(names: list[str]) -> None:
    comparisons = check_together([SCENARIOS[name] for name in names], before=ahead(5))
    assert all(comparison.max_grad_rel_err < 1e-9 for comparison in comparisons.values())
