"""ZeRO-1 on pipelines that may be lost: f + 1 holders keep the optimizer's state of each parameter, and update it.

Gradients are summed as ever, so every holder has them whole. Then the keepers of a parameter
(`motet.planner.reconfiguration.state_owners`) apply the update, all with the same bits, and send the new values to
those holders that are none: in the pieces of both ranks' shards, so pipelines may differ in tensor parallelism. A
rank's own part of the update needs no other rank.

Why an update is applied by all or by none, whichever f nodes are lost at whatever moment:

* Before any keeper has applied it: nobody has, and the iteration is done again.
* A keeper may apply it only after the sum that ends the iteration, for which every rank needs all its gradients. So as
  soon as one has, all survivors can, and in a recovery all do: each its own part, once (`TrainingProcess._agree`). Of
  each parameter's f + 1 keepers, in different pipelines, one at least survives whole; it has the new values and
  moments then, whether the exchange had begun or not.
* What a rank does not keep it holds only when the exchange is complete there. Until then it counts as missing, is told
  to nobody as held, and comes from a keeper in the recovery: a message that was cut off is never used.

After a recovery f + 1 pipelines keep each state again, where there are so many. With more than f losses at once some
parameter may have lost all its keepers, though not all its holders: then all go back to the last checkpoint.

Limits: states are not divided within a parameter. The exchange follows the update, and does not overlap with anything.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

import torch.distributed as dist

from motet.plan import Plan
from motet.planner.reconfiguration.copies import local_parts, match_parts
from motet.planner.reconfiguration.state_owners import ParameterReplica, StateOwners, choose_state_owners
from motet.planner.templates.pipelines import nodes_of_pipelines
from motet.resilience.handover import Described, Description, Handover, Holding, Item, carry_out, plan_handover
from motet.runtime.executor import Executor

Groups = Mapping[str, tuple[int, ...]]
"""By parameter, the ranks that hold it together with this one, in the order of their shards."""


def groups_of(holding: Holding) -> Groups:
    """A parameter that is not cut is held by each rank alone."""
    return {
        name: (dist.get_rank(),) if p.shard is None else tuple(dist.get_process_group_ranks(p.tp.group))
        for name, p in holding.trained().items()
    }


def agree_on_state_owners(
    plan: Plan,
    held: Sequence[Described],
    could_hold: Sequence[Described],
    groups: Sequence[Groups],
    *,
    number: int,
    devices_per_node: int,
) -> StateOwners:
    """Of every parameter of the plan, the same on all ranks. `held`, `could_hold`, `groups`: by rank; what there is,
    what its stages have room for, and with whom."""
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
                num_bytes=_num_bytes(could_hold[ranks[0]][Item(name, "moments")]),
                lacking_bytes=sum(_lacking_bytes(held[r], could_hold[r], Item(name, "moments")) for r in ranks),
            )
            for ranks in sorted(groups_of_name)
        ]
        for name, groups_of_name in members.items()
    }
    return choose_state_owners(holders, number)


def _num_bytes(description: Description) -> float:
    return description.num_bytes * description.share


def _lacking_bytes(held: Described, wanted: Described, item: Item) -> float:
    description = wanted[item]
    dim = 0 if description.shard is None else description.shard.dim
    there = held[item].ranges(dim) if item in held else ()
    _, lacking = match_parts(local_parts(description.ranges(dim)), there)
    return sum(b - a for a, b, _ in lacking) * description.num_bytes / description.shape[dim]


def kept_by_rank(keepers: StateOwners, num_ranks: int) -> list[set[str]]:
    """The parameters of which each rank keeps the state."""
    result: list[set[str]] = [set() for _ in range(num_ranks)]
    for name, of_name in keepers.items():
        for keeper in of_name:
            for rank in keeper.ranks:
                result[rank].add(name)
    return result


def without_others_moments(could_hold: Sequence[Described], keepers: StateOwners) -> list[Described]:
    """What every rank needs: all values, and the moments that it keeps."""
    return [
        {item: d for item, d in of_rank.items() if item.kind == "values" or item.parameter in kept}
        for of_rank, kept in zip(could_hold, kept_by_rank(keepers, len(could_hold)), strict=True)
    ]


def keep_alone(
    new: Holding,
    executor: Executor,
    could_hold: Sequence[Described],
    keepers: StateOwners,
    *,
    devices_per_node: int,
) -> None:
    """Tells this rank's optimizer what it keeps, and how it gets what others update."""
    updated: list[Described] = []
    awaited: list[Described] = []
    kept = kept_by_rank(keepers, len(could_hold))
    for of_rank, of_its_own in zip(could_hold, kept, strict=True):
        values = {item: d for item, d in of_rank.items() if item.kind == "values"}
        updated.append({item: d for item, d in values.items() if item.parameter in of_its_own})
        awaited.append({item: d for item, d in values.items() if item.parameter not in of_its_own})
    handover = plan_handover(updated, awaited, devices_per_node=devices_per_node)
    assert not handover.missing, handover.missing
    rank = dist.get_rank()
    new.optimizer.keep_alone(
        kept[rank],
        written={name for name, (first, *_) in keepers.items() if rank == first.ranks[0]},
        exchange=partial(_exchange, handover, new, executor),
    )


def _exchange(handover: Handover, holding: Holding, executor: Executor) -> None:
    values = holding.values()

    def wait(work: dist.Work, peer: int) -> None:
        executor.wait_for(work, "new parameters", (peer,))

    carry_out(handover, values, values, wait)
