"""One low-precision copy of each weight for a step: what graphs keep, and that gradients stay what they were."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from tiny_language_models import tiny_language_model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from motet.runtime.cast_weights import CastWeights
from motet.runtime.split_backward import SplitBackward, make_splittable

NUM_MICROBATCHES = 3


def autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def make_model(family: str, *, frozen: bool = False, recompute: bool = False) -> PreTrainedModel:
    torch.manual_seed(0)
    if family == "gpt2":
        sizes = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, **sizes))
    else:
        model = tiny_language_model(family).float()
    make_splittable(model)
    model.train()
    model.requires_grad_(not frozen)
    if recompute:
        model.activation_checkpointing_enable()
    return model


def forward(model: PreTrainedModel, microbatch: int) -> tuple[Tensor, Tensor]:
    """The input, whose gradient is asked for, and a loss."""
    generator = torch.Generator().manual_seed(microbatch)
    x = torch.randn(2, 8, model.config.hidden_size, generator=generator, requires_grad=True)
    with autocast():
        logits = model(inputs_embeds=x, use_cache=False).logits
    return x, logits.float().sin().sum()


@contextmanager
def kept_bytes(model: nn.Module) -> Iterator[list[int]]:
    """Of all different tensors that autograd keeps, parameters left out; one entry for what came since the last."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}
    sizes = [0]

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in own and place not in kept:
            kept[place] = tensor
            sizes[-1] += tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield sizes


def weight_bytes(model: nn.Module) -> int:
    """Of one bfloat16 copy of all matrices that linear layers multiply with."""
    return sum(
        2 * module.weight.numel()
        for module in model.modules()
        if type(module).__name__ in ("SplittableLinear", "CastingConv1D")
    )


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_later_microbatches_keep_no_weights(family: str, frozen: bool) -> None:
    def grown(casting: AbstractContextManager[object]) -> tuple[int, ...]:
        model = make_model(family, frozen=frozen)
        losses = []
        with kept_bytes(model) as sizes, casting:
            for microbatch in range(NUM_MICROBATCHES):
                losses.append(forward(model, microbatch))
                sizes.append(0)
        return tuple(sizes[:-1])

    first, *later = grown(CastWeights())
    assert weight_bytes(make_model(family)) > 0
    assert set(later) == {first - weight_bytes(make_model(family))}
    assert set(grown(nullcontext())) == {first}


def gradients(
    model: PreTrainedModel, casting: AbstractContextManager[object], run: Callable[[PreTrainedModel], list[Tensor]]
) -> dict[str, Tensor]:
    """Of inputs and parameters, after all microbatches."""
    with casting:
        inputs = run(model)
    found = {f"input {i}": x.grad for i, x in enumerate(inputs)}
    found |= {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def in_flight(model: PreTrainedModel) -> list[Tensor]:
    """All forwards, then the backwards."""
    pairs = [forward(model, microbatch) for microbatch in range(NUM_MICROBATCHES)]
    for _, loss in pairs:
        loss.backward()
    return [x for x, _ in pairs]


def in_halves(model: PreTrainedModel) -> list[Tensor]:
    splits = [SplitBackward() for _ in range(NUM_MICROBATCHES)]
    pairs = []
    for microbatch, split in enumerate(splits):
        with split:
            pairs.append(forward(model, microbatch))
    for split, (_, loss) in zip(splits, pairs, strict=True):
        split.input_half([loss], [None])
    for split in splits:
        list(split.weight_half())
    return [x for x, _ in pairs]


@pytest.mark.parametrize("run", [in_flight, in_halves])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("family", "frozen"), [("llama", False), ("llama", True), ("qwen3", False), ("gpt2", False), ("llama-tied", False)]
)
def test_gradients_are_those_of_own_copies(
    run: Callable[[PreTrainedModel], list[Tensor]], recompute: bool, family: str, frozen: bool
) -> None:
    model = make_model(family, frozen=frozen, recompute=recompute)
    expected = gradients(model, nullcontext(), run)
    model.zero_grad()
    ours = gradients(model, CastWeights(), run)
    assert ours.keys() == expected.keys()
    assert (len(expected) > NUM_MICROBATCHES) is not frozen
    for name, gradient in expected.items():
        assert torch.equal(ours[name], gradient), name


def test_forwards_without_graph_leave_no_copies_behind() -> None:
    """A copy that was made without a graph would take the weights' gradients away."""
    model = make_model("llama")
    casting = CastWeights()
    with casting, torch.no_grad():
        forward(model, 0)
    assert not casting._copies
    expected = gradients(make_model("llama"), nullcontext(), in_flight)
    for name, gradient in gradients(model, casting, in_flight).items():
        assert torch.equal(gradient, expected[name])


def test_copies_are_of_the_weights_as_they_stand() -> None:
    model, casting = make_model("llama"), CastWeights()
    with casting:
        before = forward(model, 0)[1]
        casting.clear()
        with torch.no_grad():
            model.lm_head.weight.zero_()
        assert forward(model, 0)[1] == 0 != before
