"""Moves parameters and optimizer states between ranks, so that every rank has what its new plan needs (thesis 2.5).

Rows that replicas share are copied share by share, each whole, as no recovery changes how they are cut.

Frozen parameters are not copied: a stage is built with them. The corrections of routers' scores are, which every holder
updates alike and which have no moments. Moments may be held by other ranks than the parameter:
under ZeRO-1 with `train.failures`, f + 1 replicas of each parameter own its optimizer state and update it
(`motet.planner.reconfiguration.state_owners`). Gradients are summed as usual, so every replica has them whole. The
owners of a parameter apply the update, all with the same bits, and send the new values to the other replicas, in the
pieces of both ranks' shards, so pipelines may differ in tensor parallelism. A rank's own part of the update needs no
other rank.

Why an update is applied by all owners or by none, whichever f nodes are lost at whatever moment:

* Before any owner has applied it: none has, and the iteration is repeated.
* An owner may apply it only after the sum that ends the iteration, for which every rank needs all its gradients. So
  once one has, all survivors can, and in a recovery all do: each its own part, once (`TrainingProcess._agree`). Of each
  parameter's f + 1 owners, in different pipelines, at least one survives whole; it then has the new values and moments,
  whether the exchange had begun or not.
* A rank holds a parameter that it does not own only when the exchange is complete there. Until then it counts as
  missing, is not reported as held, and comes from an owner in the recovery: an interrupted message is never used.

After a recovery f + 1 pipelines own each state again, where there are so many. With more than f losses at once some
parameter may have lost all its owners, though not all its replicas: then all ranks return to the last checkpoint.

Limits: states are not divided within a parameter. The exchange follows the update without overlapping with anything.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from motet.cluster.pipelines_on_nodes import nodes_of_pipelines
from motet.parallel.tensor.tensor_plans import Shard, local_ranges
from motet.plan import Plan
from motet.planner.reconfiguration.copies import (
    Copy,
    Ranges,
    local_parts,
    match_parts,
    num_moved_bytes,
    plan_copies,
)
from motet.planner.reconfiguration.state_owners import ParameterReplica, StateOwners, choose_state_owners
from motet.runtime.engine import Engine
from motet.runtime.executor import Executor
from motet.runtime.local_model import LocalModel, LocalParameter
from motet.runtime.training.master_weights import new_state
from motet.runtime.training.optimizer import Optimizer

MESSAGE_BYTES = 64 * 2**20
"""Largest message between two ranks, unless one tensor is larger."""
MAX_MESSAGES = 16
"""Concurrent messages of one rank: each has a buffer."""
Kind = Literal["values", "moments"]
"""Moments include the master of a parameter in half precision."""


class Item(NamedTuple):
    """A parameter's values or its moments; where replicas share it by rows, those of one share."""

    parameter: str
    kind: Kind
    share: str = ""
    """Name of the share, the same wherever it is held; "": the parameter is not shared by rows."""


@dataclass(frozen=True)
class ItemDescription:
    """The part of an item that one rank holds. A share of rows is held whole."""

    shape: tuple[int, ...]
    """Shape of the whole tensor, or of the share."""
    shard: Shard | None
    tp_rank: int
    tp_size: int
    num_bytes: int
    """Bytes of the whole item."""
    steps: float
    """Number of updates so far, for moments."""

    @property
    def share(self) -> float:
        return 1.0 if self.shard is None else 1.0 / self.tp_size

    def ranges(self, dim: int) -> Ranges:
        if self.shard is None:
            return ((0, self.shape[dim]),)
        return tuple(local_ranges(self.shape[dim], self.shard, self.tp_rank, self.tp_size))


RankContents = Mapping[Item, ItemDescription]
"""Items that one rank holds, or needs."""


