"""`motet verify` with context parallelism: alone and with all other kinds, on families that differ in their masks."""

from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

import dense_masks
import numpy as np
import pytest
import torch
from dense_masks import dense
from distributed import run_distributed
from one_process import check_together, verify
from sampling import in_campaigns
from scenario import FROZEN, Scenario, ScenarioBatch

from motet.assignment.sample import Segment
from motet.attention.masks.distribution import held_outputs
from motet.attention.masks.interval_mask import IntervalMask
from motet.attention.masks.rules import AttentionRule, mask_of, register_mask
from motet.attention.masks.token_layout import Document, layout_of_documents
from motet.models.materialize import float64_throughout
from motet.parallel.context import context_attention as context_parallel
from motet.parallel.context import context_rows, context_sequence
from motet.runtime.assembly import build_engine
from motet.runtime.verification.verify import Comparison

SCENARIOS = [
    Scenario(llm="phi3", cp=2, tp=2, placement="colocated"),  # Its attention has a configuration of its own then.
    Scenario(llm="llama", cp=2, placement="colocated"),
    Scenario(llm="qwen3", cp=3, placement="colocated", items="half", frozen="audio", num_microbatches=3),
    Scenario(llm="gemma3", cp=2, llm_pp=2, placement="colocated", frozen="all but projectors"),
    Scenario(llm="llama-tied", cp=2, tp=2, placement="colocated", sequence_parallel=True, items="half"),
    Scenario(llm="qwen3", cp=2, dp=2, placement="colocated", num_microbatches=1, packing=True),
    Scenario(llm="gemma3", cp=4, placement="colocated", items="none", recompute=True),
    Scenario(llm="llama", cp=2, llm_pp=2, tp=2, placement="colocated", frozen="all but encoders", items="half"),
    Scenario(llm="llama", cp=2, llm_pp=2, placement="colocated", cp_method="ulysses", merge="prepend"),
]


RINGS = [
    Scenario(llm="qwen3", cp=2, llm_pp=2, placement="shared", cp_method="ring", cp_policy="zigzag"),
    Scenario(llm="gemma3", cp=3, placement="shared", cp_method="ring", cp_policy="contiguous", recompute=True),
    Scenario(llm="llama-tied", cp=2, tp=2, placement="shared", cp_method="ring", sequence_parallel=True, items="half"),
    Scenario(llm="llama", cp=4, placement="shared", cp_method="ring", cp_policy="ilp", media_attention="own_item"),
    Scenario(llm="mistral", cp=2, dp=2, placement="shared", cp_method="ring", cp_policy="zigzag", items="one"),
    Scenario(
        llm="llama", cp=2, placement="shared", cp_method="ring", schedule="zero_bubble_h1", frozen="all but projectors"
    ),
    Scenario(llm="llama", cp=4, placement="shared", cp_method="ring", context_block=16, frozen="all but encoders"),
    Scenario(llm="qwen3", encoder_cp=2, cp=2, placement="shared", cp_method="ring", packing=True),
]
"""Ring attention, with the distributions that Cornstarch compares with; in one of them some members hold no tokens."""


HYBRIDS = [
    Scenario(llm="llama", cp=4, placement="shared", cp_method="hybrid", cp_policy="zigzag", items="half"),
    Scenario(llm="qwen3", cp=4, llm_pp=2, placement="shared", cp_method="hybrid", cp_policy="contiguous", packing=True),
    Scenario(llm="gemma3", cp=4, placement="shared", cp_method="hybrid", recompute=True, frozen="all but projectors"),
    Scenario(llm="gpt_oss", cp=4, placement="shared", cp_method="hybrid", context_block=16),
    Scenario(llm="llama", llm_pp=2, llm_cps=(4, 1), placement="shared", cp_method="hybrid", schedule="zero_bubble_h1"),
    Scenario(llm="llama", cp=4, encoder_cp=4, placement="shared", cp_method="hybrid", fully_sharded=True),
]
"""Tokens traded for heads within pairs, and a ring over pairs."""


