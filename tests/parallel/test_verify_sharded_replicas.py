"""Replicas that share parameters (FSDP over data parallelism): `motet verify`, and what stays in memory."""

from dataclasses import replace

import pytest
from one_process import check
from sampling import in_campaigns
from scenario import Scenario

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
        SHARED, llm_pp=4, llm_places=(0, 1, 0, 1), schedule="interleaved_1f1b", num_samples=8, llm="llama-tied"
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
