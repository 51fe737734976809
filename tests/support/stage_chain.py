"""Runs the stages of a language model one after the other in one process, as the engine would over several."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from motet.assignment.sample import IGNORED_LABEL, Sample, Segment
from motet.families.discovery.language_model_parts import causal_paths
from motet.families.language_models import is_tied
from motet.models.stages.language_model import LanguageModelStage
from motet.models.stages.stage import StageInput


@dataclass(frozen=True)
class LossAndGradients:
    loss: Tensor
    """The sum of the losses of all tokens with a label."""
    gradients: Mapping[str, Tensor]
    """Gradients by name in the transformers model."""


def text_samples(token_ids: Sequence[Tensor], name: str = "language_model") -> list[Sample]:
    """Metadata of samples of text, in which every token but the first is predicted."""
    return [Sample(str(i), {name: (Segment(len(ids)),)}, {name: len(ids) - 1}) for i, ids in enumerate(token_ids)]


def run_chain(
    stages: Sequence[LanguageModelStage], samples: Sequence[Sample], features: Sequence[Mapping[str, Tensor]]
) -> LossAndGradients:
    """One microbatch, forward and backward; the graph is cut between stages.

    Args:
        features: `input_ids` and `labels` of each sample.
    """
    entered: list[Tensor | None] = []
    made: list[Tensor | None] = []
    loss: Tensor | None = None
    carried: Tensor | None = None
    for stage in stages:
        entered.append(None if carried is None else carried.detach().requires_grad_())
        if carried is not None:
            assert tuple(carried.shape) == stage.input_shape(samples)
        read = features if stage.needs_features else [{}] * len(samples)
        carried, loss = stage(StageInput(samples, read, entered[-1]))
        made.append(carried)
    assert loss is not None
    loss.backward()
    for into, output in zip(reversed(entered[1:]), reversed(made[:-1]), strict=True):
        if output is not None and into is not None and into.grad is not None:
            output.backward(into.grad)
    gradients: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                canonical = stage.canonical_name(name).removeprefix("module.")
                gradients[canonical] = gradients.get(canonical, 0) + parameter.grad
    return LossAndGradients(loss.detach(), gradients)


def run_whole(model: Any, features: Sequence[Mapping[str, Tensor]]) -> LossAndGradients:
    """The same of the plain transformers model, sample by sample."""
    total: Any = 0.0
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    for sample in features:
        logits = model(input_ids=sample["input_ids"][None], **options).logits[0]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        total = total + cross_entropy(wide[:-1], sample["labels"][1:], ignore_index=IGNORED_LABEL, reduction="sum")
    total.backward()
    paths = causal_paths(model)
    tied = {f"{paths.output}.weight": f"{paths.words}.weight"} if is_tied(model) else {}
    gradients = {tied.get(name, name): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return LossAndGradients(total.detach(), gradients)


def largest_difference(ours: LossAndGradients, expected: LossAndGradients) -> float:
    """The largest relative difference of the loss or of a parameter's gradient, whose floor is a millionth of the
    largest gradient; infinite where one of the two lacks a gradient."""
    difference = float((ours.loss - expected.loss).abs() / expected.loss.abs())
    floor = 1e-6 * max(float(gradient.norm()) for gradient in expected.gradients.values())
    for name in ours.gradients.keys() | expected.gradients.keys():
        if name not in ours.gradients or name not in expected.gradients:
            return float("inf")
        own, other = ours.gradients[name], expected.gradients[name]
        difference = max(difference, float((own - other).norm() / max(float(other.norm()), floor)))
    return difference
