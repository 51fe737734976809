"""Assignment of samples to the microbatches of each module's replicas, for one iteration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from math import gcd

from motet.assignment.sample import Sample
from motet.plan import Plan

Microbatch = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchAssignment:
    """The cut of one global batch. Modules need not cut it alike.

    `microbatches[module][replica][i]` are indices into the global batch. A module's microbatch lists only samples that
    the module has something to do for; an empty one has no actions, unless replicas that share experts wait for it.
    """

    microbatches: Mapping[str, tuple[tuple[Microbatch, ...], ...]]

    def samples_of(self, module: str, replica: int, microbatch: int) -> Microbatch:
        """A microbatch's samples; none of an idle one, which only replicas that share experts with this one have."""
        own = self.microbatches[module][replica]
        return own[microbatch] if microbatch < len(own) else ()


def split_evenly(items: Sequence[int], num_parts: int) -> tuple[Microbatch, ...]:
    """Contiguous parts whose sizes differ by at most one, the larger ones first; parts may be empty."""
    size, extra = divmod(len(items), num_parts)
    bounds = [i * size + min(i, extra) for i in range(num_parts + 1)]
    return tuple(tuple(items[a:b]) for a, b in pairwise(bounds))


def num_shares(plan: Plan) -> int:
    """Number of independent parts of the batch: the greatest common divisor of the modules' numbers of replicas."""
    return gcd(*(len(module.replicas) for module in plan.modules.values()))


def contiguous_assignment(plan: Plan, samples: Sequence[Sample]) -> BatchAssignment:
    """Cuts the batch in the order in which it comes: into contiguous shares, and each into `num_microbatches`.

    Where the plan has `replica_microbatches`, the batch is cut into that many microbatches of equal size, and each
    replica takes a run of them. With contrastive towers, the contrastive batches are cut first
    (`contrastive_assignment`)."""
    if plan.loss_module is not None:
        return contrastive_assignment(plan, samples, plan.loss_module)
    return assignment_of_shares(plan, samples, cut_evenly(plan, range(len(samples))))


def cut_evenly(plan: Plan, samples: Sequence[int]) -> list[tuple[Microbatch, ...]]:
    """Microbatches by share: contiguous runs of equal numbers of samples, as far as they divide."""
    if plan.replica_microbatches:
        parts = iter(split_evenly(samples, sum(plan.replica_microbatches)))
        return [tuple(islice(parts, n)) for n in plan.replica_microbatches]
    return [split_evenly(share, plan.num_microbatches) for share in split_evenly(samples, num_shares(plan))]


def microbatches_of_shares(plan: Plan) -> tuple[int, ...]:
    return plan.replica_microbatches or (plan.num_microbatches,) * num_shares(plan)


