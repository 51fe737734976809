"""The attention kernels on a GPU: how fast are they on the area of a mask, against FlexAttention and torch's own?

TFLOP/s count the pairs of the mask alone: 4 x pairs x heads x head dimension forwards, 2.5 times that backwards. What
is computed in vain on tiles that are seen in part is not counted, so a mask of many of them cannot reach what a dense
causal one does.

What is compared: motet's Triton kernels; FlexAttention, compiled, with its block mask from our metadata; for the causal
mask torch's `scaled_dot_product_attention(is_causal=True)`, which takes the best of its backends. bfloat16.

Without a GPU it runs at tiny sizes, in Triton's interpreter; that shows that it works and nothing else, and no report
is written.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Read when Triton is imported.

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.attention_samples import packed_documents, text_and_images
from benchmarks.reporting import Report
from motet.assignment.sample import Segment
from motet.attention.kernels import flash
from motet.attention.kernels.backends import flex, flex_mask
from motet.attention.kernels.device_mask import DeviceMask, device_mask
from motet.attention.masks.interval_mask import IntervalMask
from motet.attention.masks.rules import AttentionRule, mask_of
from motet.attention.masks.tile_counts import row_pairs
from motet.attention.masks.token_layout import Document, layout_of_documents
from motet.parallel.context.context_attention import MOST_TILES_OF_A_TASK

CAUSAL = "causal"
DENSE = "torch, dense causal"
GOALS = {CAUSAL: (0.90, 0.85)}
OTHER_GOALS = (0.80, 0.62)
"""Forward and backward: TFLOP/s over those of the best dense causal attention."""


@dataclass(frozen=True)
class Size:
    num_tokens: int
    heads: int
    key_heads: int
    dim: int


@dataclass(frozen=True)
class Passes:
    """Forward and backward of one implementation."""

    forward: Callable[[], object]
    backward: Callable[[], object] | None


def masks(num_tokens: int) -> dict[str, IntervalMask]:
    random = np.random.default_rng(0)
    packed, mixed = packed_documents(num_tokens, random), text_and_images(num_tokens, random)
    drawn = {
        CAUSAL: ([Document((Segment(num_tokens),))], AttentionRule()),
        "window of 4096, 64 sinks": ([Document((Segment(num_tokens),))], AttentionRule(window=4096, sink=64)),
        "packed documents": (packed, AttentionRule()),
        "images see themselves": (mixed, AttentionRule(media="own_item")),
        "Gemma3 global": (mixed, AttentionRule(media="block_causal")),
        "one bit for all images": (mixed, AttentionRule(media="own_modality")),
    }
    return {name: mask_of(layout_of_documents(documents), rule) for name, (documents, rule) in drawn.items()}


def implementations(name: str, mask: DeviceMask, size: Size, device: torch.device) -> dict[str, Passes]:
    generator = torch.Generator(device).manual_seed(0)

    def drawn(heads: int) -> Tensor:
        shape = (1, heads, size.num_tokens, size.dim)
        return torch.randn(shape, generator=generator, dtype=torch.bfloat16, device=device)

    query, key, value, d_out = drawn(size.heads), drawn(size.key_heads), drawn(size.key_heads), drawn(size.heads)
    scale = size.dim**-0.5
    out, lse = flash.forward(query, key, value, mask, scale)
    found = {
        "motet": Passes(
            lambda: flash.forward(query, key, value, mask, scale),
            lambda: flash.backward(d_out, query, key, value, out, lse, mask, scale),
        )
    }
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]

    def by_autograd(attend: Callable[[], Tensor], *, has_backward: bool = True) -> Passes:
        if not has_backward:
            return Passes(attend, None)
        result = attend()
        return Passes(attend, lambda: torch.autograd.grad(result, leaves, d_out, retain_graph=True))

    block_mask = flex_mask(mask)
    if device.type == "cuda":
        found["FlexAttention"] = by_autograd(lambda: flex(leaves[0], leaves[1], leaves[2], block_mask, scale))
    else:  # torch has no backward for it there.
        attend = torch.no_grad()(lambda: flex(query, key, value, block_mask, scale))
        found["FlexAttention"] = by_autograd(attend, has_backward=False)
    if name == CAUSAL:
        found[DENSE] = by_autograd(
            lambda: scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=size.heads != size.key_heads)
        )
    return found


def seconds(run: Callable[[], object], repetitions: int, device: torch.device) -> float:
    """The median; on a GPU by its own clock."""
    run()
    times = []
    for _ in range(repetitions):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            began = time.process_time()
            run()
            times.append(max(time.process_time() - began, 1e-9))
    return statistics.median(times)


def show(report: Report, size: Size, block: int, repetitions: int, device: torch.device) -> None:
    """A table of one size: TFLOP/s forwards and backwards, and over dense causal attention."""
    rows: list[list[str]] = []
    best = (1.0, 1.0)
    for name, mask in masks(size.num_tokens).items():
        on_device = device_mask([mask], device=device, block=block, max_tiles=MOST_TILES_OF_A_TASK)
        flop = 4.0 * float(row_pairs(mask).sum()) * size.heads * size.dim
        speeds = {}
        for who, passes in implementations(name, on_device, size, device).items():
            forward = flop / seconds(passes.forward, repetitions, device) / 1e12
            backward = passes.backward and 2.5 * flop / seconds(passes.backward, repetitions, device) / 1e12
            speeds[who] = forward, backward
        if name == CAUSAL:
            dense_forward, dense_backward = speeds[DENSE]
            assert dense_backward is not None
            best = dense_forward, dense_backward
        goal = GOALS.get(name, OTHER_GOALS)
        for who, (forward, backward) in speeds.items():
            rows.append(
                [
                    name,
                    who,
                    f"{forward:.4g}",
                    f"{forward / best[0]:.2f}",
                    "-" if backward is None else f"{backward:.4g}",
                    "-" if backward is None else f"{backward / best[1]:.2f}",
                    f"{goal[0]:.2f}, {goal[1]:.2f}" if who == "motet" else "",
                ]
            )
    report.add(f"### {size.num_tokens} tokens, {size.heads} heads, {size.key_heads} key heads of {size.dim}")
    columns = ["mask", "", "TFLOP/s forwards", "of dense causal", "TFLOP/s backwards", "of dense causal", "goals"]
    report.table(columns, rows)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072], help="tokens")
    parser.add_argument("--heads", nargs="+", default=["32:8", "64:8"], help="query heads : key heads")
    parser.add_argument("--dim", type=int, default=128, help="of a head")
    parser.add_argument("--block", type=int, default=128, help="tokens of a tile's side")
    parser.add_argument("--repetitions", type=int, default=20)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> Report:
    args = parse(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = Report("attention-kernels", "The attention kernels on a GPU")
    for heads in args.heads:
        query_heads, key_heads = map(int, heads.split(":"))
        for length in args.lengths:
            show(report, Size(length, query_heads, key_heads, args.dim), args.block, args.repetitions, device)
    return report


if __name__ == "__main__":
    made = main()
    if torch.cuda.is_available():
        made.write()
    else:
        print(made.text())
        print("No GPU: these figures mean nothing, and no report is written.")
