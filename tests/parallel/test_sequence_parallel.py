from typing import Any

import pytest
from distributed import run_distributed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from tp_cases import CASES, VISION, Case, projected, random, run_text
from tp_compare import largest_error
from transformers import SiglipVisionConfig, SiglipVisionModel

from motet.parallel.tensor.tensor_collectives import TensorParallel
from motet.parallel.tensor.tensor_parallel import apply_tensor_parallel


class Blocks(nn.Module):
    """SigLIP's transformer layers, called one by one as a stage calls them, each under a checkpoint of the stage's."""

    def __init__(self, *, use_reentrant: bool = False) -> None:
        super().__init__()
        self.encoder: Any = SiglipVisionModel(SiglipVisionConfig(**VISION)).encoder
        self.use_reentrant = use_reentrant
        self.seen: list[int] = []
        self.encoder.layers[0].layer_norm2.register_forward_hook(lambda m, args, out: self.seen.append(out.shape[-2]))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.encoder.layers:
            hidden = checkpoint(layer, hidden, None, use_reentrant=self.use_reentrant)
        return hidden


def interleaved(model: Any, case: Case) -> Tensor:
    """Two microbatches, forward, forward, backward, backward: as a pipeline does.

    5 and 6 tokens are shards of 3 on two ranks: the shape does not tell them apart.
    """
    first = projected(model(random(2, 5, 32, seed=1, like=model)), model)
    second = projected(model(random(1, 6, 32, seed=2, like=model)), model)
    first.backward()
    second.backward()
    return (first + second).detach()


CASE = Case("siglip_vision_model", Blocks, lambda model: interleaved(model, CASE))


def test_recomputation_knows_its_own_microbatch() -> None:
    def compare(rank: int) -> None:
        error, where = largest_error(CASE, TensorParallel(None, rank, 2, True), step=interleaved)
        assert error <= 1e-11, (where, error)  # The gradient of k_proj.bias is all rounding.

    run_distributed(compare, 2)


def test_norms_see_a_share_of_the_sequence() -> None:
    def run(rank: int, sequence_parallel: bool) -> list[int]:
        model: Any = CASE.model()
        apply_tensor_parallel(model, TensorParallel(None, rank, 2, sequence_parallel))
        interleaved(model, CASE)
        return model.seen

    assert run_distributed(run, 2, False) == [[5, 6, 5, 6]] * 2  # forward, forward, recomputed twice
    assert run_distributed(run, 2, True) == [[3, 3, 3, 3]] * 2


def test_activation_that_lost_its_length_is_refused() -> None:
    def run(rank: int) -> None:
        model: Any = CASE.model()
        apply_tensor_parallel(model, TensorParallel(None, rank, 2, True))
        hidden = model.encoder.layers[0](random(1, 5, 32, seed=1, like=model), None)
        with pytest.raises(AssertionError, match="lost its sequence length"):
            model.encoder.layers[1](hidden * 1.0, None)

    run_distributed(run, 2)


def test_activation_that_was_written_to_is_refused() -> None:
    """In place it keeps its length, but a share was added to it that no gradient is summed for."""

    def run(rank: int) -> None:
        model: Any = CASE.model()
        apply_tensor_parallel(model, TensorParallel(None, rank, 2, True))
        hidden = model.encoder.layers[0](random(1, 5, 32, seed=1, like=model), None)
        hidden += 1.0
        with pytest.raises(AssertionError, match="wrote into the activation between two layers"):
            model.encoder.layers[1](hidden, None)

    run_distributed(run, 2)


def test_reentrant_checkpoints_are_refused() -> None:
    """They detach what they are given; a wrong result would be worse than none."""

    def run(rank: int) -> None:
        model: Any = Blocks(use_reentrant=True).double()
        apply_tensor_parallel(model, TensorParallel(None, rank, 2, True))
        hidden = random(1, 5, 32, seed=1, like=model).requires_grad_()
        with pytest.raises(AssertionError, match="lost its sequence length"):
            projected(model(hidden), model).backward()

    run_distributed(run, 2)


def test_text_without_images_leaves_out_the_first_and_last_layers() -> None:
    """Mllama skips cross-attention layers then, those at a stage's ends too: nobody may rely on them to scatter."""

    def run(rank: int) -> None:
        case = next(case for case in CASES if case.family == "mllama_text_model")
        model: Any = case.model()
        apply_tensor_parallel(model, TensorParallel(None, rank, 2, True))
        lengths: list[int] = []
        model.model.norm.register_forward_hook(lambda module, args, out: lengths.append(out.shape[-2]))
        case.run(model)
        run_text(model)
        assert lengths == [5, 5]

    run_distributed(run, 2)


@pytest.mark.parametrize("family", ["llama", "mllama_text_model"])
def test_transformers_own_recomputation_knows_its_microbatch(family: str) -> None:
    """It recomputes what is inside a layer, so no hook of the layer runs again. 5 and 8 tokens: the shards differ."""

    def step(model: Any, case: Case) -> Tensor:
        model.gradient_checkpointing_enable()
        model.train()
        first, second = run_text(model, num_tokens=5), run_text(model, num_tokens=8)
        first.backward()
        second.backward()
        return (first + second).detach()

    def compare(rank: int) -> None:
        case = next(case for case in CASES if case.family == family)
        error, where = largest_error(case, TensorParallel(None, rank, 2, True), step=step)
        assert error <= 1e-11, (where, error)  # The gradient of k_proj.bias is all rounding.

    run_distributed(compare, 2)
