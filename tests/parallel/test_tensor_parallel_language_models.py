"""Language-model stages cut over a tensor-parallel group against the same model in one stage on one process."""

import copy
from typing import Any

import pytest
import torch
from distributed import run_distributed
from recomputing import recomputing
from sampling import in_campaigns
from torch import Tensor
from tp_cases import CASES, Case
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from motet.assignment.sample import Sample, Segment
from motet.errors import UserError
from motet.families.discovery.language_model_parts import num_causal_layers
from motet.families.tiny import tiny_config
from motet.models.materialize import float64_throughout
from motet.models.stages.language_model import LanguageModelStage
from motet.models.stages.stage import StageInput
from motet.parallel.tensor.tensor_collectives import gather_full
from motet.parallel.tensor.tensor_parallel import TensorParallel, apply_tensor_parallel, tp_reduce_gradients
from motet.plan import LayerRange
from motet.runtime.assembly import make_stage

LANGUAGE_MODELS = [case for case in CASES if hasattr(case.model(), "lm_head")]
NUM_IMAGE_TOKENS = (3, 0, 5)
"""Of each sample; the second has no image."""


def batch(case: Case, *, with_loss: bool) -> tuple[list[Sample], list[dict[str, Tensor]]]:
    merged = case.family != "mllama_text_model"  # there the image enters by cross-attention instead
    generator = torch.Generator().manual_seed(0)
    samples, features = [], []
    for index, num_image_tokens in enumerate(NUM_IMAGE_TOKENS):
        image = (Segment(num_image_tokens, source="vision"),) if num_image_tokens and merged else ()
        layouts = {"lm": (Segment(2), *image, Segment(3 - index))}
        if num_image_tokens:
            layouts["vision"] = (Segment(num_image_tokens),)
        samples.append(Sample(str(index), layouts))
        num_tokens = samples[-1].num_tokens("lm")
        ids, labels = torch.randint(0, 48, (2, num_tokens), generator=generator)
        labels[: 2 if with_loss else None] = -100
        features.append({"input_ids": ids, "labels": labels})
    return samples, features


def run(stages: list[LanguageModelStage], case: Case, *, with_loss: bool) -> tuple[Tensor, Tensor]:
    """The loss, and the gradient that goes back to the encoder."""
    samples, features = batch(case, with_loss=with_loss)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(sum(NUM_IMAGE_TOKENS), 32, generator=generator, dtype=torch.float64).requires_grad_()
    hidden = loss = None
    for stage in stages:
        incoming = {"vision": images} if stage.is_first or stage.cross_attends else {}
        hidden, loss = stage(StageInput(samples, features, hidden, incoming))
    assert loss is not None
    loss.backward()
    assert images.grad is not None
    return loss.detach(), images.grad


def compare(rank: int, packing: bool, recompute: bool, with_loss: bool, in_turn: bool = False) -> None:
    """`in_turn`: every second model with sequence parallelism and the others without, not all in both ways."""
    with float64_throughout():
        _compare(rank, packing, recompute, with_loss, in_turn)


def _compare(rank: int, packing: bool, recompute: bool, with_loss: bool, in_turn: bool) -> None:
    for i, case in enumerate(LANGUAGE_MODELS):
        num_layers = num_causal_layers(case.model())
        whole = LanguageModelStage("lm", case.model(), (0, num_layers), packing=packing)
        expected, expected_images = run([whole], case, with_loss=with_loss)
        wanted = {whole.canonical_name(name): p.grad for name, p in whole.named_parameters() if p.grad is not None}
        for sequence_parallel in (i % 2 == 0,) if in_turn else (False, True):
            tp = TensorParallel(None, rank, 2, sequence_parallel)
            stages = [
                LanguageModelStage("lm", case.model(), layers, packing=packing)
                for layers in ((0, 1), (1, 2), (2, num_layers))
            ]
            layouts = [apply_tensor_parallel(recomputing(stage, recompute), tp) for stage in stages]
            loss, images = run(stages, case, with_loss=with_loss)
            found: dict[str, Any] = {}
            for stage, layout in zip(stages, layouts, strict=True):
                tp_reduce_gradients(stage)
                for name, parameter in stage.named_parameters():
                    if parameter.grad is not None:
                        gradient = gather_full(parameter.grad, layout.shards.get(name), tp)
                        canonical = stage.canonical_name(name)  # tied ones are on two stages: their sum counts
                        found[canonical] = found.get(canonical, 0) + gradient
            tolerance = 1e-11
            torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(images, expected_images, rtol=tolerance, atol=tolerance)
            assert found.keys() == wanted.keys()
            for name, gradient in wanted.items():
                torch.testing.assert_close(
                    found[name],
                    gradient,
                    rtol=tolerance,
                    atol=tolerance,
                    msg=lambda m, at=(case.family, name): f"{at} {m}",
                )


@pytest.mark.parametrize(
    ("packing", "recompute", "in_turn"),
    [(True, False, True), *in_campaigns((p, r, False) for p in (False, True) for r in (False, True))],
)
def test_stages_equal_one_process(packing: bool, recompute: bool, in_turn: bool) -> None:
    run_distributed(compare, 2, packing, recompute, True, in_turn)


@pytest.mark.campaign
def test_microbatch_without_loss_tokens() -> None:
    run_distributed(compare, 2, True, False, False)


def test_stages_that_share_keys_and_values_are_refused() -> None:
    """Gemma 4's last blocks read those of blocks before them, and each rank has made its own heads'."""
    model = AutoModelForCausalLM.from_config(tiny_config(CONFIG_MAPPING["gemma4_text"]()))

    class Node:
        name, family, adapters = "lm", "gemma4_text", None
        trained_parts = frozenset({"module"})

        def make_stage(self, layers: LayerRange, **options: Any) -> LanguageModelStage:
            return LanguageModelStage("lm", copy.deepcopy(model), layers, **options)

    node: Any = Node()
    with pytest.raises(UserError, match=r"stages of lm read keys and values .* use tp 1 or one stage"):
        make_stage(node, (0, 3), TensorParallel(None, 0, 2), torch.device("cpu"), packing=False, recompute=None)
    assert not node.make_stage((0, 6)).exchanges_heads
    case = next(case for case in CASES if case.family == "llama")
    assert not LanguageModelStage("lm", case.model(), (0, 2)).exchanges_heads