UNLIKE_STAGES = [
    Scenario(llm="llama", llm_pp=2, llm_cps=(2, 1), placement="shared"),
    Scenario(llm="gemma3", llm_pp=3, llm_cps=(1, 2, 1), placement="shared", items="half"),
    Scenario(llm="qwen3", llm_pp=2, llm_cps=(2, 3), placement="shared", frozen="all but projectors"),
    Scenario(llm="llama-tied", llm_pp=2, llm_cps=(3, 2), placement="shared", items="none", schedule="zero_bubble_h1"),
    Scenario(llm="llama", llm_pp=2, llm_cps=(1, 2), tp=2, placement="shared", items="half", recompute=True),
    Scenario(llm="llama", llm_pp=3, llm_cps=(2, 2, 1), placement="colocated", frozen="all but encoders", dp=1),
    Scenario(llm="qwen3", llm_pp=2, llm_cps=(2, 1), placement="shared", fully_sharded=True, num_microbatches=3),
    Scenario(llm="llama", llm_pp=2, llm_cps=(4, 1), placement="shared", context_block=16, frozen="all but encoders"),
]
"""Tokens are shared out otherwise from stage to stage; in the last, some members hold none."""


MIXTURES = [
    Scenario(llm="gpt_oss", cp=2, placement="shared"),
    Scenario(llm="gpt_oss", cp=2, placement="shared", cp_method="ulysses", llm_pp=2),
    Scenario(llm="gpt_oss", cp=2, tp=2, ep=2, placement="shared", cp_method="ring", cp_policy="zigzag"),
    Scenario(llm="gpt_oss", cp=4, placement="shared", cp_method="ring", context_block=16, recompute=True),
    Scenario(llm="gpt_oss", media_attention="own_item", placement="shared"),
    Scenario(llm="llama4", cp=2, placement="shared"),
    Scenario(llm="llama4", cp=2, placement="shared", cp_method="ulysses", llm_pp=2, recompute=True),
    Scenario(llm="llama4", cp=3, tp=2, placement="shared", cp_method="ring", items="half", sequence_parallel=True),
]
"""Sinks (gpt-oss), and chunks of tokens and queries that are scaled by their places (Llama 4)."""


RULES = [
    Scenario(llm="gemma3", media_attention="block_causal", placement="colocated"),
    Scenario(llm="gemma3", media_attention="block_causal", cp=2, llm_pp=2, placement="colocated"),
    Scenario(llm="llama", media_attention="own_item", cp=2, placement="colocated", frozen="all but projectors"),
    Scenario(llm="mistral", media_attention="own_modality", cp=3, placement="colocated", merge="prepend"),
    Scenario(llm="qwen3", media_attention="own_item", tp=2, llm_pp=2, placement="colocated", items="half"),
]
"""What media tokens see, with and without context parallelism."""


def two_answers(segments: tuple[Segment, ...], window: int | None) -> IntervalMask:
    """The last four tokens are two answers to what stands before them."""
    assert window is None
    return mask_of(layout_of_documents([Document(segments, answers=(2, 2))]), AttentionRule())


def sinks(segments: tuple[Segment, ...], window: int | None) -> IntervalMask:
    """Layers with a window see the first two tokens of the sample too."""
    rule = AttentionRule() if window is None else AttentionRule(window=window, sink=2)
    return mask_of(layout_of_documents([Document(segments)]), rule)


register_mask("two_answers", two_answers)
register_mask("sinks", sinks)

OWN_MASKS = [
    Scenario(llm="llama", media_attention="two_answers", placement="colocated"),
    Scenario(llm="llama", media_attention="two_answers", cp=2, llm_pp=2, placement="colocated"),
    Scenario(llm="gemma3", media_attention="sinks", items="half", placement="colocated"),
    Scenario(llm="gemma3", media_attention="sinks", cp=2, tp=2, merge="prepend", placement="colocated"),
    Scenario(llm="qwen3", media_attention="prefix", items="half", placement="colocated"),
    Scenario(llm="gemma3", media_attention="prefix", cp=2, merge="prepend", placement="colocated"),
]
"""Masks that users bring, and prefixes."""


def test_what_own_masks_say() -> None:
    """The plain model is given their matrices, so these are compared with others."""
    batch = ScenarioBatch(scenario := OWN_MASKS[0], scenario.config())
    for sample in batch.samples:
        segments = sample.layouts["language_model"]
        document = Document(segments, answers=(2, 2))
        np.testing.assert_array_equal(two_answers(segments, None).dense(), dense([document], dense_masks.answers))
        np.testing.assert_array_equal(sinks(segments, 3).dense(), dense([document], dense_masks.sliding(3, 2)))


