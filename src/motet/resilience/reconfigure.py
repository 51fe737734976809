"""From a plan and what was lost or joined to the next plan and what must be copied for it (thesis 2.5).

Pure, and the same on every rank that is told the same. How many nodes each pipeline gets is decided by
`motet.resilience.sizes`, which node takes which place by `motet.resilience.holdings`: across pipelines, so that the
fewest bytes move. The global batch stays what it was, and so do its microbatches; only who computes them changes.

Below (f + 1) n0 nodes the guarantee cannot be kept: save and stop, or go on with fewer failures to survive. Where
nobody holds some layer any more, the last checkpoint must be loaded.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from motet.plan import Plan
from motet.resilience.holdings import Copy, Holdings, LayerBytes, Node, Unit, best_places, copies, missing_layers
from motet.resilience.microbatches import iteration_s, min_max_counts
from motet.resilience.pipelines import Templates, build_plan, nodes_of_pipelines, with_ranks
from motet.resilience.sizes import Step, new_sizes

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


def reconfigure(
    plan: Plan,
    templates: Templates,
    *,
    lost: Collection[int] = (),
    leaving: Collection[int] = (),
    num_joined: int = 0,
) -> Reconfiguration:
    """`lost`, `leaving`: numbers of nodes; those that leave have no part any more, but hand over what they hold.
    `num_joined`: nodes that are new, with nothing on them.

    Survivors keep their order and nodes that join come after them, so the new ranks have no gaps. A failure during
    the recovery from another is reconfigured from the same plan with all nodes lost since.
    Raises `UserError` for a plan without pipelines of whole nodes."""
    size = templates.devices_per_node
    before = nodes_of_pipelines(plan, size)
    out = {*lost, *leaving}
    surviving = [node for node in range(-(-plan.num_ranks // size)) if node not in out]
    missing = _missing(plan, {*surviving, *leaving}, size)
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
    new_plan, old_ranks, copies = _place(
        plan, draft, nodes, sorted(leaving), size, templates.layer_bytes, copy=not missing
    )
    return Reconfiguration(
        outcome="restore" if missing else "continue",
        message=_message(plan, missing, steps, len(new_plan.replica_microbatches)),
        plan=new_plan,
        old_ranks=old_ranks,
        copies=copies,
        steps=tuple(steps),
        num_spares=num_spares,
    )


def reconfigure_below(
    plan: Plan,
    templates: Templates,
    *,
    lost: Collection[int] = (),
    leaving: Collection[int] = (),
    num_joined: int = 0,
) -> tuple[Reconfiguration, str | None]:
    """As `reconfigure`, but where too few nodes are left to survive all `templates.failures`, for as many as can be
    survived; and the line that says that they are too few, None if they are not."""
    first = found = reconfigure(plan, templates, lost=lost, leaving=leaving, num_joined=num_joined)
    for failures in range(templates.failures - 1, -1, -1):
        if found.plan is None:
            fewer = replace(templates, failures=failures)
            found = reconfigure(plan, fewer, lost=lost, leaving=leaving, num_joined=num_joined)
    if found.plan is None:
        return first, first.message
    return found, None if found is first else first.message


def _missing(plan: Plan, surviving: Collection[int], size: int) -> list[tuple[str, int]]:
    """Layers of which no surviving node holds some share."""
    held = Holdings([plan]).by_rank(plan)
    return missing_layers([units for rank, units in enumerate(held) if rank // size in surviving], held)


def _stopped(templates: Templates, num_nodes: int, missing: Sequence[tuple[str, int]]) -> Reconfiguration:
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


def _message(plan: Plan, missing: Sequence[tuple[str, int]], steps: Sequence[Step], num_pipelines: int) -> str:
    done = "; ".join(map(str, steps)) or "nothing changes"
    if missing:
        return f"nobody holds {_listed(missing)} any more; loading the last checkpoint into {num_pipelines} pipelines"
    return f"{done}; {num_pipelines} pipelines"


def _listed(layers: Sequence[tuple[str, int]]) -> str:
    shown = ", ".join(f"layer {layer} of {module}" for module, layer in layers[:3])
    return shown if len(layers) <= 3 else f"{shown} and {len(layers) - 3} more"


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
    size: int,
    layer_bytes: LayerBytes | None,
    *,
    copy: bool,
) -> tuple[Plan, tuple[int | None, ...], tuple[Copy, ...]]:
    """The draft on those of `nodes` that hold most of what they need, the old ranks, and what ranks lack."""
    holdings = Holdings([old, draft])
    weights = holdings.weights(draft, layer_bytes)
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
    if not copy:
        return plan, old_ranks, ()
    held, needed = [units for i in order for units in of_nodes[i]], holdings.by_rank(plan)
    made = copies(held, needed, weights, units_per_layer=holdings.units_per_layer, devices_per_node=size)
    return plan, old_ranks, made


def _by_node(of_ranks: Sequence[frozenset[Unit]], size: int) -> list[Node]:
    return [tuple(of_ranks[first : first + size]) for first in range(0, len(of_ranks), size)]
