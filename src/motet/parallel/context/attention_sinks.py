"""Attention with sinks, and attention merged from several parts of the keys.

A sink is a number of each head, learned (gpt-oss): the logit of a key without value that every query sees. It takes a
share of the softmax, and nothing else. So attention with sinks is attention over the keys, merged with a part whose
output is zero and whose log-sum-exp is the sink; the backward of a flash kernel is right if it is given the merged
output and log-sum-exps. Log-sum-exps are of base 2, -inf for queries without keys.
"""

from typing import cast

import torch
from torch import Tensor

from motet.attention.kernels.backends import LOG2_E, Backend, PartialBackend, QueryKeyValue, Saved
from motet.attention.kernels.device_mask import DeviceMask


def partial_backend(backend: Backend) -> PartialBackend:
    assert hasattr(backend, "forward_part"), "refused where the stage was built"
    return cast(PartialBackend, backend)


def merge_parts(out: Tensor, log_sums: Tensor, part: Tensor, of_part: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys as one."""
    both = torch.logaddexp2(log_sums, of_part)
    safe = both.masked_fill(both == float("-inf"), 0.0)
    return (
        out * torch.exp2(log_sums - safe)[..., None] + part * torch.exp2(of_part - safe)[..., None],
        both,
    )


def add_sinks(out: Tensor, log_sums: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output [B, heads, Q, dim] and log-sum-exps [B, heads, Q] with sinks [heads]."""
    both = torch.logaddexp2(log_sums, _as_log_sums(sinks, log_sums))
    return out * torch.exp2(log_sums - both)[..., None], both


def gradient_of_sinks(sinks: Tensor, d_out: Tensor, out: Tensor, log_sums: Tensor) -> Tensor:
    """[heads]; `out` and `log_sums` with the sinks."""
    shares = torch.exp2(_as_log_sums(sinks, log_sums) - log_sums)
    of_queries = (d_out.to(shares.dtype) * out.to(shares.dtype)).sum(-1)
    return -(shares * of_queries).sum((0, 2)).to(sinks.dtype)


def _as_log_sums(sinks: Tensor, log_sums: Tensor) -> Tensor:
    return (sinks.detach().to(log_sums.dtype) * LOG2_E)[None, :, None]


def forward_with_sinks(
    backend: Backend, inputs: QueryKeyValue, sinks: Tensor | None, mask: DeviceMask, scale: float
) -> tuple[Tensor, Saved]:
    """`Backend.forward`; `sinks`: [heads]."""
    if sinks is None:
        return backend.forward(inputs, mask, scale)
    with torch.autocast(inputs[0].device.type, enabled=False):
        out, log_sums = partial_backend(backend).forward_part(inputs, mask, scale)
        out, log_sums = add_sinks(out, log_sums, sinks)
    return out.to(inputs[0].dtype), (log_sums,)


def backward_with_sinks(
    backend: Backend,
    d_out: Tensor,
    inputs: QueryKeyValue,
    sinks: Tensor | None,
    out: Tensor,
    saved: Saved,
    mask: DeviceMask,
    scale: float,
) -> tuple[QueryKeyValue, Tensor | None]:
    """The gradients of the inputs, and of the sinks."""
    if sinks is None:
        return backend.backward(d_out, inputs, out, saved, mask, scale), None
    (log_sums,) = saved
    gradients = partial_backend(backend).backward_part(d_out, inputs, out, log_sums, mask, scale)
    d_query, d_key, d_value = (gradient.to(given.dtype) for gradient, given in zip(gradients, inputs, strict=True))
    return (d_query, d_key, d_value), gradient_of_sinks(sinks, d_out, out, log_sums)