@dataclass
class LocalState:
    """A model and its optimizer's states on this rank, all of one step."""

    model: LocalModel
    optimizer: Optimizer
    corrections: Mapping[str, LocalParameter] = field(default_factory=dict)
    """Of routers' scores, by name (`motet.runtime.router_corrections`)."""

    @staticmethod
    def of(engine: Engine, optimizer: Optimizer) -> "LocalState":
        return LocalState(engine.model, optimizer, engine.router_corrections.held)

    def trained(self) -> dict[str, LocalParameter]:
        result: dict[str, LocalParameter] = {}
        for p in self.model.parameters:
            if p.parameter.requires_grad and p.is_kept:
                result.setdefault(p.name, p)
        return result

    def describe(self) -> dict[Item, ItemDescription]:
        """Returns what this rank holds, without parameters whose new values have not arrived yet and without moments
        that other ranks own."""
        states, result = self.optimizer.states(), {}
        for name, p in self._copied().items():
            is_corrected = name in self.corrections
            is_here: dict[Kind, bool] = {
                "values": is_corrected or self.optimizer.is_current(p.parameter),
                "moments": not is_corrected and self.optimizer.keeps(p.parameter),
            }
            shape = p.full_shape if p.rows is None else tuple(p.parameter.shape)
            is_cut = p.rows is None and p.shard is not None
            for kind in is_here:
                if is_here[kind] and p.parameter.numel():
                    result[_item(p, kind)] = ItemDescription(
                        shape=shape or (1,),
                        shard=p.shard if is_cut else None,
                        tp_rank=p.tp.rank if is_cut else 0,
                        tp_size=p.tp.size if is_cut else 1,
                        num_bytes=_bytes_per_element(p.parameter, kind) * torch.Size(shape).numel(),
                        steps=float(states[p.parameter]["step"]) if p.parameter in states else 0.0,
                    )
        return result

    def _copied(self) -> Mapping[str, LocalParameter]:
        """All that changes during training."""
        return {**self.trained(), **self.corrections}

    def values(self) -> dict[Item, list[Tensor]]:
        """What changes during training, at least one-dimensional, sharing memory with it."""
        return {_item(p, "values"): [_at_least_1d(p.parameter)] for p in self._copied().values()}

    def tensors(self) -> dict[Item, list[Tensor]]:
        """The values and the moments that exist here."""
        if not self.optimizer.states():
            self.optimizer.initialize_states()
        states = self.optimizer.states()
        moments = {
            _item(p, "moments"): [_at_least_1d(state) for key, state in states[p.parameter].items() if key != "step"]
            for p in self.trained().values()
            if p.parameter in states
        }
        return self.values() | moments


def _item(p: LocalParameter, kind: Kind) -> Item:
    if p.rows is None:
        return Item(p.name, kind)
    share = f"rows {p.rows.members.rank} of {p.rows.members.size}"
    return Item(p.name, kind, share if p.shard is None else f"{share} of shard {p.tp.rank} of {p.tp.size}")


def _bytes_per_element(parameter: Tensor, kind: Kind) -> int:
    if kind == "values":
        return parameter.element_size()
    return sum(state.element_size() for key, state in new_state(parameter.new_empty(0)).items() if key != "step")


