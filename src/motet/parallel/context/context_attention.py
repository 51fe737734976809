"""Attention of queries on this rank to keys on all ranks of a context-parallel group.

*All-gather* (Cornstarch 4.3, thesis 3.4.3): keys and values arrive head group by head group, the next one while the
last one is computed; backwards, they arrive once more, and their gradients return to their owners in the same way. Here
a rank gets only the blocks that some query of its sees, so it is an all-to-all in which most ranks may have little to
send. Gradients are added in the order of ranks: results are the same bit by bit.

*Ulysses* (Jacobs et al. 2023): two all-to-alls trade tokens for heads, where the heads divide by the group.

*Ring*: keys and values go from rank to rank (`motet.parallel.context.ring_attention`).

*Hybrid* (Fang and Zhao 2024, "USP"): successive ranks trade tokens for heads, and the keys and values of each such
group go around among the ranks that have the same heads.

Deviation: the papers gather all blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from motet.attention.kernels.backends import Backend
from motet.attention.kernels.device_mask import DeviceMask, device_mask
from motet.attention.masks.distribution import Distribution
from motet.attention.masks.interval_mask import IntervalMask
from motet.attention.masks.tile_counts import blocks_seen
from motet.devices import to_device
from motet.parallel.context.attention_sinks import backward_with_sinks, forward_with_sinks
from motet.parallel.context.ring_attention import ring_attention
from motet.parallel.tensor.tensor_collectives import TensorParallel, exchange_rows
from motet.plan import ContextOptions


@dataclass(frozen=True)
class ContextParallel:
    """A context-parallel group, whose members share the tokens of a stage's sequences, seen from one member."""

    group: dist.ProcessGroup | None
    rank: int
    """This member's rank in the group."""
    size: int
    options: ContextOptions = field(default_factory=ContextOptions)
    tp_size: int = 1
    """Size of the stage's tensor-parallel groups, which share the heads of each member's tokens."""
    head_groups: int = 2
    """Number of head groups in which keys and values are gathered (method `all_gather`)."""

    def as_group(self) -> TensorParallel:
        """Returns the group as a `TensorParallel`, for collectives that take one."""
        return TensorParallel(self.group, self.rank, self.size)


MOST_TILES_OF_A_TASK = 32
"""Tiles of one task: a block of queries with more is split over compute units; thesis 3.3.2.2 finds 16 to 32 good."""