ENCODERS = [
    Scenario(encoder_cp=2, placement="colocated"),
    Scenario(vision="clip", encoder_cp=3, encoder_pp=2, cp=2, placement="colocated", items="half", recompute=True),
    Scenario(vision="dinov2", encoder_cp=2, tp=2, placement="colocated", frozen="all but projectors"),
    Scenario(encoder_cp=2, dp=2, cp_method="ulysses", placement="colocated", num_microbatches=1, frozen="audio"),
    Scenario(encoder_cp=4, cp=3, placement="colocated", items="half"),
    Scenario(encoder_cp=2, encoder_pp=3, placement="colocated", frozen="all but encoders", num_microbatches=3),
]
"""Encoders share their tokens, alone or beside the language model."""
UNLIKE_ENCODERS = [
    Scenario(encoder_pp=2, encoder_cps=(1, 2), placement="colocated", frozen="all but projectors", items="half"),
    Scenario(vision="clip", encoder_pp=3, encoder_cps=(2, 3, 1), placement="colocated", num_microbatches=3),
    Scenario(encoder_pp=2, encoder_cps=(2, 1), encoder_cuts=(6,), placement="colocated", items="half"),
    Scenario(encoder_pp=2, encoder_cps=(2, 1), encoder_cuts=(5,), placement="colocated", packing=True),
    Scenario(encoder_pp=2, encoder_cps=(1, 2), encoder_cuts=(6,), cp=2, placement="colocated", recompute=True),
    Scenario(encoder_pp=2, encoder_cps=(2, 3), encoder_cuts=(6,), placement="colocated", schedule="zero_bubble_h1"),
    Scenario(encoder_pp=2, encoder_cps=(3, 1), encoder_cuts=(1,), context_block=64, placement="colocated"),
    Scenario(encoder_pp=2, encoder_cps=(2, 1), tp=2, placement="colocated", frozen="all but encoders"),
    Scenario(encoder_pp=2, encoder_cps=(1, 2), placement="colocated", fully_sharded=True),
]
"""From stage to stage otherwise: before, between and behind the blocks (6 is the projector); in one of them some
members hold none."""


USUAL = [*SCENARIOS, RINGS[0], HYBRIDS[0], MIXTURES[0], MIXTURES[5]]
EVERY = [*USUAL, *UNLIKE_STAGES, *RULES, *OWN_MASKS, *ENCODERS, *UNLIKE_ENCODERS]


USUAL = [
    Scenario(llm="qwen3", cp=3, placement="shared", items="half", frozen="audio", num_microbatches=3, packing=True),
    Scenario(llm="llama", cp=2, placement="shared", cp_method="ulysses", merge="prepend"),
    RINGS[0],
    UNLIKE_STAGES[1],
    Scenario(llm="llama-tied", llm_pp=2, llm_cps=(2, 1), placement="shared", schedule="zero_bubble_h1", items="none"),
    Scenario(llm="gemma3", media_attention="block_causal", cp=2, placement="shared"),
    Scenario(llm="llama", media_attention="two_answers", cp=2, placement="shared"),
    Scenario(llm="gemma3", media_attention="sinks", items="half", placement="shared", recompute=True),
    Scenario(encoder_cp=2, placement="colocated", frozen="all but projectors"),
    UNLIKE_ENCODERS[2],
    UNLIKE_ENCODERS[3],
]
"""One for each mechanism of those above, on few ranks. Tensor parallelism beside context parallelism is in
test_verify_fully_sharded.py and test_verify_unlike.py."""


def test_some_equal_one_process() -> None:
    check_together([replace(scenario, dtype="float64") for scenario in USUAL])


@pytest.mark.parametrize("num_ranks", in_campaigns(sorted({scenario.num_ranks for scenario in EVERY})))
def test_equals_one_process(num_ranks: int) -> None:
    """All scenarios of a size share a start of processes."""
    check_together([replace(scenario, dtype="float64") for scenario in EVERY if scenario.num_ranks == num_ranks])


@pytest.mark.campaign
def test_every_ring_equals_one_process() -> None:
    check_together([*RINGS, *HYBRIDS])


@pytest.mark.campaign
def test_every_mixture_equals_one_process() -> None:
    check_together(MIXTURES)


@pytest.mark.parametrize(
    "options",
    [
        {"cp": 2, "encoder_cp": 2},
        *in_campaigns([{"cp": 2, "cp_method": "ulysses"}, {"media_attention": "own_item"}]),
    ],
)
def test_bfloat16(options: dict) -> None:
    check_together([Scenario(placement="colocated", dtype="bfloat16", **options)])


NO_TOKENS = [
    Scenario(cp=3, encoder_cp=3, context_block=64, placement="colocated", items="half"),
    Scenario(llm="qwen3", cp=2, llm_pp=2, context_block=128, placement="colocated", cp_method="ulysses"),
]
"""Blocks so large that some rank of the group owns no tokens of a microbatch."""


