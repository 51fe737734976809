"""Which samples make up each microbatch of each module's replica, for one iteration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
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
    that modality's microbatch. Where the plan has `replica_microbatches`, the batch is cut into that many microbatches
    of equal size, and each replica takes a run of them. Where towers are contrasted, the contrastive batches are cut
    first (`contrastive_assignment`).
    """
    if plan.loss_module is not None:
        return contrastive_assignment(plan, samples, plan.loss_module)
    if plan.replica_microbatches:
        parts = iter(split_evenly(range(len(samples)), sum(plan.replica_microbatches)))
        return assignment_of_replicas(plan, samples, [tuple(islice(parts, n)) for n in plan.replica_microbatches])
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
                for microbatch in split_evenly(share, plan.num_microbatches_of(name))
            )
            for share in shares
            for place in range(per_share)
        )
    return BatchAssignment(cut)


def contrastive_assignment(plan: Plan, samples: Sequence[Sample], loss: str) -> BatchAssignment:
    """Cuts the batch into contrastive batches first, the microbatches of the loss (DistMM 5.2 and 5.4, Figure 2).

    Each module cuts a contrastive batch by itself, over its own replicas and into its own number of microbatches (3
    replicas with 4 of 2 samples, 4 replicas with 2 of 3). Where the contrastive batches do not divide the global batch,
    they differ by one sample. A sample without a modality is left out of that
    modality's microbatch, one without any tower's modality out of the loss's.
    """
    batches = split_evenly(range(len(samples)), plan.num_microbatches_of(loss))
    towers = [plan.modules[edge.source].data_module(edge.source) for edge in plan.edges if edge.target == loss]
    cut: dict[str, tuple[tuple[Microbatch, ...], ...]] = {}
    for name, module in plan.modules.items():
        read = towers if name == loss else [module.data_module(name)]
        able = [[i for i in batch if any(samples[i].has(tower) for tower in read)] for batch in batches]
        shares = [split_evenly(batch, len(module.replicas)) for batch in able]
        per_batch = plan.num_microbatches_of(name) // len(batches)
        cut[name] = tuple(
            tuple(microbatch for share in shares for microbatch in split_evenly(share[r], per_batch))
            for r in range(len(module.replicas))
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
