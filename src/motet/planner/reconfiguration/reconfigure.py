"""Derives the next plan, and the copies that it needs, from a plan and the nodes that were lost or joined (thesis 2.5).

Pure, and the same on every rank that is given the same. The global batch and its microbatches stay the same; only who
computes them changes.

1. `resize_pipelines` decides how many nodes each pipeline gets (thesis 2.5.1):
   simple: a pipeline with at least n0 nodes left takes the template of that size;
   borrow: a pipeline with fewer takes nodes, one by one, from the largest pipeline;
   merge: if no pipeline can lend enough, incomplete pipelines merge with one another, the last with the smallest.
   The thesis merges any two pipelines. Here incomplete ones merge first, which keeps f + 1 pipelines whenever there
   are (f + 1) n0 nodes: a merge happens only while all pipelines together have fewer than n0 nodes to spare, and that
   still holds after it, so h pipelines with (f + 1) n0 <= N' < (h + 1) n0 nodes are at least f + 1. A pipeline without
   nodes is given up; where that leaves fewer than f + 1, others lend the nodes of a new one.
   Nodes that join complete pipelines first; then they form new pipelines or enlarge existing ones, whichever is faster
   by `estimate`. A node that no template takes is a spare (a merged pipeline may exceed the largest template), and so
   is one that could only start a pipeline that cannot run: there are never more pipelines than microbatches.
2. `motet.planner.reconfiguration.shard_map` decides which node takes which place, so that the fewest bytes move, and
   lists the copies.

With fewer than (f + 1) n0 nodes the guarantee cannot be kept: training saves and stops, or continues with fewer
failures to survive. If no rank holds some layer any more, the last checkpoint must be loaded.

With ZeRO-1 (`Templates.state_bytes`) f + 1 pipelines own the optimizer state of each parameter. A recovery chooses them
by what survivors really hold (`motet.resilience.state_transfer`); given `owned`, this module predicts that choice, and
copies parameters and states separately. Places are the same with and without, as all layers have states in proportion.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from motet.cluster.pipelines_on_nodes import nodes_of_pipelines
from motet.plan import Plan
from motet.planner.reconfiguration.shard_map import (
    Copy,
    Node,
    ShardMap,
    Unit,
    best_places,
    layer_copies,
    missing_layers,
)
from motet.planner.reconfiguration.state_owners import (
    OwnedStates,
    lost_states,
    next_owners,
    states_by_rank,
    states_to_copy,
    without_states,
)
from motet.planner.templates.pipelines import Templates, build_plan, iteration_s, min_max_counts, renumber_ranks

StepKind = Literal["simple", "borrow", "merge", "give_up", "fill", "grow", "new", "spare"]


@dataclass(frozen=True)
class Step:
    """One change of one pipeline's size."""

    kind: StepKind
    pipeline: int | None
    """Its number before; new pipelines continue the numbering. None: `num_nodes` become spares."""
    num_nodes: int
    """Nodes of the pipeline after the step."""
    other: int | None = None
    """The pipeline that it borrowed from or merged with."""

    def __str__(self) -> str:
        if self.pipeline is None:
            return f"{self.num_nodes} nodes wait"
        partner = "" if self.other is None else f" with {self.other}" if self.kind == "merge" else f" from {self.other}"
        return f"{self.kind}{partner}: pipeline {self.pipeline} has {self.num_nodes} nodes"


Estimate = Callable[[Sequence[int]], float]
"""Numbers of nodes of all pipelines -> seconds of an iteration; infinite if they cannot run."""


