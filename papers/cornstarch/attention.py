"""Attention under context parallelism: Cornstarch table 4, thesis tables 3.3 and 3.4.

Loads come from the masks (papers.cornstarch.attention_masks) through motet's own counts and distribution. Milliseconds
are two constants times tokens (projections, and communication that is not hidden) and tiles. Each row says on which two
cells they are calibrated; all others are held out.
"""

from collections.abc import Iterable, Mapping
from functools import cache

import numpy as np

from motet.attention.masks.distribution import TileCost, distribute
from motet.attention.masks.tile_counts import TileCounts, tile_counts
from papers.cornstarch.attention_masks import FOUR_OF_DCP, MULTIMODAL
from papers.cornstarch.attention_time import AttentionKernel, devices_s
from papers.tables import Row, Table

Published = dict[tuple[str, ...], tuple[float, ...]]
"""Published rows: columns in milliseconds, by the row's names."""

A40_UNITS = 84
COST = TileCost(full_s=1.0, partial_s=1.1)
"""In units of a full tile on one unit of the device."""
NUM_DRAWS = 2
TOKENS = {"16k": 1 << 14, "32k": 1 << 15, "64k": 1 << 16, "128k": 1 << 17, "256k": 1 << 18}

TABLE_4_POLICIES = {"LPT": "lpt", "Random": "random", "Naive ring": "contiguous", "Zigzag": "zigzag"}
TABLE_4_MS: Published = {
    ("16k", "EP"): (3.92, 3.93, 4.24, 3.96),
    ("16k", "EE"): (4.31, 4.32, 4.86, 4.37),
    ("16k", "MP"): (3.00, 2.99, 3.12, 3.08),
    ("32k", "EP"): (10.01, 10.07, 11.76, 10.21),
    ("32k", "EE"): (11.12, 11.12, 13.43, 11.60),
    ("32k", "MP"): (6.09, 6.18, 6.76, 6.57),
    ("64k", "EP"): (25.43, 25.48, 32.24, 28.17),
    ("64k", "EE"): (36.99, 37.12, 46.67, 37.36),
    ("64k", "MP"): (14.18, 14.15, 16.56, 15.33),
}
TABLE_4_RANKS = 8
TABLE_4_HEADS = 64

TABLE_3_3_POLICIES: dict[str, tuple[str, int | None]] = {
    "Causal CP": ("zigzag", None),
    "Inter-GPU balance only": ("lpt", None),
    "Intra-GPU balance only": ("zigzag", 24),
    "Cornstarch": ("lpt", 24),
}
"""How blocks are distributed, and into pieces of how many tiles rows are split: 512 tiles in 16 to 32 pieces."""
TABLE_3_3_MS: Published = {
    ("LLM-S",): (243.44, 255.59, 225.73, 204.95),
    ("LLM-M",): (460.13, 487.44, 440.86, 417.31),
    ("LLM-L",): (568.18, 610.67, 558.56, 551.60),
}
TABLE_3_3_WIDTHS = {"LLM-S": 2048, "LLM-M": 4096, "LLM-L": 5120}
"""Heads times head dimension."""
TABLE_3_3_RANKS = 4
MERGE_TILES = 2.0
"""Cost of merging a partial result, in tiles."""

TABLE_3_4_LENGTHS = ("32k", "64k", "128k", "256k")
TABLE_3_4_MS: Published = {
    ("Lambda", "Cornstarch"): (177.41, 143.56, 375.49, 1193.32),
    ("Lambda", "DCP"): (46.36, 124.72, 417.07, 1545.83),
    ("Causal", "Cornstarch"): (211.51, 158.15, 380.88, 1189.57),
    ("Causal", "DCP"): (54.63, 149.18, 503.56, 1861.39),
    ("Causal blockwise", "Cornstarch"): (228.36, 124.72, 333.91, 1002.70),
    ("Causal blockwise", "DCP"): (41.13, 104.87, 316.93, 1083.57),
    ("Shared questions", "Cornstarch"): (199.99, 179.59, 351.41, 1190.41),
    ("Shared questions", "DCP"): (39.79, 120.74, 374.99, 1358.43),
}
TABLE_3_4_RANKS = 16

_MASKS = MULTIMODAL | FOUR_OF_DCP

Cell = tuple[float, float]
"""Work that grows with the tokens, and the slowest rank's load in tiles: what the two constants are for."""


def tables() -> list[Table]:
    return [table_4(), table_3_3(), table_3_4()]


def table_4() -> Table:
    kernel = AttentionKernel(num_units=A40_UNITS, cost=COST, heads_per_launch=8)
    cells = {
        (length, mask, name): (TOKENS[length], _slowest(mask, length, TABLE_4_RANKS, policy, kernel, TABLE_4_HEADS))
        for length, mask in TABLE_4_MS
        for name, policy in TABLE_4_POLICIES.items()
    }
    published = _flat(TABLE_4_MS, TABLE_4_POLICIES)
    rows = _rows(
        {"{} {}, {}".format(*cell): values for cell, values in cells.items()},
        {"{} {}, {}".format(*cell): ms for cell, ms in published.items()},
        fitted_on=("16k EP, LPT", "64k EP, LPT"),
        assumptions="8 heads a launch on an A40's 84 units; one bit per modality; 1196 + 1500 + 1000 tokens a sample",
    )
    return Table(
        "Cornstarch table 4: one attention layer of Llama 3.1 70B on 8 ranks",
        tuple(rows),
        "The published EE takes up to 1.45 times EP at the same length; with samples as in the thesis its mask has no "
        "more area than EP's, so ours is too low there. 64 heads in the published times would be above the peak of an "
        "A40, so the heads were divided or the masks are sparser than figure 11 shows.",
    )


