"""The two halves of a backward: equal to the whole, the same products and none twice, and what is kept in between."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from tiny_language_models import TINY, tiny_language_model
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from motet.parallel.split_backward import SplitBackward, linear, make_splittable

TOKENS = torch.arange(5, 29).reshape(2, 12) % 40


def model_of(family: str = "llama", *, recompute: bool = False) -> nn.Module:
    model = tiny_language_model(family)
    make_splittable(model)
    if recompute:
        model.gradient_checkpointing_enable()
        model.train()
    return model


def loss_of(model: nn.Module, embeddings: Tensor | None = None) -> Tensor:
    inputs = {"input_ids": TOKENS} if embeddings is None else {"inputs_embeds": embeddings}
    return model(**inputs, use_cache=False).logits.sin().sum()


def take_gradients(model: nn.Module) -> dict[str, Tensor]:
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients


def forward_split(forward: Callable[[], Tensor]) -> tuple[Tensor, SplitBackward]:
    split = SplitBackward()
    with split:
        loss = forward()
    return loss, split


def split_gradients(model: nn.Module, forward: Callable[[], Tensor]) -> dict[str, Tensor]:
    loss, split = forward_split(forward)
    split.input_half([loss], [None])
    list(split.weight_half())
    return take_gradients(model)


def whole_gradients(model: nn.Module, forward: Callable[[], Tensor]) -> dict[str, Tensor]:
    forward().backward()
    return take_gradients(model)


def assert_same(model: nn.Module, forward: Callable[[], Tensor], rtol: float = 1e-12) -> None:
    expected = whole_gradients(model, forward)
    torch.testing.assert_close(split_gradients(model, forward), expected, rtol=rtol, atol=rtol * 1e-3)
    assert expected


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", [family for family in TINY if family != "mllama"])
def test_language_models_get_the_gradients_of_a_whole_backward(family: str, recompute: bool) -> None:
    model = model_of(family, recompute=recompute)
    assert_same(model, lambda: loss_of(model))
    embeddings = torch.randn(2, 12, model.config.hidden_size, dtype=torch.float64, requires_grad=True)
    loss_of(model, embeddings).backward()
    expected, embeddings.grad = embeddings.grad, None
    split_gradients(model, lambda: loss_of(model, embeddings))
    torch.testing.assert_close(embeddings.grad, expected, rtol=1e-12, atol=1e-15)


def test_what_is_frozen_stays_without_gradient() -> None:
    model = model_of("phi3")
    model.model.layers[1].requires_grad_(False)
    model.model.layers[2].self_attn.o_proj.requires_grad_(False)
    assert_same(model, lambda: loss_of(model))
    for frozen in ("weight", "bias"):
        model = nn.Sequential(nn.Linear(3, 2, dtype=torch.float64))
        make_splittable(model)
        model[0].get_parameter(frozen).requires_grad_(False)
        assert_same(model, lambda model=model: model(torch.ones(5, 3, dtype=torch.float64)).sin().sum())


def test_a_weight_used_twice_and_in_other_ways_gets_the_sum() -> None:
    weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
    model = nn.ParameterList([weight])
    x = torch.randn(3, 4, dtype=torch.float64)
    assert_same(model, lambda: (linear(linear(x, weight).tanh(), weight) @ weight + linear(x[0], weight)).sin().sum())


def test_autocast_gives_the_same_within_its_rounding() -> None:
    """A weight that is used by another function too, through the cast copy that autocast keeps, loses nothing there."""
    model = model_of().float()
    width = model.config.hidden_size

    def forward() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model)
            other = torch.matmul(torch.ones(1, width), model.lm_head.weight.T)
        return loss.float() + other.float().sum()

    expected = whole_gradients(model, forward)
    split = split_gradients(model, forward)
    assert split.keys() == expected.keys()
    for name, gradient in split.items():
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, expected[name], rtol=0.03, atol=0.03 * float(expected[name].abs().max()))


class Products(TorchDispatchMode):
    """Counts matrix products by their sizes, whichever is whose transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            a, b = args[-2:]
            self.count[tuple(sorted((*a.shape, b.shape[-1])))] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("with_input_gradient", [True, False])
def test_no_product_is_made_twice(with_input_gradient: bool) -> None:
    """The weight half has one product for each linear layer and nothing else; together they have the whole's."""
    model = model_of()
    num_linears = sum(isinstance(module, nn.Linear) for module in model.modules())
    embeddings = torch.randn(2, 12, model.config.hidden_size, dtype=torch.float64, requires_grad=with_input_gradient)
    with Products() as whole, FlopCounterMode(display=False) as whole_flops:
        loss = loss_of(model, embeddings)
        whole.count.clear()
        before = whole_flops.get_total_flops()
        loss.backward()
    backward_flops = whole_flops.get_total_flops() - before
    model.zero_grad()
    loss, split = forward_split(lambda: loss_of(model, embeddings))
    with Products() as inputs, FlopCounterMode(display=False) as input_flops:
        split.input_half([loss], [None])
    with Products() as weights, FlopCounterMode(display=False) as weight_flops:
        list(split.weight_half())
    assert inputs.count + weights.count == whole.count
    assert weights.count.total() == num_linears
    expected = 2 * TOKENS.numel() * sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    assert weight_flops.get_total_flops() == expected
    assert input_flops.get_total_flops() == backward_flops - expected


