"""The communicators that a plan needs: groups of stages and of reductions, and links between stages.

Every rank derives the same, in the same order, so process groups are made and opened alike everywhere
(`motet.parallel.mesh`), and `motet plan` can say how many there will be.

Each reduction has groups of its own: its buckets start when the rank's own backward reaches them, so two reductions
over the same ranks may start in different orders on different ranks, and must not meet in one group. Activations and
gradients between two ranks have a communicator for each direction and each of both, where the transport pairs sends
and receives by their order (NCCL): a receive that was posted early must not hold back what comes after it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import lcm
from typing import NamedTuple

from motet.assignment.batch_assignment import BatchAssignment, num_shares
from motet.assignment.sample import Sample, Segment
from motet.errors import UserError
from motet.plan import POST_BALANCED, Plan, Stage, expert_groups, places, tensor_parallel_groups
from motet.schedule.action import Reduce
from motet.schedule.dependencies import Activation, Dependencies, Gradient, Holder, reductions
from motet.schedule.lower import messages
from motet.schedule.routes import derive_routes

Ranks = tuple[int, ...]


class Link(NamedTuple):
    """One direction between two ranks, for activations or for gradients."""

    sender: int
    receiver: int
    gradient: bool

    def __str__(self) -> str:
        return f"{'gradients' if self.gradient else 'activations'} {self.sender}>{self.receiver}"


@dataclass(frozen=True)
class ReductionRanks:
    """The groups of one share of a reduction.

    Holders with different tp_size cut the layers into shards of different sizes: a rank's shard is then summed in
    several pieces, each by those who hold it."""

    members: tuple[Ranks, ...]
    """The tensor-parallel groups that hold the share."""
    pieces: tuple[Ranks, ...]
    """The ranks that sum each piece; one piece for each place where all groups have one size."""
    firsts: Ranks = ()
    """The first ranks of all groups, if these have different sizes."""

    @property
    def tp_sizes(self) -> Ranks:
        """The different sizes of the holders' groups."""
        return tuple(sorted({len(places) for places in self.members}))


@dataclass(frozen=True)
class Communicators:
    """All groups of a plan, of one rank and more."""

    stage_groups: tuple[Ranks, ...]
    """Tensor- and context-parallel groups, those that share parameters, and those that share experts."""
    reductions: Mapping[Reduce, tuple[ReductionRanks, ...]]
    """By reduction, its shares: one unless replicas share parameters."""
    experts: Mapping[Reduce, tuple[Ranks, ...]]
    """By reduction whose experts replicas share: the ranks that hold the same experts."""
    links: tuple[Link, ...]

    def groups(self) -> Iterator[Ranks]:
        """The groups that become process groups, in the order in which they are made."""
        everyone: list[Ranks] = [*self.stage_groups]
        for reduction, shares in self.reductions.items():
            for share in shares:
                everyone += [*share.pieces, share.firsts]
            everyone += self.experts.get(reduction, ())
        return (ranks for ranks in everyone if len(ranks) > 1)

    def groups_by_rank(self, num_ranks: int) -> list[int]:
        """How many groups each rank belongs to, with that of all ranks."""
        number = [int(num_ranks > 1)] * num_ranks
        for ranks in self.groups():
            for rank in ranks:
                number[rank] += 1
        return number

    def links_by_rank(self, num_ranks: int) -> list[tuple[int, int]]:
        """How many links each rank sends on, and how many it receives on."""
        sent, received = Counter(link.sender for link in self.links), Counter(link.receiver for link in self.links)
        return [(sent[rank], received[rank]) for rank in range(num_ranks)]


def communicators(plan: Plan) -> Communicators:
    """The plan's communicators.

    Raises `UserError` for groups of ranks that overlap in a way that has no sums."""
    shared = [
        ranks
        for *_, stage in plan.stages()
        for ranks in [*tensor_parallel_groups(stage), *(context_parallel_groups(stage) if stage.cp_size > 1 else [])]
    ]
    for module in plan.modules.values():
        if module.shares_over_replicas:
            for r in range(0, len(module.replicas), module.sharded_replicas):
                for s in range(len(module.replicas[r].stages)):
                    shared += module.sharing_groups(r, s)
        if module.ep > 1:
            shared += [ranks for stage in module.replicas[0].stages for ranks in expert_groups(module, stage.layers)]
    reduced, experts = {}, {}
    for reduction, holders in reductions(plan).items():
        shares = []
        for members in _members_by_share(plan, holders):
            _check_members(reduction, members)
            sizes = {len(ranks) for ranks in members}
            firsts = tuple(sorted({ranks[0] for ranks in members})) if len(sizes) > 1 else ()
            shares.append(ReductionRanks(tuple(members), tuple(_pieces(members, lcm(*sizes))), firsts))
        reduced[reduction] = tuple(shares)
        module = plan.modules[reduction.module]
        if module.replicas_sharing_experts > 1 and not reduction.tied:
            sharing = groups_sharing_experts(plan, reduction)
            experts[reduction] = tuple(tuple(sorted(same)) for same in zip(*sharing, strict=True))
    return Communicators(tuple(dict.fromkeys(shared)), reduced, experts, tuple(plan_links(plan)))