def table_3_3() -> Table:
    cells: dict[str, Cell] = {}
    for name, (policy, tiles) in TABLE_3_3_POLICIES.items():
        kernel = AttentionKernel(num_units=A40_UNITS, cost=COST, tiles_per_piece=tiles, piece_s=MERGE_TILES)
        load = float(np.mean([_slowest(mask, "64k", TABLE_3_3_RANKS, policy, kernel, 1) for mask in MULTIMODAL]))
        cells |= {f"{model}, {name}": (width, load * width) for model, width in TABLE_3_3_WIDTHS.items()}
    rows = _rows(
        cells,
        {"{}, {}".format(*cell): ms for cell, ms in _flat(TABLE_3_3_MS, TABLE_3_3_POLICIES).items()},
        fitted_on=("LLM-S, Causal CP", "LLM-S, Cornstarch"),
        assumptions="CP 4; a launch per head on 84 units; rows split into pieces of 24 tiles; merging costs 2 tiles",
    )
    return Table(
        "Thesis table 3.3: an attention layer at 64k tokens",
        tuple(rows),
        "What the thesis found surprising follows from the launches: a rank has not many more rows than a device has "
        "units, so the longest row decides, and even sums alone gain nothing.",
    )


def table_3_4() -> Table:
    published = _flat(TABLE_3_4_MS, TABLE_3_4_LENGTHS)
    rows: list[Row] = []
    for system in ("Cornstarch", "DCP"):
        chosen = {(mask, length): ms for (mask, owner, length), ms in published.items() if owner == system}
        cells: dict[str, Cell] = {}
        for mask, length in chosen:
            counts = _counts(mask, length, 0)
            work = COST.of_blocks(counts)
            # DCP cuts pairs of blocks, so its loads are even; Cornstarch's are what LPT makes of rows.
            shares = distribute(work, TABLE_3_4_RANKS, num_tokens=counts.num_tokens)
            load = shares.loads.mean() if system == "DCP" else shares.loads.max()
            cells[f"{mask} {length}, {system}"] = (counts.num_tokens, float(load))
        rows += _rows(
            cells,
            {f"{mask} {length}, {system}": ms for (mask, length), ms in chosen.items()},
            fitted_on=(f"Causal 128k, {system}", f"Causal 256k, {system}"),
            assumptions="Lambda: sink 64, window 4096; blocks of 256; four answers as long as the question",
        )
    return Table(
        "Thesis table 3.4: an attention layer on 16 GPUs, Cornstarch and DCP",
        tuple(rows),
        "The parameters of the masks are not given. At 256k the published times of Cornstarch are alike for Lambda, "
        "causal and shared questions, though a window of 4096 leaves 3% of the causal area and four answers 52%. The "
        "windows grow with the sequence, or the time did not follow the area. Published times of Cornstarch at 32k "
        "are above those at 64k; nothing here explains that.",
    )


def _flat(published: Published, columns: Iterable[str]) -> dict[tuple[str, ...], float]:
    """Flattens nested cells to keys (row, column)."""
    names = list(columns)
    return {(*key, name): ms for key, row in published.items() for name, ms in zip(names, row, strict=True)}


def _rows(
    cells: Mapping[str, Cell], published: Mapping[str, float], *, fitted_on: tuple[str, str], assumptions: str
) -> list[Row]:
    """Two constants make milliseconds of the cells; they are exact on two of them."""
    constants = np.linalg.solve([cells[name] for name in fitted_on], [published[name] for name in fitted_on])
    return [
        Row(
            what=f"{name}: attention, ms",
            published=ms,
            ours=float(np.dot(constants, cells[name])),
            calibrated_on="; ".join(fitted_on),
            held_out=name not in fitted_on,
            assumptions=assumptions,
        )
        for name, ms in published.items()
    ]


@cache
def _counts(mask: str, length: str, draw: int) -> TileCounts:
    return tile_counts(_MASKS[mask](TOKENS[length], np.random.default_rng(draw)))


def _slowest(mask: str, length: str, num_ranks: int, policy: str, kernel: AttentionKernel, num_heads: int) -> float:
    """Tiles that the slowest rank computes for one head of `num_heads`; the mean over the draws."""
    found = []
    for draw in range(NUM_DRAWS):
        counts = _counts(mask, length, draw)
        shares = distribute(kernel.cost.of_blocks(counts), num_ranks, num_tokens=counts.num_tokens, policy=policy)
        found.append(devices_s(counts, shares, kernel, num_heads).max())
    return float(np.mean(found)) / num_heads
