"""Replicas that share parameters (FSDP over data parallelism): `motet verify`, and what stays in memory."""

import os
from dataclasses import replace
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from one_process import check, check_drawn
from sampling import in_campaigns
from scenario import FROZEN, Scenario, ScenarioBatch
from training import first_samples, run_config

from motet.costs.memory import MemoryOptions, static_layer_bytes
from motet.families.configured_graph import read_graph
from motet.parallel import fully_sharded, row_shards
from motet.planner.from_run_file import plan_for, planning_problem
from motet.runtime.assembly import build_engine, build_optimizer
from motet.runtime.verification.worker import verify_worker

NUM_DRAWS = int(os.environ.get("MOTET_SHARING_DRAWS", "60"))
SEED = os.environ.get("MOTET_SHARING_SEED", "16")

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
WHOLE = replace(SHARED, whole_parameters=True)
CASES |= {
    "whole parameters": replace(WHOLE, llm_pp=2, llm="llama-tied"),
    "whole parameters, a replica without images": replace(HALF, whole_parameters=True),
    "whole parameters, split backward": replace(WHOLE, llm_pp=2, schedule="zero_bubble_h1", items="none"),
    "whole parameters, recomputed, sequence parallel": replace(
        WHOLE, llm="qwen3", tp=2, sequence_parallel=True, recompute=True, frozen="audio"
    ),
    "whole parameters, hybrid": replace(WHOLE, dp=4, num_microbatches=1),
    "whole parameters, context parallel": replace(WHOLE, cp=2, encoder_cp=2),
}
"""ZeRO-2."""
USUAL = ("two replicas, two stages", "whole parameters")


@pytest.mark.parametrize("name", [*USUAL, *in_campaigns(n for n in CASES if n not in USUAL)])
def test_equals_one_process(name: str) -> None:
    check(CASES[name])


def draw(rng: Random) -> Scenario:
    """Replicas that share parameters, with every other kind of parallelism that four processes allow."""
    dp, sharded_replicas, tp, cp, llm_pp = rng.choice(
        [
            (2, 2, 1, 1, 1),
            (2, 2, 1, 1, 2),
            (2, 2, 2, 1, 1),
            (2, 2, 1, 2, 1),
            (3, 3, 1, 1, 1),
            (4, 2, 1, 1, 1),
            (4, 4, 1, 1, 1),
        ]
    )
    frozen = rng.choice(sorted(FROZEN))
    return replace(
        SHARED,
        llm=rng.choice(["llama", "qwen3", "gemma3", "llama-tied"]),
        vision=rng.choice(["siglip", "dinov2", "clip"]),
        frozen=frozen,
        items=rng.choice(["mixed", "half", "one"] + ["none"] * ("language_model" not in FROZEN[frozen])),
        dp=dp,
        sharded_replicas=sharded_replicas,
        whole_parameters=rng.random() < 0.3,
        tp=tp,
        cp=cp,
        encoder_cp=cp,
        sequence_parallel=tp > 1 and rng.random() < 0.5,
        llm_pp=llm_pp,
        num_microbatches=rng.choice([1, 2, 3]) if dp < 4 else 1,
        num_samples=rng.choice([7, 8, 9]) if dp < 4 else rng.choice([4, 5]),
        recompute=rng.random() < 0.3,
        packing=cp == 1 and rng.random() < 0.2,
        schedule=rng.choice(["1f1b", "gpipe", "zero_bubble_h1"]),
    )


@pytest.mark.campaign
def test_drawn_layouts() -> None:
    print(f"MOTET_SHARING_SEED={SEED} MOTET_SHARING_DRAWS={NUM_DRAWS}")
    check_drawn(draw, check, SEED, NUM_DRAWS)


def test_the_plan_of_planner_fsdp_equals_one_process(tmp_path: Path) -> None:
    """Gradients, and weights after two steps of the optimizer."""
    config = run_config(
        tmp_path,
        train__dtype="float64",
        parallel__planner="fsdp",
        parallel__explicit={},
        parallel__placement=None,
        parallel__limits={"dp": (2,)},
        cluster__num_devices=2,
    )
    plan = plan_for(config, planning_problem(config, first_samples(config.train.global_batch_size)))
    assert all(module.sharded_replicas == 2 for module in plan.modules.values())
    result = run_distributed(lambda rank: verify_worker(config, plan, 2), 2, timeout=120)[0]
    assert result["failures"] == []
    assert result["max_grad_rel_err"] <= 1e-9
    assert result["steps"] == 2
    assert result["max_weight_rel_err"] <= 1e-9


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


@pytest.mark.parametrize(("dp", "padding"), [(2, 0.02), pytest.param(3, 0.04, marks=pytest.mark.campaign)])
def test_training_keeps_a_share_of_everything(dp: int, padding: float) -> None:
    """But for padding where rows do not divide, as by three: a share of 64 rows then has 22."""
    scenario = replace(SHARED, dp=dp, sharded_replicas=dp, dtype="float32", num_samples=2 * dp)
    plain = replace(scenario, fully_sharded=False, sharded_replicas=1)
    predicted = sum(
        sum(
            static_layer_bytes(
                layer,
                trainable=True,
                tp_size=1,
                num_holders=1,
                num_shares=dp,
                options=MemoryOptions(),
            )
        )
        for workload in read_graph(scenario.config()).workloads.values()
        for layer in workload.layers
    )
    expected, _, _ = run_distributed(lambda rank: trained(plain), dp)[0]
    for values, num_bytes, whole in run_distributed(lambda rank: trained(scenario), dp):
        assert values == pytest.approx(expected, rel=2e-6)
        assert num_bytes <= 1.1 * whole / dp
        assert num_bytes == pytest.approx(predicted, rel=padding)


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


def collectives(scenario: Scenario) -> tuple[int, int]:
    """Numbers of gathers and of sums in one iteration."""
    config = scenario.config()
    engine = build_engine(config, scenario.plan(config), torch.device("cpu"))
    with (
        patch.object(dist, "all_gather_into_tensor", wraps=dist.all_gather_into_tensor) as gathers,
        patch.object(dist, "reduce_scatter_tensor", wraps=dist.reduce_scatter_tensor) as sums,
    ):
        engine.run(ScenarioBatch(scenario, config))
    return gathers.call_count, sums.call_count


def test_whole_parameters_are_gathered_once_and_gradients_summed_as_before() -> None:
    scenario = replace(SHARED, items="none", dtype="float32", num_microbatches=3, num_samples=12)
    whole = replace(scenario, whole_parameters=True)
    for (gathers, sums), (fewer, same) in zip(
        run_distributed(lambda rank: collectives(scenario), 2),
        run_distributed(lambda rank: collectives(whole), 2),
        strict=True,
    ):
        assert gathers > fewer
        assert sums == same > 0


def test_replicas_that_run_alike_gather_a_block_at_a_time() -> None:
    alike = replace(SHARED, items="none", dtype="float32")
    unlike = replace(alike, num_samples=5, num_microbatches=3)
    for scenario, by_block in ((alike, True), (unlike, False)):
        for num_units, most in run_distributed(lambda rank, scenario=scenario: units_at_once(scenario), 2):
            assert num_units > 2
            assert most == (2 if by_block else num_units)
