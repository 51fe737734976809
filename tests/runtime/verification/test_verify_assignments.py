"""`motet verify` of every way to cut a batch, alone and in drawn combinations with what else moves samples: deferral,
reordering, packing under a limit, units of unequal data parallelism, halves of backwards, frozen parts, missing
modalities.

`MOTET_FUZZ_SEED` is the seed of the draws; it is printed, and a failure names its scenario.
"""

import os
from dataclasses import replace
from itertools import product
from random import Random

import pytest
from one_process import check_together
from sampling import in_campaigns
from scenario import FROZEN, Scenario

from motet.balancing.policies import ASSIGNMENTS

USUAL_SEED = "16"
SEED = os.environ.get("MOTET_FUZZ_SEED", USUAL_SEED)
MAX_RANKS = 6
LONGEST = 180
"""No sample of a scenario has more tokens in its language model."""

SMALL = Scenario(llm_pp=2, num_microbatches=3, num_samples=11, frozen="audio")

ALONE = [
    *(
        replace(SMALL, assignment=name, schedule=schedule)
        for name in ASSIGNMENTS
        for schedule in ("1f1b", "eager_1f1b", "zero_bubble_h1")
    ),
    replace(SMALL, assignment="entrain", packing=True, max_packed_tokens=LONGEST),
    replace(SMALL, assignment="entrain", placement="colocated"),
]

FEATURES_AGAIN = [
    Scenario(llm_pp=2, recompute_features=True, placement="shared", num_microbatches=3),
    Scenario(llm_pp=3, recompute_features=True, placement="replicated", items="half", packing=True),
    Scenario(encoder_pp=2, llm_pp=2, recompute_features=True, schedule="zero_bubble_h1", num_microbatches=3),
    Scenario(dp=2, recompute_features=True, placement="shared", fully_sharded=True, sharded_replicas=2),
    Scenario(recompute_features=True, placement="colocated", frozen="all but projectors", tp=2),
]
"""Encoders' graphs are there for one microbatch at a time."""

MEETING = [
    Scenario(dp=2, llm_pp=2, assignment="post_balanced", placement="shared", num_samples=11, num_microbatches=3),
    Scenario(dp=2, assignment="post_balanced", placement="parallel", num_samples=9, frozen="audio", items="half"),
    Scenario(dp=3, assignment="post_balanced", placement="shared", num_samples=13, frozen="all but language model"),
    Scenario(dp=2, llm_pp=2, assignment="post_balanced", placement="replicated", num_samples=9),
    Scenario(dp=2, tp=2, assignment="post_balanced", placement="shared", num_samples=9, schedule="zero_bubble_h1"),
    Scenario(dp=2, cp=2, encoder_cp=2, assignment="post_balanced", placement="shared", num_samples=9),
    Scenario(
        dp=2, assignment="post_balanced", placement="shared", num_samples=9, fully_sharded=True, sharded_replicas=2
    ),
    Scenario(units=(2, 2, 2), assignment="post_balanced", num_samples=9, recompute_features=True, encoder_pp=1),
]
"""Replicas of encoders send to every replica of the language model."""

UNITS = [
    Scenario(units=(encoders, encoders, llm), num_microbatches=2, num_samples=7, items=items)
    for (encoders, llm), items in zip(
        [*product((1, 2, 3), repeat=2), (4, 1), (1, 5)], ["mixed", "half", "one", "all but one"] * 3, strict=False
    )
]
"""Between any two numbers of replicas."""

BALANCED = [name for name in ASSIGNMENTS if name != "contiguous" for _ in range(1 + (name == "entrain"))]
"""The assignments that are drawn, deferral twice as often as others."""


