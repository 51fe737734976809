"""Who computes attention under an interval mask: the Triton kernels, FlexAttention, or torch's dense attention.

A backend is a forward and a backward of its own, because context parallelism (motet.parallel.context_attention) gets
keys and values from other ranks in both, and keeps them in neither.
"""

from abc import ABC, abstractmethod
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from motet.attention.kernels.device_mask import DeviceMask
from motet.attention.kernels.reference import dense_attention
from motet.attention.masks.tile_counts import most_block_tokens
from motet.errors import UserError

BackendName = Literal["auto", "triton", "flex", "dense"]

MOST_HEAD_DIM = 256
"""Of kernels on a GPU."""

Saved = tuple[Tensor, ...]
"""What a forward leaves for its backward beside inputs and output."""


class Backend(Protocol):
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: DeviceMask, scale: float
    ) -> tuple[Tensor, Saved]:
        """Output [B, heads, Q, dim] of query [B, heads, Q, dim], key and value [B, key heads, K, dim]; no graph."""

    def backward(
        self,
        d_out: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        saved: Saved,
        mask: DeviceMask,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value."""


class TritonBackend:
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: DeviceMask, scale: float
    ) -> tuple[Tensor, Saved]:
        from motet.attention.kernels import flash

        out, lse = flash.forward(query.contiguous(), key.contiguous(), value.contiguous(), mask, scale)
        return out, (lse,)

    def backward(
        self,
        d_out: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        saved: Saved,
        mask: DeviceMask,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from motet.attention.kernels import flash

        query, key, value = (tensor.contiguous() for tensor in inputs)
        return flash.backward(d_out.contiguous(), query, key, value, out, saved[0], mask, scale)


class _Recomputing(ABC):
    """Attention that torch differentiates: the backward runs it once more, with a graph."""

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: DeviceMask, scale: float) -> Tensor:
        """The output, with its graph."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: DeviceMask, scale: float
    ) -> tuple[Tensor, Saved]:
        with torch.no_grad():
            return self.attend(query, key, value, mask, scale), ()

    def backward(
        self,
        d_out: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        saved: Saved,
        mask: DeviceMask,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (tensor.detach().requires_grad_() for tensor in inputs)
        with torch.enable_grad():
            again = self.attend(query, key, value, mask, scale)
        d_query, d_key, d_value = torch.autograd.grad(again, (query, key, value), d_out)
        return d_query, d_key, d_value


class DenseBackend(_Recomputing):
    """Limits: a matrix of queries x keys."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: DeviceMask, scale: float) -> Tensor:
        return dense_attention(query, key, value, mask, scale)


class FlexBackend(_Recomputing):
    """Limits: on the CPU torch has no backward for it."""

    def __init__(self) -> None:
        self._block_masks: dict[DeviceMask, Any] = {}
        """Of the few masks that it is called with: layers, heads and passes of a microbatch share one."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: DeviceMask, scale: float) -> Tensor:
        from motet.attention.kernels.flex import flex, flex_mask

        if mask not in self._block_masks:
            self._block_masks[mask] = flex_mask(mask)
        return flex(query, key, value, self._block_masks[mask], scale)


def backend_for(device: torch.device, name: BackendName = "auto") -> Backend:
    """`auto`: the Triton kernels on a GPU, dense attention elsewhere.

    Raises `UserError` for a backend that the device does not have."""
    if name == "auto":
        name = "triton" if device.type == "cuda" else "dense"
    if name == "flex" and device.type != "cuda":
        raise UserError("parallel: context.backend: flex has no backward on the CPU; give dense")
    if name == "triton" and device.type != "cuda" and not _interpreting():
        raise UserError(
            "parallel: context.backend: triton needs a GPU, or its interpreter (TRITON_INTERPRET=1); give dense"
        )
    backends: dict[str, type[Backend]] = {"triton": TritonBackend, "flex": FlexBackend, "dense": DenseBackend}
    return backends[name]()


def check_backend(device: torch.device, name: BackendName, *, block_size: int, head_dim: int) -> None:
    """Raises `UserError` for a backend that the device does not have, and for sizes that it cannot do."""
    backend = backend_for(device, name)
    if isinstance(backend, DenseBackend):
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


def _interpreting() -> bool:
    try:
        from triton import knobs
    except ImportError:
        return False
    return bool(knobs.runtime.interpret)
