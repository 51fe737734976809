"""Attention under an interval mask by the Triton kernels, with its gradient.

On a GPU, or anywhere in Triton's interpreter (TRITON_INTERPRET=1 in the environment before the import).
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs

from motet.attention.kernels import triton_kernels as kernels
from motet.attention.kernels.device_mask import MOST_HEAD_DIM, DeviceMask, DeviceTasks


def forward(query: Tensor, key: Tensor, value: Tensor, mask: DeviceMask, scale: float) -> tuple[Tensor, Tensor]:
    """Output [B, heads, Q, dim], and log-sum-exp [B, heads, Q] of the scores in base 2. Queries that see no key give 0
    and zero gradients. The inputs [B, heads, Q, dim], [B, key heads, K, dim] and [B, key heads, K, dim] are contiguous.

    Raises `ValueError` for shapes that do not fit."""
    _check(query, key, value, mask)
    heads, tasks = query.shape[1], mask.query_tasks
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    partial_out = _partials(tasks, heads, mask.block, query)
    partial_lse = _partials(tasks, heads, mask.block, query, dim=1)
    settings = _settings(query, key, mask)
    _launch(
        kernels.forward_kernel, (len(tasks.tasks), heads), query, key, value, out, lse, partial_out, partial_lse,
        *_mask_tensors(mask), tasks.tasks, tasks.tiles, query.shape[2], key.shape[2], scale, **settings,
    )  # fmt: skip
    _launch(
        kernels.merge_outputs_kernel, (len(tasks.split_blocks), heads), partial_out, partial_lse, out, lse,
        tasks.split_blocks, query.shape[2], NUM_HEADS=heads, **_sizes(settings),
    )  # fmt: skip
    return out, lse


def backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, mask: DeviceMask, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. Contiguous inputs."""
    delta = (out.float() * d_out.float()).sum(-1)
    shared = (query, key, value, d_out, lse, delta, mask, scale)
    return _query_gradient(*shared), *_key_value_gradient(*shared)


def _query_gradient(
    query: Tensor, key: Tensor, value: Tensor, d_out: Tensor, lse: Tensor, delta: Tensor, mask: DeviceMask, scale: float
) -> Tensor:
    heads, tasks = query.shape[1], mask.query_tasks
    d_query = torch.empty_like(query)
    partial = _partials(tasks, heads, mask.block, query)
    settings = _settings(query, key, mask)
    _launch(
        kernels.query_gradient_kernel, (len(tasks.tasks), heads), query, key, value, d_out, lse, delta,
        d_query, partial, *_mask_tensors(mask), tasks.tasks, tasks.tiles,
        query.shape[2], key.shape[2], scale, **settings,
    )  # fmt: skip
    _add_partials(partial, d_query, tasks, _sizes(settings))
    return d_query


def _key_value_gradient(
    query: Tensor, key: Tensor, value: Tensor, d_out: Tensor, lse: Tensor, delta: Tensor, mask: DeviceMask, scale: float
) -> tuple[Tensor, Tensor]:
    heads, tasks = key.shape[1], mask.key_tasks
    d_key, d_value = torch.empty_like(key), torch.empty_like(value)
    partial_key, partial_value = (_partials(tasks, heads, mask.block, query) for _ in range(2))
    settings = _settings(query, key, mask, num_sums=2)
    _launch(
        kernels.key_value_gradient_kernel, (len(tasks.tasks), heads), query, key, value, d_out, lse, delta,
        d_key, d_value, partial_key, partial_value, *_mask_tensors(mask), tasks.tasks, tasks.tiles,
        query.shape[2], key.shape[2], scale, **settings,
    )  # fmt: skip
    _add_partials(partial_key, d_key, tasks, _sizes(settings))
    _add_partials(partial_value, d_value, tasks, _sizes(settings))
    return d_key, d_value


def _add_partials(partial: Tensor, out: Tensor, tasks: DeviceTasks, sizes: dict[str, int]) -> None:
    grid = (len(tasks.split_blocks), out.shape[1])
    sizes = {"NUM_HEADS": out.shape[1], **sizes}
    _launch(kernels.add_partials_kernel, grid, partial, out, tasks.split_blocks, out.shape[2], **sizes)


def _launch(kernel: Any, grid: tuple[int, int], *args: Any, **settings: Any) -> None:
    if all(grid):
        kernel[grid](*args, **settings)


def _partials(tasks: DeviceTasks, heads: int, block: int, like: Tensor, dim: int | None = None) -> Tensor:
    """One block of float32 for each slot and head."""
    shape = (tasks.num_slots, heads, block, like.shape[-1] if dim is None else dim)
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _mask_tensors(mask: DeviceMask) -> tuple[Tensor, ...]:
    return mask.lo, mask.hi, mask.classes_seen, mask.position, mask.key_class


def _settings(query: Tensor, key: Tensor, mask: DeviceMask, num_sums: int = 1) -> dict[str, int]:
    heads, key_heads, head_dim = query.shape[1], key.shape[1], query.shape[-1]
    return settings_of(heads, key_heads, head_dim, query.element_size(), mask.block, num_sums)


def settings_of(
    num_heads: int, num_key_heads: int, head_dim: int, element_size: int, block: int, num_sums: int = 1
) -> dict[str, int]:
    """Returns the settings that a kernel is compiled for. Wide heads and elements, and sums [block, head_dim] that are
    held besides, leave room for fewer tokens of the other side at a time, and need more threads.

    `benchmarks/attention_kernel_resources.py` tells whether what a program holds fits into its registers."""
    dim = max(16, triton.next_power_of_2(head_dim))
    return {
        "NUM_HEADS": num_heads,
        "GROUP": num_heads // num_key_heads,
        "HEAD_DIM": head_dim,
        "DIM": dim,
        "BLOCK": block,
        "STEP": min(block, 64 // num_sums if dim <= 128 and element_size == 2 else 32),
        "UPCAST": knobs.runtime.interpret,
        **({"num_warps": 8} if dim * num_sums >= 128 else {}),
    }


def _sizes(settings: dict[str, int]) -> dict[str, int]:
    return {name: settings[name] for name in ("HEAD_DIM", "DIM", "BLOCK")}


def _check(query: Tensor, key: Tensor, value: Tensor, mask: DeviceMask) -> None:
    batch, heads, num_queries, dim = query.shape
    conditions: list[tuple[Callable[[], bool], str]] = [
        (lambda: key.shape == value.shape, "key and value must have one shape"),
        (lambda: key.shape[0] == batch and key.shape[3] == dim, "key must have the query's batch and head dimension"),
        (lambda: heads % key.shape[1] == 0, f"{heads} query heads are no multiple of {key.shape[1]} key heads"),
        (lambda: dim <= MOST_HEAD_DIM, f"head dimension {dim} is above {MOST_HEAD_DIM}"),
        (lambda: query.dtype == key.dtype == value.dtype, "query, key and value must have one dtype"),
        (lambda: mask.lo.shape[:2] == (batch, num_queries), f"the mask is not of {batch} x {num_queries} queries"),
        (lambda: mask.position.shape == (batch, key.shape[2]), f"the mask is not of {batch} x {key.shape[2]} keys"),
    ]
    for holds, message in conditions:
        if not holds():
            raise ValueError(message)
