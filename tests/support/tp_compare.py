"""Compares a model that is cut over a group with the same model in one process: loss and every (gathered) gradient."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from tp_cases import Case

from motet.parallel.tensor.tensor_collectives import gather_full
from motet.parallel.tensor.tensor_parallel import TensorParallel, apply_tensor_parallel, tp_reduce_gradients

Step = Callable[[nn.Module, Case], Tensor]


def one_step(model: nn.Module, case: Case) -> Tensor:
    loss = case.run(model)
    loss.backward()
    return loss.detach()


def largest_error(
    case: Case,
    tp: TensorParallel,
    *,
    dtype: torch.dtype = torch.float64,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    step: Step = one_step,
    context: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> tuple[float, str]:
    """(relative error, where), the worst of loss and gradients.

    `prepare` is applied to both models before one is cut: it freezes, or turns checkpointing on. Gradients that are
    zero by mathematics (key biases without rotary positions) are measured against a thousandth of the RMS gradient
    (in float32 a tenth: what should be zero is rounding noise there).
    Asserts that frozen parameters got no gradient.
    """
    reference, parallel = case.model(dtype), case.model(dtype)
    prepare(reference)
    prepare(parallel)
    layout = apply_tensor_parallel(parallel, tp)
    with context():
        expected = step(reference, case)
        loss = step(parallel, case)
    tp_reduce_gradients(parallel)
    errors = [(abs(loss - expected).item() / max(1.0, abs(expected).item()), "loss")]
    gradients = [p.grad for p in reference.parameters() if p.grad is not None]
    rms = (sum(g.square().sum() for g in gradients) / sum(g.numel() for g in gradients)) ** 0.5
    factor = 1e-3 if dtype == torch.float64 else 1e-1
    for name, whole in reference.named_parameters():
        part = parallel.get_parameter(name)
        if not whole.requires_grad:
            assert part.grad is None, f"{name} is frozen but got a gradient"
            continue
        if whole.grad is None:  # Layers that were left out: what is summed over the group counts as zero.
            assert part.grad is None or not part.grad.any(), f"{name} took no part but got a gradient"
            continue
        assert part.grad is not None, f"{name} got no gradient"
        assert part.requires_grad
        gradient = gather_full(part.grad, layout.shards.get(name), tp)
        floor = factor * rms * whole.numel() ** 0.5
        errors.append((((gradient - whole.grad).norm() / torch.maximum(whole.grad.norm(), floor)).item(), name))
    if hasattr(reference, "states"):  # what encoders get back through cross-attention
        wanted = reference.states.grad
        errors.append((((parallel.states.grad - wanted).norm() / wanted.norm()).item(), "encoder output"))
    return max(errors)