class SharedAttention:
    """Attention of one microbatch under one mask, over the tokens of all ranks of the group.

    Every rank makes its own from the same mask and distribution, and calls it in the same order.
    """

    def __init__(
        self,
        mask: IntervalMask,
        distribution: Distribution,
        cp: ContextParallel,
        backend: Backend,
        device: torch.device,
    ) -> None:
        self.cp, self.backend, self.distribution = cp, backend, distribution
        self._device = device
        self._blocks = [distribution.blocks_of(rank) for rank in range(cp.size)]
        self._mask = mask.padded(len(distribution.rank_of_block) * cp.options.block_size)

    @property
    def num_local_tokens(self) -> int:
        return int(self.distribution.token_counts[self.cp.rank])

    def prepare(self) -> None:
        """Derives masks and exchanges ahead of the first call."""
        if self.cp.size > 1 and self.cp.options.method == "all_gather":
            _ = self.exchange, self.mask_of_gathered
        elif self.cp.size > 1 and self.cp.options.method in ("ring", "hybrid"):
            _ = self.masks_of_owners
        else:
            _ = self.mask_of_all

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        """Attends from this rank's n tokens to all; inputs and output are [1, heads, n, dim].

        `sinks`: [heads], logits of a key without value that every query sees."""
        attend = {"all_gather": _gathered, "ulysses": _traded, "ring": ring_attention, "hybrid": _traded}[
            self.cp.options.method
        ]
        if self.cp.size == 1:
            attend = _alone
        whole = len(self._blocks[self.cp.rank]) * self.cp.options.block_size
        # Under autocast rotary positions leave queries and keys in float32 and values not.
        device = query.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
        if whole > self.num_local_tokens:
            query, key, value = (pad(t, (0, 0, 0, whole - t.shape[2])) for t in (query, key, value))
        query, key, value = (t[0].to(dtype) for t in (query, key, value))
        return attend(query, key, value, sinks, self, scale)[None, :, : self.num_local_tokens]

    @cached_property
    def _seen(self) -> np.ndarray:
        """Returns a bool array [ranks, N]: the key blocks that some query of each rank sees."""
        return blocks_seen(self._mask, self.distribution.rank_of_block, self.cp.size, self.cp.options.block_size)

    def needed(self, receiver: int, owner: int) -> np.ndarray:
        """Returns the owner's key blocks that some query of the receiver sees."""
        blocks = self._blocks[owner]
        return blocks[self._seen[receiver, blocks]]

    @cached_property
    def received_blocks(self) -> list[np.ndarray]:
        """Key blocks that this rank receives from each rank, itself included."""
        return [self.needed(self.cp.rank, owner) for owner in range(self.cp.size)]

    @cached_property
    def mask_of_gathered(self) -> DeviceMask:
        """The mask of this rank's queries over the keys that it receives."""
        return self._device_mask(self._blocks[self.cp.rank], np.concatenate(self.received_blocks))

    @cached_property
    def num_traders(self) -> int:
        """Number of successive ranks that trade tokens for heads. Each such group is a member of the ring."""
        return self.cp.options.num_traders(self.cp.size)

    @property
    def ring_size(self) -> int:
        return self.cp.size // self.num_traders

    @property
    def ring_place(self) -> int:
        """The member of the ring that this rank is in."""
        return self.cp.rank // self.num_traders

    def rank_at(self, place: int) -> int:
        """The rank of that member of the ring which has the same heads as this one."""
        return place % self.ring_size * self.num_traders + self.cp.rank % self.num_traders

    def ranks_at(self, place: int) -> range:
        return range(place * self.num_traders, (place + 1) * self.num_traders)

    @cached_property
    def _blocks_of_members(self) -> list[np.ndarray]:
        """Blocks of each member of the ring, in the order of its ranks."""
        return [
            np.concatenate([self._blocks[rank] for rank in self.ranks_at(place)]) for place in range(self.ring_size)
        ]

    @cached_property
    def masks_of_owners(self) -> list[DeviceMask]:
        """The masks of this member's queries over the keys of each member of the ring."""
        return [self._device_mask(self._blocks_of_members[self.ring_place], keys) for keys in self._blocks_of_members]

    @property
    def rows_of_members(self) -> list[int]:
        """Positions of the tokens of each member of the ring, in whole blocks."""
        return [len(blocks) * self.cp.options.block_size for blocks in self._blocks_of_members]

    @cached_property
    def mask_of_all(self) -> DeviceMask:
        """The mask of all tokens, in the order of the ranks."""
        order = np.concatenate(self._blocks)
        return self._device_mask(order, order)

    def _device_mask(self, queries: np.ndarray, keys: np.ndarray) -> DeviceMask:
        return device_mask(
            [self._mask],
            query_blocks=queries,
            key_blocks=keys,
            device=self._device,
            block=self.cp.options.block_size,
            max_tiles=MOST_TILES_OF_A_TASK,
        )

    @cached_property
    def exchange(self) -> "_Exchange":
        """The exchange of keys and values between their owners and the ranks that need them."""
        size, rank = self.cp.options.block_size, self.cp.rank
        place = np.zeros(len(self.distribution.rank_of_block), np.int64)
        place[self._blocks[rank]] = np.arange(len(self._blocks[rank]))
        sent = [place[self.needed(receiver, rank)] for receiver in range(self.cp.size)]
        rows = (np.concatenate(sent)[:, None] * size + np.arange(size)).reshape(-1)
        return _Exchange(
            to_device(torch.from_numpy(rows), self._device),
            [len(blocks) * size for blocks in sent],
            [len(blocks) * size for blocks in self.received_blocks],
            len(self._blocks[rank]) * size,
            self.cp.group,
        )

    @property
    def rows_of_ranks(self) -> list[int]:
        """Positions of every rank's tokens, in whole blocks."""
        return [len(blocks) * self.cp.options.block_size for blocks in self._blocks]


@dataclass(frozen=True, eq=False)
class _Exchange:
    """Exchange of rows of tensors [n, ...]: from their owners to other ranks, and back as sums."""

    rows: Tensor
    """Indices of the local rows that are sent, in the order of the receivers."""
    sent: list[int]
    received: list[int]
    num_local: int
    group: dist.ProcessGroup | None

    def gather(self, local: Tensor) -> "_Pending":
        return _Pending(local.index_select(0, self.rows), self.sent, self.received, self.group)

    def give_back(self, gradient: Tensor) -> "_Pending":
        return _Pending(gradient, self.received, self.sent, self.group)

    def add_up(self, returned: Tensor) -> Tensor:
        """Sums the rows that all receivers returned to [num_local, ...]."""
        return returned.new_zeros((self.num_local, *returned.shape[1:])).index_add_(0, self.rows, returned)


