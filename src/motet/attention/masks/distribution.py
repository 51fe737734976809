"""Distribution of blocks of queries over a context-parallel group (Cornstarch 4.3.2, 5.3; thesis 3.3.2.1).

`lpt` is longest processing time first, with a cap: ranks' token counts differ by at most one block, else what balances
the attention unbalances everything else. Under the cap every rank takes one block in every round of G blocks, so a
round is: ranks in ascending order of load, blocks in descending order, matched. Keys of load and rank in one integer
make that three numpy calls.

*Bound.* Let s be the difference between the largest and the smallest load before a round, and d the difference between
the round's largest and smallest block (0 for a missing one). Afterwards the difference is at most max(s, d): a rank
that had the smaller load gets the larger block, so the two effects oppose each other. Hence no load exceeds the
mean by more than the largest d of a round. The plain heap's bound, the mean and the largest block, is never smaller.

Then the most loaded rank exchanges blocks with one of the least loaded, as long as that helps. This never makes the
largest load larger.

Deviations: the papers' listings leave the order of blocks open, or go over the unsorted list; LPT means descending.
All arithmetic is on integers, so every rank finds the same distribution.

The other policies are baselines.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from motet.assignment.sample import Sample, places_in_sample
from motet.attention.masks.rules import AttentionRule, Rule, mask_of_documents, rule_named
from motet.attention.masks.tile_counts import BLOCK_SIZE, Int64, TileCounts, num_blocks, tile_counts
from motet.attention.masks.token_layout import Document
from motet.errors import UserError
from motet.plan import ContextOptions, Stage

_MOST_EXCHANGES = 64
_PAIRS_TO_COMPARE = 8192
_GOOD_ENOUGH = 250
"""Loads that exceed the mean by less than 0.4% of it are left as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileCost:
    """Cost of a tile per head."""

    full_s: float
    partial_s: float
    """More than a full one: its mask is computed for every pair."""
    block_s: float = 0.0
    """Fixed cost of every block of queries."""

    def of_blocks(self, counts: TileCounts) -> NDArray[np.float64]:
        """[N]: seconds of every block of queries, per head."""
        return self.of_rows(counts.full, counts.partial)

    def of_rows(self, full: Int64, partial: Int64) -> NDArray[np.float64]:
        """[n]: seconds of rows with so many full and partial tiles, per head."""
        return self.full_s * full + self.partial_s * partial + self.block_s


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """Blocks of a sequence of T tokens over the G ranks of a context-parallel group."""

    rank_of_block: Int64
    """[N]."""
    loads: NDArray
    """[G], in the unit of the workloads."""
    lower_bound: float
    """No distribution with the cap has a smaller largest load."""
    num_tokens: int
    block_size: int

    @property
    def num_ranks(self) -> int:
        return len(self.loads)

    @property
    def imbalance(self) -> float:
        """The largest load over the mean, at least 1."""
        mean = float(self.loads.mean())
        return float(self.loads.max()) / mean if mean else 1.0

    @property
    def token_counts(self) -> Int64:
        """[G]."""
        sizes = np.minimum(self.block_size, self.num_tokens - np.arange(len(self.rank_of_block)) * self.block_size)
        return np.bincount(self.rank_of_block, sizes, minlength=self.num_ranks).astype(np.int64)

    def blocks_of(self, rank: int) -> Int64:
        """The rank's blocks, in the order of the sequence."""
        return np.flatnonzero(self.rank_of_block == rank)

    def tokens_of(self, rank: int) -> Int64:
        """Positions in the sequence of the rank's tokens, in the order in which it holds them."""
        places = (self.blocks_of(rank)[:, None] * self.block_size + np.arange(self.block_size)).ravel()
        return places[places < self.num_tokens]

    @property
    def permutation(self) -> Int64:
        """[T]: positions in the sequence in the order of the ranks, as an all-gather brings them together."""
        return np.concatenate([self.tokens_of(rank) for rank in range(self.num_ranks)])