def test_recomputation_is_done_once_and_in_the_input_half() -> None:
    model = model_of(recompute=True)
    calls: list[int] = []
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(lambda *_, i=i: calls.append(i))
    loss, split = forward_split(lambda: loss_of(model))
    assert calls == [0, 1, 2, 3]
    split.input_half([loss], [None])
    assert calls == [0, 1, 2, 3, 3, 2, 1, 0]
    list(split.weight_half())
    assert len(calls) == 8


class Allocations(TorchDispatchMode):
    """The storages made in its block, those of `existing` tensors and their views left out."""

    def __init__(self, existing: Iterable[Tensor]) -> None:
        super().__init__()
        self.existing = {tensor.untyped_storage().data_ptr() for tensor in existing}
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.existing:
                storage = tensor.untyped_storage()
                self.storages[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        return result

    @property
    def alive(self) -> int:
        """In bytes."""
        return sum(size for storage, size in self.storages.values() if not storage.expired())


def test_between_the_halves_only_inputs_and_output_gradients_of_linears_are_kept() -> None:
    """Inputs once, where several layers share them. After the weight half there is nothing but gradients."""
    model = model_of()
    embeddings = torch.randn(2, 12, model.config.hidden_size, dtype=torch.float64, requires_grad=True)
    inputs, outputs = linear_sizes(model, embeddings)
    with Allocations([embeddings, *model.parameters()]) as made:
        loss, split = forward_split(lambda: loss_of(model, embeddings))
        after_forward = made.alive
        split.input_half([loss], [None])
        del loss
        after_input_half = made.alive
        list(split.weight_half())
        after_weight_half = made.alive
    gradients = {name: p.grad.nbytes for name, p in model.named_parameters() if p.grad is not None}
    assert embeddings.grad is not None
    already_there = embeddings.grad.nbytes + sum(size for name, size in gradients.items() if "norm" in name)
    assert after_input_half == already_there + inputs + outputs
    assert after_input_half - already_there < after_forward
    assert after_weight_half == embeddings.grad.nbytes + sum(gradients.values())


def linear_sizes(model: nn.Module, embeddings: Tensor) -> tuple[int, int]:
    """Bytes of all different inputs and of all outputs of linear layers."""
    inputs: dict[int, Tensor] = {}
    outputs: list[Tensor] = []

    def note(_: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        inputs[args[0].data_ptr()] = args[0]
        outputs.append(output)

    hooks = [m.register_forward_hook(note) for m in model.modules() if isinstance(m, nn.Linear)]
    loss_of(model, embeddings)
    for hook in hooks:
        hook.remove()
    return sum(x.nbytes for x in inputs.values()), sum(y.nbytes for y in outputs)


def test_parameters_are_told_when_they_are_final_the_last_layers_first() -> None:
    layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    make_splittable(layers)
    loss, split = forward_split(lambda: layers(torch.ones(2, 3)).sum())
    split.input_half([loss], [None])
    assert split.parameters == set(layers.parameters())
    told = []
    for parameter in split.weight_half():
        assert parameter.grad is not None
        told.append(parameter)
    assert [id(p) for p in told] == [id(p) for i in (2, 1, 0) for p in (layers[i].weight, layers[i].bias)]
    assert not split.parameters


def test_a_parameter_that_is_used_twice_is_told_once_it_has_both() -> None:
    shared, other = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    layers = nn.Sequential(shared, other, shared)
    make_splittable(layers)
    expected = whole_gradients(layers, lambda: layers(torch.ones(1, 2)).sum())
    loss, split = forward_split(lambda: layers(torch.ones(1, 2)).sum())
    split.input_half([loss], [None])
    told = [parameter for parameter in split.weight_half() if parameter is not other.weight]
    assert [id(parameter) for parameter in told] == [id(shared.weight), id(shared.bias)]
    loss, split = forward_split(lambda: layers(torch.ones(1, 2)).sum())
    layers.zero_grad()
    split.input_half([loss], [None])
    for parameter in split.weight_half():
        if parameter is shared.weight:
            torch.testing.assert_close(parameter.grad, expected["0.weight"])


def test_contexts_may_stand_in_each_other() -> None:
    weight = nn.Parameter(torch.ones(1, 1))
    outer, inner = SplitBackward(), SplitBackward()
    with outer:
        with inner:
            linear(torch.ones(1), weight).sum()
        loss = linear(torch.ones(1), weight).sum()
    assert linear(torch.ones(1), weight).grad_fn.name() != loss.grad_fn.next_functions[0][0].name()
    outer.input_half([loss], [None])
    assert (len(outer.parameters), len(inner.parameters)) == (1, 0)
