"""`motet verify` of draws from the whole product: context parallelism and masks of media, every way to cut a batch,
every schedule on the plans that it is made for, units of unequal data parallelism, packing, frozen parts, missing
modalities, all at once.

`MOTET_FUZZ_SEED` is the seed of the draws; it is printed, and a failure names its scenario.
"""

import os
from random import Random

import pytest
from one_process import check_together
from scenario import FROZEN, Scenario
from test_verify_assignments import LONGEST, no_media

from motet.balancing.policies import ASSIGNMENTS
from motet.schedule.generators import CONTRASTING, GENERATORS

SEED = os.environ.get("MOTET_FUZZ_SEED", "2")
MAX_RANKS = 6

ROUND = ("interleaved_1f1b", "interleaved_1f1b_adjusted")
THERE_AND_BACK = ("zero_bubble_v",)
SHARED = ("bubble_filling", "dip")
CHAIN = tuple(sorted(set(GENERATORS) - {*ROUND, *THERE_AND_BACK, *SHARED, *CONTRASTING}))
"""Schedules, by the plans that they are made for: several rounds over the ranks, a round there and back, encoders on
the language model's ranks, and for all others a chain of ranks."""


def drawn(number: int, seed: str) -> Scenario:
    rng = Random(f"{seed}/{number}")
    while True:
        packing = rng.random() < 0.4
        schedule = rng.choice([*CHAIN, *ROUND, *THERE_AND_BACK, *SHARED])
        goes_round = schedule in (*ROUND, *THERE_AND_BACK) or (schedule in SHARED and rng.random() < 0.5)
        scenario = Scenario(
            llm=rng.choice(["llama", "gemma3", "qwen3", "llama-tied", "phi3", "mistral"]),
            vision=rng.choice(["siglip", "clip", "dinov2", "pixtral", "qwen2_5_vl"]),
            audio=rng.choice(["whisper", "qwen2_audio"]),
            encoder_pp=rng.choice([1, 1, 2]),
            llm_pp=4 if goes_round else rng.choice([1, 2, 3]),
            llm_cuts=(1, 2, 4) if goes_round else (),
            llm_places=((0, 1, 1, 0) if schedule in THERE_AND_BACK else (0, 1, 0, 1)) if goes_round else (),
            tp=rng.choice([1, 1, 1, 2]),
            cp=rng.choice([1, 2, 2, 3]),
            encoder_cp=rng.choice([1, 1, 2]),
            cp_method=rng.choice(["all_gather", "all_gather", "ulysses"]),
            media_attention=rng.choice(["causal", "causal", "own_item", "block_causal", "prefix"]),
            sequence_parallel=rng.random() < 0.5,
            dp=rng.choice([1, 1, 2]),
            units=rng.choice([None, None, tuple(rng.choice([1, 2, 3]) for _ in range(3))]),
            num_samples=rng.randint(1, 12),
            num_microbatches=rng.randint(1, 4),
            placement="shared" if schedule in SHARED else rng.choice(["parallel", "colocated", "shared", "replicated"]),
            merge=rng.choice(["placeholder", "placeholder", "prepend", "cross_attention"]),
            schedule=schedule,
            assignment=rng.choice(list(ASSIGNMENTS)),
            max_packed_tokens=LONGEST if packing and rng.random() < 0.5 else None,
            frozen=rng.choice(sorted(FROZEN)),
            items=rng.choice(["mixed", "mixed", "half", "one", "all but one", "none"]),
            packing=packing,
            fully_sharded=rng.random() < 0.2,
            recompute=rng.random() < 0.2,
            feature_select=rng.choice(["patch", "patch", "full"]),
            feature_layer=rng.choice([None, None, None, -1, -2, 1]),
        ).consistent()
        if is_possible(scenario):
            return scenario


def is_possible(scenario: Scenario) -> bool:
    if scenario.units and scenario.placement != "parallel":
        return False
    if scenario.placement in ("replicated", "shared") and (scenario.encoder_pp == 2 or scenario.encoder_cp > 1):
        return False  # Copies are whole; else stages would overlap in part.
    if scenario.frozen in ("all but projectors", "all but encoders") and no_media(scenario):
        return False  # Nothing trainable is reached.
    if scenario.vision in ("qwen2_5_vl",) and scenario.feature_layer is not None:
        return False  # Its head merges patches, so there are no features before it.
    if scenario.vision not in ("clip", "dinov2") and scenario.feature_select == "full":
        return False  # No class token.
    if scenario.fully_sharded and scenario.placement == "replicated":
        return False  # Copies of what is shared out have to be whole.
    return scenario.num_ranks <= MAX_RANKS and can_share_tokens(scenario)


def can_share_tokens(scenario: Scenario) -> bool:
    """What docs/attention.md calls limits of context parallelism, and Ulysses' division of 4 heads and 2 key heads."""
    if scenario.uses_cross_attention and (scenario.cp > 1 or scenario.media_attention != "causal"):
        return False
    encoder_cp = scenario.cp if scenario.placement in ("replicated", "shared") else scenario.encoder_cp
    if encoder_cp > 1 and (scenario.vision in ("pixtral", "qwen2_5_vl") or scenario.audio == "qwen2_audio"):
        return False
    return scenario.cp_method == "all_gather" or scenario.cp == 1 or (scenario.cp == 2 and scenario.tp == 1)


def test_some_of_the_whole_product_equal_one_process() -> None:
    print(f"MOTET_FUZZ_SEED={SEED}")
    check_together([drawn(i, SEED) for i in range(2)])


@pytest.mark.campaign
def test_the_whole_product_equals_one_process() -> None:
    print(f"MOTET_FUZZ_SEED={SEED}")
    check_together([drawn(i, SEED) for i in range(200)])


def test_the_draws_have_all_that_may_meet() -> None:
    draws = [drawn(i, "2") for i in range(200)]
    sharing = [scenario for scenario in draws if scenario.cp > 1]
    assert len(sharing) > 50
    assert {scenario.schedule for scenario in sharing} == set(GENERATORS) - CONTRASTING
    assert {scenario.assignment for scenario in sharing} == set(ASSIGNMENTS)
    assert {scenario.frozen for scenario in sharing} == set(FROZEN)
    assert {scenario.cp_method for scenario in sharing} == {"all_gather", "ulysses"}
    for switch in ("packing", "fully_sharded", "recompute", "units", "max_packed_tokens"):
        assert {bool(getattr(scenario, switch)) for scenario in sharing} == {True, False}
