"""Backends of attention under an interval mask: Triton kernels, FlexAttention, or torch's attention under a matrix.

A backend is a forward and a backward of its own, because context parallelism
(`motet.parallel.context.context_attention`) gets keys and values from other ranks in both, and keeps them in neither.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

from motet.attention.kernels.device_mask import MOST_HEAD_DIM, DeviceMask, TileMap
from motet.attention.masks.tile_counts import most_block_tokens
from motet.devices import to_device
from motet.errors import UserError

# Dense attention of torch: the reference. Its mask is a matrix of queries x keys.


def dense_attention(query: Tensor, key: Tensor, value: Tensor, mask: DeviceMask, scale: float | None = None) -> Tensor:
    """Output [B, heads, Q, dim]. `scale` of the scores: 1 / sqrt(dim) by default. Queries that see no key give 0 and
    zero gradients."""
    allowed = mask.dense()
    has_keys = allowed.any(-1)
    if allowed.shape[-1] == 0:
        return query * 0 + (key.sum() + value.sum()) * 0
    # A softmax over nothing would be NaN, and so would its gradient: such rows see everything, and are then cut out.
    allowed = (allowed | ~has_keys[..., None])[:, None]
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=allowed, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return torch.where(has_keys[:, None, :, None], out, torch.zeros((), dtype=out.dtype, device=out.device))


# FlexAttention of torch: the second path on GPUs. `create_block_mask` of torch evaluates the mask for all pairs; here
# the tiles come from our block map. On the CPU torch has no backward for it (NotImplementedError).


def flex_mask(mask: DeviceMask) -> BlockMask:
    """The mask in FlexAttention's terms. Make it once per microbatch: all layers and heads share it."""

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position = mask.position[batch, key]
        lo, hi = mask.lo[batch, query], mask.hi[batch, query]
        first = (lo[..., 0] <= position) & (position < hi[..., 0])
        second = (lo[..., 1] <= position) & (position < hi[..., 1])
        seen = (mask.classes_seen[batch, query] >> mask.key_class[batch, key].long()) & 1
        return (first | second) & (seen != 0)

    num_queries, num_keys = mask.lo.shape[1], mask.position.shape[1]
    num_columns = -(-num_keys // mask.block)
    partial = _padded_rows(mask.tile_maps, full=False, num_columns=num_columns, device=mask.lo.device)
    full = _padded_rows(mask.tile_maps, full=True, num_columns=num_columns, device=mask.lo.device)
    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=mask.block, mask_mod=allowed, seq_lengths=(num_queries, num_keys)
    )


def flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None = None) -> Tensor:
    """As `dense_attention`, by FlexAttention under a `flex_mask`. Compiled on GPUs."""
    is_grouped = query.shape[1] != key.shape[1]
    if query.is_cuda:
        return _compiled()(query, key, value, block_mask=mask, scale=scale, enable_gqa=is_grouped)
    return flex_attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=is_grouped)


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)


