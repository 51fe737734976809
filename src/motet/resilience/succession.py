"""Computes the membership that follows from another one and what has happened: a pure function, so any agent may do
it."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from motet.cluster.pipelines_on_nodes import nodes_of_pipelines, replicas_per_pipeline
from motet.config import RunConfig
from motet.errors import UserError
from motet.plan import Plan, Replica
from motet.planner.problem import PlanningProblem
from motet.planner.reconfiguration.reconfigure import reconfigure_below
from motet.planner.templates.pipelines import Templates
from motet.planner.templates.planner import make_templates
from motet.resilience.membership import Change, Membership


def check_survivable(config: RunConfig, plan: Plan) -> None:
    """Raises `UserError` unless the run can survive as many failures as `train.failures.tolerate` says."""
    failures, cluster = config.train.failures, config.cluster
    assert failures is not None
    if cluster.device != "cpu":
        raise UserError(
            f"train.failures: is not supported on cluster.device {cluster.device}; give cpu, or set it to null"
        )
    pipelines = nodes_of_pipelines(plan, cluster.num_devices // cluster.num_nodes)
    number, size = len(pipelines), replicas_per_pipeline(plan)
    if size > 1 and failures.stop_below_guarantee:
        raise UserError(
            "train.failures.stop_below_guarantee: is not supported where replicas share parameters: groups "
            "of them that lose a node are left out; set it to false"
        )
    if size > 1 and failures.replace_stragglers_after_s is not None and max(map(len, pipelines)) > 1:
        raise UserError(
            "train.failures.replace_stragglers_after_s: is not supported where replicas on several nodes share "
            "parameters: they wait for each other, so all of them seem slow if one is; set it to null"
        )
    if failures.copy_every is not None:
        if config.parallel.zero1:
            raise UserError("train.failures.copy_every: is not supported with parallel.zero1; leave one of them out")
        if cluster.num_nodes < 2:
            raise UserError("train.failures.copy_every: cluster.num_nodes is 1, so no node could keep a copy; give 2")
        return
    needed = failures.tolerate + 1
    if number < needed:
        of = f" of {size} replicas that share parameters" if size > 1 else ""
        remedy = f"give dp: {needed * size}" + (" or fewer sharded_replicas" if size > 1 else "")
        raise UserError(
            f"train.failures.tolerate: is {failures.tolerate}, but the plan has {number} "
            f"pipeline{'s' * (number > 1)}{of} on nodes of their own; {remedy} and cluster.num_nodes of at least "
            f"{needed}, tolerate fewer, or give copy_every"
        )
    # Under ZeRO-1 so many pipelines keep each state.
    keeps_alone = failures.tolerate == 0 and (number == 1 or config.parallel.zero1)
    if keeps_alone and not config.train.checkpoint_every:
        why = "the plan has one pipeline" if number == 1 else "with parallel.zero1 one pipeline keeps each state"
        remedy = "more pipelines" if number == 1 else "tolerate: 1, or leave zero1 out"
        raise UserError(
            f"train.failures.tolerate: is 0, and {why}, so a loss takes all nodes back to the last checkpoint, but "
            f"train.checkpoint_every is 0; give a number of steps, or {remedy}"
        )


def templates_of(problem: PlanningProblem) -> Templates | None:
    """Returns the templates; None where they do not cover all numbers of nodes that may be left."""
    try:
        return make_templates(problem)
    except UserError as error:
        print(f"{error}; pipelines that lose a node are left out", file=sys.stderr)
        return None


@dataclass(frozen=True)
class Succession:
    """Computes the next membership of one training from the present one and the changes since."""

    node_size: int
    templates: Templates | None
    """None, or where replicas share parameters by rows: spares take the places of lost nodes; pipelines that still lack
    a node are dropped, and all others stay as they are."""
    stops_below_guarantee: bool = False
    first_plan: str | None = None
    """JSON of the plan to return to without templates, when there are nodes for pipelines that were dropped."""

    def __call__(self, membership: Membership, changes: Sequence[Change], *, is_settled: bool = True) -> Membership:
        """Nodes that were lost or have left are out; nodes about to leave stay to send what they hold; nodes that
        joined come last.

        `is_settled`: the members hold what the membership's plan gives them. Else its recovery may not have ended, and
        whoever has no place in the next plan, a spare too, may hold what nobody else does: it sends that first.

        Where all remaining nodes are about to leave, they save what they hold, and training stops. A training that is
        to stop does so, whatever happens before.
        Where nothing was lost, only nodes that have left are out, as other ranks may still wait for the rest."""
        gone = {
            change.node
            for change in changes
            if change.kind == "lost" or (change.kind == "left" and change.node not in membership.staying)
        }
        going = [change.node for change in changes if change.kind == "leaving" and change.node not in gone]
        joined = [change.node for change in changes if change.kind == "joined"]
        out = {*gone, *going}
        candidates = [node for node in (*membership.staying, *membership.waiting, *joined) if node not in out]
        plan = Plan.from_json(membership.plan)
        lost = [place for place, node in enumerate(membership.nodes) if node in gone]
        leaving = [place for place, node in enumerate(membership.nodes) if node in going]
        next_plan = self._next_plan(plan, lost, leaving, len(candidates), is_settled)
        order = [*membership.nodes, *candidates]
        warned = [node for node in (*membership.leaving, *going) if node not in {*gone, *candidates}]
        if next_plan.plan is None and warned:
            back = [node for node in warned if node not in membership.nodes]
            last = self._next_plan(plan, lost, (), len(back), is_settled)
            if last.plan is not None:
                listed = ", ".join(map(str, warned))
                stop = f"without the nodes that leave ({listed}) no pipeline is whole"
                next_plan, order = replace(last, note="", stop=stop), [*membership.nodes, *back]
        nodes = tuple(order[place] for place in next_plan.places)
        is_urgent = any(change.kind == "lost" for change in changes)
        # Nodes without a place in the plan become spares. Others may still wait for them, or need what they hold, but
        # where pipelines are left out and all are told to stop.
        have_left = {change.node for change in changes if change.kind == "left"}
        spares_before = () if is_settled else membership.waiting
        unplaced = [
            node
            for node in (*membership.nodes, *membership.staying, *spares_before)
            if node not in {*nodes, *gone, *warned, *have_left} and next_plan.plan is not None
        ]
        staying = unplaced if next_plan.needs_unplaced or not is_urgent else []
        warned += staying
        waiting = tuple(node for node in (*candidates, *unplaced) if node not in {*nodes, *warned})
        spares = sorted({*waiting, *staying})
        note = next_plan.note
        if spares and next_plan.plan is not None:
            note += f"; the plan has no use for node{'s' * (len(spares) > 1)} {', '.join(map(str, spares))}, waiting"
        return Membership(
            generation=membership.generation + 1,
            nodes=nodes,
            leaving=tuple(node for node in warned if node not in nodes),
            waiting=tuple(dict.fromkeys(waiting)),
            staying=tuple(node for node in staying if node not in nodes),
            num_admitted=max(membership.num_admitted, *(node + 1 for node in joined), 0),
            plan=(next_plan.plan or plan).to_json(),
            changes=tuple(changes),
            is_urgent=is_urgent,
            note=note,
            stop=next_plan.stop or membership.stop,
            saves_checkpoint=next_plan.plan is not None,
        )

    def _next_plan(
        self, plan: Plan, lost: Sequence[int], leaving: Sequence[int], num_candidates: int, is_settled: bool
    ) -> "_NextPlan":
        """`lost`, `leaving`: places (positions in the membership) of nodes that the next plan cannot use."""
        num_nodes, out = plan.num_ranks // self.node_size, (*lost, *leaving)
        if not out and not num_candidates:
            return _NextPlan(plan, range(num_nodes), note="nothing changes")
        if self.templates is None or replicas_per_pipeline(plan) > 1:
            pipelines = nodes_of_pipelines(plan, self.node_size)
            instead, lacking = _fill_places(pipelines, out, range(num_nodes, num_nodes + num_candidates))
            kept = _drop_broken_pipelines(plan, lacking, self.node_size)
            if kept is None:
                return _NextPlan(None, (), stop="too few nodes are left for a whole pipeline")
            whole, places = kept
            used = [instead.get(place, place) for place in places]
            unused = [num_nodes + i for i in range(num_candidates) if num_nodes + i not in used]
            whole, used = self._with_dropped_pipelines(whole, used, unused)
            is_intact = any(not set(nodes) & {*lacking, *instead} for nodes in pipelines)
            note = _whole_pipelines_text(whole)
            return _NextPlan(whole, used, note=note, needs_unplaced=not (is_intact and is_settled))
        found, too_few = reconfigure_below(plan, self.templates, lost=lost, leaving=leaving, num_joined=num_candidates)
        if found.plan is None:
            return _NextPlan(None, (), stop=too_few)
        new_nodes = found.old_ranks[: found.plan.num_ranks : self.node_size]
        surviving = [rank // self.node_size for rank in new_nodes if rank is not None]
        joined = range(num_nodes, num_nodes + num_candidates - found.num_spares)
        note = f"{found.message}; fewer failures can be survived now" if too_few else found.message
        stop = too_few if self.stops_below_guarantee else None
        return _NextPlan(found.plan, (*surviving, *joined), note=note, stop=stop)

    def _with_dropped_pipelines(self, plan: Plan, places: list[int], unused: Sequence[int]) -> tuple[Plan, list[int]]:
        """Returns the plan with as many pipelines of the first plan as there are nodes for, and the places of nodes."""
        first = plan if self.first_plan is None else Plan.from_json(self.first_plan)
        for number in range(num_pipelines(first), num_pipelines(plan), -1):
            larger = _first_pipelines(first, number, self.node_size)
            num_more = larger.num_ranks // self.node_size - len(places)
            if num_more <= len(unused) and _first_pipelines(larger, num_pipelines(plan), self.node_size) == plan:
                return larger, [*places, *unused[:num_more]]
        return plan, places


def num_pipelines(plan: Plan) -> int:
    return min(len(module.replicas) for module in plan.modules.values()) // replicas_per_pipeline(plan)


def _whole_pipelines_text(plan: Plan) -> str:
    number, size = num_pipelines(plan), replicas_per_pipeline(plan)
    of = f" of {size} replicas that share parameters" if size > 1 else ""
    return f"{number} whole pipeline{'s' * (number > 1)}{of}"


def _first_pipelines(plan: Plan, number: int, node_size: int) -> Plan:
    """Returns the plan with its first pipelines alone; as it is where these are not on its first nodes."""
    ranks = {
        rank
        for module in plan.modules.values()
        for replica in module.replicas[number * replicas_per_pipeline(plan) :]
        for stage in replica.stages
        for rank in stage.ranks
    }
    lost = sorted({rank // node_size for rank in ranks})
    kept = _drop_broken_pipelines(plan, lost, node_size)
    return plan if kept is None or kept[1] != list(range(len(kept[1]))) else kept[0]


@dataclass(frozen=True)
class _NextPlan:
    plan: Plan | None
    places: Sequence[int]
    """Places of the nodes that the plan uses, in order; places after the present nodes' are those of candidates."""
    note: str = ""
    stop: str | None = None
    needs_unplaced: bool = True
    """Whether nodes without a place may hold what no other node holds."""


