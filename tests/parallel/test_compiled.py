"""Compiled blocks: the gradients of plain ones, and no compilation for each length."""

import copy
from dataclasses import replace

import pytest
import torch
from one_process import check
from recomputing import recomputing
from sampling import in_campaigns
from scenario import Scenario
from tiny_language_models import tiny_language_model
from torch import Tensor
from torch._dynamo.utils import counters

from motet.assignment.sample import Sample, Segment
from motet.errors import UserError
from motet.models.stages.language_model import LanguageModelStage
from motet.models.stages.stage import StageInput
from motet.parallel.activations import compile_blocks
from motet.runtime.assembly import check_compiled

BLOCKS = (1, 5)
"""Layers."""


def run(stage: LanguageModelStage, lengths: tuple[int, ...]) -> list[Tensor]:
    samples = [Sample(str(i), {"m": (Segment(length),)}) for i, length in enumerate(lengths)]
    torch.manual_seed(0)
    hidden = torch.randn(stage.input_shape(samples), dtype=torch.float64, requires_grad=True)
    for parameter in stage.parameters():
        parameter.grad = None
    output = stage(StageInput(samples, [{} for _ in samples], hidden)).hidden
    assert output is not None
    output.sin().sum().backward()
    found = [output.detach(), hidden.grad, *(parameter.grad for parameter in stage.parameters())]
    return [tensor for tensor in found if tensor is not None]


@pytest.mark.parametrize("recompute", [True, *in_campaigns([False, "attention", "offload", "every_2"])])
def test_lengths_compile_nothing_anew(recompute: bool | str) -> None:
    """Several padded rows: one row, or rows of one length, which have no mask, would be other cases."""
    torch._dynamo.reset()
    counters.clear()
    model = tiny_language_model("llama")
    plain = LanguageModelStage("m", copy.deepcopy(model), BLOCKS)
    compiled = LanguageModelStage("m", model, BLOCKS)
    compile_blocks(compiled, "aot_eager")
    recomputing(compiled, recompute)
    found = []
    for lengths in ((7, 12), (9, 4, 16), (21, 3), (5, 11, 2, 8)):
        for ours, expected in zip(run(compiled, lengths), run(plain, lengths), strict=True):
            assert torch.allclose(ours, expected, rtol=1e-11, atol=1e-13)
        found.append(counters["stats"]["unique_graphs"])
    assert found == [1] * 4, found
    assert not counters["graph_break"], counters["graph_break"]


VERIFIED = {
    "pipeline": Scenario(llm_pp=2, placement="colocated", recompute=True),
    "packed": Scenario(llm="qwen3", placement="replicated", packing=True, frozen="audio"),
    "adapters": Scenario(llm="phi3", vision="clip", lora=("language_model",), placement="replicated"),
    "bfloat16": Scenario(placement="replicated", dtype="bfloat16", recompute="every_2"),
    "two windows": Scenario(llm="gemma3", vision="pixtral", audio="qwen2_audio", placement="replicated"),
}


@pytest.mark.campaign
@pytest.mark.parametrize("name", VERIFIED)
def test_equals_one_process(name: str) -> None:
    torch._dynamo.reset()
    check(replace(VERIFIED[name], compiles=True))


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        (Scenario(llm_pp=2, schedule="zero_bubble_h1"), "cannot be compiled under zero_bubble_h1"),
        (Scenario(tp=2), "is not supported with tp, which vision has"),
        (Scenario(cp=2), "is not supported with cp, which language_model has"),
        (Scenario(dp=2, fully_sharded=True), "is not supported with fully_sharded, which"),
    ],
)
def test_what_is_not_shown_equal_is_refused(scenario: Scenario, message: str) -> None:
    config = scenario.config()
    with pytest.raises(UserError, match=message):
        check_compiled(config, scenario.plan(config))
