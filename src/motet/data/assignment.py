"""Which samples make up each microbatch of each module's replica, for one iteration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

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
    """Cuts the batch in the order in which it comes, so that microbatch i of every module needs microbatch i of others.

    The batch is cut into as many contiguous shares as all numbers of replicas can be divided by, and a share into
    `num_microbatches`. Where a module has several replicas for a share, each microbatch's samples are dealt to them in
    turn (DistTrain's broker between units of unequal data parallelism). A sample without a modality is left out of
    that modality's microbatch.
    """
    shares = split_evenly(range(len(samples)), gcd(*(len(module.replicas) for module in plan.modules.values())))
    cut = {}
    for name, module in plan.modules.items():
        per_share = len(module.replicas) // len(shares)
        cut[name] = tuple(
            tuple(
                tuple(
                    i
                    for i in microbatch
                    if (i - share[0]) % per_share == place and samples[i].has(module.data_module(name))
                )
                for microbatch in split_evenly(share, plan.num_microbatches)
            )
            for share in shares
            for place in range(per_share)
        )
    return BatchAssignment(cut)


def assignment_of_replicas(
    plan: Plan,
    samples: Sequence[Sample],
    replicas: Sequence[Sequence[Microbatch]],
    encoder_pieces: Sequence[Sequence[Microbatch]] | None = None,
) -> BatchAssignment:
    """All modules cut the batch alike: `replicas[r][i]` is microbatch i of every module's replica r. `encoder_pieces`:
    if given, the encoders' microbatches instead. A sample without a modality is left out of that modality's microbatch.

    Raises `ValueError` if modules do not have this number of replicas."""
    cut = {}
    for name, module in plan.modules.items():
        if len(module.replicas) != len(replicas):
            raise ValueError(
                f"assignment: {name} has {len(module.replicas)} replicas, other modules {len(replicas)}; "
                "give all modules equally many"
            )
        own = encoder_pieces if encoder_pieces is not None and module.kind == "encoder" else replicas
        data_module = module.data_module(name)
        cut[name] = tuple(
            tuple(tuple(i for i in microbatch if samples[i].has(data_module)) for microbatch in microbatches)
            for microbatches in own
        )
    return BatchAssignment(cut)
