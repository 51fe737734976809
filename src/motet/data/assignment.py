"""Which samples make up each microbatch of each module's replica, for one iteration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from motet.data.sample import Sample
from motet.plan import Plan

Microbatch = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchAssignment:
    """The cut of one global batch. Modules need not cut it alike.

    `microbatches[module][replica][i]` are indices into the global batch. A module's microbatch lists only samples that
    the module has something to do for; an empty one has no actions.
    """

    microbatches: Mapping[str, tuple[tuple[Microbatch, ...], ...]]

    def samples_of(self, module: str, replica: int, microbatch: int) -> Microbatch:
        return self.microbatches[module][replica][microbatch]


def split_evenly(items: Sequence[int], num_parts: int) -> tuple[Microbatch, ...]:
    """Contiguous parts whose sizes differ by at most one, the larger ones first; parts may be empty."""
    size, extra = divmod(len(items), num_parts)
    bounds = [i * size + min(i, extra) for i in range(num_parts + 1)]
    return tuple(tuple(items[a:b]) for a, b in pairwise(bounds))


def contiguous_assignment(plan: Plan, samples: Sequence[Sample]) -> BatchAssignment:
    """Cuts the batch in the order in which it comes, the same way for every module with the same number of replicas.

    Replicas get contiguous shares, and a replica's share is cut into its module's `num_microbatches`. A sample without
    a modality is left out of that modality's microbatch.
    """
    everyone = range(len(samples))
    cut = {}
    for name, module in plan.modules.items():
        shares = split_evenly(everyone, len(module.replicas))
        cut[name] = tuple(
            tuple(
                tuple(i for i in microbatch if samples[i].has(module.data_module(name)))
                for microbatch in split_evenly(share, plan.num_microbatches)
            )
            for share in shares
        )
    return BatchAssignment(cut)
