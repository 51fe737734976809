"""Ring attention: keys and values travel around a context-parallel group, from member to member, one hop at a time.
A member is a rank, or, under method `hybrid`, a group of ranks of which each has some of the heads.

Each member computes its queries against the keys that it holds, while the next ones arrive, and merges the results by
their log-sum-exps. In the backward they travel once more, with the gradients that all members add to them; these are
back at their owners after the last hop. No rank ever holds more keys than two members'. (Liu et al. 2023, "Ring
Attention with Blockwise Transformers", section 3; the baselines of Cornstarch 6.4 are its contiguous and its zigzag
distribution: `policy`.)

Limits: every member gets all keys, also those that none of its queries sees (`all_gather` leaves these out).
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from motet.parallel.context.attention_sinks import add_sinks, gradient_of_sinks, merge_parts, partial_backend

SharedAttention = Any
"""`motet.parallel.context.context_attention.SharedAttention`, which imports this module."""


class _Hop:
    """A started hop: rows to the next member, and those of the one before."""

    def __init__(self, sent: Tensor, num_received: int, shared: SharedAttention) -> None:
        self._sent = sent.contiguous()  # Kept until it has arrived.
        self._received = sent.new_empty((*sent.shape[:2], num_received, sent.shape[3]))
        operations = [
            dist.P2POp(operation, tensor, group=shared.cp.group, group_peer=shared.rank_at(shared.ring_place + step))
            for operation, tensor, step in ((dist.isend, self._sent, 1), (dist.irecv, self._received, -1))
            if tensor.numel()
        ]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._received


def _around(held: Tensor, shared: SharedAttention) -> Iterator[tuple[int, Tensor]]:
    """Yields each member's place in the ring with its keys and values, this rank's first; the next ones travel
    meanwhile."""
    for step in range(shared.ring_size):
        owner = (shared.ring_place - step) % shared.ring_size
        is_last = step + 1 == shared.ring_size
        hop = None if is_last else _Hop(held, shared.rows_of_members[owner - 1], shared)
        yield owner, held
        if hop is not None:
            held = hop.wait()


class _Ring(torch.autograd.Function):
    """query [heads, Q, dim], key and value [key heads, K, dim] of this rank's tokens, and sinks [heads] or None ->
    [heads, Q, dim]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        shared: SharedAttention,
        scale: float,
    ) -> Tensor:
        backend = partial_backend(shared.backend)
        out: Tensor | None = None
        log_sums: Tensor | None = None
        for owner, held in _around(torch.stack([key, value]), shared):
            with torch.autocast(query.device.type, enabled=False):  # Parts are merged in more than half precision.
                inputs = (query[None], held[0][None], held[1][None])
                part, of_part = backend.forward_part(inputs, shared.masks_of_owners[owner], scale)
            if out is None or log_sums is None:
                out, log_sums = part, of_part
            else:
                out, log_sums = merge_parts(out, log_sums, part, of_part)
        assert out is not None
        assert log_sums is not None
        if sinks is not None:
            out, log_sums = add_sinks(out, log_sums, sinks)
        result = out[0].to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, result, log_sums)
        ctx.shared, ctx.scale = shared, scale
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_result: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, result, log_sums = ctx.saved_tensors
        shared, scale = ctx.shared, ctx.scale
        backend = partial_backend(shared.backend)
        d_query: Tensor | None = None
        arriving: _Hop | None = None
        for owner, held in _around(torch.stack([key, value]), shared):
            inputs = (query[None], held[0][None], held[1][None])
            d_part, d_key, d_value = backend.backward_part(
                d_result[None], inputs, result[None], log_sums, shared.masks_of_owners[owner], scale
            )
            d_query = d_part if d_query is None else d_query + d_part
            own = torch.cat([d_key, d_value])
            if arriving is not None:
                own = own + arriving.wait()  # What those before have added to this owner's.
            arriving = _Hop(own, shared.rows_of_members[owner - 1], shared)
        assert d_query is not None
        assert arriving is not None
        d_held = arriving.wait()
        d_sinks = None if sinks is None else gradient_of_sinks(sinks, d_result[None], result[None], log_sums)
        return d_query[0].to(query.dtype), d_held[0].to(key.dtype), d_held[1].to(value.dtype), d_sinks, None, None


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, shared: SharedAttention, scale: float
) -> Tensor:
    """Attention of this rank's queries to the keys of all members; shapes as `_Ring`'s."""
    result: Tensor = _Ring.apply(query, key, value, sinks, shared, scale)
    return result
