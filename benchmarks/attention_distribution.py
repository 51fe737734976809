"""Token blocks over context-parallel ranks: how even are their loads, how quick is the planning?

Cornstarch 4.3.2 and thesis 3.3.2 claim 1 ms for a million tokens in blocks of 128.

Pure planning on one core, from the segments of drawn samples to the shares of 64 ranks. Times are CPU time, so that
other processes on the machine count for little.
"""

import argparse
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import heapq
from collections.abc import Callable

import numpy as np

from benchmarks.attention_samples import packed_documents, text_and_images
from benchmarks.measuring import Spread
from benchmarks.reporting import Report
from motet.attention.masks.distribution import POLICIES, Distribution, TileCost, distribute
from motet.attention.masks.rules import AttentionRule, mask_of
from motet.attention.masks.tile_counts import block_map, row_pairs, tile_counts
from motet.attention.masks.token_layout import Document, TokenLayout, layout_of_documents

COST = TileCost(full_s=1.0e-6, partial_s=1.2e-6)
"""Only the ratio matters here: a partial tile costs more, for its mask."""
MOST_IMBALANCE = 1.01
GOALS_MS = {
    "distribution": 1.0,
    "workloads": 100.0,
    "lowering, workloads, distribution": 200.0,
    "rows of the map": 100.0,
}

IMAGES_APART = AttentionRule(media="own_item")
GEMMA3 = AttentionRule(media="block_causal")
GEMMA3_LOCAL = AttentionRule(media="block_causal", window=1024)
Draw = Callable[[int, np.random.Generator], list[Document]]
CASES: dict[str, tuple[Draw, AttentionRule]] = {
    "packed documents, causal": (packed_documents, AttentionRule()),
    "text and images, images see themselves": (text_and_images, IMAGES_APART),
    "text and images, Gemma3 global": (text_and_images, GEMMA3),
    "text and images, Gemma3 local": (text_and_images, GEMMA3_LOCAL),
    "text and images, one bit for all images": (text_and_images, AttentionRule(media="own_modality")),
}


