"""The runtime on a pretend accelerator: equal to one process on a CPU, whatever the model's parts and layout."""

import pytest
import torch
from one_process import prepare, verify
from pretend_accelerator import on_accelerator
from scenario import Scenario

ALONE = (
    Scenario(placement="shared"),
    Scenario(placement="shared", packing=True, items="half"),
    Scenario(placement="shared", llm="qwen3", vision="qwen2_5_vl", audio="qwen2_audio", recompute=True),
)
IN_PAIRS = (
    Scenario(placement="shared", cp=2),
    Scenario(placement="shared", llm="gemma3", llm_pp=2, vision="clip", schedule="zero_bubble_h1"),
)
OTHERS = (
    Scenario(placement="shared", items="none"),
    Scenario(placement="shared", media_attention="own_item", packing=True),
    Scenario(placement="shared", llm="mistral", vision="pixtral"),
    Scenario(placement="shared", llm="phi3", vision="dinov2"),
    Scenario(merge="cross_attention", llm="mllama", placement="shared"),
    Scenario(placement="shared", lora=("language_model",)),
    Scenario(placement="shared", cp=2, cp_method="ring"),
    Scenario(placement="shared", cp=2, cp_method="ulysses"),
    Scenario(placement="shared", tp=2),
    Scenario(placement="shared", tp=2, sequence_parallel=True),
    Scenario(placement="shared", dp=2),
    Scenario(placement="parallel", llm_pp=2),
    Scenario(placement="parallel", encoder_cp=2),
    Scenario(placement="shared", llm="mixtral"),
)


def _check(*scenarios: Scenario) -> None:
    for scenario in scenarios:
        prepare(scenario)

    def work(rank: int, device: torch.device) -> None:
        for scenario in scenarios:
            comparison = verify(scenario, device=device)
            if comparison is not None:
                assert comparison.failures == [], scenario
                assert comparison.max_grad_rel_err <= 1e-9

    on_accelerator(work, scenarios[0].num_ranks)


@pytest.mark.parametrize("scenarios", [ALONE, IN_PAIRS], ids=["alone", "in pairs"])
def test_gradients_are_those_of_one_process(scenarios):
    _check(*scenarios)


@pytest.mark.campaign
@pytest.mark.parametrize("scenario", OTHERS, ids=str)
def test_gradients_of_other_parts_and_layouts_are_those_of_one_process(scenario):
    _check(scenario)
