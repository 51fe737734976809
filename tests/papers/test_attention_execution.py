"""Simulated attention: by hand, against bounds, and the thesis' observation that even sums alone do not help."""

import dense_masks
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling import examples

from motet.assignment.sample import Segment
from motet.attention.masks.distribution import TileCost, distribute
from motet.attention.masks.rules import AttentionRule, mask_of
from motet.attention.masks.tile_counts import FULL, PARTIAL, tile_counts
from motet.attention.masks.token_layout import Document, layout_of_documents
from papers.cornstarch.attention_time import (
    AttentionKernel,
    devices_s,
    gathered_s,
    ring_rounds_s,
    ring_s,
)

COST = TileCost(full_s=1.0, partial_s=1.0)


def full(*tiles: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of so many full tiles."""
    return np.array(tiles), np.zeros(len(tiles), int)


def test_figure_3_3b() -> None:
    """Rows of 1 and 5 tiles on two units: the long one alone decides, until it is split into pieces of two tiles."""
    rows = full(1, 5)
    assert AttentionKernel(num_units=2, cost=COST).device_s(*rows, 1) == 5
    split = AttentionKernel(num_units=2, cost=COST, tiles_per_piece=2)
    assert split.tasks(*rows).tolist() == pytest.approx([5 / 3, 5 / 3, 5 / 3, 1])
    assert split.device_s(*rows, 1) == pytest.approx(10 / 3)
    merging = AttentionKernel(num_units=2, cost=COST, tiles_per_piece=2, piece_s=1.0)
    assert merging.tasks(*rows).sum() == pytest.approx(6 + 3)


def test_heads_of_a_launch_share_the_units() -> None:
    # Of two heads: 1, 1, 5 beside 5. Of three: 1, 1, 5 beside 5, 1, 5, and one head after them.
    for heads, seconds in ((1, 4 * 5), (2, 2 * 7), (3, 11 + 5), (4, 13)):
        kernel = AttentionKernel(num_units=2, cost=COST, heads_per_launch=heads)
        assert kernel.device_s(*full(1, 5), 4) == seconds


def test_a_round_of_a_ring_leaves_empty_rows_out_and_merges_the_others() -> None:
    kernel = AttentionKernel(num_units=1, cost=TileCost(full_s=1.0, partial_s=2.0, block_s=0.25), piece_s=0.5)
    assert kernel.ring_round_s(np.array([3, 0, 0]), np.array([1, 0, 1]), 2) == 2 * (5 + 2 + 2 * 0.75)


@given(
    tasks=st.lists(st.integers(0, 20), min_size=1, max_size=30),
    units=st.integers(1, 8),
    pieces=st.integers(1, 6),
    heads=st.integers(1, 5),
)
@examples(100)
def test_no_device_beats_its_bounds(tasks: list[int], units: int, pieces: int, heads: int) -> None:
    whole = AttentionKernel(num_units=units, cost=COST).device_s(*full(*tasks), heads)
    split = AttentionKernel(num_units=units, cost=COST, tiles_per_piece=pieces).device_s(*full(*tasks), heads)
    assert heads * max(max(tasks), sum(tasks) / units) <= whole <= heads * (sum(tasks) / units + max(tasks)) + 1e-9
    assert heads * sum(tasks) / units - 1e-9 <= split <= heads * (sum(tasks) / units + pieces) + 1e-9


@given(st.floats(0, 9), st.floats(0, 9), st.integers(1, 6))
def test_gathering_beside_computing(compute: float, gather: float, steps: int) -> None:
    """Step by step on two queues: the link, and the device that waits for it."""
    link = started = device = 0.0
    for _ in range(steps):
        link = max(link, started) + gather / steps  # It starts with the computation that it runs beside.
        started = max(device, link)
        device = started + compute / steps
    assert gathered_s(compute, gather, steps) == pytest.approx(device)


def test_a_ring_waits_for_the_slowest_in_every_round() -> None:
    """Causal, two ranks: rank 1 alone has work with rank 0's keys, and rank 0 none with rank 1's."""
    pairs = np.array([[1.0, 0.0], [2.0, 1.0]])
    assert ring_s(pairs, send_s=0.5) == 1 + 2
    assert ring_s(pairs, send_s=3.0) == 3 + 2
    assert ring_s(np.array([[4.0]]), send_s=9.0) == 4


def test_rounds_of_a_ring() -> None:
    """Against tiles counted in the dense mask, tokens in the ranks' own order."""
    mask = mask_of(layout_of_documents([Document((Segment(1000),))]), AttentionRule(window=300))
    cost = TileCost(full_s=1.0, partial_s=1.5)
    kernel = AttentionKernel(num_units=1, cost=cost)
    shares = distribute(cost.of_blocks(tile_counts(mask)), 3, num_tokens=1000, policy="striped")
    rounds = ring_rounds_s(mask, shares, kernel, num_heads=2)
    tiles = dense_masks.tiles(mask.dense(), 128)
    for one in range(3):
        for other in range(3):
            part = tiles[shares.blocks_of(one)][:, shares.blocks_of(other)]
            assert rounds[one, other] == 2 * ((part == FULL).sum() + 1.5 * (part == PARTIAL).sum())


def test_even_sums_do_not_help_until_long_rows_are_split() -> None:
    """Thesis 3.5.4: balance between devices only is no gain, inside devices is one, both together are the best."""
    images = [Segment(1200, "vision", item) if item % 2 else Segment(700 + 50 * (item % 5)) for item in range(64)]
    counts = tile_counts(mask_of(layout_of_documents([Document(tuple(images))]), AttentionRule(media="own_item")))

    def slowest(policy: str, tiles_per_piece: int | None) -> float:
        kernel = AttentionKernel(num_units=84, cost=COST, tiles_per_piece=tiles_per_piece, piece_s=1.0)
        shares = distribute(COST.of_blocks(counts), 4, num_tokens=counts.num_tokens, policy=policy)
        return float(devices_s(counts, shares, kernel, 1).max())

    neither, between, inside, both = (
        slowest(p, n) for p, n in [("zigzag", None), ("lpt", None), ("zigzag", 32), ("lpt", 32)]
    )
    assert between > 0.95 * neither
    assert inside < 0.8 * neither
    assert both < 0.98 * inside