def show_balance(report: Report, num_tokens: int, num_ranks: int, num_draws: int) -> float:
    """The largest load over the mean: median and worst of the draws. Returns the worst of ours."""
    rows = []
    worst = 0.0
    for name, (draw, rule) in CASES.items():
        found: dict[str, list[float]] = {policy: [] for policy in POLICIES}
        heap, over_bound, uneven = [], [], []
        for seed in range(num_draws):
            documents = draw(num_tokens, np.random.default_rng(seed))
            workloads = COST.of_blocks(tile_counts(mask_of(layout_of_documents(documents), rule)))
            heap.append(capped_heap(workloads, num_ranks) / workloads.mean() * num_ranks / len(workloads))
            for policy, values in found.items():
                shares = distribute(workloads, num_ranks, num_tokens=num_tokens, policy=policy)
                values.append(shares.imbalance)
                if policy == "lpt":
                    over_bound.append(largest_over_bound(shares))
                if policy == "lpt_uncapped":
                    uneven.append(np.ptp(shares.token_counts) // 128)
        worst = max(worst, *found["lpt"])
        rows.append(
            [
                name,
                *(f"{np.median(values):.3f} ({max(values):.3f})" for values in (*found.values(), heap)),
                f"{max(over_bound):.4f}",
                max(uneven),
            ]
        )
    report.add(
        f"### {num_tokens} tokens, {num_ranks} ranks, {num_draws} draws: largest load over the mean, median (worst)"
    )
    report.table(["", *POLICIES, "heap with the cap", "lpt over lower bound, worst", "blocks apart without cap"], rows)
    return worst


def capped_heap(workloads: np.ndarray, num_ranks: int) -> float:
    """The largest load of the papers' heap, sorted, if a rank leaves it with its share of the blocks."""
    most = -(-len(workloads) // num_ranks)
    loads, heap = [0.0] * num_ranks, [(0.0, 0, rank) for rank in range(num_ranks)]
    for work in np.sort(workloads)[::-1].tolist():
        load, blocks, rank = heapq.heappop(heap)
        loads[rank] = load + work
        if blocks + 1 < most:
            heapq.heappush(heap, (load + work, blocks + 1, rank))
    return max(loads)


def largest_over_bound(shares: Distribution) -> float:
    return float(shares.loads.max()) / shares.lower_bound if shares.lower_bound else 1.0


def show_times(report: Report, num_tokens: int, num_ranks: int, repetitions: int) -> dict[str, float]:
    """Milliseconds of the slowest case for each goal."""
    rows, slowest = [], dict.fromkeys(GOALS_MS, 0.0)
    for name, (draw, rule) in CASES.items():
        documents = draw(num_tokens, np.random.default_rng(0))
        times = times_ms(documents, rule, num_ranks, repetitions)
        rows.append([name, *(spread.text(1, 2) for spread in times.values())])
        for goal in GOALS_MS:
            slowest[goal] = max(slowest[goal], times[goal].median)
    report.add(f"### {num_tokens} tokens, {num_ranks} ranks, {repetitions} repetitions: CPU ms, median (quartiles)")
    report.table(["", *times], rows)
    return slowest


def times_ms(documents: list[Document], rule: AttentionRule, num_ranks: int, repetitions: int) -> dict[str, Spread]:
    layout = layout_of_documents(documents)
    mask = mask_of(layout, rule)
    counts = tile_counts(mask)
    workloads = COST.of_blocks(counts)

    def share(policy: str = "lpt") -> Distribution:
        return distribute(workloads, num_ranks, num_tokens=mask.num_tokens, policy=policy)

    def everything() -> None:
        fresh = tile_counts(mask_of(layout_of_documents(documents), rule))
        distribute(COST.of_blocks(fresh), num_ranks, num_tokens=fresh.num_tokens)

    def layout_and_mask() -> TokenLayout:
        fresh = layout_of_documents(documents)
        mask_of(fresh, rule)
        return fresh

    own = share().blocks_of(num_ranks // 2)
    timed: dict[str, Callable[[], object]] = {
        "lowering": layout_and_mask,
        "rows' pairs": lambda: row_pairs(mask),
        "workloads": lambda: tile_counts(mask),
        "distribution": share,
        "plain heap, no cap": lambda: share("lpt_uncapped"),
        "lowering, workloads, distribution": everything,
        "rows of the map": lambda: block_map(mask, own),
    }
    return {name: cpu_ms(run, repetitions) for name, run in timed.items()}


def cpu_ms(run: Callable[[], object], repetitions: int) -> Spread:
    times = []
    for _ in range(repetitions + 1):
        started = time.process_time()
        run()
        times.append((time.process_time() - started) * 1e3)
    return Spread.of(times[1:])


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", type=int, default=1 << 16, help="tokens of the shorter sequences")
    parser.add_argument("--long", type=int, default=1 << 20, help="tokens of the longer ones")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--draws", type=int, default=20, help="of the shorter ones; of the longer ones a quarter")
    parser.add_argument("--repetitions", type=int, default=15, help="of what is timed")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> Report:
    args = parse(arguments)
    report = Report("attention-distribution", "Distribution of attention over context-parallel ranks")
    report.add(
        "Blocks of 128 tokens; a partial tile costs 1.2 full ones. Text and images: runs of 32 to 800 tokens of text, "
        "images of 256 between them. Packed documents: log-normal lengths, median 1097 tokens. `contiguous` is how "
        "plain ring attention cuts, `striped` how striped ring attention does; `lpt` and `snake` keep token counts "
        "within one block of one another."
    )
    report.add("## Balance")
    worst = max(
        show_balance(report, args.short, args.ranks, args.draws),
        show_balance(report, args.long, args.ranks, max(1, args.draws // 4)),
    )
    most = f"the largest load under lpt is at most {MOST_IMBALANCE} of the mean, in every draw"
    report.goal(most, worst <= MOST_IMBALANCE, f"{worst:.4f}")
    report.add("## Planning time")
    slowest = show_times(report, args.long, args.ranks, args.repetitions)
    report.table(
        ["", "goal, ms", "slowest case, ms", ""],
        [
            [name, goal, f"{slowest[name]:.2f}", "reached" if slowest[name] <= goal else "missed"]
            for name, goal in GOALS_MS.items()
        ],
    )
    return report


if __name__ == "__main__":
    main().write()
