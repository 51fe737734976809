"""Several ranks that share one GPU, against one process on the CPU.

The backend stages tensors over pinned memory and gloo (`wrapped_group`), so these are the stages, engine and messages
of a GPU without NCCL. `make gpu` sets `MOTET_TEST_DEVICE=cuda`; elsewhere the same lines run on the CPU.
"""

import os
from collections import defaultdict
from collections.abc import Iterable
from functools import partial

import pytest
import torch
from distributed import run_distributed
from one_process import prepare, verify
from scenario import Scenario
from wrapped_group import WrappedGroup, register

from motet.runtime.verification.comparison import Comparison

DEVICE = os.environ.get("MOTET_TEST_DEVICE", "cpu")

LAYOUTS = {
    "pipeline": Scenario(llm="llama-tied", llm_pp=2, placement="colocated", items="half", num_microbatches=3),
    "zero bubble": Scenario(llm_pp=2, placement="colocated", schedule="zero_bubble_h1", recompute=True),
    "tensor and sequence parallelism": Scenario(llm="qwen3", tp=2, sequence_parallel=True, placement="shared"),
    "context parallelism": Scenario(llm="llama", cp=2, placement="shared"),
    "ring": Scenario(llm="llama", cp=2, cp_method="ring", placement="shared"),
    "data parallelism": Scenario(dp=2, placement="shared"),
    "fully sharded": Scenario(fully_sharded=True, placement="shared", dp=2, sharded_replicas=2, num_samples=8),
    "experts": Scenario(llm="mixtral", tp=2, ep=2, placement="replicated"),
}
FAMILIES = {
    name: Scenario(**{"llm": llm, "vision": vision, "placement": "replicated", "recompute": True, **more})  # type: ignore[arg-type]
    for name, (llm, vision, more) in {
        "llama": ("llama", "siglip", {"packing": True}),
        "qwen3": ("qwen3", "clip", {"packing": True}),
        "gemma3": ("gemma3", "siglip", {"schedule": "zero_bubble_h1"}),
        "mistral": ("mistral", "pixtral", {"packing": True}),
        "phi3": ("phi3", "qwen2_5_vl", {"packing": True}),
        "llama-tied": ("llama-tied", "dinov2", {}),
        "mixtral": ("mixtral", "siglip", {}),
        "mllama": ("mllama", "clip", {"merge": "cross_attention"}),
        "deepseek_v3": ("deepseek_v3", "siglip", {}),
        "qwen3, no images": ("qwen3", "siglip", {"items": "none"}),
    }.items()
}


def check(scenarios: Iterable[Scenario]) -> None:
    """Those with one number of ranks share a start of processes."""
    by_size: dict[int, list[Scenario]] = defaultdict(list)
    for scenario in scenarios:
        prepare(scenario)
        by_size[scenario.num_ranks].append(scenario)
    for num_ranks, group in by_size.items():
        found = run_distributed(
            compare, num_ranks, group, backend=WrappedGroup.backend_name, before=partial(register, WrappedGroup),
            start_method="fork" if DEVICE == "cpu" else "spawn",
        )[0]  # fmt: skip
        assert [comparison for comparison in found if comparison.failures or comparison.max_grad_rel_err > 1e-9] == []


def compare(rank: int, scenarios: list[Scenario]) -> list[Comparison | None]:
    device = torch.device(DEVICE)
    return [verify(scenario, device=device) for scenario in scenarios]


def test_pipeline() -> None:
    check([LAYOUTS["pipeline"]])


@pytest.mark.campaign
def test_layouts() -> None:
    check(LAYOUTS.values())


@pytest.mark.campaign
def test_families() -> None:
    check(FAMILIES.values())