def distribute(
    workloads: NDArray,
    num_ranks: int,
    *,
    num_tokens: int,
    block_size: int = BLOCK_SIZE,
    policy: str = "lpt",
    allow_empty: bool = False,
) -> Distribution:
    """`workloads` [N]: of every block, in any unit. `allow_empty`: whether ranks may be left without tokens.

    Raises `UserError` where there are fewer blocks than ranks, `ValueError` for arguments that do not fit together."""
    if policy not in POLICIES:
        raise UserError(f"no distribution is called {policy!r}; there are {', '.join(POLICIES)}")
    blocks = len(workloads)
    if blocks != num_blocks(num_tokens, block_size):
        raise ValueError(f"{blocks} workloads for {num_tokens} tokens in blocks of {block_size}")
    if num_ranks < 1 or (blocks < num_ranks and not allow_empty):
        raise UserError(
            f"cp_size {num_ranks} does not fit: {num_tokens} tokens are {blocks} blocks of {block_size}, "
            "and each rank needs one"
        )
    short_last = num_tokens % block_size != 0
    rank_of_block = POLICIES[policy](_as_integers(workloads, num_ranks), num_ranks, short_last)
    loads = np.zeros(num_ranks, workloads.dtype)
    np.add.at(loads, rank_of_block, workloads)
    return Distribution(rank_of_block, loads, lower_bound(workloads, num_ranks), num_tokens, block_size)


def check_ulysses(num_heads: int, num_key_heads: int, num_traders: int) -> None:
    """Raises `UserError` unless each of the ranks that trade tokens for heads gets whole heads. Of one rank of a
    tensor-parallel group."""
    for what, heads in (("query", num_heads), ("key", num_key_heads)):
        if heads % num_traders:
            raise UserError(
                f"context.method: ulysses cannot divide {heads} {what} heads by {num_traders} ranks; "
                "use all_gather, or fewer ranks"
            )