class _Pending:
    """A started all-to-all, to be waited for."""

    def __init__(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None
    ) -> None:
        self._sent = rows.contiguous()
        self._received = rows.new_empty((sum(received), *rows.shape[1:]))
        self._work = dist.all_to_all_single(
            self._received, self._sent, list(received), list(sent), group=group, async_op=True
        )

    def wait(self) -> Tensor:
        assert self._work is not None
        self._work.wait()
        return self._received


class _Gathered(torch.autograd.Function):
    """All-gather attention: query [heads, Q, dim], key and value [key heads, K, dim] of this rank's tokens, and sinks
    [heads] or None -> [heads, Q, dim]."""

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
        portions = _portions(query, key, shared.cp.head_groups)
        outs, saved = [], []
        pending = shared.exchange.gather(_as_rows(key, value, portions[0].keys))
        for number, portion in enumerate(portions):
            gathered = _from_rows(pending.wait())
            if number + 1 < len(portions):
                pending = shared.exchange.gather(_as_rows(key, value, portions[number + 1].keys))
            own_sinks = None if sinks is None else sinks[portion.queries]
            inputs = (query[None, portion.queries], *gathered)
            out, kept = forward_with_sinks(shared.backend, inputs, own_sinks, shared.mask_of_gathered, scale)
            outs.append(out[0])
            saved.append(kept)
        result = torch.cat(outs)
        ctx.save_for_backward(query, key, value, sinks, result, *(tensor for kept in saved for tensor in kept))
        ctx.shared, ctx.scale, ctx.portions = shared, scale, portions
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_result: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, result, *kept = ctx.saved_tensors
        shared, scale, portions = ctx.shared, ctx.scale, ctx.portions
        per_portion = len(kept) // len(portions)
        d_queries, d_sinks, returns = [], [], []
        pending = shared.exchange.gather(_as_rows(key, value, portions[0].keys))
        for number, portion in enumerate(portions):
            gathered = _from_rows(pending.wait())
            if number + 1 < len(portions):
                pending = shared.exchange.gather(_as_rows(key, value, portions[number + 1].keys))
            (d_query, d_key, d_value), d_own_sinks = backward_with_sinks(
                shared.backend,
                d_result[None, portion.queries],
                (query[None, portion.queries], *gathered),
                None if sinks is None else sinks[portion.queries],
                result[None, portion.queries].contiguous(),
                tuple(kept[number * per_portion : (number + 1) * per_portion]),
                shared.mask_of_gathered,
                scale,
            )
            d_queries.append(d_query[0])
            d_sinks.append(d_own_sinks)
            returns.append(shared.exchange.give_back(_as_rows(d_key[0], d_value[0])))
        d_rows = [shared.exchange.add_up(pending.wait()) for pending in returns]
        d_keys, d_values = zip(*(_from_rows(rows) for rows in d_rows), strict=True)
        d_all_sinks = None if sinks is None else torch.cat([own for own in d_sinks if own is not None])
        d_key, d_value = torch.cat(d_keys, dim=1)[0], torch.cat(d_values, dim=1)[0]
        return torch.cat(d_queries), d_key, d_value, d_all_sinks, None, None


def _gathered(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, shared: SharedAttention, scale: float
) -> Tensor:
    return _Gathered.apply(query, key, value, sinks, shared, scale)


@dataclass(frozen=True)
class _Portion:
    """A group of heads that are computed together."""

    queries: slice
    keys: slice


def _portions(query: Tensor, key: Tensor, head_groups: int) -> list[_Portion]:
    heads, key_heads = query.shape[0], key.shape[0]
    group = heads // key_heads
    count = min(head_groups, key_heads)
    bounds = [key_heads * i // count for i in range(count + 1)]
    return [_Portion(slice(a * group, b * group), slice(a, b)) for a, b in pairwise(bounds)]


def _as_rows(key: Tensor, value: Tensor, heads: slice = slice(None)) -> Tensor:
    """[tokens, 2, heads, dim], so that tokens travel whole."""
    return torch.stack([key[heads], value[heads]]).permute(2, 0, 1, 3)


def _from_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `_as_rows`: key and value [1, heads, tokens, dim]."""
    key, value = rows.permute(1, 2, 0, 3)
    return key[None], value[None]


class _GatherRows(torch.autograd.Function):
    """Differentiable `collect_rows`: gradients of all copies are added up in the order of the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: list[np.ndarray], cp: ContextParallel) -> Tensor:
        ctx.held, ctx.cp, ctx.num_own = held, cp, len(x)
        return collect_rows(x, held, cp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor | None, ...]:
        size = len(ctx.held)
        order = to_device(torch.from_numpy(np.concatenate(ctx.held)), d_rows.device)
        counts = [len(rows) for rows in ctx.held]
        returned = _Pending(d_rows.index_select(0, order), counts, [ctx.num_own] * size, ctx.cp.group).wait()
        return returned.unflatten(0, (size, ctx.num_own)).sum(0), None, None


