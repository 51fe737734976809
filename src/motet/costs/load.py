"""What one microbatch means for the layers of a module: the few sums on which times and sizes depend."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np

from motet.assignment.sample import Sample
from motet.families.token_counts import token_counts
from motet.ragged_arrays import Floats
from motet.shapes.module_shape import ModuleWorkload


class Load(NamedTuple):
    """Sums over the sequences of one microbatch in one module."""

    tokens: float = 0.0
    """Padding included where sequences are padded."""
    pairs: float = 0.0
    """Pairs of tokens that attention computes: the sum of squared lengths, if sequences stand apart."""
    sequences: float = 0.0
    incoming: float = 0.0
    """Tokens that arrive from other modules; for cross-attention where all rows see all of them, times the rows."""
    incoming_pairs: float = 0.0
    """Own tokens times tokens that arrive: for cross-attention."""
    outputs: float = 0.0
    """Tokens that an encoder hands on, or that carry a language model's loss."""
    tokens_squared: float = 0.0
    """The square of `tokens`: a large microbatch outgrows caches, so that its tokens cost more."""

    def share(self, cp_size: int) -> "Load":
        """Of one rank, if the sequences' tokens and pairs are divided equally over a context-parallel group."""
        if cp_size == 1:
            return self
        return Load(
            tokens=self.tokens / cp_size,
            pairs=self.pairs / cp_size,
            sequences=self.sequences,
            incoming=self.incoming / cp_size,
            incoming_pairs=self.incoming_pairs / cp_size,
            outputs=self.outputs / cp_size,
            tokens_squared=self.tokens_squared / cp_size**2,
        )


def microbatch_load(
    workload: ModuleWorkload, data_module: str, samples: Sequence[Sample], sources: Sequence[str] = ()
) -> Load:
    """The load of these samples on the module whose layouts stand under `data_module`.

    `sources`: the modules whose outputs enter it. A contrastive loss's tokens are samples, its pairs those it compares
    between two towers.
    """
    if workload.kind == "loss":
        return Load(tokens=len(samples), pairs=len(samples) ** 2, sequences=len(samples), outputs=len(samples))
    sums = _sums(workload, data_module, samples, sources, {})
    if not sums.sequences:
        return Load(incoming=sums.incoming, outputs=sums.outputs)
    return Load(*_load(workload, *sums))


def sample_loads(
    workload: ModuleWorkload, data_module: str, samples: Sequence[Sample], sources: Sequence[str] = ()
) -> Floats:
    """[sample, value of a `Load`]: what `microbatch_load` makes of each sample alone; 0 where it lacks the modality."""
    if workload.kind == "loss":
        return np.tile(microbatch_load(workload, data_module, samples[:1]), (len(samples), 1))
    known: dict[tuple[int, ...], int] = {}
    sums = [_sums(workload, data_module, (s,), sources, known) if s.has(data_module) else NOTHING for s in samples]
    columns = np.fromiter(chain.from_iterable(sums), np.float64, len(sums) * len(NOTHING)).reshape(len(sums), -1).T
    return np.stack(np.broadcast_arrays(*_load(workload, *columns)), axis=1)


class _Sums(NamedTuple):
    """Over the sequences of some samples."""

    length: float
    squared_length: float
    longest: float
    sequences: float
    incoming: float
    outputs: float


NOTHING = _Sums(0, 0, 0, 0, 0, 0)

Value = TypeVar("Value", float, Floats)


def _load(
    workload: ModuleWorkload,
    length: Value,
    squared_length: Value,
    longest: Value,
    sequences: Value,
    incoming: Value,
    outputs: Value,
) -> tuple[Value, Value, Value, Value, Value, Value, Value]:
    """From the values of `_Sums` to those of a `Load`: of one microbatch, or of many as arrays."""
    tokens, pairs, entering, seeing = length, squared_length, incoming, length
    if workload.arrangement == "padded":
        tokens, pairs = sequences * longest, sequences * longest**2
        sees_all = workload.cross_attends and not workload.sees_own_items
        entering, seeing = (
            incoming * sequences if sees_all else incoming,
            longest if workload.sees_own_items else tokens,
        )
    elif workload.arrangement == "packed":
        pairs = length**2
    return tokens, pairs, sequences, entering, seeing * incoming, outputs, tokens**2


def _sums(
    workload: ModuleWorkload,
    data_module: str,
    samples: Sequence[Sample],
    sources: Sequence[str],
    known: dict[tuple[int, ...], int],
) -> _Sums:
    """An encoder's items are sequences of their own (and so are an item's tiles); other modules have one each. `known`:
    tokens of an item by its grid, as far as they have been asked for."""
    length = squared = longest = sequences = incoming = outputs = 0
    encodes_items = workload.encodes_items
    for sample in samples:
        layout = sample.layouts.get(data_module, ())
        for source in sources:
            incoming += sample.num_outputs(source)
        if not encodes_items:
            outputs += sample.num_loss_tokens.get(data_module, 0)
            if layout:
                num_tokens = sum([segment.num_tokens for segment in layout])
                length += num_tokens
                squared += num_tokens**2
                longest = max(longest, num_tokens)
                sequences += 1
            continue
        for segment in layout:
            outputs += segment.outputs
            of_grid = known.get(segment.grid)
            if of_grid is None:
                of_grid = known[segment.grid] = token_counts(workload.config, segment.grid).num_tokens
            num_tiles = max(1, segment.num_tokens // of_grid)
            num_tokens = segment.num_tokens // num_tiles
            length += num_tokens * num_tiles
            squared += num_tokens**2 * num_tiles
            longest = max(longest, num_tokens)
            sequences += num_tiles
    return _Sums(length, squared, longest, sequences, incoming, outputs)