def drawn(number: int, seed: str) -> Scenario:
    rng = Random(f"{seed}/{number}")
    while True:
        packing = rng.random() < 0.5
        merge = rng.choice(["placeholder", "placeholder", "prepend", "cross_attention"])
        scenario = Scenario(
            llm=rng.choice(["llama", "gemma3", "qwen3", "llama-tied", "phi3", "mistral"]),
            vision=rng.choice(["siglip", "pixtral", "clip", "qwen2_5_vl", "dinov2"]),
            audio=rng.choice(["whisper", "qwen2_audio"]),
            encoder_pp=rng.choice([1, 1, 2]),
            llm_pp=rng.choice([1, 2, 3]),
            tp=rng.choice([1, 1, 1, 2]),
            dp=rng.choice([1, 2]),
            units=rng.choice([None, tuple(rng.choice([1, 2, 3]) for _ in range(3))]),
            num_samples=rng.randint(1, 12),
            num_microbatches=rng.randint(1, 4),
            placement=rng.choice(["parallel", "colocated", "shared", "replicated"]),
            merge=merge,
            schedule=rng.choice(["1f1b", "eager_1f1b", "gpipe", "zero_bubble_h1", "zero_bubble_h2"]),
            assignment=rng.choice(BALANCED),
            frozen=rng.choice(sorted(FROZEN)),
            items=rng.choice(["mixed", "mixed", "half", "one", "all but one", "none"]),
            packing=packing,
            max_packed_tokens=LONGEST if packing and rng.random() < 0.5 else None,
            recompute=rng.random() < 0.2,
        ).consistent()
        if is_possible(scenario):
            return scenario


def is_possible(scenario: Scenario) -> bool:
    if scenario.units and scenario.placement != "parallel":
        return False
    if scenario.placement in ("replicated", "shared") and scenario.encoder_pp == 2:
        return False  # Copies are whole; else stages would overlap in part.
    if scenario.frozen in ("all but projectors", "all but encoders") and no_media(scenario):
        return False  # Nothing trainable is reached.
    return scenario.num_ranks <= MAX_RANKS


def no_media(scenario: Scenario) -> bool:
    few = scenario.num_samples is not None and scenario.num_samples < 2
    return scenario.items == "none" or (few and scenario.items != "mixed")


def diagonal(scenarios: list[Scenario], number: int) -> list[Scenario]:
    """One of three parts of a table with three columns: an entry of each row, from columns in turn."""
    return [scenario for i, scenario in enumerate(scenarios) if (i + i // 3) % 3 == number]


@pytest.mark.parametrize("number", [0, *in_campaigns([1, 2])])
def test_every_assignment_equals_one_process(number: int) -> None:
    """Schedules take turns."""
    check_together(diagonal(ALONE, number))


def test_replicas_of_all_shares_meet_and_features_are_made_again() -> None:
    check_together([MEETING[0], FEATURES_AGAIN[0]])


@pytest.mark.campaign
def test_every_meeting_of_replicas_equals_one_process() -> None:
    check_together([*MEETING, *FEATURES_AGAIN])


@pytest.mark.parametrize("number", [0, *in_campaigns([1, 2])])
def test_units_of_unequal_data_parallelism_equal_one_process(number: int) -> None:
    check_together(diagonal(UNITS, number))


@pytest.mark.campaign
def test_some_drawn_combinations_equal_one_process() -> None:
    print(f"MOTET_FUZZ_SEED={SEED}")
    check_together([drawn(i, SEED) for i in range(4)])


@pytest.mark.campaign
def test_drawn_combinations_equal_one_process() -> None:
    print(f"MOTET_FUZZ_SEED={SEED}")
    check_together([drawn(i, SEED) for i in range(220)])


def test_the_usual_draws_have_all_that_may_meet() -> None:
    draws = [drawn(i, USUAL_SEED) for i in range(220)]
    for name, levels in {
        "assignment": set(ASSIGNMENTS) - {"contiguous"},
        "schedule": {"1f1b", "eager_1f1b", "gpipe", "zero_bubble_h1", "zero_bubble_h2"},
        "frozen": set(FROZEN),
        "items": {"mixed", "half", "one", "all but one", "none"},
        "packing": {True, False},
    }.items():
        assert {getattr(scenario, name) for scenario in draws} == levels
    assert {s.units[1:] for s in draws if s.units} >= set(product((1, 2, 3), repeat=2)) - {(3, 3)}
    assert any(s.max_packed_tokens for s in draws if s.assignment.startswith("entrain"))