def verify_and_count(scenario: Scenario) -> tuple[Comparison | None, dict[str, list[int]]]:
    """And by language model or encoder, how many tokens this rank held of every sequence."""
    held: dict[str, list[int]] = {"text": [], "items": []}

    class Counting(context_sequence.ContextSequence):
        def __init__(self, documents: Any, rules: Any, *rest: Any) -> None:
            super().__init__(documents, rules, *rest)
            held["items" if rules[0].text == "full" else "text"].append(self.num_held)

    with patch.object(context_sequence, "ContextSequence", Counting):
        return verify(scenario), held


@pytest.mark.parametrize("scenario", [NO_TOKENS[0], *in_campaigns([NO_TOKENS[1]])], ids=["all_gather", "ulysses"])
def test_ranks_without_tokens(scenario: Scenario) -> None:
    results = run_distributed(lambda rank: verify_and_count(scenario), scenario.num_ranks)
    assert results[0][0].passed, results[0][0].failures
    for what in ["text", "items"] if scenario.encoder_cp > 1 else ["text"]:
        counts = [held[what] for _, held in results if held[what]]
        assert any(0 in of_rank for of_rank in counts), what
        assert any(any(of_rank) for of_rank in counts), what


@pytest.mark.parametrize("scenario", [Scenario(cp=2, placement="colocated")], ids=["cp2"])
def test_what_a_route_brings_is_derived_once(scenario: Scenario) -> None:
    def work(rank: int) -> tuple[int, int]:
        routes = []

        def counted(*arguments: Any) -> Any:
            routes.append(arguments)
            return held_outputs(*arguments)

        with patch.object(context_rows, "held_outputs", counted):
            verify(scenario)
        return len(routes), len({repr(arguments) for arguments in routes})

    for derived, distinct in run_distributed(work, scenario.num_ranks):
        assert derived == distinct > 0


def test_masks_are_derived_beside_the_loading() -> None:
    """All that a coming batch needs is there before it is run, and made once for forward, backward and all layers."""
    scenario = Scenario(llm="gemma3", cp=2, encoder_cp=2, placement="colocated")

    def work(rank: int) -> tuple[int, int]:
        engine = build_engine(config := scenario.config(), scenario.plan(config), torch.device("cpu"))
        batch = ScenarioBatch(scenario, config)
        with (
            patch.object(context_parallel, "device_mask", wraps=context_parallel.device_mask) as masks,
            float64_throughout(),
        ):
            engine.prepare(batch)
            before = masks.call_count
            engine.run(batch)
            return before, masks.call_count

    *encoders, first, second = run_distributed(work, scenario.num_ranks)
    assert all(before == after > 0 for before, after in encoders)
    assert first == second == (4, 4)  # Two microbatches, with and without a window.


def draw(seed: int) -> Scenario:
    """One of the product of all that context parallelism meets, on at most 8 ranks."""
    random = Random(seed)
    while True:
        scenario = Scenario(
            llm=random.choice(["llama", "qwen3", "gemma3", "llama-tied", "phi3", "mistral"]),
            vision=random.choice(["siglip", "clip", "dinov2"]),
            cp=random.choice([1, 2, 3, 4]),
            llm_cps=random.choice([(), (), (2, 1), (1, 2), (3, 2)]),
            encoder_cp=random.choice([1, 1, 2]),
            encoder_cps=random.choice([(), (), (2, 1), (1, 2)]),
            tp=random.choice([1, 2]),
            llm_pp=random.choice([1, 2]),
            dp=random.choice([1, 2]),
            sequence_parallel=random.choice([False, True]),
            num_microbatches=random.choice([1, 2, 3]),
            placement=random.choice(["parallel", "colocated"]),
            schedule=random.choice(["1f1b", "gpipe", "zero_bubble_h1"]),
            frozen=random.choice(list(FROZEN)),
            items=random.choice(["mixed", "half"]),
            packing=random.choice([False, True]),
            recompute=random.choice([False, True]),
            merge=random.choice(["placeholder", "prepend"]),
            media_attention=random.choice(["causal", "causal", "own_item", "block_causal", "prefix", "sinks"]),
        )
        if scenario.llm_cps:
            scenario = replace(scenario, llm_pp=2, cp=max(scenario.llm_cps))
        if scenario.encoder_cps:
            scenario = replace(scenario, encoder_pp=2, encoder_cuts=random.choice([(), (1,), (2,), (5,), (6,)]))
        if scenario.num_ranks <= 8 and (scenario.cp > 1 or scenario.encoder_cp > 1 or scenario.encoder_cps):
            return scenario


@pytest.mark.parametrize("seed", [0, *in_campaigns(range(1, 60))])
def test_drawn_from_the_product(seed: int) -> None:
    check_together([replace(draw(seed), dtype="float32")])
