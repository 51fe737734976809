"""Which member of a context-parallel group holds which tokens of a microbatch, and which encoder outputs go there.

It follows from the layouts and the plan alone: those who send to a module find it as those who hold it do. What is
balanced is the attention of layers that see all; where windows cut it, it goes by the tokens, of which all have
equally many.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from motet.assignment.sample import Sample, places_in_sample
from motet.attention.masks.custom_masks import Rule, mask_of_documents, rule_named
from motet.attention.masks.distribution import Distribution, TileCost, distribute
from motet.attention.masks.rules import AttentionRule
from motet.attention.masks.tile_counts import tile_counts
from motet.attention.masks.token_layout import Document
from motet.plan import ContextOptions, Stage

Rows = NDArray[np.int64]

KERNEL_COST = TileCost(full_s=1.0, partial_s=1.2)
"""Relative: the kernels pay by the tile, and a little for the mask of a partial one (assumed, not yet measured)."""

FULL = AttentionRule(text="full")


def rule_of_text(options: ContextOptions) -> Rule:
    """Of a language model's layers without a window."""
    return rule_named(options.media_attention)


@lru_cache(maxsize=512)
def share_out(documents: tuple[Document, ...], rule: Rule, options: ContextOptions, cp_size: int) -> Distribution:
    """Who holds which blocks of documents that stand one after the other; some members may hold none."""
    mask = mask_of_documents(documents, rule)
    return distribute(
        KERNEL_COST.of_blocks(tile_counts(mask, options.block_size)),
        cp_size,
        num_tokens=mask.num_tokens,
        block_size=options.block_size,
        policy=options.policy,
        allow_empty=True,
    )


def member_of(stage: Stage, rank: int) -> int:
    """The place in the context-parallel group of one of a stage's ranks."""
    return stage.ranks.index(rank) // stage.tp_size


def tokens_of_members(documents: tuple[Document, ...], rule: Rule, options: ContextOptions, cp_size: int) -> list[Rows]:
    """For each member: which tokens of these documents stand in its share."""
    distribution = share_out(documents, rule, options, cp_size)
    return [distribution.tokens_of(member) for member in range(cp_size)]


def held_outputs(
    samples: Sequence[Sample],
    wanted: Sequence[bool],
    module: str,
    source: str,
    options: ContextOptions,
    cp_size: int,
) -> list[Rows]:
    """For each member: which output tokens of `source`, of the `wanted` ones of a microbatch's samples, stand in its
    share of the language model `module`. They count in the order (sample, item) of the wanted samples."""
    documents = tuple(Document(tuple(sample.layouts[module])) for sample in samples)
    distribution = share_out(documents, rule_of_text(options), options, cp_size)
    places: list[int] = []
    start = 0
    for sample, is_wanted in zip(samples, wanted, strict=True):
        if is_wanted:
            places += places_in_sample(sample, module, source, start)
        start += sample.num_tokens(module)
    members = distribution.rank_of_block[np.array(places, np.int64) // options.block_size]
    return [np.flatnonzero(members == member) for member in range(cp_size)]
