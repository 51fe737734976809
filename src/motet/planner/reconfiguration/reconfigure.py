"""From a plan and what was lost or joined to the next plan and what must be copied for it (thesis 2.5).

Pure, and the same on every rank that is told the same. How many nodes each pipeline gets is decided by
`motet.planner.templates.pipeline_sizes`, which node takes which place by `motet.planner.reconfiguration.holdings`:
across pipelines, so that the fewest bytes move. The global batch stays what it was, and so do its microbatches; only
who computes them changes.

Below (f + 1) n0 nodes the guarantee cannot be kept: save and stop, or go on with fewer failures to survive. Where
nobody holds some layer any more, the last checkpoint must be loaded.

With ZeRO-1 (`Templates.state_bytes`) f + 1 pipelines keep the optimizer's state of each parameter. Which, a recovery
decides by what is really there (`motet.resilience.optimizer_state`); whoever is told here what was kept is told what
will be, and copies are then of parameters and of states apart. Places are the same with and without, as all layers
have states in proportion.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from motet.plan import Plan
from motet.planner.reconfiguration.holdings import Copy, Holdings, Node, Unit, best_places, copies, missing_layers
from motet.planner.reconfiguration.optimizer_state import (
    KeptStates,
    held_states,
    lost_states,
    next_keepers,
    states_to_copy,
    without_states,
)
from motet.planner.templates.pipeline_sizes import Step, new_sizes
from motet.planner.templates.pipelines import (
    Templates,
    build_plan,
    iteration_s,
    min_max_counts,
    nodes_of_pipelines,
    with_ranks,
)

Outcome = Literal["continue", "save_and_stop", "restore", "stop"]


@dataclass(frozen=True, kw_only=True)
class Reconfiguration:
    outcome: Outcome
    """`continue`: under `plan`, after `copies`. `restore`: under `plan`, everything from the last checkpoint.
    `save_and_stop`: too few nodes, but they hold every layer. `stop`: too few nodes, and they do not."""
    message: str
    """For the user: what was lost and what is done."""
    plan: Plan | None = None
    """None where training stops."""
    old_ranks: tuple[int | None, ...] = ()
    """For each new rank, the rank that it had; None: it has joined. Ranks beyond the plan's belong to survivors that no
    template takes, then to nodes that leave: they have copies to send, and nothing else to do."""
    copies: tuple[Copy, ...] = ()
    """Between new ranks. What a rank holds already and still needs is not among them."""
    steps: tuple[Step, ...] = ()
    num_spares: int = 0
    """Of the joined nodes, the last so many wait: no combination of templates takes them. Where all do, and that is not
    enough, survivors are left out."""
    kept: KeptStates | None = None
    """Under `plan`; None unless it was told what was kept."""


def reconfigure(
    plan: Plan,
    templates: Templates,
    *,
    lost: Collection[int] = (),
    leaving: Collection[int] = (),
    num_joined: int = 0,
    kept: KeptStates | None = None,
) -> Reconfiguration:
    """`lost`, `leaving`: numbers of nodes; those that leave have no part any more, but hand over what they hold.
    `num_joined`: nodes that are new, with nothing on them. `kept`: optimizer states under `plan`; None: whoever holds a
    layer has its states.

    Survivors keep their order and nodes that join come after them, so the new ranks have no gaps. A failure during
    the recovery from another is reconfigured from the same plan with all nodes lost since.
    Raises `UserError` for a plan without pipelines of whole nodes."""
    size = templates.devices_per_node
    before = nodes_of_pipelines(plan, size)
    out = {*lost, *leaving}
    surviving = [node for node in range(-(-plan.num_ranks // size)) if node not in out]
    missing = _missing(plan, {*surviving, *leaving}, size, kept)
    if len(surviving) + num_joined < templates.least_total:
        return _stopped(templates, len(surviving) + num_joined, missing)

    total = sum(plan.replica_microbatches) or plan.num_microbatches * len(before)
    sizes, steps, spares = new_sizes(
        [len(nodes) for nodes in before],
        [len(set(nodes) - out) for nodes in before],
        num_joined,
        fewest=templates.fewest_nodes,
        most=templates.most_nodes,
        num_needed=templates.failures + 1,
        estimate=lambda sizes: _estimate_s(templates, sizes, total),
    )
    chosen = [templates.by_nodes[n] for _, n in sorted(sizes.items())]
    draft = build_plan(plan, templates, [t.num_nodes for t in chosen], min_max_counts(chosen, total))
    num_spares = min(spares, num_joined)
    nodes: list[int | None] = [*surviving, *[None] * (num_joined - num_spares)]
    new_plan, old_ranks, copies, new_kept = _place(
        plan, draft, nodes, sorted(leaving), templates, kept, copy=not missing
    )
    return Reconfiguration(
        outcome="restore" if missing else "continue",
        message=_message(plan, missing, steps, len(new_plan.replica_microbatches)),
        plan=new_plan,
        old_ranks=old_ranks,
        copies=copies,
        steps=tuple(steps),
        num_spares=num_spares,
        kept=new_kept,
    )


def reconfigure_below(
    plan: Plan,
    templates: Templates,
    *,
    lost: Collection[int] = (),
    leaving: Collection[int] = (),
    num_joined: int = 0,
    kept: KeptStates | None = None,
) -> tuple[Reconfiguration, str | None]:
    """As `reconfigure`, but where too few nodes are left to survive all `templates.failures`, for as many as can be
    survived; and the line that says that they are too few, None if they are not."""
    first = found = reconfigure(plan, templates, lost=lost, leaving=leaving, num_joined=num_joined, kept=kept)
    for failures in range(templates.failures - 1, -1, -1):
        if found.plan is None:
            fewer = replace(templates, failures=failures)
            found = reconfigure(plan, fewer, lost=lost, leaving=leaving, num_joined=num_joined, kept=kept)
    if found.plan is None:
        return first, first.message
    return found, None if found is first else first.message


def _missing(plan: Plan, surviving: Collection[int], size: int, kept: KeptStates | None) -> list[str]:
    """Layers of which no surviving node holds some share, or whose states none keeps."""
    holdings = Holdings([plan])
    held = holdings.by_rank(plan)
    layers = missing_layers([units for rank, units in enumerate(held) if rank // size in surviving], held)
    told = [f"layer {layer} of {module}" for module, layer in layers]
    if kept is None:
        return told
    left = {rank: of_rank for rank, of_rank in held_states(plan, holdings, kept).items() if rank // size in surviving}
    lost = {(state.module, state.layer): None for state in lost_states(kept, left, holdings)}
    states = [(module, layer) for module, layer in lost if (module, layer) not in layers]
    return [*told, *(f"the optimizer's state of layer {layer} of {module}" for module, layer in states)]


def _stopped(templates: Templates, num_nodes: int, missing: Sequence[str]) -> Reconfiguration:
    text = (
        f"{num_nodes} nodes are left, but {templates.failures + 1} pipelines of at least {templates.fewest_nodes} "
        f"(to survive {templates.failures} failures) need {templates.least_total}"
    )
    if missing:
        return Reconfiguration(
            outcome="stop",
            message=f"{text}, and nobody holds {_listed(missing)} any more; resume from the last checkpoint with "
            f"{templates.least_total} nodes, or with fewer failures to survive",
        )
    return Reconfiguration(
        outcome="save_and_stop",
        message=f"{text}; a checkpoint is saved: resume from it with {templates.least_total} nodes, or with fewer "
        "failures to survive",
    )


def _message(plan: Plan, missing: Sequence[str], steps: Sequence[Step], num_pipelines: int) -> str:
    done = "; ".join(map(str, steps)) or "nothing changes"
    if missing:
        return f"nobody holds {_listed(missing)} any more; loading the last checkpoint into {num_pipelines} pipelines"
    return f"{done}; {num_pipelines} pipelines"


def _listed(missing: Sequence[str]) -> str:
    shown = ", ".join(missing[:3])
    return shown if len(missing) <= 3 else f"{shown} and {len(missing) - 3} more"


def _estimate_s(templates: Templates, sizes: Sequence[int], total: int) -> float:
    if len(sizes) > total:
        return float("inf")
    chosen = [templates.by_nodes[n] for n in sizes]
    return iteration_s(chosen, min_max_counts(chosen, total))


def _place(
    old: Plan,
    draft: Plan,
    nodes: Sequence[int | None],
    leaving: Sequence[int],
    templates: Templates,
    kept: KeptStates | None,
    *,
    copy: bool,
) -> tuple[Plan, tuple[int | None, ...], tuple[Copy, ...], KeptStates | None]:
    """The draft on those of `nodes` that hold most of what they need, the old ranks, what ranks lack, and who keeps
    which states."""
    holdings, size = Holdings([old, draft]), templates.devices_per_node
    weights = holdings.weights(draft, templates.layer_bytes)
    held_before = [*holdings.by_rank(old), *[frozenset[Unit]()] * size]
    nothing: Node = (frozenset(),) * size
    everyone = [*nodes, *leaving]
    of_nodes = [nothing if node is None else tuple(held_before[node * size : (node + 1) * size]) for node in everyone]
    rows = best_places(of_nodes[: len(nodes)], _by_node(holdings.by_rank(draft), size), weights)
    all_taken = {taken for taken, *_ in rows}
    order = sorted(range(len(everyone)), key=lambda i: i not in all_taken)
    rank_of: dict[int, int] = {}
    for place, (taken, *devices) in enumerate(rows):
        first = order.index(taken) * size
        rank_of |= {place * size + i: first + device for i, device in enumerate(devices)}
    plan = with_ranks(draft, rank_of)
    in_order = [everyone[i] for i in order]
    old_ranks = tuple(None if node is None else node * size + device for node in in_order for device in range(size))
    states, new_kept = None, None
    if kept is not None and templates.state_bytes is not None:
        of_old = held_states(old, holdings, kept)
        held_now = {new: of_old[rank] for new, rank in enumerate(old_ranks) if rank is not None and rank in of_old}
        new_kept = next_keepers(plan, holdings, templates, held=held_now if copy else None)
        states = states_to_copy(plan, holdings, templates.state_bytes, new_kept, held_now)
        weights = without_states(weights, holdings, templates.state_bytes)
    if not copy:
        return plan, old_ranks, (), new_kept
    held, needed = [units for i in order for units in of_nodes[i]], holdings.by_rank(plan)
    made = copies(held, needed, weights, units_per_layer=holdings.units_per_layer, devices_per_node=size, states=states)
    return plan, old_ranks, made, new_kept


def _by_node(of_ranks: Sequence[frozenset[Unit]], size: int) -> list[Node]:
    return [tuple(of_ranks[first : first + size]) for first in range(0, len(of_ranks), size)]