def context_parallel_groups(stage: Stage) -> list[Ranks]:
    """The context-parallel groups of a stage, one for each position in the tensor-parallel groups."""
    return list(zip(*(places(ranks) for ranks in tensor_parallel_groups(stage)), strict=True))


def groups_sharing_experts(plan: Plan, reduction: Reduce) -> list[Ranks]:
    """The groups over which the experts of these layers are distributed."""
    module = plan.modules[reduction.module]
    stage = next(s for s in module.replicas[0].stages if s.layers[0] <= reduction.first < s.layers[1])
    return [tuple(places(ranks)) for ranks in expert_groups(module, stage.layers)]


def _members_by_share(plan: Plan, holders: tuple[Holder, ...]) -> list[list[Ranks]]:
    """Returns, for each share of the parameters, the tensor-parallel groups that hold it of a run of layers, in all
    replicas and for all members of context-parallel groups, each of which has the gradients of its own tokens.

    There is one share unless replicas share parameters."""
    result: dict[int, list[Ranks]] = {}
    for holder in holders:
        module = plan.modules[holder.module]
        stage = module.replicas[holder.replica].stages[holder.stage]
        for ranks in tensor_parallel_groups(stage):
            in_order = places(ranks)
            share = 0
            if module.shares_over_replicas:
                groups = module.sharing_groups(holder.replica, holder.stage)
                shares = {group.index(rank) for group, rank in zip(groups, in_order, strict=True)}
                if len(shares) > 1:
                    raise UserError(
                        f"plan: modules.{holder.module}.sharded_replicas: the ranks of its tensor-parallel groups "
                        "alternate; number those of a replica one after the other"
                    )
                share = shares.pop()
            result.setdefault(share, []).append(tuple(in_order))
    return list(result.values())


def _pieces(members: Sequence[Ranks], num_pieces: int) -> list[Ranks]:
    """Returns the ranks that hold each piece."""
    return [tuple(sorted({held[piece * len(held) // num_pieces] for held in members})) for piece in range(num_pieces)]


def _check_members(reduction: Reduce, members: Sequence[Ranks]) -> None:
    """Checks that a rank that holds the layers several times has the same shard each time."""
    place_of: dict[int, tuple[int, int]] = {}
    for ranks in members:
        for place, rank in enumerate(ranks):
            if place_of.setdefault(rank, (place, len(ranks))) != (place, len(ranks)):
                raise UserError(
                    f"plan: rank {rank} has different positions in the groups that hold layers {reduction.first}.."
                    f"{reduction.last - 1} of {reduction.module}; give groups with all ranks in common, or none"
                )


def plan_links(plan: Plan) -> list[Link]:
    """The links that any batch may need, however it is cut."""
    everything = {module.data_module(name): (Segment(1),) for name, module in plan.modules.items()}
    of_samples = _replicas_of_samples(plan)
    samples = [Sample(str(i), everything, {}) for i in range(len(of_samples))]
    assignment = BatchAssignment(
        {
            name: tuple(
                (tuple(i for i, replica_of in enumerate(of_samples) if replica_of[name] == r),)
                for r in range(len(module.replicas))
            )
            for name, module in plan.modules.items()
        }
    )
    routes = derive_routes(plan, assignment, samples)
    dependencies = Dependencies(routes)
    links = set()
    for route in (route for outgoing in routes.outgoing.values() for route in outgoing):
        for value in (Activation(route.source, route.target), Gradient(route.source, route.target)):
            is_gradient = isinstance(value, Gradient)
            if not is_gradient or route.carries_gradient:
                links |= {Link(m.sender, m.receiver, is_gradient) for m in messages(value, dependencies)}
    return sorted(links)


def _replicas_of_samples(plan: Plan) -> list[dict[str, int]]:
    """Each sample's replica of each module, such that all replicas of a share that may meet do meet."""
    replicas_of = []
    # Modules around a contrastive loss cut each of its batches by themselves, so that any of their replicas may meet.
    meets_all = plan.loss_module is not None or plan.assignment == POST_BALANCED
    parts = 1 if meets_all else num_shares(plan)
    for share in range(parts):
        of_share = {
            name: range(share * size, (share + 1) * size)
            for name, module in plan.modules.items()
            for size in [len(module.replicas) // parts]
        }
        first = {name: replicas[0] for name, replicas in of_share.items()}
        for name, replicas in of_share.items():
            replicas_of += [{**first, name: r} for r in replicas]
        for edge in plan.edges:
            pairs = product(of_share[edge.source], of_share[edge.target])
            replicas_of += [{**first, edge.source: a, edge.target: b} for a, b in pairs]
    return replicas_of


def in_rounds(links: Sequence[Link]) -> list[Link]:
    """The links in an order in which many can be opened at once: each rank stands at most once in a round, and rounds
    follow one another. A chain of n ranks takes two rounds where the order of ranks would take n - 1."""
    rounds: list[tuple[set[int], list[Link]]] = []
    for link in links:
        for busy, members in rounds:
            if busy.isdisjoint(link[:2]):
                busy.update(link[:2])
                members.append(link)
                break
        else:
            rounds.append(({*link[:2]}, [link]))
    return [link for _, members in rounds for link in members]
