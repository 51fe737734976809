"""The simulated memory of each rank by kind against what a training step holds."""

import random
from pathlib import Path
from typing import Any

import pytest
from distributed import run_distributed
from live_storages import bytes_by_kind
from training import run_config

from motet.api import read_batch
from motet.config import RunConfig
from motet.planner.evaluate import evaluate
from motet.planner.from_run_file import plan_for, planning_problem

VISION = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 96,
    "patch_size": 16,
    "vision_use_head": False,
}
LANGUAGE_MODEL = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    # Of fewer heads, plain attention under a mask repeats keys and values, which predictions leave out.
    "num_key_value_heads": 4,
    "vocab_size": 128,
}
TOLERANCE = 0.05


def config_of(layout: dict[str, dict[str, Any]], **overrides: Any) -> RunConfig:
    config = run_config(
        Path("not-written"),
        train__global_batch_size=8,
        data__no_image=0.0,
        data__no_sound=1.0,
        data__max_digits=1,
        parallel__placement=None,
        **overrides,
    )
    values = config.model_dump(exclude_unset=True)
    values["model"] = {
        "encoders": {"vision": {"config": "SiglipVisionConfig", "values": VISION, "projector": "mlp"}},
        "language_model": {"config": "LlamaConfig", "values": LANGUAGE_MODEL},
    }
    values["parallel"]["explicit"] = layout
    num_ranks = sum(each.get("tp", 1) * each.get("pp", 1) * each.get("dp", 1) for each in layout.values())
    values["cluster"] = {"num_devices": num_ranks}
    return RunConfig.model_validate(values)


def compare(config: RunConfig) -> None:
    batch = read_batch(config)
    problem = planning_problem(config, batch.samples)
    plan = plan_for(config, problem)
    result = evaluate(problem, plan).result
    predicted = result.peak_memory_by_kind(range(plan.num_ranks))
    # What is measured is the most of each kind, at whatever moment.
    most_saved = result.most_saved(range(plan.num_ranks))
    held = run_distributed(lambda rank: bytes_by_kind(config, plan, batch), plan.num_ranks, timeout=200)
    for rank, measured in enumerate(held):
        expected = {**predicted[rank], "activations": most_saved[rank]}
        for kind, size in measured.items():
            assert size == pytest.approx(expected[kind], rel=TOLERANCE), f"rank {rank}: {kind}: {expected}, {measured}"


def layout(vision: dict[str, Any], language_model: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {"vision": vision, "language_model": language_model}


def test_two_stages() -> None:
    compare(config_of(layout({}, {}), parallel__num_microbatches=4))


def test_bfloat16_with_two_owners_takes_12_bytes_a_parameter() -> None:
    """2 for the weight, 4 for its main gradient, and half of 12 for the master and two moments."""
    both = {"dp": 2}
    config = config_of(layout(both, both), train__dtype="bfloat16", parallel__zero1=True)
    batch = read_batch(config)
    plan = plan_for(config, planning_problem(config, batch.samples))
    held = run_distributed(lambda rank: bytes_by_kind(config, plan, batch), plan.num_ranks, timeout=200)
    for of_rank in held:
        num_parameters = of_rank["weights"] / 2
        num_bytes = of_rank["weights"] + of_rank["gradients"] + of_rank["moments"]
        assert 11.9 * num_parameters <= num_bytes <= 12.1 * num_parameters


def draw(seed: int) -> RunConfig:
    rng = random.Random(seed)
    dp = rng.choice([1, 1, 2])
    vision = {"pp": rng.choice([1, 2]) if dp == 1 else 1, "dp": dp}
    text = {"pp": rng.choice([1, 2, 3]) if dp == 1 else 1, "dp": dp, "tp": rng.choice([1, 2]) if dp == 1 else 1}
    return config_of(
        layout(vision, text),
        parallel__num_microbatches=rng.choice([2, 4]),
        parallel__schedule=rng.choice(["1f1b", "gpipe", "eager_1f1b", "bubble_filling"]),
        parallel__recompute=rng.choice([(), (), ("language_model",), ("vision", "language_model")]),
        parallel__zero1=dp > 1 and rng.random() < 0.5,
    )


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(20))
def test_drawn_plans(seed: int) -> None:
    compare(draw(seed))
