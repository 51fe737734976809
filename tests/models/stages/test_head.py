"""The head of the last stage: forwards that are left before it equal those that are not."""

import copy
from typing import Any

import pytest
import torch
from tiny_language_models import MIXTURES, SIZES, TINY
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import Cohere2Config, Cohere2ForCausalLM, Gemma2Config, Gemma2ForCausalLM, LlamaConfig
from transformers import LlamaForCausalLM as Llama
from transformers.modeling_outputs import CausalLMOutputWithPast

from motet.assignment.sample import Sample, Segment
from motet.models.materialize import float64_throughout
from motet.models.stages.language_model import LanguageModelStage
from motet.models.stages.stage import StageInput

SAMPLES = [Sample("short", {"llm": (Segment(5),)}), Sample("long", {"llm": (Segment(9),)})]


class Masking(Llama):
    """Writes into the head's output (as Chameleon does)."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits[..., 3] = -5.0
        return output


class Scaling(Llama):
    """Scales the head's output in evaluation only."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if not self.training:
            output.logits = output.logits * 0.5
        return output


class Wide(Llama):
    """Computes logits outside of autocast."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self.model(*args, **{key: value for key, value in kwargs.items() if key != "logits_to_keep"})[0]
        with torch.autocast("cpu", enabled=False):
            return CausalLMOutputWithPast(logits=self.lm_head(hidden.to(self.lm_head.weight.dtype)))


MODELS = {
    **{family: (TINY | MIXTURES)[family] for family in ("llama", "llama-tied", "gemma3", "mixtral")},
    "cohere2": (Cohere2ForCausalLM, Cohere2Config, {"logit_scale": 0.3, "head_dim": 8}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"final_logit_softcapping": 2.0, "head_dim": 8}),
    "masking": (Masking, LlamaConfig, {}),
    "scaling": (Scaling, LlamaConfig, {}),
}
RETURN_OUTPUT = {"llama", "llama-tied", "gemma3", "mixtral", "scaling"}
"""Models that, in training, return the head's output unchanged."""


@pytest.fixture(autouse=True)
def _float64():
    with float64_throughout():
        yield


def features_of(samples: list[Sample], num_without_label: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    features = []
    for sample in samples:
        ids = torch.randint(3, SIZES["vocab_size"], (sample.num_tokens("llm"),), generator=generator)
        labels = ids.clone()
        labels[:num_without_label] = -100
        features.append({"input_ids": ids, "labels": labels})
    return features


def count_forwards(model: nn.Module) -> list[object]:
    """A list that grows with each forward of the model that comes to its end."""
    ended, forward = [], model.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        ended.append(output)
        return output

    model.forward = counted
    return ended


@pytest.mark.parametrize("name", MODELS)
def test_later_forwards_equal_the_first(name: str) -> None:
    model_class, config_class, values = MODELS[name]
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES, **values)).double().train()
    stage = LanguageModelStage("llm", copy.deepcopy(model), (3, 6))
    ended = count_forwards(stage.module)
    hidden = torch.randn(stage.input_shape(SAMPLES), dtype=torch.float64)
    features = features_of(SAMPLES, num_without_label=3)
    results = []
    for _ in range(3):
        stage.zero_grad()
        entering = hidden.clone().requires_grad_()
        loss = stage(StageInput(SAMPLES, features, entering)).loss
        loss.backward()
        results.append((loss.detach(), entering.grad, *(p.grad.clone() for p in stage.parameters())))
    assert len(ended) == (1 if name in RETURN_OUTPUT else 3)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_the_model_in_training_and_in_evaluation(name: str) -> None:
    model_class, config_class, values = MODELS[name]
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES, **values)).double()
    stage = LanguageModelStage("llm", copy.deepcopy(model), (0, 6))
    samples, features = SAMPLES[:1], features_of(SAMPLES[:1], num_without_label=0)
    for mode in (True, True, False, False, True):
        model.train(mode)
        stage.train(mode)
        logits, _ = stage.forward_whole(StageInput(samples, features), has_labels=False)
        expected = model(input_ids=features[0]["input_ids"][None], use_cache=False).logits
        torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)


def test_hooks_of_the_head_run_once_in_each_forward() -> None:
    torch.manual_seed(0)
    stage = LanguageModelStage("llm", Llama(LlamaConfig(**SIZES)).double(), (0, 6))
    seen: list[torch.Size] = []
    stage.module.lm_head.register_forward_hook(lambda head, args, output: seen.append(output.shape))
    for _ in range(3):
        stage(StageInput(SAMPLES, features_of(SAMPLES, num_without_label=3)))
    assert seen == [torch.Size([1, 8, SIZES["vocab_size"]])] * 3


def test_hooks_of_the_whole_model_run_in_each_forward() -> None:
    torch.manual_seed(0)
    stage = LanguageModelStage("llm", Llama(LlamaConfig(**SIZES)).double(), (0, 6))
    inputs = StageInput(SAMPLES, features_of(SAMPLES, num_without_label=3))
    (plain, again) = (stage(inputs).loss for _ in range(2))
    assert torch.equal(plain, again)

    def halve(module: nn.Module, args: Any, output: Any) -> None:
        output.logits = output.logits * 0.5

    hook = stage.module.register_forward_hook(halve)
    assert not torch.equal(stage(inputs).loss, plain)
    hook.remove()
    assert torch.equal(stage(inputs).loss, plain)
    seen: list[nn.Module] = []
    hook = register_module_forward_hook(lambda module, *_: seen.append(module))
    stage(inputs)
    hook.remove()
    assert stage.module in seen


def test_a_model_that_leaves_autocast_around_its_head() -> None:
    torch.manual_seed(0)
    stage = LanguageModelStage("llm", Wide(LlamaConfig(**SIZES)), (0, 6))
    inputs = StageInput(SAMPLES[:1], features_of(SAMPLES[:1], num_without_label=0))
    for enabled in (True, True, False, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            logits, _ = stage.forward_whole(inputs, has_labels=False)
        assert logits.dtype == stage.module.lm_head.weight.dtype


def test_inference_mode() -> None:
    torch.manual_seed(0)
    stage = LanguageModelStage("llm", Llama(LlamaConfig(**SIZES)).double(), (0, 6))
    inputs = StageInput(SAMPLES, features_of(SAMPLES, num_without_label=3))
    with torch.inference_mode():
        found = [stage(inputs).loss for _ in range(2)]
    assert all(torch.equal(loss, stage(inputs).loss) for loss in found for _ in range(2))


def test_a_forward_after_one_that_failed() -> None:
    torch.manual_seed(0)
    stage = LanguageModelStage("llm", Llama(LlamaConfig(**SIZES)).double(), (0, 6))
    inputs = StageInput(SAMPLES, features_of(SAMPLES, num_without_label=3))

    def fail(*_: object) -> None:
        raise RuntimeError("failed")

    hook = stage.module.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="failed"):
        stage(inputs)
    hook.remove()
    losses = [stage(inputs).loss for _ in range(3)]
    assert torch.equal(losses[0], losses[2])
