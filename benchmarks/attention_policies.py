"""Simulated attention under context parallelism: sequence length x mask x policy, who wins where?

The masks of Cornstarch's and the thesis' measurements, and Gemma3's; the forward pass of one layer. Devices, links and
heads are arguments. Rows of tiles run on a device's units (papers.cornstarch.attention_time); keys and values are
gathered beside the computation, one KV head at a time, or go round in a ring. Nothing is measured here.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.attention_samples import text_and_images
from benchmarks.reporting import Report
from motet.attention.masks.distribution import Distribution, TileCost, distribute
from motet.attention.masks.interval_mask import IntervalMask
from motet.attention.masks.rules import AttentionRule, mask_of
from motet.attention.masks.tile_counts import BLOCK_SIZE, TileCounts, tile_counts
from motet.attention.masks.token_layout import layout_of_documents
from papers.cornstarch.attention_masks import FOUR_OF_DCP, MULTIMODAL
from papers.cornstarch.attention_time import AttentionKernel, devices_s, gathered_s, ring_rounds_s, ring_s

BYTES = 2
"""Bytes of a number in bf16."""
PIECES = 16
"""Into so many pieces a row with all tiles is split (the thesis found 16 to 32 good)."""


def gemma3(window: int | None) -> Callable[[int, np.random.Generator], IntervalMask]:
    rule = AttentionRule(media="block_causal", window=window)
    return lambda num_tokens, random: mask_of(layout_of_documents(text_and_images(num_tokens, random)), rule)


MASKS = MULTIMODAL | FOUR_OF_DCP | {"Gemma3 global": gemma3(None), "Gemma3 local": gemma3(1024)}


@dataclass(frozen=True)
class Machine:
    num_ranks: int
    kernel: AttentionKernel
    num_heads: int
    num_kv_heads: int
    head_dim: int
    link_bytes_per_s: float

    def kv_s(self, num_tokens: float) -> float:
        """Seconds to move keys and values of all heads of so many tokens over a rank's link."""
        return 2 * num_tokens * self.num_kv_heads * self.head_dim * BYTES / self.link_bytes_per_s


def gathered(policy: str, *, split: bool) -> Callable[[IntervalMask, TileCounts, Machine], float]:
    def seconds(mask: IntervalMask, counts: TileCounts, machine: Machine) -> float:
        kernel = machine.kernel
        if split:
            kernel = replace(kernel, tiles_per_piece=max(1, len(counts.full) // PIECES))
        compute_s = devices_s(counts, shares_of(counts, machine, policy), kernel, machine.num_heads).max()
        gather_s = machine.kv_s(counts.num_tokens * (1 - 1 / machine.num_ranks))
        return gathered_s(float(compute_s), gather_s, machine.num_kv_heads)

    return seconds


def in_a_ring(policy: str) -> Callable[[IntervalMask, TileCounts, Machine], float]:
    def seconds(mask: IntervalMask, counts: TileCounts, machine: Machine) -> float:
        shares = shares_of(counts, machine, policy)
        rounds_s = ring_rounds_s(mask, shares, machine.kernel, machine.num_heads)
        return ring_s(rounds_s, machine.kv_s(shares.token_counts.max()))

    return seconds


def shares_of(counts: TileCounts, machine: Machine, policy: str) -> Distribution:
    work = machine.kernel.cost.of_blocks(counts)
    return distribute(work, machine.num_ranks, num_tokens=counts.num_tokens, policy=policy)


POLICIES = {
    "LPT, rows split": gathered("lpt", split=True),
    "LPT": gathered("lpt", split=False),
    "zigzag, rows split": gathered("zigzag", split=True),
    "zigzag": gathered("zigzag", split=False),
    "random, rows split": gathered("random", split=True),
    "contiguous": gathered("contiguous", split=False),
    "ring, contiguous": in_a_ring("contiguous"),
    "ring, zigzag": in_a_ring("zigzag"),
    "ring, striped": in_a_ring("striped"),
    "ring, LPT": in_a_ring("lpt"),
}


def show(report: Report, machine: Machine, lengths: list[int], num_draws: int) -> dict[str, int]:
    """How often each policy is the fastest, or within 1% of it."""
    wins = dict.fromkeys(POLICIES, 0)
    for length in lengths:
        rows = []
        for name, draw in MASKS.items():
            times, evenly = np.zeros(len(POLICIES)), 0.0
            for seed in range(num_draws):
                mask = draw(length, np.random.default_rng(seed))
                counts = tile_counts(mask)
                times += [policy(mask, counts, machine) * 1e3 / num_draws for policy in POLICIES.values()]
                evenly += perfect_s(counts, machine) * 1e3 / num_draws
            winners = times <= 1.01 * times.min()
            for policy, wins_here in zip(POLICIES, winners, strict=True):
                wins[policy] += bool(wins_here)
            cells = (f"**{t:.2f}**" if won else f"{t:.2f}" for t, won in zip(times, winners, strict=True))
            rows.append([name, f"{evenly:.2f}", *cells])
        report.add(
            f"### {length} tokens, {machine.num_ranks} ranks: milliseconds; bold: the fastest and what is within 1%"
        )
        report.table(["", "all units always busy", *POLICIES], rows)
    return wins


def perfect_s(counts: TileCounts, machine: Machine) -> float:
    work = float(machine.kernel.cost.of_blocks(counts).sum())
    return work * machine.num_heads / machine.kernel.num_units / machine.num_ranks


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1 << 14, 1 << 16, 1 << 18])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--units", type=int, default=132, help="compute units of a device (H100: 132)")
    parser.add_argument("--tflops", type=float, default=500.0, help="of the attention kernel on full tiles")
    parser.add_argument("--partial", type=float, default=1.2, help="cost of a partial tile in full ones")
    parser.add_argument("--merge", type=float, default=1.0, help="cost of a piece's partial result in full tiles")
    parser.add_argument("--link-gb-per-s", type=float, default=50.0, help="of each device (400 Gb/s: 50)")
    parser.add_argument("--draws", type=int, default=2)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> Report:
    args = parse(arguments)
    tile_s = 4 * BLOCK_SIZE**2 * args.head_dim / (args.tflops * 1e12) * args.units
    kernel = AttentionKernel(
        num_units=args.units,
        cost=TileCost(full_s=tile_s, partial_s=args.partial * tile_s),
        heads_per_launch=args.heads // args.kv_heads,
        piece_s=args.merge * tile_s,
    )
    link = args.link_gb_per_s * 1e9
    machine = Machine(args.ranks, kernel, args.heads, args.kv_heads, args.head_dim, link)
    report = Report("attention-policies", "Simulated attention under context parallelism")
    report.add(
        f"Forward of one layer, {args.heads} heads, {args.kv_heads} KV heads, of {args.head_dim}; devices with "
        f"{args.units} units that reach {args.tflops:g} TFLOP/s on full tiles, links of {args.link_gb_per_s:g} GB/s. "
        f"A partial tile costs {args.partial:g} full ones, a partial result (of a piece of a row, or of a round of a "
        f"ring) {args.merge:g}. A launch is for the heads of one KV head. Mean of {args.draws} draws."
    )
    wins = show(report, machine, args.lengths, args.draws)
    total = len(args.lengths) * len(MASKS)
    report.add(f"## Fastest, or within 1%, of {total} cells")
    report.table(["policy", "cells"], sorted(wins.items(), key=lambda item: -item[1]))
    return report


if __name__ == "__main__":
    main().write()
