"""What one microbatch means for the layers of a module: the few sums on which times and sizes depend."""

from collections.abc import Sequence
from typing import NamedTuple

from motet.data.sample import Sample
from motet.models.token_counts import token_counts
from motet.workload import ModuleWorkload


class Load(NamedTuple):
    """Sums over the sequences of one microbatch in one module."""

    tokens: float = 0.0
    """Padding included where sequences are padded."""
    pairs: float = 0.0
    """Pairs of tokens that attention computes: the sum of squared lengths, if sequences stand apart."""
    sequences: float = 0.0
    incoming: float = 0.0
    """Tokens that arrive from other modules; for cross-attention, times the rows that all see all of them."""
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
    lengths = [length for sample in samples for length in _sequence_lengths(workload, data_module, sample)]
    incoming = sum(sample.num_outputs(source) for source in sources for sample in samples)
    if workload.encodes_items:
        outputs = sum(sample.num_outputs(data_module) for sample in samples)
    else:
        outputs = sum(sample.num_loss_tokens.get(data_module, 0) for sample in samples)
    if not lengths:
        return Load(incoming=incoming, outputs=outputs)
    num_rows = 1
    if workload.arrangement == "separate":
        tokens, pairs = sum(lengths), sum(length**2 for length in lengths)
    elif workload.arrangement == "padded":
        num_rows = len(lengths)
        tokens, pairs = num_rows * max(lengths), num_rows * max(lengths) ** 2
    else:
        tokens, pairs = sum(lengths), sum(lengths) ** 2
    return Load(
        tokens=tokens,
        pairs=pairs,
        sequences=len(lengths),
        incoming=incoming * (num_rows if workload.cross_attends else 1),
        incoming_pairs=tokens * incoming,
        outputs=outputs,
        tokens_squared=tokens**2,
    )


def _sequence_lengths(workload: ModuleWorkload, data_module: str, sample: Sample) -> list[int]:
    """An encoder's items are sequences of their own (and so are an item's tiles); other modules have one each."""
    layout = sample.layouts.get(data_module, ())
    if not workload.encodes_items:
        return [sample.num_tokens(data_module)] if layout else []
    lengths = []
    for segment in layout:
        num_tiles = max(1, segment.num_tokens // token_counts(workload.config, segment.grid).num_tokens)
        lengths += [segment.num_tokens // num_tiles] * num_tiles
    return lengths