@dataclass
class _Resizing:
    fewest: int
    most: int
    num_needed: int
    """f + 1 pipelines."""
    nodes: dict[int, int]
    next_number: int
    steps: list[Step] = field(default_factory=list)

    def note(self, kind: StepKind, pipeline: int, other: int | None = None) -> None:
        self.steps.append(Step(kind, pipeline, self.nodes.get(pipeline, 0), other))

    @property
    def incomplete(self) -> list[int]:
        """Pipelines with fewer nodes than the smallest template, the largest first."""
        return sorted((p for p, n in self.nodes.items() if n < self.fewest), key=lambda p: (-self.nodes[p], p))

    @property
    def complete(self) -> list[int]:
        """Pipelines with enough nodes for a template, the largest first."""
        return sorted((p for p, n in self.nodes.items() if n >= self.fewest), key=lambda p: (-self.nodes[p], p))

    @property
    def num_lendable(self) -> int:
        return sum(self.nodes[p] - self.fewest for p in self.complete)

    def borrow(self, pipeline: int) -> None:
        while self.nodes[pipeline] < self.fewest:
            lender = self.complete[0]
            self.nodes[lender] -= 1
            self.nodes[pipeline] += 1
            self.note("borrow", pipeline, lender)

    def merge(self, pipeline: int, other: int) -> int:
        """Merges into `other`. Returns the nodes in excess of the largest template."""
        together = self.nodes[other] + self.nodes.pop(pipeline)
        self.nodes[other] = min(together, self.most)
        self.note("merge", other, pipeline)
        return together - self.nodes[other]

    def add_pipeline(self, num_nodes: int) -> int:
        pipeline, self.next_number = self.next_number, self.next_number + 1
        self.nodes[pipeline] = num_nodes
        self.note("new", pipeline)
        return pipeline

    def give_up_empty(self) -> None:
        for pipeline in [p for p, n in self.nodes.items() if n == 0]:
            del self.nodes[pipeline]
            self.note("give_up", pipeline)

    def fill(self, num_free: int) -> int:
        """Gives free nodes to incomplete pipelines. Returns the remaining free nodes."""
        for pipeline in self.incomplete:
            taken = min(num_free, self.fewest - self.nodes[pipeline])
            if taken:
                self.nodes[pipeline] += taken
                num_free -= taken
                self.note("fill", pipeline)
        return num_free

    def complete_all(self, num_free: int) -> int:
        """Completes all pipelines by borrowing and merging. Returns the remaining free nodes."""
        while self.incomplete:
            pipeline, *others = self.incomplete
            if self.fewest - self.nodes[pipeline] <= self.num_lendable:
                self.borrow(pipeline)
            elif others:
                num_free += self.merge(others[0], pipeline)
            else:
                num_free += self.merge(pipeline, self.complete[-1])
            num_free = self.fill(num_free)
        return num_free

    def add_needed(self, num_free: int) -> int:
        """Replaces pipelines that were given up, up to f + 1. Returns the remaining free nodes."""
        while len(self.nodes) < self.num_needed:
            taken = min(num_free, self.fewest)
            num_free -= taken
            self.borrow(self.add_pipeline(taken))
        return num_free

    def distribute(self, num_free: int, estimate: Estimate) -> int:
        """Adds free nodes to existing or new pipelines. Returns the nodes that remain as spares."""
        options = []
        for num_new in range(num_free // self.fewest + 1):
            idle, nodes = self._grown(num_free, num_new)
            seconds = estimate(list(nodes.values()))
            if num_new == 0 or math.isfinite(seconds):
                options.append((idle, seconds, num_new, nodes))
        # Options that leave fewer nodes idle take precedence over faster ones.
        idle, _, num_new, grown = min(options, key=lambda option: option[:2])
        for pipeline, num_nodes in grown.items():
            if pipeline in self.nodes and self.nodes[pipeline] < num_nodes:
                self.nodes[pipeline] = num_nodes
                self.note("grow", pipeline)
        for _ in range(num_new):
            self.add_pipeline(grown[self.next_number])
        one_more = math.isfinite(estimate([*self.nodes.values(), self.fewest]))
        if idle and one_more and self.fewest - idle <= self.num_lendable:
            self.borrow(self.add_pipeline(idle))
            return 0
        if idle:
            self.steps.append(Step("spare", None, idle))
        return idle

    def _grown(self, num_free: int, num_new: int) -> tuple[int, dict[int, int]]:
        """Returns the nodes left over and the nodes of every pipeline if `num_new` pipelines are added."""
        nodes = {**self.nodes, **{self.next_number + i: self.fewest for i in range(num_new)}}
        idle = num_free - num_new * self.fewest
        while idle and min(nodes.values()) < self.most:
            smallest = min(nodes, key=lambda p: (nodes[p], p))
            nodes[smallest] += 1
            idle -= 1
        return idle, nodes


def resize_pipelines(
    before: Sequence[int],
    left: Sequence[int],
    num_joined: int,
    *,
    fewest: int,
    most: int,
    num_needed: int,
    estimate: Estimate,
) -> tuple[dict[int, int], list[Step], int]:
    """Returns the nodes of each pipeline by its number, the steps that led there, and the number of spare nodes.

    `before`, `left`: nodes of each pipeline before and after the losses. `fewest`, `most`: n0 and the largest template.
    `num_needed`: f + 1. There must be at least `num_needed * fewest` nodes in total."""
    assert sum(left) + num_joined >= num_needed * fewest
    sizes = _Resizing(fewest, most, num_needed, dict(enumerate(left)), next_number=len(left))
    for pipeline, (was, now) in enumerate(zip(before, left, strict=True)):
        if fewest <= now < was:
            sizes.note("simple", pipeline)
    sizes.give_up_empty()
    num_free = sizes.add_needed(sizes.complete_all(sizes.fill(num_joined)))
    spares = sizes.distribute(num_free, estimate) if num_free else 0
    return sizes.nodes, sizes.steps, spares


Outcome = Literal["continue", "save_and_stop", "restore", "stop"]


@dataclass(frozen=True, kw_only=True)
class Reconfiguration:
    outcome: Outcome
    """`continue`: under `plan`, after `copies`. `restore`: under `plan`, everything from the last checkpoint.
    `save_and_stop`: too few nodes, but they hold every layer. `stop`: too few nodes, and they do not."""
    message: str
    """For the user: what was lost and what is done."""
    plan: Plan | None = None
    """The next plan; None if training stops."""
    old_ranks: tuple[int | None, ...] = ()
    """By new rank: its old rank; None: its node has joined. Ranks beyond the plan's belong to survivors that no
    template takes, then to leaving nodes; these only send copies."""
    copies: tuple[Copy, ...] = ()
    """Between new ranks, without what a rank already holds."""
    steps: tuple[Step, ...] = ()
    num_spares: int = 0
    """The last so many joined nodes become spares, as no combination of templates takes them. Where all of them do and
    that is not enough, survivors become spares too."""
    owned: OwnedStates | None = None
    """State owners under `plan`; None unless `owned` was given."""


def reconfigure(
    plan: Plan,
    templates: Templates,
    *,
    lost: Collection[int] = (),
    leaving: Collection[int] = (),
    num_joined: int = 0,
    owned: OwnedStates | None = None,
) -> Reconfiguration:
    """Derives the next plan, with at least `templates.failures + 1` pipelines.

    `lost`, `leaving`: numbers of nodes; leaving nodes take no further part, but send what they hold. `num_joined`: new,
    empty nodes. `owned`: owners of optimizer states under `plan`; None: every rank has the states of its layers.

    Survivors keep their order and joining nodes follow them, so the new ranks have no gaps. A failure during the
    recovery from another is reconfigured from the same plan, with all nodes lost since.
    Raises `UserError` for a plan without pipelines of whole nodes."""
    size = templates.devices_per_node
    before = nodes_of_pipelines(plan, size)
    out = {*lost, *leaving}
    surviving = [node for node in range(-(-plan.num_ranks // size)) if node not in out]
    missing = _missing(plan, {*surviving, *leaving}, size, owned)
    if len(surviving) + num_joined < templates.min_total_nodes:
        return _stopped(templates, len(surviving) + num_joined, missing)

    total = sum(plan.replica_microbatches) or plan.num_microbatches * len(before)
    sizes, steps, spares = resize_pipelines(
        [len(nodes) for nodes in before],
        [len(set(nodes) - out) for nodes in before],
        num_joined,
        fewest=templates.min_nodes,
        most=templates.max_nodes,
        num_needed=templates.failures + 1,
        estimate=lambda sizes: _estimate_s(templates, sizes, total),
    )
    chosen = [templates.by_nodes[n] for _, n in sorted(sizes.items())]
    draft = build_plan(plan, templates, [t.num_nodes for t in chosen], min_max_counts(chosen, total))
    num_spares = min(spares, num_joined)
    nodes: list[int | None] = [*surviving, *[None] * (num_joined - num_spares)]
    next_plan, old_ranks, copies, next_owned = _place(
        plan, draft, nodes, sorted(leaving), templates, owned, copy=not missing
    )
    num_pipelines = len(next_plan.replica_microbatches)
    return Reconfiguration(
        outcome="restore" if missing else "continue",
        message=f"nobody holds {_listed(missing)} any more; loading the last checkpoint into {num_pipelines} pipelines"
        if missing
        else f"{'; '.join(map(str, steps)) or 'nothing changes'}; {num_pipelines} pipelines",
        plan=next_plan,
        old_ranks=old_ranks,
        copies=copies,
        steps=tuple(steps),
        num_spares=num_spares,
        owned=next_owned,
    )


def reconfigure_below(
    plan: Plan,
    templates: Templates,
    *,
    lost: Collection[int] = (),
    leaving: Collection[int] = (),
    num_joined: int = 0,
    owned: OwnedStates | None = None,
) -> tuple[Reconfiguration, str | None]:
    """Reconfigures like `reconfigure` but, where too few nodes are left to survive `templates.failures`, for as many
    failures as can be survived. The second result is the message that too few nodes are left; None if there are
    enough."""
    first = found = reconfigure(plan, templates, lost=lost, leaving=leaving, num_joined=num_joined, owned=owned)
    for failures in range(templates.failures - 1, -1, -1):
        if found.plan is None:
            fewer = replace(templates, failures=failures)
            found = reconfigure(plan, fewer, lost=lost, leaving=leaving, num_joined=num_joined, owned=owned)
    if found.plan is None:
        return first, first.message
    return found, None if found is first else first.message


def _missing(plan: Plan, surviving: Collection[int], size: int, owned: OwnedStates | None) -> list[str]:
    """Describes the layers of which no surviving node holds some share, or whose states no surviving node owns."""
    shard_map = ShardMap([plan])
    held = shard_map.by_rank(plan)
    layers = missing_layers([units for rank, units in enumerate(held) if rank // size in surviving], held)
    told = [f"layer {layer} of {module}" for module, layer in layers]
    if owned is None:
        return told
    left = {
        rank: of_rank for rank, of_rank in states_by_rank(plan, shard_map, owned).items() if rank // size in surviving
    }
    lost = {(state.module, state.layer): None for state in lost_states(owned, left, shard_map)}
    states = [(module, layer) for module, layer in lost if (module, layer) not in layers]
    return [*told, *(f"the optimizer's state of layer {layer} of {module}" for module, layer in states)]


def _stopped(templates: Templates, num_nodes: int, missing: Sequence[str]) -> Reconfiguration:
    needed = templates.min_total_nodes
    text = (
        f"{num_nodes} nodes are left, but {templates.failures + 1} pipelines of at least {templates.min_nodes} "
        f"(to survive {templates.failures} failures) need {needed}"
    )
    remedy = f"with {needed} nodes, or with fewer failures to survive"
    if missing:
        lost = f"nobody holds {_listed(missing)} any more; resume from the last checkpoint {remedy}"
        return Reconfiguration(outcome="stop", message=f"{text}, and {lost}")
    message = f"{text}; a checkpoint is saved: resume from it {remedy}"
    return Reconfiguration(outcome="save_and_stop", message=message)


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
    owned: OwnedStates | None,
    *,
    copy: bool,
) -> tuple[Plan, tuple[int | None, ...], tuple[Copy, ...], OwnedStates | None]:
    """Puts the draft on the `nodes` that already hold most of it. Returns the plan, `old_ranks`, the copies and the
    state owners."""
    shard_map, size = ShardMap([old, draft]), templates.devices_per_node
    weights = shard_map.weights(draft, templates.layer_bytes)
    held_before = [*shard_map.by_rank(old), *[frozenset[Unit]()] * size]
    nothing: Node = (frozenset(),) * size
    everyone = [*nodes, *leaving]
    of_nodes = [nothing if node is None else tuple(held_before[node * size : (node + 1) * size]) for node in everyone]
    of_ranks = shard_map.by_rank(draft)
    places = [tuple(of_ranks[first : first + size]) for first in range(0, len(of_ranks), size)]
    rows = best_places(of_nodes[: len(nodes)], places, weights)
    all_taken = {taken for taken, *_ in rows}
    order = sorted(range(len(everyone)), key=lambda i: i not in all_taken)
    rank_of: dict[int, int] = {}
    for place, (taken, *devices) in enumerate(rows):
        first = order.index(taken) * size
        rank_of |= {place * size + i: first + device for i, device in enumerate(devices)}
    plan = renumber_ranks(draft, rank_of)
    in_order = [everyone[i] for i in order]
    old_ranks = tuple(None if node is None else node * size + device for node in in_order for device in range(size))
    states, next_owned = None, None
    if owned is not None and templates.state_bytes is not None:
        of_old = states_by_rank(old, shard_map, owned)
        held_now = {new: of_old[rank] for new, rank in enumerate(old_ranks) if rank is not None and rank in of_old}
        next_owned = next_owners(plan, shard_map, templates, held=held_now if copy else None)
        states = states_to_copy(plan, shard_map, templates.state_bytes, next_owned, held_now)
        weights = without_states(weights, shard_map, templates.state_bytes)
    if not copy:
        return plan, old_ranks, (), next_owned
    held, needed = [units for i in order for units in of_nodes[i]], shard_map.by_rank(plan)
    made = layer_copies(
        held, needed, weights, units_per_layer=shard_map.units_per_layer, devices_per_node=size, states=states
    )
    return plan, old_ranks, made, next_owned
