"""`motet verify` of encoders that run ahead: the batch's encoder outputs come from the iteration before."""

from dataclasses import replace

import pytest
from distributed import run_distributed
from one_process import Before, check, prepare, verify
from sampling import in_campaigns
from scenario import Scenario, ScenarioBatch

from motet.config import RunConfig
from motet.runtime.engine import Engine
from motet.runtime.next_batch import NextBatch
from motet.runtime.stage_runner import StageRunner
from motet.runtime.verification.verify import DRAW_KEY
from motet.schedule.routes import Cell

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
    "sharded over tokens": replace(
        CHAIN, fully_sharded=True, encoder_cp=2, cp=2, llm_pp=1, packing=True, placement="colocated"
    ),
    "sharded over replicas": replace(
        CHAIN, fully_sharded=True, dp=2, sharded_replicas=2, llm_pp=1, placement="colocated", items="half"
    ),
    "cross-attention": replace(CHAIN, llm="mllama", merge="cross_attention", vision="clip", placement="colocated"),
}


USUAL = ("one of two encoders", "trained projectors behind", "on the language model's ranks", "tensor parallel")


def ahead(first: int) -> Before:
    def run_before(engine: Engine, config: RunConfig, batch: ScenarioBatch) -> None:
        other = ScenarioBatch(batch.scenario, config, first)
        engine.run(other, seed=(0, 1), following=NextBatch(batch, DRAW_KEY))

    return run_before


@pytest.mark.parametrize("name", [*USUAL, *in_campaigns(name for name in SCENARIOS if name not in USUAL)])
def test_outputs_of_the_iteration_before_give_the_gradients_of_one_process(name: str) -> None:
    check(SCENARIOS[name], before=ahead(5))


@pytest.mark.parametrize("is_stale", [False, True])
def test_a_stale_output_of_the_wrong_batch_is_seen(monkeypatch: pytest.MonkeyPatch, is_stale: bool) -> None:
    """Planted: encoders hand on what they have kept for the batch before, which has the same shapes."""
    keep, older = StageRunner.forget_output, {}

    def keep_older(self: StageRunner, cell: Cell) -> None:
        keep(self, cell)
        if cell in self._routes.kept:
            name = self._routes.next_name(cell)
            self._kept[name], older[name] = older.get(name, self._kept[name]), self._kept[name]

    if is_stale:
        monkeypatch.setattr(StageRunner, "forget_output", keep_older)

    def run_two_before(engine: Engine, config: RunConfig, batch: ScenarioBatch) -> None:
        first, second = (batch.with_other_contents(number) for number in (50, 100))
        engine.run(first, seed=(0, 1), following=NextBatch(second, (0, 2)))
        engine.run(second, seed=(0, 2), following=NextBatch(batch, DRAW_KEY))

    scenario = replace(CHAIN, llm_pp=1, placement="colocated")
    prepare(scenario)
    comparison = run_distributed(lambda rank: verify(scenario, run_two_before), scenario.num_ranks)[0]
    assert comparison.passed is not is_stale
    assert (comparison.max_grad_rel_err > 1e-3) is is_stale