def _fill_places(
    pipelines: Sequence[Sequence[int]], out: Sequence[int], candidates: Sequence[int]
) -> tuple[dict[int, int], list[int]]:
    """Returns which place's node takes which place instead of one that is out, and the places that stay empty.

    Pipelines that lack the fewest nodes are completed first: by candidates, then by those that lack the most."""
    empty, instead, spare = set(out), dict[int, int](), list(candidates)
    broken = sorted((nodes for nodes in pipelines if empty & {*nodes}), key=lambda nodes: len(empty & {*nodes}))
    while broken:
        first, *others = broken
        needed = [place for place in first if place in empty]
        given = [*spare, *(place for nodes in reversed(others) for place in nodes if place not in empty)][: len(needed)]
        if len(given) < len(needed):
            break
        instead.update(zip(needed, given, strict=True))
        spare = [place for place in spare if place not in given]
        empty = (empty - {*needed}) | {place for place in given if place not in candidates}
        broken = others
    return instead, sorted(empty)


def _drop_broken_pipelines(plan: Plan, lost_places: Sequence[int], node_size: int) -> tuple[Plan, list[int]] | None:
    """Returns the plan without the pipelines that had a lost node, and the places of the nodes that it uses; None if no
    pipeline is left. The others keep their numbers of microbatches, which become larger."""
    lost = {place * node_size + i for place in lost_places for i in range(node_size)}
    size = replicas_per_pipeline(plan)
    broken = {r // size for _, r, _, stage in plan.stages() if lost & {*stage.ranks}}
    whole = [r for r in range(num_pipelines(plan) * size) if r // size not in broken]
    if not whole:
        return None
    used = sorted(
        {rank for m in plan.modules.values() for r in whole for s in m.replicas[r].stages for rank in s.ranks}
    )
    number = {rank: i for i, rank in enumerate(used)}

    def renumbered(replica: Replica) -> Replica:
        stages = (replace(stage, ranks=tuple(number[rank] for rank in stage.ranks)) for stage in replica.stages)
        return Replica(stages=tuple(stages))

    modules = {
        name: replace(module, replicas=tuple(renumbered(module.replicas[r]) for r in whole))
        for name, module in plan.modules.items()
    }
    counts = tuple(plan.replica_microbatches[r] for r in whole) if plan.replica_microbatches else ()
    smaller = replace(
        plan, modules=modules, num_microbatches=max(counts, default=plan.num_microbatches), replica_microbatches=counts
    )
    return smaller, [rank // node_size for rank in used[::node_size]]
