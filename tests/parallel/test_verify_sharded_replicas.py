"""Replicas that share parameters (FSDP over data parallelism): `motet verify`, and what stays in memory."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from distributed import run_distributed
from one_process import check
from sampling import in_campaigns
from scenario import Scenario, ScenarioBatch

from motet.parallel import fully_sharded, row_shards
from motet.runtime.assembly import build_engine, build_optimizer

SHARED = Scenario(fully_sharded=True, placement="shared", dp=2, sharded_replicas=2, num_samples=8)
HALF = replace(SHARED, items="half", llm_pp=2)
"""The second replica has no images and no sounds."""
CASES = {
    "two replicas, two stages": replace(SHARED, llm_pp=2),
    "a replica without images": HALF,
    "a replica without images, frozen language model": replace(HALF, frozen="all but encoders"),
    "a replica without images, projectors alone": replace(HALF, frozen="all but projectors"),
    "a replica without images, frozen encoders": replace(HALF, frozen="all but language model"),
    "unlike numbers of microbatches": replace(SHARED, items="none", llm_pp=2, num_samples=5, num_microbatches=3),
    "three replicas": replace(SHARED, dp=3, sharded_replicas=3, num_samples=9),
    "three replicas, nothing divides": replace(
        SHARED, dp=3, sharded_replicas=3, num_samples=9, llm="gemma3", items="half"
    ),
    "hybrid": replace(SHARED, dp=4, sharded_replicas=2, num_microbatches=1, llm="llama-tied"),
    "with tensor parallelism": replace(SHARED, llm="qwen3", tp=2),
    "with sequence parallelism": replace(SHARED, llm="qwen3", tp=2, sequence_parallel=True, frozen="audio"),
    "with context parallelism": replace(SHARED, cp=2, encoder_cp=2),
    "encoders apart": replace(SHARED, placement="parallel", units=(1, 1, 2), num_microbatches=2, num_samples=6),
    "interleaved": replace(
        SHARED, llm_pp=4, llm_cuts=(1, 2, 4), llm_places=(0, 1, 0, 1), schedule="interleaved_1f1b", llm="llama-tied"
    ),
    "cross-attention": replace(SHARED, llm_pp=2, merge="cross_attention", llm="mllama", items="half"),
    "packed": replace(SHARED, llm_pp=2, packing=True),
    "language model alone": replace(SHARED, items="none", llm_pp=2),
    "two stages, tied, recomputed": replace(SHARED, llm="llama-tied", llm_pp=2, recompute=True),
    "split backward": replace(SHARED, llm_pp=2, schedule="zero_bubble_h1"),
}
USUAL = ("two replicas, two stages",)


@pytest.mark.parametrize("name", [*USUAL, *in_campaigns(n for n in CASES if n not in USUAL)])
def test_equals_one_process(name: str) -> None:
    check(CASES[name])


def trained(scenario: Scenario) -> tuple[list[float], int, int]:
    """Losses and gradient norms of three updates; bytes of parameters, gradients and states that stay here, and those
    of whole ones."""
    config = scenario.config()
    engine = build_engine(config, scenario.plan(config), torch.device("cpu"))
    optimizer = build_optimizer(config, engine.model)
    batch = ScenarioBatch(scenario, config)
    values = []
    for step in range(3):
        engine.model.zero_gradients()
        result = engine.run(batch)
        values += [result.loss, result.gradient_norm]
        optimizer.step(step)
    parameters = [p.parameter for p in engine.model.parameters]
    modules = [parameter for stage in engine.model.modules() for parameter in stage.parameters()]
    tensors = [*parameters, *modules, *(p.grad for p in parameters if p.grad is not None)]
    tensors += [t for state in optimizer.states().values() for key, t in state.items() if key != "step"]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    whole = sum(p.numel() * p.element_size() * (4 if p.requires_grad else 1) for p in modules)
    return values, sum(storages.values()), whole


@pytest.mark.parametrize("dp", [2, pytest.param(3, marks=pytest.mark.campaign)])
def test_training_keeps_a_share_of_everything(dp: int) -> None:
    scenario = replace(SHARED, dp=dp, sharded_replicas=dp, dtype="float32", num_samples=2 * dp)
    plain = replace(scenario, fully_sharded=False, sharded_replicas=1)
    expected, _, _ = run_distributed(lambda rank: trained(plain), dp)[0]
    for values, num_bytes, whole in run_distributed(lambda rank: trained(scenario), dp):
        assert values == pytest.approx(expected, rel=2e-6)
        assert num_bytes <= 1.1 * whole / dp


def units_at_once(scenario: Scenario) -> tuple[int, int]:
    """Of one iteration, the number of units, and of those that were whole at once."""
    whole: set[int] = set()
    seen: set[int] = set()
    most = 0

    class Watched(row_shards.RowUnit):
        def gather(self) -> None:
            nonlocal most
            super().gather()
            whole.add(id(self))
            seen.add(id(self))
            most = max(most, len(whole))

        def drop(self) -> None:
            super().drop()
            whole.discard(id(self))

    config = scenario.config()
    with patch.object(fully_sharded, "RowUnit", Watched):
        engine = build_engine(config, scenario.plan(config), torch.device("cpu"))
    engine.run(ScenarioBatch(scenario, config))
    assert not whole
    return len(seen), most


def test_replicas_that_run_alike_gather_a_block_at_a_time() -> None:
    alike = replace(SHARED, items="none", dtype="float32")
    unlike = replace(alike, num_samples=5, num_microbatches=3)
    for scenario, by_block in ((alike, True), (unlike, False)):
        for num_units, most in run_distributed(lambda rank, scenario=scenario: units_at_once(scenario), 2):
            assert num_units > 2
            assert most == (2 if by_block else num_units)