def _padded_rows(
    maps: tuple[TileMap, ...], *, full: bool, num_columns: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(number of tiles [B, 1, rows], their columns [B, 1, rows, columns]) of one kind."""
    num_rows = len(maps[0].offsets) - 1
    counts = torch.zeros(len(maps), 1, num_rows, dtype=torch.int32)
    columns = torch.zeros(len(maps), 1, num_rows, num_columns, dtype=torch.int32)
    for batch, tile_map in enumerate(maps):
        for row in range(num_rows):
            tiles = slice(tile_map.offsets[row], tile_map.offsets[row + 1])
            found = tile_map.blocks[tiles][tile_map.is_full[tiles] == full]
            counts[batch, 0, row] = len(found)
            columns[batch, 0, row, : len(found)] = torch.from_numpy(found)
    return to_device(counts, device), to_device(columns, device)


BackendName = Literal["auto", "triton", "flex", "dense"]


QueryKeyValue = tuple[Tensor, Tensor, Tensor]
"""Tensors [B, heads, Q, dim], [B, key heads, K, dim] and [B, key heads, K, dim], or their gradients."""
Saved = tuple[Tensor, ...]
"""Tensors that a forward saves for its backward beside inputs and output."""


class Backend(Protocol):
    def forward(self, inputs: QueryKeyValue, mask: DeviceMask, scale: float) -> tuple[Tensor, Saved]:
        """Output [B, heads, Q, dim], without graph."""

    def backward(
        self, d_out: Tensor, inputs: QueryKeyValue, out: Tensor, saved: Saved, mask: DeviceMask, scale: float
    ) -> QueryKeyValue:
        """The gradients of the inputs."""


class PartialBackend(Backend, Protocol):
    """Attention to a part of the keys, whose results are merged (ring attention). Log-sum-exps are of base 2,
    [B, heads, Q], and -inf where a query sees none of the keys."""

    def forward_part(self, inputs: QueryKeyValue, mask: DeviceMask, scale: float) -> tuple[Tensor, Tensor]:
        """The output over these keys alone, in float32 at least, and its log-sum-exps."""

    def backward_part(
        self, d_out: Tensor, inputs: QueryKeyValue, out: Tensor, log_sums: Tensor, mask: DeviceMask, scale: float
    ) -> QueryKeyValue:
        """The part of the gradients due to these keys. `out` and `log_sums`: over all keys."""


class TritonBackend:
    def forward(self, inputs: QueryKeyValue, mask: DeviceMask, scale: float) -> tuple[Tensor, Saved]:
        from motet.attention.kernels import flash

        query, key, value = (tensor.contiguous() for tensor in inputs)
        out, lse = flash.forward(query, key, value, mask, scale)
        return out, (lse,)

    def backward(
        self, d_out: Tensor, inputs: QueryKeyValue, out: Tensor, saved: Saved, mask: DeviceMask, scale: float
    ) -> QueryKeyValue:
        from motet.attention.kernels import flash

        query, key, value = (tensor.contiguous() for tensor in inputs)
        return flash.backward(d_out.contiguous(), query, key, value, out, saved[0], mask, scale)

    def forward_part(self, inputs: QueryKeyValue, mask: DeviceMask, scale: float) -> tuple[Tensor, Tensor]:
        out, (log_sums,) = self.forward(inputs, mask, scale)
        return out.float(), log_sums

    def backward_part(
        self, d_out: Tensor, inputs: QueryKeyValue, out: Tensor, log_sums: Tensor, mask: DeviceMask, scale: float
    ) -> QueryKeyValue:
        d_query, d_key, d_value = self.backward(d_out, inputs, out, (log_sums,), mask, scale)
        return d_query.float(), d_key.float(), d_value.float()


class _Recomputing(ABC):
    """Attention that torch differentiates: the backward runs it once more, with a graph."""

    @abstractmethod
    def attend(self, inputs: QueryKeyValue, mask: DeviceMask, scale: float) -> Tensor:
        """The output, with its graph."""

    def forward(self, inputs: QueryKeyValue, mask: DeviceMask, scale: float) -> tuple[Tensor, Saved]:
        with torch.no_grad():
            return self.attend(inputs, mask, scale), ()

    def backward(
        self, d_out: Tensor, inputs: QueryKeyValue, out: Tensor, saved: Saved, mask: DeviceMask, scale: float
    ) -> QueryKeyValue:
        query, key, value = (tensor.detach().requires_grad_() for tensor in inputs)
        with torch.enable_grad():
            again = self.attend((query, key, value), mask, scale)
        d_query, d_key, d_value = torch.autograd.grad(again, (query, key, value), d_out)
        return d_query, d_key, d_value


class DenseBackend(_Recomputing):
    """Dense attention on GPUs, on request. Limits: matrices of queries x keys."""

    def attend(self, inputs: QueryKeyValue, mask: DeviceMask, scale: float) -> Tensor:
        return dense_attention(*inputs, mask, scale)

    def forward_part(self, inputs: QueryKeyValue, mask: DeviceMask, scale: float) -> tuple[Tensor, Tensor]:
        scores, _, wide_value = _scores(inputs, mask, scale)
        log_sums = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - _finite(log_sums)[..., None])
        return weights @ wide_value, log_sums * LOG2_E

    def backward_part(
        self, d_out: Tensor, inputs: QueryKeyValue, out: Tensor, log_sums: Tensor, mask: DeviceMask, scale: float
    ) -> QueryKeyValue:
        query, key, _ = inputs
        scores, wide_key, wide_value = _scores(inputs, mask, scale)
        weights = torch.exp(scores - _finite(log_sums / LOG2_E)[..., None])
        d_out, out = d_out.to(weights.dtype), out.to(weights.dtype)
        d_scores = weights * (d_out @ wide_value.mT - (d_out * out).sum(-1, keepdim=True)) * scale
        d_query = d_scores @ wide_key
        heads = (key.shape[1], query.shape[1] // key.shape[1])
        d_key = (d_scores.mT @ query.to(weights.dtype)).unflatten(1, heads).sum(2)
        d_value = (weights.mT @ d_out).unflatten(1, heads).sum(2)
        return d_query, d_key, d_value


LOG2_E = math.log2(math.e)


def _scores(inputs: QueryKeyValue, mask: DeviceMask, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The scores [B, heads, Q, K], -inf where a key is not seen, and keys and values of every query's head."""
    query, key, value = inputs
    dtype = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // key.shape[1]
    wide_key, wide_value = (tensor.to(dtype).repeat_interleave(group, dim=1) for tensor in (key, value))
    scores = query.to(dtype) @ wide_key.mT * scale
    return scores.masked_fill(~mask.dense()[:, None], float("-inf")), wide_key, wide_value


def _finite(log_sums: Tensor) -> Tensor:
    """With 0 for queries that see no key: their weights are exp(-inf)."""
    return log_sums.masked_fill(log_sums == float("-inf"), 0.0)


class CpuBackend:
    """Torch's flash attention for CPUs. It calls the private operators, since the public function does not return
    log-sum-exps.

    Limits: a matrix of queries x keys for each mask; all pairs are computed."""

    def __init__(self) -> None:
        self._biases: dict[tuple[DeviceMask, torch.dtype], tuple[Tensor, Tensor]] = {}
        """Layers, heads and passes of a microbatch share them."""

    def forward(self, inputs: QueryKeyValue, mask: DeviceMask, scale: float) -> tuple[Tensor, Saved]:
        query, key, value = inputs
        if not query.numel() or not key.numel():
            return query.new_zeros((*query.shape[:3], value.shape[3])), (query.new_full(query.shape[:3], -math.inf),)
        bias, sees_none = self._bias(mask, query.dtype)
        out, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_of_one_width(inputs), attn_mask=bias, scale=scale
        )
        log_sums = (log_sums * LOG2_E).masked_fill(sees_none, -math.inf)
        return out[..., : value.shape[3]], (log_sums,)

    def backward(
        self, d_out: Tensor, inputs: QueryKeyValue, out: Tensor, saved: Saved, mask: DeviceMask, scale: float
    ) -> QueryKeyValue:
        query, key, value = inputs
        if not query.numel() or not key.numel():
            return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        # Weights are exp(scores - log_sums), and 0 for queries that see no key.
        log_sums = saved[0].masked_fill(saved[0] == -math.inf, math.inf) / LOG2_E
        d_out, wide_out = (_widened(tensor, query.shape[3]) for tensor in (d_out, out))
        d_query, d_key, d_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out,
            *_of_one_width(inputs),
            wide_out,
            log_sums,
            0.0,
            False,
            attn_mask=self._bias(mask, query.dtype)[0],
            scale=scale,
        )
        return d_query[..., : query.shape[3]], d_key[..., : key.shape[3]], d_value[..., : value.shape[3]]

    def forward_part(self, inputs: QueryKeyValue, mask: DeviceMask, scale: float) -> tuple[Tensor, Tensor]:
        out, (log_sums,) = self.forward(_at_least_float32(inputs), mask, scale)
        return out, log_sums

    def backward_part(
        self, d_out: Tensor, inputs: QueryKeyValue, out: Tensor, log_sums: Tensor, mask: DeviceMask, scale: float
    ) -> QueryKeyValue:
        inputs = _at_least_float32(inputs)
        dtype = inputs[0].dtype
        return self.backward(d_out.to(dtype), inputs, out.to(dtype), (log_sums,), mask, scale)

    def _bias(self, mask: DeviceMask, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns what a mask adds to the scores, [B, 1, Q, K], and the queries that see no key, [B, 1, Q]."""
        if (mask, dtype) not in self._biases:
            bias = torch.where(mask.dense(), 0.0, -math.inf).to(dtype)[:, None]
            self._biases[mask, dtype] = bias, bias.amax(-1) == -math.inf
        return self._biases[mask, dtype]


def _at_least_float32(inputs: QueryKeyValue) -> QueryKeyValue:
    dtype = torch.promote_types(inputs[0].dtype, torch.float32)
    query, key, value = (tensor.to(dtype) for tensor in inputs)
    return query, key, value


def _of_one_width(inputs: QueryKeyValue) -> QueryKeyValue:
    width = max(inputs[0].shape[3], inputs[2].shape[3])
    query, key, value = (_widened(tensor, width) for tensor in inputs)
    return query, key, value


def _widened(tensor: Tensor, width: int) -> Tensor:
    """At least so wide, and contiguous in its last dimension: the operators read other tensors wrongly."""
    if tensor.shape[3] < width:
        tensor = pad(tensor, (0, width - tensor.shape[3]))
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


class FlexBackend(_Recomputing):
    """Limits: on the CPU torch has no backward for it."""

    def __init__(self) -> None:
        self._block_masks: dict[DeviceMask, Any] = {}
        """Cached block masks: layers, heads and passes of a microbatch share one."""

    def attend(self, inputs: QueryKeyValue, mask: DeviceMask, scale: float) -> Tensor:
        if mask not in self._block_masks:
            self._block_masks[mask] = flex_mask(mask)
        return flex(*inputs, self._block_masks[mask], scale)


def backend_for(device: torch.device, name: BackendName = "auto") -> Backend:
    """`auto`: the Triton kernels on a GPU, dense attention elsewhere.

    Raises `UserError` for a backend that the device does not have."""
    if name == "auto":
        name = "triton" if device.type == "cuda" else "dense"
    if name == "flex" and device.type != "cuda":
        raise UserError("parallel: context.backend: flex has no backward on the CPU; give dense")
    if name == "triton" and device.type != "cuda" and not interpreting():
        raise UserError(
            "parallel: context.backend: triton needs a GPU, or its interpreter (TRITON_INTERPRET=1); give dense"
        )
    dense = CpuBackend if device.type == "cpu" else DenseBackend
    backends: dict[str, type[Backend]] = {"triton": TritonBackend, "flex": FlexBackend, "dense": dense}
    return backends[name]()


def check_backend(device: torch.device, name: BackendName, *, block_size: int, head_dim: int) -> None:
    """Raises `UserError` for a backend that the device does not have, and for sizes that it cannot do."""
    backend = backend_for(device, name)
    if isinstance(backend, CpuBackend | DenseBackend):
        return
    if block_size < 16 or block_size & (block_size - 1):
        raise UserError(f"parallel: context.block_size is {block_size}; kernels need a power of two of at least 16")
    if head_dim > MOST_HEAD_DIM:
        raise UserError(
            f"parallel: heads of {head_dim} are too wide for kernels (at most {MOST_HEAD_DIM}); give context.backend: "
            "dense"
        )
    most = most_block_tokens(head_dim)
    if isinstance(backend, TritonBackend) and block_size > most:
        raise UserError(
            f"parallel: context.block_size is {block_size}, too many tokens for kernels with heads of {head_dim}; give "
            f"{most}"
        )


def interpreting() -> bool:
    """Whether Triton's kernels run in its interpreter, on CPUs."""
    try:
        from triton import knobs
    except ImportError:
        return False
    return bool(knobs.runtime.interpret)
