"""Every two mechanisms of parallelism meet, as far as four processes allow: sharding, experts, context parallelism,
adapters, shares of messages, split backwards, with frozen parts, missing modalities and tied weights."""

import os
from random import Random

import pytest
from one_process import check_together
from pairwise import Row, pairwise_rows
from sampling import in_campaigns
from scenario import FROZEN, Scenario

MAX_RANKS = 4
NUM_DRAWS = int(os.environ.get("MOTET_MECHANISM_DRAWS", "150"))
SEED = os.environ.get("MOTET_MECHANISM_SEED", "16")
NUM_TOGETHER = 12
"""Scenarios that share a start of processes."""

FACTORS = {
    "llm_pp": (1, 2),
    "tensor": ("1", "2", "2 with sequence parallelism"),
    "dp": (1, 2),
    "context": ("none", "all_gather lpt", "ring contiguous", "ring zigzag", "ulysses lpt"),
    "sharing": ("none", "by owners", "by rows", "gradients by rows"),
    "experts": ("none", "cut", "over ranks", "over replicas"),
    "lora": ("none", "language model", "vision"),
    "frozen": tuple(FROZEN),
    "items": ("mixed", "half", "none"),
    "schedule": ("1f1b", "gpipe", "zero_bubble_h1"),
    "packing": (False, True),
    "recompute": (False, True),
    "tied": (False, True),
    "assignment": ("contiguous", "post_balanced"),
    "features again": (False, True),
}
BY_ROWS = ("by rows", "gradients by rows")
LORA = {"none": (), "language model": ("language_model",), "vision": ("vision",)}


def num_ranks(row: Row) -> int:
    """The fewest with which a partial row can end."""
    tp = int(row.get("tensor", "1")[0])
    cp = 1 if row.get("context", "none") == "none" else 2
    encoders = 2 if row.get("sharing") == "by owners" else 0
    return tp * row.get("dp", 1) * (row.get("llm_pp", 1) * cp + encoders)


def allowed(row: Row) -> bool:
    """Of a partial row: whether something may be added to make it so."""
    of, frozen = row.get, FROZEN[row.get("frozen", "nothing")]
    if num_ranks(row) > MAX_RANKS:
        return False
    if of("sharing") == "by owners" and (of("context") == "none" or of("dp", 1) > 1 or of("tensor", "1") != "1"):
        return False
    if of("context") == "ulysses lpt" and of("tensor", "1") != "1":
        return False  # There are two key heads.
    if of("sharing") in BY_ROWS and of("dp") == 1:
        return False
    if of("experts") == "over ranks" and of("tensor") == "1":
        return False
    if of("experts") == "over replicas" and (of("dp") == 1 or of("sharing", "none") != "none"):
        return False
    # Packing and context parallelism of mixtures are refused until a probe has shown them right.
    is_beyond_experts = of("tied") or of("packing") or {of("sharing", "none"), of("context", "none")} != {"none"}
    if of("experts", "none") != "none" and is_beyond_experts:
        return False
    if of("items") == "none" and of("frozen") in ("all but projectors", "all but encoders"):
        return False  # Nothing trainable is reached.
    lora = LORA[of("lora", "none")]
    return not any(name in frozen for name in lora) and not (of("items") == "none" and lora == ("vision",))


def scenario_of(row: Row) -> Scenario:
    tp, _, sequence_parallel = row["tensor"].partition(" ")
    method, _, policy = row["context"].partition(" ")
    by_owners, tp_size = row["sharing"] == "by owners", int(tp)
    dense = "llama-tied" if row["tied"] else "qwen3"
    return Scenario(
        llm=dense if row["experts"] == "none" else "mixtral",
        llm_pp=row["llm_pp"],
        tp=tp_size,
        sequence_parallel=bool(sequence_parallel),
        dp=row["dp"],
        cp=1 if method == "none" else 2,
        encoder_cp=2 if by_owners else 1,
        cp_method="all_gather" if method == "none" else method,
        cp_policy=policy or "lpt",
        placement="colocated" if by_owners else "shared",
        fully_sharded=row["sharing"] != "none",
        sharded_replicas=row["dp"] if row["sharing"] in BY_ROWS else 1,
        whole_parameters=row["sharing"] == "gradients by rows",
        ep={"over ranks": tp_size, "over replicas": tp_size * row["dp"]}.get(row["experts"], 1),
        lora=LORA[row["lora"]],
        frozen=row["frozen"],
        items=row["items"],
        schedule=row["schedule"],
        packing=row["packing"],
        recompute=row["recompute"],
        recompute_features=row["features again"],
        assignment=row["assignment"],
        router_aux_loss=0.0 if row["experts"] == "none" else 0.05,
    )


ROWS = pairwise_rows(FACTORS, allowed)
USUAL = [
    {
        "llm_pp": 2, "tensor": "1", "dp": 2, "context": "none", "sharing": "by rows", "experts": "none",
        "lora": "language model", "frozen": "audio", "items": "half", "schedule": "zero_bubble_h1", "packing": True,
        "recompute": False, "tied": True, "assignment": "post_balanced", "features again": False,
    },
    {
        "llm_pp": 2, "tensor": "2 with sequence parallelism", "dp": 1, "context": "none", "sharing": "none",
        "experts": "over ranks", "lora": "none", "frozen": "all but encoders", "items": "mixed", "schedule": "1f1b",
        "packing": False, "recompute": True, "tied": False, "assignment": "contiguous", "features again": True,
    },
    {
        "llm_pp": 1, "tensor": "2 with sequence parallelism", "dp": 1, "context": "ring zigzag", "sharing": "none",
        "experts": "none", "lora": "none", "frozen": "nothing", "items": "half", "schedule": "zero_bubble_h1",
        "packing": True, "recompute": True, "tied": False, "assignment": "contiguous", "features again": False,
    },
]  # fmt: skip


def test_some_combinations_equal_one_process() -> None:
    assert all(allowed(row) for row in USUAL)
    check_together([scenario_of(row) for row in USUAL])


@pytest.mark.parametrize("first", in_campaigns(range(0, len(ROWS), NUM_TOGETHER)))
def test_every_two_mechanisms_equal_one_process(first: int) -> None:
    check_together([scenario_of(row) for row in ROWS[first : first + NUM_TOGETHER]])


def draw(rng: Random) -> Row:
    """Levels are drawn one after the other, of those that may still be completed."""
    row: Row = {}
    for name in rng.sample(sorted(FACTORS), len(FACTORS)):
        row[name] = rng.choice([level for level in FACTORS[name] if _completes({**row, name: level})])
    return row


def _completes(row: Row) -> bool:
    if not allowed(row):
        return False
    name = next((name for name in FACTORS if name not in row), None)
    return name is None or any(_completes({**row, name: level}) for level in FACTORS[name])


@pytest.mark.parametrize("first", in_campaigns(range(0, NUM_DRAWS, NUM_TOGETHER)))
def test_drawn_combinations_equal_one_process(first: int) -> None:
    print(f"MOTET_MECHANISM_SEED={SEED} MOTET_MECHANISM_DRAWS={NUM_DRAWS}")
    rows = [draw(Random(f"{SEED}/{i}")) for i in range(first, min(NUM_DRAWS, first + NUM_TOGETHER))]
    check_together([scenario_of(row) for row in rows])
