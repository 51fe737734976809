"""`motet verify` for each kind of recomputation."""

from dataclasses import replace

import pytest
from one_process import check
from sampling import in_campaigns
from scenario import Scenario

CASES = {
    "attention": Scenario(llm_pp=2, recompute="attention", placement="colocated"),
    "attention, split backward": Scenario(
        llm_pp=2, recompute="attention", schedule="zero_bubble_h1", placement="colocated"
    ),
    "every_2": Scenario(llm="qwen3", llm_pp=2, recompute="every_2", placement="colocated", packing=True),
    "offload": Scenario(llm_pp=2, recompute="offload", placement="colocated"),
    "offload, split backward": Scenario(
        llm="qwen3", llm_pp=2, recompute="offload", schedule="zero_bubble_h1", placement="colocated", frozen="audio"
    ),
}
PRODUCTS = {
    f"{kind}, {name}": replace(Scenario(recompute=kind), **options)  # type: ignore[arg-type]
    for kind in ("attention", "every_3", "offload")
    for name, options in {
        "sequence parallel": {"tp": 2, "sequence_parallel": True, "placement": "replicated"},
        "context parallel": {"cp": 2, "encoder_cp": 2, "placement": "shared"},
        "fully sharded": {"dp": 2, "fully_sharded": True, "sharded_replicas": 2, "placement": "replicated"},
        "gemma3, pixtral": {"llm": "gemma3", "vision": "pixtral", "audio": "qwen2_audio", "placement": "replicated"},
        "phi3, qwen2.5-vl": {"llm": "phi3", "vision": "qwen2_5_vl", "placement": "replicated", "items": "half"},
        "cross-attention": {"llm": "mllama", "merge": "cross_attention", "vision": "clip", "placement": "replicated"},
        "adapters": {"lora": ("language_model",), "placement": "replicated"},
        "bfloat16": {"dtype": "bfloat16", "llm_pp": 2, "placement": "colocated"},
        "experts": {"llm": "mixtral", "placement": "replicated"},
    }.items()
}


@pytest.mark.parametrize("name", [*in_campaigns(PRODUCTS), *CASES])
def test_equals_one_process(name: str) -> None:
    check({**CASES, **PRODUCTS}[name])
