"""Stages whose ranks share tokens and parameters (FSDP): `motet verify`, drawn layouts, and what stays in memory."""

import os
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from one_process import check, check_drawn
from sampling import in_campaigns
from scenario import FROZEN, Scenario, ScenarioBatch

from motet.parallel import fully_sharded
from motet.runtime.assembly import build_engine, build_optimizer

NUM_DRAWS = int(os.environ.get("MOTET_SHARDED_DRAWS", "40"))
SEED = os.environ.get("MOTET_SHARDED_SEED", "7")

SHARDED = Scenario(fully_sharded=True, placement="colocated")
CASES = {
    "language model": replace(SHARDED, cp=2),
    "all modules, two stages, frozen encoders": replace(
        SHARDED, cp=2, llm_pp=2, encoder_cp=2, frozen="all but projectors", items="half"
    ),
    "encoders alone are trained": replace(SHARDED, cp=2, encoder_cp=2, frozen="all but encoders"),
    "three ranks, tied, recomputed": replace(SHARDED, llm="llama-tied", cp=3, encoder_cp=3, recompute=True),
    "with tensor parallelism": replace(SHARDED, llm="qwen3", cp=2, tp=2, frozen="audio"),
    "two replicas": replace(SHARDED, cp=2, dp=2, num_microbatches=1),
    "split backward": replace(SHARDED, cp=2, llm_pp=2, schedule="zero_bubble_h1"),
    "without images": replace(SHARDED, llm="gemma3", cp=2, encoder_cp=2, items="none"),
}
USUAL = (
    "all modules, two stages, frozen encoders",
    "three ranks, tied, recomputed",
    "with tensor parallelism",
)


@pytest.mark.parametrize("name", [*USUAL, *in_campaigns(n for n in CASES if n not in USUAL)])
def test_equals_one_process(name: str) -> None:
    check(CASES[name])


def draw(rng: Random) -> Scenario:
    frozen = rng.choice(sorted(FROZEN))
    tp = rng.choice([1, 1, 2])
    cp = rng.choice([2, 2, 3]) if tp == 1 else 2
    return replace(
        SHARDED,
        llm=rng.choice(["llama", "qwen3", "gemma3", "llama-tied"]),
        frozen=frozen,
        items=rng.choice(["mixed", "half"] + ["none"] * ("language_model" not in FROZEN[frozen])),
        cp=cp,
        encoder_cp=rng.choice([1, 2]),
        tp=tp,
        llm_pp=rng.choice([1, 2]) if tp == 1 else 1,
        # Ulysses divides four heads, of keys two.
        cp_method=rng.choice(["all_gather", "all_gather", "ulysses"]) if tp == 1 and cp == 2 else "all_gather",
        recompute=rng.random() < 0.3,
        schedule=rng.choice(["1f1b", "gpipe", "zero_bubble_h1"]),
    )


@pytest.mark.campaign
def test_drawn_layouts() -> None:
    print(f"MOTET_SHARDED_SEED={SEED} MOTET_SHARDED_DRAWS={NUM_DRAWS}")
    check_drawn(draw, check, SEED, NUM_DRAWS)


def trained(scenario: Scenario) -> tuple[list[float], dict[str, int], int]:
    """Losses and gradient norms of three updates; and bytes on this rank after them: of all parameters, of those
    and gradients that are here, of the optimizer's states."""
    config = scenario.config()
    engine = build_engine(config, scenario.plan(config), torch.device("cpu"))
    optimizer = build_optimizer(config, engine.model)
    batch = ScenarioBatch(scenario, config)
    losses = []
    for step in range(3):
        result = engine.run(batch)
        losses += [result.loss, result.gradient_norm]
        gradients = sum(p.parameter.grad.nbytes for p in engine.model.parameters if p.parameter.grad is not None)
        optimizer.step(step)
        engine.model.zero_gradients()
    parameters = [p.parameter for p in engine.model.parameters]
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}
    sizes = {
        "whole": sum(p.numel() * p.element_size() for p in parameters),
        "here": sum(storages.values()),
        "gradients": gradients,
        "largest": max(p.numel() * p.element_size() for p in parameters),
    }
    states = sum(t.nbytes for state in optimizer.states().values() for key, t in state.items() if key != "step")
    return losses, sizes, states