def gather_rows(x: Tensor, distribution: Distribution, cp: ContextParallel) -> Tensor:
    """Gathers [n, H] of this rank's tokens to [T, H] of all tokens, in sequence order, on every rank."""
    return _GatherRows.apply(x, [distribution.tokens_of(rank) for rank in range(cp.size)], cp)


def collect_rows(own: Tensor, held: Sequence[np.ndarray], cp: ContextParallel) -> Tensor:
    """Gathers the rows [n, H] of all members, of which member i has `held[i]`, without a graph.

    Members' rows travel filled up to the most that one has."""
    most = max(len(rows) for rows in held)
    sent = torch.nn.functional.pad(own, (0, 0, 0, most - len(own)))
    collected = own.new_empty((cp.size * most, own.shape[1]))
    dist.all_gather_into_tensor(collected, sent, group=cp.group)
    place = np.empty(sum(len(rows) for rows in held), np.int64)
    for member, rows in enumerate(held):
        place[rows] = member * most + np.arange(len(rows))
    return collected.index_select(0, to_device(torch.from_numpy(place), own.device))


def _tokens_to_heads(tensors: Sequence[Tensor], shared: SharedAttention) -> list[Tensor]:
    """Ulysses' all-to-all: each [heads, own tokens, dim] -> [heads / traders, their tokens, dim]."""
    num_own, num_theirs = _trade_sizes(tensors[0].shape[1], shared)
    parts = [x.unflatten(0, (shared.num_traders, -1)).transpose(1, 2).flatten(2) for x in tensors]
    received = exchange_rows(torch.cat(parts, 2).flatten(0, 1), num_own, num_theirs, shared.cp.group)
    of_tensors = zip(received.split([part.shape[2] for part in parts], 1), tensors, strict=True)
    return [rows.unflatten(1, (-1, x.shape[2])).transpose(0, 1) for rows, x in of_tensors]


def _heads_to_tokens(x: Tensor, shared: SharedAttention) -> Tensor:
    """The inverse, of a result."""
    own = shared.rows_of_ranks[shared.cp.rank]
    num_own, num_theirs = _trade_sizes(own, shared)
    received = exchange_rows(x.transpose(0, 1), num_theirs, num_own, shared.cp.group)
    return received.unflatten(0, (shared.num_traders, own)).transpose(1, 2).flatten(0, 1)


def _trade_sizes(own: int, shared: SharedAttention) -> tuple[list[int], list[int]]:
    """Rows of which a rank sends its own to each rank of its group of traders, and receives theirs; 0 for others."""
    traders = shared.ranks_at(shared.ring_place)
    rows = shared.rows_of_ranks
    return (
        [own if rank in traders else 0 for rank in range(shared.cp.size)],
        [rows[rank] if rank in traders else 0 for rank in range(shared.cp.size)],
    )


class _Whole(torch.autograd.Function):
    """Attention of one rank by a backend, without communication."""

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
        out, kept = forward_with_sinks(shared.backend, (query, key, value), sinks, shared.mask_of_all, scale)
        ctx.save_for_backward(query, key, value, sinks, out, *kept)
        ctx.shared, ctx.scale = shared, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, *kept = ctx.saved_tensors
        backend, mask = ctx.shared.backend, ctx.shared.mask_of_all
        gradients, d_sinks = backward_with_sinks(
            backend, d_out, (query, key, value), sinks, out, tuple(kept), mask, ctx.scale
        )
        return *gradients, d_sinks, None, None


def _alone(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, shared: SharedAttention, scale: float
) -> Tensor:
    return _Whole.apply(query[None], key[None], value[None], sinks, shared, scale)[0]


def _traded(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, shared: SharedAttention, scale: float
) -> Tensor:
    query, key, value = _tokens_to_heads((query, key, value), shared)
    own_sinks = None if sinks is None else sinks.chunk(shared.num_traders)[shared.cp.rank % shared.num_traders]
    attend = ring_attention if shared.ring_size > 1 else _alone
    return _heads_to_tokens(attend(query, key, value, own_sinks, shared, scale), shared)