def _at_least_1d(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(tensor.shape or (1,))


def describe(states: Sequence[LocalState]) -> dict[Item, ItemDescription]:
    """Describes the largest part of each item that any of these states has."""
    return {item: description for item, (description, _) in _largest(states).items()}


def tensors_of(states: Sequence[LocalState]) -> dict[Item, list[Tensor]]:
    """Returns the tensors of the parts that `describe` lists."""
    tensors = {id(local): local.tensors() for local in states}
    return {item: tensors[id(local)][item] for item, (_, local) in _largest(states).items()}


def _largest(states: Sequence[LocalState]) -> dict[Item, tuple[ItemDescription, LocalState]]:
    result: dict[Item, tuple[ItemDescription, LocalState]] = {}
    for local in states:
        for item, description in local.describe().items():
            if item not in result or description.share > result[item][0].share:
                result[item] = (description, local)
    return result


@dataclass(frozen=True)
class TransferPlan:
    """The copies between ranks; the same on every rank."""

    copies: Sequence[Copy[Item]]
    missing: Sequence[Item]
    """Items of which no rank holds some part."""
    moved_bytes: int
    dims: Mapping[Item, int]
    steps: Mapping[str, float]
    """Number of updates so far, by parameter."""

    @property
    def missing_descriptions(self) -> tuple[str, ...]:
        """Names the missing parameters, and the missing states of parameters whose values are present."""
        without_values = list(dict.fromkeys(item.parameter for item in self.missing if item.kind == "values"))
        states = dict.fromkeys(item.parameter for item in self.missing if item.parameter not in without_values)
        return (*without_values, *(f"the optimizer's state of {parameter}" for parameter in states))


def plan_transfer(
    held: Sequence[RankContents], needed: Sequence[RankContents], *, devices_per_node: int
) -> TransferPlan:
    """Plans the transfer from what the ranks hold to what they need. Nodes have consecutive ranks."""
    everything = [(item, d) for rank in (*held, *needed) for item, d in rank.items()]
    dims = {item: 0 for item, _ in everything} | {item: d.shard.dim for item, d in everything if d.shard is not None}
    unit_bytes = {item: d.num_bytes // d.shape[dims[item]] for item, d in everything}
    made, missing = plan_copies(
        {rank: {item: d.ranges(dims[item]) for item, d in parts.items()} for rank, parts in enumerate(held)},
        {rank: {item: d.ranges(dims[item]) for item, d in parts.items()} for rank, parts in enumerate(needed)},
        unit_bytes,
        devices_per_node=devices_per_node,
    )
    steps = {item.parameter: d.steps for rank in held for item, d in rank.items() if item.kind == "moments"}
    return TransferPlan(made, missing, round(num_moved_bytes(made)), dims, steps)


@torch.no_grad()
def transfer_state(transfer: TransferPlan, held: Mapping[Item, Sequence[Tensor]], new: LocalState) -> None:
    """Fills the new model and its optimizer from the ranks that hold them; collective. `held`: this rank's tensors, as
    from `LocalState.tensors`."""
    new.optimizer.initialize_states()
    execute_copies(transfer, held, new.tensors())
    states = new.optimizer.states()
    for name, p in new.trained().items():
        if p.parameter in states:
            states[p.parameter]["step"].fill_(transfer.steps[name])
    new.optimizer.renew_copies()


@torch.no_grad()
def execute_copies(
    transfer: TransferPlan,
    held: Mapping[Item, Sequence[Tensor]],
    filled: Mapping[Item, Sequence[Tensor]],
    wait: Callable[[dist.Work, int], object] = lambda work, peer: work.wait(),
) -> None:
    """Copies from `held` into `filled` on every rank; collective. `wait`: waits for a message to or from a peer.

    All ranks handle messages in the same order, so the first unfinished message is in progress on both sides, however
    few a rank handles at once."""
    rank = dist.get_rank()
    under_way: deque[_Message] = deque()
    for number, group in enumerate(_messages(transfer)):
        source, target = group[0].source, group[0].target
        if source == target == rank:
            for copy in group:
                for there, here in zip(
                    _parts(filled, copy, transfer, False), _parts(held, copy, transfer, True), strict=True
                ):
                    there.copy_(here)
        elif rank == source:
            flat = torch.cat([part.reshape(-1) for copy in group for part in _parts(held, copy, transfer, True)])
            under_way.append(_Message(dist.isend(flat, target, tag=number), target, flat, ()))
        elif rank == target:
            parts = [part for copy in group for part in _parts(filled, copy, transfer, False)]
            flat = parts[0].new_empty(sum(part.numel() for part in parts))
            under_way.append(_Message(dist.irecv(flat, source, tag=number), source, flat, parts))
        if len(under_way) > MAX_MESSAGES:
            under_way.popleft().finish(wait)
    while under_way:
        under_way.popleft().finish(wait)


@dataclass(frozen=True)
class _Message:
    work: dist.Work | None
    peer: int
    flat: Tensor
    parts: Sequence[Tensor]
    """The parts that are filled by a receive; empty for a send."""

    def finish(self, wait: Callable[[dist.Work, int], object]) -> None:
        assert self.work is not None
        wait(self.work, self.peer)
        if not self.parts:
            return
        for part, values in zip(self.parts, self.flat.split([part.numel() for part in self.parts]), strict=True):
            part.copy_(values.view_as(part))


def _parts(
    tensors: Mapping[Item, Sequence[Tensor]], copy: Copy[Item], transfer: TransferPlan, is_source: bool
) -> list[Tensor]:
    start = copy.source_start if is_source else copy.target_start
    return [tensor.narrow(transfer.dims[copy.name], start, copy.length) for tensor in tensors[copy.name]]


def _messages(transfer: TransferPlan) -> list[list[Copy[Item]]]:
    """Groups the copies into messages, in an order that all ranks agree on."""
    result: list[list[Copy[Item]]] = []
    pairs: dict[tuple[int, int], list[Copy[Item]]] = {}
    sizes: dict[tuple[int, int], float] = {}
    for copy in transfer.copies:
        pair = (copy.source, copy.target)
        if pair not in pairs or sizes[pair] + copy.num_bytes > MESSAGE_BYTES:
            pairs[pair] = []
            sizes[pair] = 0
            result.append(pairs[pair])
        pairs[pair].append(copy)
        sizes[pair] += copy.num_bytes
    return result


Groups = Mapping[str, tuple[int, ...]]
"""Ranks that hold a replica of each parameter together with this one, in the order of their shards."""


def parameter_groups(local: LocalState) -> Groups:
    return {
        name: (dist.get_rank(),) if p.shard is None else tuple(dist.get_process_group_ranks(p.tp.group))
        for name, p in local.trained().items()
    }


def agree_on_state_owners(
    plan: Plan,
    held: Sequence[RankContents],
    could_hold: Sequence[RankContents],
    groups: Sequence[Groups],
    *,
    number: int,
    devices_per_node: int,
) -> StateOwners:
    """Chooses the owners of every parameter's state, equally on all ranks. By rank: `held`, what there is;
    `could_hold`, what its stages have room for; `groups`, from `parameter_groups`."""
    pipeline_of = {
        node: pipeline for pipeline, nodes in enumerate(nodes_of_pipelines(plan, devices_per_node)) for node in nodes
    }
    members: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for of_rank in groups:
        for name, ranks in of_rank.items():
            members[name].add(ranks)
    holders = {
        name: [
            ParameterReplica(
                ranks=ranks,
                pipeline=pipeline_of[ranks[0] // devices_per_node],
                num_bytes=moments.num_bytes * moments.share,
                lacking_bytes=sum(_lacking_bytes(held[r], could_hold[r], Item(name, "moments")) for r in ranks),
            )
            for ranks in sorted(groups_of_name)
            for moments in (could_hold[ranks[0]][Item(name, "moments")],)
        ]
        for name, groups_of_name in members.items()
    }
    return choose_state_owners(holders, number)


def _lacking_bytes(held: RankContents, wanted: RankContents, item: Item) -> float:
    description = wanted[item]
    dim = 0 if description.shard is None else description.shard.dim
    there = held[item].ranges(dim) if item in held else ()
    _, lacking = match_parts(local_parts(description.ranges(dim)), there)
    return sum(b - a for a, b, _ in lacking) * description.num_bytes / description.shape[dim]


def _owned_by_rank(owners: StateOwners, num_ranks: int) -> list[set[str]]:
    result: list[set[str]] = [set() for _ in range(num_ranks)]
    for name, replicas in owners.items():
        for replica in replicas:
            for rank in replica.ranks:
                result[rank].add(name)
    return result


def needed_contents(could_hold: Sequence[RankContents], owners: StateOwners) -> list[RankContents]:
    """Returns what every rank needs: all values, and the moments that it owns."""
    return [
        {item: d for item, d in of_rank.items() if item.kind == "values" or item.parameter in owned}
        for of_rank, owned in zip(could_hold, _owned_by_rank(owners, len(could_hold)), strict=True)
    ]


def shard_optimizer(
    new: LocalState,
    executor: Executor,
    could_hold: Sequence[RankContents],
    owners: StateOwners,
    *,
    devices_per_node: int,
) -> None:
    """Makes this rank's optimizer update what it owns, and receive the new values of what others own."""
    updated: list[RankContents] = []
    received: list[RankContents] = []
    owned = _owned_by_rank(owners, len(could_hold))
    for of_rank, names in zip(could_hold, owned, strict=True):
        # The corrections of routers' scores, which have no moments, are updated everywhere.
        values = {
            item: d
            for item, d in of_rank.items()
            if item.kind == "values" and Item(item.parameter, "moments") in of_rank
        }
        updated.append({item: d for item, d in values.items() if item.parameter in names})
        received.append({item: d for item, d in values.items() if item.parameter not in names})
    transfer = plan_transfer(updated, received, devices_per_node=devices_per_node)
    assert not transfer.missing, transfer.missing
    rank = dist.get_rank()
    new.optimizer.keep_alone(
        owned[rank],
        written={name for name, (first, *_) in owners.items() if rank == first.ranks[0]},
        exchange=partial(_exchange, transfer, new, executor),
    )


def _exchange(transfer: TransferPlan, local: LocalState, executor: Executor) -> None:
    values = local.values()

    def wait(work: dist.Work, peer: int) -> None:
        executor.wait_for(work, "new parameters", (peer,))

    execute_copies(transfer, values, values, wait)