def test_training_keeps_a_share() -> None:
    scenario = replace(SHARDED, cp=2, encoder_cp=2, dtype="float32", num_samples=4)
    whole = run_distributed(lambda rank: trained(replace(scenario, fully_sharded=False)), scenario.num_ranks)
    sharded = run_distributed(lambda rank: trained(scenario), scenario.num_ranks)
    for (losses, _, _), (expected, _, _) in zip(sharded, whole, strict=True):
        assert losses == pytest.approx(expected, rel=1e-6)
    for (_, all_sizes, all_states), (_, sizes, states) in zip(whole, sharded, strict=True):
        assert sizes["whole"] == all_sizes["whole"] == all_sizes["here"]
        assert sizes["here"] <= sizes["whole"] / 2 + sizes["largest"]
        assert sizes["gradients"] <= all_sizes["gradients"] / 2 + sizes["largest"]
        assert states <= all_states / 2 + 2 * sizes["largest"]
    assert sum(states for _, _, states in sharded) == sum(states for _, _, states in whole) / 2


def units_at_once(scenario: Scenario, *, recompute_features: tuple[str, ...] = ()) -> tuple[int, int]:
    """Of one iteration, how many there were in all, and at once: embedding, head and the like count as one, every block
    as one."""
    whole: set[int] = set()
    seen: set[int] = set()
    most = 0

    class Watched(fully_sharded._Unit):
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
    with patch.object(fully_sharded, "_Unit", Watched):
        plan = replace(scenario.plan(config), recompute_features=recompute_features)
        engine = build_engine(config, plan, torch.device("cpu"))
    engine.run(ScenarioBatch(scenario, config))
    assert not whole
    return len(seen), most


@pytest.mark.parametrize("recompute", [False, True])
def test_one_block_is_gathered_at_a_time(recompute: bool) -> None:
    scenario = replace(SHARDED, cp=2, dtype="float32", recompute=recompute, frozen="all but language model")
    counts = run_distributed(lambda rank: units_at_once(scenario), scenario.num_ranks)
    assert all(most <= 2 < num_units for num_units, most in counts[1:])


def test_one_block_is_gathered_at_a_time_where_a_forward_runs_again() -> None:
    scenario = replace(SHARDED, cp=2, encoder_cp=2, dtype="float32", frozen="all but encoders")
    worker = partial(units_at_once, scenario, recompute_features=("vision", "audio", "language_model"))
    counts = run_distributed(lambda rank: worker(), scenario.num_ranks)
    assert all(most <= 2 < num_units for num_units, most in counts)


def gradients_summed(scenario: Scenario) -> tuple[int, int]:
    """Of one iteration: elements of gradients that were summed inside groups, and how many units had gradients of
    matrices at once, whose owners are others."""
    num_elements = most = 0
    units: list[fully_sharded._Unit] = []

    class Watched(fully_sharded._Unit):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            units.append(self)

        def sum_gradients(self) -> None:
            nonlocal most
            most = max(most, sum(any(map(is_unsummed, unit.parameters)) for unit in units))
            super().sum_gradients()

    def is_unsummed(parameter: torch.Tensor) -> bool:
        return parameter.dim() > 1 and parameter.grad is not None and not parameter.untyped_storage().nbytes()

    reduce = dist.reduce

    def counted(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        nonlocal num_elements
        num_elements += tensor.numel()
        return reduce(tensor, *arguments, **options)

    config = scenario.config()
    with patch.object(fully_sharded, "_Unit", Watched), patch.object(dist, "reduce", counted):
        engine = build_engine(config, scenario.plan(config), torch.device("cpu"))
        engine.run(ScenarioBatch(scenario, config))
    return num_elements, most


def test_halves_sum_as_much_as_whole_backwards_block_by_block() -> None:
    scenario = replace(SHARDED, cp=2, llm_pp=2, dtype="float32", schedule="zero_bubble_h1")
    halves = run_distributed(lambda rank: gradients_summed(scenario), scenario.num_ranks)
    whole = run_distributed(lambda rank: gradients_summed(replace(scenario, schedule="1f1b")), scenario.num_ranks)
    for (num_elements, most), (expected, _) in zip(halves, whole, strict=True):
        assert num_elements == expected
        assert most <= 1
    assert any(num_elements for num_elements, _ in halves)