def lower_bound(workloads: NDArray, num_ranks: int) -> float:
    """No distribution with the cap has a smaller largest load.

    It is no less than the mean. And of the k G + 1 heaviest blocks some rank has k + 1, which weigh no less than the
    lightest of these, beside as many others as the cap demands."""
    if not len(workloads):
        return 0.0
    descending = np.sort(workloads)[::-1].astype(np.float64)
    sums = np.concatenate([[0.0], np.cumsum(descending)])
    k = np.arange(-(-len(workloads) // num_ranks))
    last = k * num_ranks + 1
    others = np.maximum(len(workloads) // num_ranks - (k + 1), 0)
    bounds = sums[last] - sums[last - (k + 1)] + sums[-1] - sums[len(workloads) - others]
    return float(max(sums[-1] / num_ranks, bounds.max()))


def lpt(workloads: Int64, num_ranks: int, short_last: bool) -> Int64:
    """Longest processing time first, one block for every rank in every round; then exchanges."""
    blocks = len(workloads)
    rounds = -(-blocks // num_ranks)
    rank_bits = (num_ranks - 1).bit_length()
    order = _descending(workloads)
    heaviest_first = np.zeros((rounds, num_ranks), np.int64)
    heaviest_first.ravel()[:blocks] = workloads[order] << rank_bits
    keys = np.arange(num_ranks)  # load and rank in one number, ascending.
    owners = np.empty((rounds, num_ranks), np.int64)
    for number, work in enumerate(heaviest_first):
        owners[number] = keys
        keys = keys + work
        keys.sort()
    owners &= (1 << rank_bits) - 1
    rank_of_block = np.empty(blocks, np.int64)
    rank_of_block[order] = owners.ravel()[:blocks]
    fixed = -1
    if short_last and blocks % num_ranks:
        fixed = blocks - 1
        _give_short_block_to_a_rank_with_more(rank_of_block, workloads, num_ranks)
    _exchange(rank_of_block, workloads, num_ranks, fixed)
    return rank_of_block


def _give_short_block_to_a_rank_with_more(rank_of_block: Int64, workloads: Int64, num_ranks: int) -> None:
    """A rank with one block less than others must have whole ones, or it would be behind by more than a block."""
    counts = np.bincount(rank_of_block, minlength=num_ranks)
    last = len(rank_of_block) - 1
    if counts[rank_of_block[last]] < counts.max():
        candidates = np.flatnonzero(counts[rank_of_block] == counts.max())
        nearest = candidates[np.argmin(np.abs(workloads[candidates] - workloads[last]))]
        rank_of_block[[last, nearest]] = rank_of_block[[nearest, last]]


def _exchange(rank_of_block: Int64, workloads: Int64, num_ranks: int, fixed: int) -> None:
    """Exchanges blocks of the most loaded rank with one of the least loaded, in place; the block `fixed` stays."""
    loads = np.zeros(num_ranks, np.int64)
    np.add.at(loads, rank_of_block, workloads)
    aim = -(-int(loads.sum()) // num_ranks)
    num_partners = max(1, _PAIRS_TO_COMPARE * num_ranks**2 // max(1, len(workloads)) ** 2)
    is_partner = np.zeros(num_ranks, bool)
    for _ in range(_MOST_EXCHANGES):
        most = int(loads.argmax())
        if (int(loads[most]) - aim) * _GOOD_ENOUGH <= aim:
            return
        is_partner[:] = False
        is_partner[np.argsort(loads, kind="stable")[:num_partners]] = True
        given, taken = np.flatnonzero(rank_of_block == most), np.flatnonzero(is_partner[rank_of_block])
        given, taken = given[given != fixed], taken[taken != fixed]
        moved = workloads[given][:, None] - workloads[taken][None]
        larger = np.maximum(loads[most] - moved, loads[rank_of_block[taken]] + moved)
        if not larger.size or larger.min() >= loads[most]:
            return
        one, other = (int(index) for index in np.unravel_index(larger.argmin(), larger.shape))
        partner = rank_of_block[taken[other]]
        loads[most] -= moved[one, other]
        loads[partner] += moved[one, other]
        rank_of_block[given[one]], rank_of_block[taken[other]] = partner, most


def lpt_uncapped(workloads: Int64, num_ranks: int, short_last: bool) -> Int64:
    """The papers' listing, sorted: each block to the least loaded rank, whatever number of tokens that gives."""
    heap = [(0, rank) for rank in range(num_ranks)]
    rank_of_block = np.empty(len(workloads), np.int64)
    for block in _descending(workloads).tolist():
        load, rank = heap[0]
        rank_of_block[block] = rank
        heapq.heapreplace(heap, (load + int(workloads[block]), rank))
    return rank_of_block


def snake(workloads: Int64, num_ranks: int, short_last: bool) -> Int64:
    """Heaviest first, forth and back over the ranks."""
    rounds = -(-len(workloads) // num_ranks)
    owners = np.tile(np.arange(num_ranks), (rounds, 1))
    owners[1::2] = owners[1::2, ::-1]
    rank_of_block = np.empty(len(workloads), np.int64)
    rank_of_block[_descending(workloads)] = owners.ravel()[: len(workloads)]
    return rank_of_block


def random(workloads: Int64, num_ranks: int, short_last: bool) -> Int64:
    """Random order, equally many blocks for each rank (Cornstarch 5.3)."""
    return np.random.default_rng(0).permutation(np.arange(len(workloads)) % num_ranks)


def zigzag(workloads: Int64, num_ranks: int, short_last: bool) -> Int64:
    """2 G chunks; rank i has the i-th from either end. Balances a causal mask."""
    chunk = np.arange(len(workloads)) * 2 * num_ranks // len(workloads)
    return np.minimum(chunk, 2 * num_ranks - 1 - chunk)


def contiguous(workloads: Int64, num_ranks: int, short_last: bool) -> Int64:
    """G chunks, as plain ring attention has them."""
    return np.arange(len(workloads)) * num_ranks // len(workloads)


def striped(workloads: Int64, num_ranks: int, short_last: bool) -> Int64:
    """Block i on rank i mod G, as striped ring attention has them."""
    return np.arange(len(workloads)) % num_ranks


MOST_NODES = 200
"""Nodes of the branch-and-bound search of `ilp`: a limit on seconds would give each rank a distribution of its own."""
MOST_VARIABLES = 4096
"""Variables of the largest problem of `ilp`; larger ones are `lpt`'s."""


def ilp(workloads: Int64, num_ranks: int, short_last: bool) -> Int64:
    """Integer program for the smallest largest load (Cornstarch 4.3.2), solved by HiGHS under the cap of `lpt`; `lpt`
    where that is no worse, or the search ends without a solution."""
    greedy, blocks = lpt(workloads, num_ranks, short_last), len(workloads)
    total = int(workloads.sum())
    if blocks * num_ranks > MOST_VARIABLES or num_ranks == 1 or not total:
        return greedy
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_matrix, hstack, identity, kron

    # Variables: whether block b is on rank g, at b * G + g, and the largest load, over the mean, as the last one.
    each_block = csr_matrix(np.ones((1, num_ranks)))
    on_rank = identity(num_ranks, format="csr")
    one_rank = kron(identity(blocks), each_block)
    loads = kron(csr_matrix(workloads[None] * (num_ranks / total)), on_rank)
    counts = kron(csr_matrix(np.ones((1, blocks))), on_rank)
    at_least = counts
    if short_last and blocks % num_ranks:  # The rank with the short block has as many as any other.
        at_least = counts - kron(csr_matrix(np.eye(1, blocks, blocks - 1)), on_rank)
    columns = [hstack([one_rank, csr_matrix((blocks, 1))]), hstack([loads, csr_matrix(-np.ones((num_ranks, 1)))])]
    columns += [hstack([rows, csr_matrix((num_ranks, 1))]) for rows in (counts, at_least)]
    found = milp(
        np.eye(1, blocks * num_ranks + 1, blocks * num_ranks)[0],
        integrality=np.append(np.ones(blocks * num_ranks), 0),
        bounds=Bounds(0, np.append(np.ones(blocks * num_ranks), np.inf)),
        constraints=[
            LinearConstraint(columns[0], 1, 1),
            LinearConstraint(columns[1], -np.inf, 0),
            LinearConstraint(columns[2], -np.inf, -(-blocks // num_ranks)),
            LinearConstraint(columns[3], blocks // num_ranks, np.inf),
        ],
        options={"node_limit": MOST_NODES},
    )
    if found.x is None:
        return greedy
    rank_of_block = found.x[:-1].reshape(blocks, num_ranks).argmax(1).astype(np.int64)

    def largest(owners: Int64) -> int:
        own = np.zeros(num_ranks, np.int64)
        np.add.at(own, owners, workloads)
        return int(own.max())

    return rank_of_block if largest(rank_of_block) < largest(greedy) else greedy


POLICIES: dict[str, Callable[[Int64, int, bool], Int64]] = {
    "lpt": lpt,
    "lpt_uncapped": lpt_uncapped,
    "snake": snake,
    "random": random,
    "zigzag": zigzag,
    "contiguous": contiguous,
    "striped": striped,
    "ilp": ilp,
}
"""(workloads [N], number of ranks, whether the last block is shorter than the others) -> rank of each block [N]."""


def _descending(workloads: Int64) -> Int64:
    """Indices of the blocks, heaviest first, equal ones in the order of the sequence."""
    index_bits = len(workloads).bit_length()
    if len(workloads) and int(workloads.max()).bit_length() + index_bits >= 63:
        return np.argsort(-workloads, kind="stable")
    keys = (-workloads << index_bits) | np.arange(len(workloads))  # Distinct, so any sort gives the same.
    keys.sort()
    return keys & ((1 << index_bits) - 1)


def _as_integers(workloads: NDArray, num_ranks: int) -> Int64:
    """Scaled such that a load and a rank fit into one word together."""
    if len(workloads) and not (np.isfinite(workloads).all() and workloads.min() >= 0):
        raise ValueError("workloads must be finite and not negative")
    most = float(workloads.max(initial=0)) * len(workloads)  # A sum's last bits would depend on the processor.
    room = 2.0 ** (61 - num_ranks.bit_length())
    if np.issubdtype(workloads.dtype, np.integer) and most < room:
        return workloads.astype(np.int64)
    scale = 2.0 ** np.floor(np.log2(room / most) - 1) if most else 0.0
    return np.rint(workloads * scale).astype(np.int64)


# Token ownership follows from the layouts and the plan alone, so senders and owners derive the same. The balance is
# that of layers with full attention; sliding windows cost about the same for every token.

Rows = NDArray[np.int64]

KERNEL_COST = TileCost(full_s=1.0, partial_s=1.2)
"""Relative: the kernels pay by the tile, and a little for the mask of a partial one (assumed, not yet measured)."""

FULL = AttentionRule(text="full")


def rule_of_text(options: ContextOptions) -> Rule:
    """Rule of a language model's layers without a window."""
    return rule_named(options.media_attention)


@lru_cache(maxsize=512)
def share_out(documents: tuple[Document, ...], rule: Rule, options: ContextOptions, cp_size: int) -> Distribution:
    """Owners of the blocks of documents that stand one after the other; some members may own none."""
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
    """Tokens of these documents that each member owns."""
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
