"""`motet verify` over layouts: every two options that may meet meet in some scenario, families taking turns."""

from dataclasses import replace
from itertools import cycle

import pytest
from one_process import check_together
from pairwise import Row, allowed_pairs, pairs_of, pairwise_rows
from sampling import in_campaigns
from scenario import FROZEN, Scenario

MAX_RANKS = 8

FACTORS = {
    "encoder_pp": (1, 2),
    "llm_pp": (1, 2, 3),
    "tensor": ("1", "2", "2 with sequence parallelism"),
    "dp": (1, 2),
    "num_microbatches": (1, 2, 3, 4, 5),
    "placement": ("parallel", "colocated", "replicated"),
    "merge": ("placeholder", "prepend", "cross_attention"),
    "schedule": ("1f1b", "gpipe", "zero_bubble_h1"),
    "frozen": tuple(FROZEN),
    "items": ("mixed", "half", "none"),
    "packing": (False, True),
    "recompute": (False, True),
}

LANGUAGE_MODELS = ("llama", "gemma3", "qwen3", "llama-tied", "phi3", "mistral")
VISION = ("siglip", "pixtral", "clip", "qwen2_5_vl", "dinov2")
AUDIO = ("whisper", "qwen2_audio")


def allowed(row: Row) -> bool:
    """Of a partial row: whether something may be added to make it so."""
    if row.get("placement") == "replicated" and row.get("encoder_pp") == 2:
        return False  # Copies are whole.
    if row.get("items") == "none" and row.get("frozen") in ("all but projectors", "all but encoders"):
        return False  # Nothing trainable is reached.
    fewest = {"encoder_pp": 1, "llm_pp": 1, "tensor": "1", "dp": 1, "placement": "replicated"}
    return scenario_of({**fewest, **row}).num_ranks <= MAX_RANKS


def scenario_of(row: Row) -> Scenario:
    values = {name: level for name, level in row.items() if name != "tensor"}
    tp, _, sequence_parallel = row["tensor"].partition(" ")
    return Scenario(tp=int(tp), sequence_parallel=bool(sequence_parallel), **values).consistent()


def scenarios() -> list[Scenario]:
    turns = zip(cycle(LANGUAGE_MODELS), cycle(VISION), cycle(AUDIO), strict=False)
    return [
        scenario_of({"llm": llm, "vision": vision, "audio": audio, **row})
        for row, (llm, vision, audio) in zip(pairwise_rows(FACTORS, allowed), turns, strict=False)
    ]


def test_every_two_options_meet() -> None:
    """Read from the scenarios themselves. What is left out is named here, so that nothing is lost by a slip."""
    rows = [
        {name: getattr(scenario, name) for name in FACTORS if name != "tensor"}
        | {"tensor": f"{scenario.tp}{' with sequence parallelism' * scenario.sequence_parallel}"}
        for scenario in scenarios()
    ]
    met = {pair for row in rows for pair in pairs_of(row)}
    every = set(allowed_pairs(FACTORS, lambda row: True))
    assert every - met == {
        (("encoder_pp", 2), ("placement", "replicated")),
        (("frozen", "all but projectors"), ("items", "none")),
        (("frozen", "all but encoders"), ("items", "none")),
    }


def test_families_take_turns() -> None:
    everyone = scenarios()
    assert {scenario.llm for scenario in everyone} == {*LANGUAGE_MODELS, "mllama"}
    assert {(scenario.vision, scenario.audio) for scenario in everyone} == {(v, a) for v in VISION for a in AUDIO}


SIZES = sorted({scenario.num_ranks for scenario in scenarios()})
USUAL = (4,)
"""Sizes whose scenarios `make test` runs."""


@pytest.mark.parametrize(
    ("num_ranks", "dtype"),
    [
        *((size, "float64") for size in USUAL),
        *in_campaigns((size, "float64") for size in SIZES if size not in USUAL),
        *in_campaigns((size, "float32") for size in SIZES),
    ],
)
def test_layouts_equal_one_process(num_ranks: int, dtype: str) -> None:
    """All scenarios of a size share a start of processes."""
    check_together([replace(scenario, dtype=dtype) for scenario in scenarios() if scenario.num_ranks == num_ranks])