def contrastive_assignment(plan: Plan, samples: Sequence[Sample], loss: str) -> BatchAssignment:
    """Cuts the batch into contrastive batches first, the microbatches of the loss (DistMM 5.2 and 5.4, Figure 2).

    Each module cuts a contrastive batch by itself, over its own replicas and into its own number of microbatches (3
    replicas with 4 of 2 samples, 4 replicas with 2 of 3). Where the contrastive batches do not divide the global batch,
    they differ by one sample. A sample without a modality is left out of that
    modality's microbatch, one without any tower's modality out of the loss's.

    The contrastive batch's first samples are those of all replicas' first microbatches, so that a decoder which has
    other replicas than the tower it reads can begin with what the tower makes first.
    """
    batches = split_evenly(range(len(samples)), plan.num_microbatches_of(loss))
    towers = [plan.modules[edge.source].data_module(edge.source) for edge in plan.edges if edge.target == loss]
    counts = {name: plan.num_microbatches_of(name) // len(batches) for name in plan.modules}
    num_steps = gcd(*(count for name, count in counts.items() if name != loss))
    cut: dict[str, tuple[tuple[Microbatch, ...], ...]] = {}
    for name, module in plan.modules.items():
        read = towers if name == loss else [module.data_module(name)]
        able = [[i for i in batch if any(samples[i].has(tower) for tower in read)] for batch in batches]
        by_batch = [_in_steps(batch, len(module.replicas), counts[name], num_steps) for batch in able]
        cut[name] = tuple(
            tuple(microbatch for of_replica in replica for microbatch in of_replica)
            for replica in zip(*by_batch, strict=True)
        )
    return BatchAssignment(cut)


def _in_steps(
    samples: Sequence[int], num_replicas: int, num_microbatches: int, num_steps: int
) -> list[list[Microbatch]]:
    """Cuts the samples as evenly as possible: [replica][microbatch]. There are `num_steps` steps; the microbatches of a
    step, of all replicas, have the samples before those of the next step."""
    shares = [split_evenly(share, num_microbatches) for share in split_evenly(range(len(samples)), num_replicas)]
    order = sorted(
        (i * num_steps // num_microbatches, r, i) for r in range(num_replicas) for i in range(num_microbatches)
    )
    left = iter(samples)
    taken = {(r, i): tuple(islice(left, len(shares[r][i]))) for _, r, i in order}
    return [[taken[r, i] for i in range(num_microbatches)] for r in range(num_replicas)]


def assignment_of_shares(
    plan: Plan,
    samples: Sequence[Sample],
    shares: Sequence[Sequence[Microbatch]],
    *,
    encoder_pieces: Sequence[Sequence[Microbatch]] | None = None,
    work: Mapping[str, Sequence[float]] | None = None,
) -> BatchAssignment:
    """All modules cut the batch alike: `shares[d][i]` is microbatch i of every module's replicas of share d, so that it
    needs microbatch i of others. `encoder_pieces`: if given, the encoders' microbatches instead.

    Where a module has several replicas for a share, each microbatch's samples are dealt to them (DistTrain's broker
    between units of unequal data parallelism) such that their loads stay even: seconds of each sample by module in
    `work`, or else tokens. A sample without a modality is left out of that modality's microbatch.

    Raises `ValueError` if there are not `num_shares` shares."""
    if len(shares) != num_shares(plan):
        raise ValueError(
            f"assignment: has {len(shares)} shares, but the plan's numbers of replicas need {num_shares(plan)}"
        )
    cut = {}
    for name, module in plan.modules.items():
        own = encoder_pieces if encoder_pieces is not None and module.kind == "encoder" else shares
        data_module = module.data_module(name)
        has = [sample.has(data_module) for sample in samples]
        num_replicas = len(module.replicas) // len(shares)
        loads: Sequence[float] = ()
        if num_replicas > 1:
            loads = work[data_module] if work else [sample.num_tokens(data_module) for sample in samples]
        replicas: list[tuple[Microbatch, ...]] = []
        for microbatches in own:
            able = [tuple([i for i in members if has[i]]) for members in microbatches]
            replicas += deal(able, loads, num_replicas)
        cut[name] = tuple(replicas)
    return BatchAssignment(cut)


def deal(microbatches: Sequence[Microbatch], loads: Sequence[float], num_replicas: int) -> list[tuple[Microbatch, ...]]:
    """Deals each microbatch's samples to the replicas, the heaviest first, each to the replica with the least load."""
    if num_replicas == 1:
        return [tuple(microbatches)]
    so_far = [0.0] * num_replicas
    result: list[list[Microbatch]] = [[] for _ in range(num_replicas)]
    for members in microbatches:
        hands: list[list[int]] = [[] for _ in range(num_replicas)]
        for i in sorted(members, key=lambda i: -loads[i]):
            r = min(range(num_replicas), key=so_far.__getitem__)
            hands[r].append(i)
            so_far[r] += loads[i]
        for replica, hand in zip(result, hands, strict=True):
            replica.append(tuple(i for i in members if i in hand))
    return [tuple(replica) for replica in result]


def packed_sequences(microbatch: Microbatch, num_tokens: Sequence[int], max_tokens: int) -> list[Microbatch]:
    """Packs a microbatch into sequences of at most `max_tokens`, by best-fit decreasing (at most 11/9 of the fewest
    sequences, plus one). `num_tokens`: of each sample of the global batch. Runs after deferral, so that what is packed
    is what is computed together (thesis section 4.6); the mask keeps packed samples apart.

    Raises `ValueError` if a sample alone is longer than `max_tokens`."""
    sequences: list[list[int]] = []
    room: list[int] = []
    for i in sorted(microbatch, key=lambda i: -num_tokens[i]):
        if num_tokens[i] > max_tokens:
            raise ValueError(f"packing: sample {i} has {num_tokens[i]} tokens, more than the limit of {max_tokens}")
        fitting = [s for s, left in enumerate(room) if left >= num_tokens[i]]
        if fitting:
            s = min(fitting, key=room.__getitem__)
            sequences[s].append(i)
        else:
            s = len(sequences)
            sequences.append([i])
            room.append(max_tokens)
        room[s] -= num_tokens[i]
    return [tuple(sequence) for sequence in sequences]
