"""One low-precision copy of each weight for a step: what graphs keep, and that gradients stay what they were."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from random import Random
from unittest.mock import patch

import pytest
import torch
from distributed import run_distributed
from one_process import check_drawn
from scenario import FROZEN, Scenario, ScenarioBatch
from tiny_language_models import tiny_language_model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from motet.parallel.split_backward import CastWeights, SplitBackward, make_splittable
from motet.runtime.assembly import build_engine, build_optimizer
from motet.runtime.stage_runner import StageRunner

NUM_MICROBATCHES = 3
NUM_DRAWS = int(os.environ.get("MOTET_CAST_DRAWS", "40"))
SEED = os.environ.get("MOTET_CAST_SEED", "3")


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


def trained(scenario: Scenario) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses of two updates, the second one's gradients, and how often any weight was copied at most in a step."""
    config = scenario.config()
    engine = build_engine(config, scenario.plan(config), torch.device("cpu"))
    optimizer = build_optimizer(config, engine.model)
    batch = ScenarioBatch(scenario, config)
    made: list[Counter[int]] = []
    real = CastWeights.copy

    def copy(self: CastWeights, weight: Tensor, dtype: torch.dtype) -> Tensor:
        made[-1][id(weight)] += weight not in self._copies
        return real(self, weight, dtype)

    losses = []
    with patch.object(CastWeights, "copy", copy):
        for step in range(2):
            made.append(Counter())
            engine.model.zero_gradients()
            losses.append(engine.run(batch).loss)
            assert not any(runner._cast_weights._copies for runner in engine.executor.runners.values())
            optimizer.step(step)
    found = {p.name: p.parameter.grad for p in engine.model.parameters if p.parameter.grad is not None}
    return losses, found, max((number for counts in made for number in counts.values()), default=0)


def assert_same_bits(scenario: Scenario) -> None:
    """As with copies of its own for each microbatch."""
    shared = run_distributed(lambda rank: trained(scenario), scenario.num_ranks)
    with patch.object(StageRunner, "_casting", lambda self: nullcontext()):
        own = run_distributed(lambda rank: trained(scenario), scenario.num_ranks)
    for (losses, found, most), (expected_losses, expected, none) in zip(shared, own, strict=True):
        assert losses == expected_losses
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert torch.equal(found[name], gradient), name
        assert none == 0
        assert most <= 1
    assert max(most for *_, most in shared) == 1


CASES = {
    "pipeline": Scenario(dtype="bfloat16", llm_pp=2, num_microbatches=4, frozen="audio", items="half"),
    "halves, recomputed, frozen but for projectors": Scenario(
        dtype="bfloat16",
        llm="llama-tied",
        placement="colocated",
        llm_pp=2,
        num_microbatches=3,
        schedule="zero_bubble_h1",
        recompute=True,
        frozen="all but projectors",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same_bit_by_bit(name: str) -> None:
    assert_same_bits(CASES[name])


def draw(rng: Random) -> Scenario:
    tp = rng.choice([1, 1, 2])
    return Scenario(
        dtype="bfloat16",
        llm=rng.choice(["llama", "llama-tied", "qwen3", "gemma3", "phi3"]),
        vision=rng.choice(["siglip", "clip", "dinov2"]),
        placement=rng.choice(["colocated", "replicated"]) if tp == 2 else rng.choice(["colocated", "parallel"]),
        tp=tp,
        sequence_parallel=tp == 2 and rng.random() < 0.5,
        llm_pp=rng.choice([1, 2]) if tp == 1 else 1,
        num_microbatches=rng.choice([1, 2, 4]),
        frozen=rng.choice(sorted(FROZEN)),
        items=rng.choice(["mixed", "half"]),
        packing=rng.random() < 0.3,
        recompute=rng.random() < 0.4,
        schedule=rng.choice(["1f1b", "gpipe", "zero_bubble_h1"]),
    )


@pytest.mark.campaign
def test_drawn_layouts() -> None:
    print(f"MOTET_CAST_SEED={SEED} MOTET_CAST_DRAWS={NUM_DRAWS}")
    check_drawn(draw, assert_same_bits, SEED, NUM_DRAWS)
