"""Lowers a schedule to a program: adds reductions and messages, and puts everything into one total order.

Every rank runs its projection of the one order in which each message stands right after its producer. That cannot
deadlock under any rendezvous rule: the first step of the order that has not happened is first in the projection of
every rank that takes part in it. All ranks derive the same order; `Program.digest` lets them compare it.

A program is arrays of numbers (`motet.schedule.dependencies` numbers actions and values); its steps as objects are a
view of them.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from motet.plan import ModulePlan, Plan, Stage, places
from motet.ragged_arrays import Floats, Ints, ranges, starts_of
from motet.schedule.action import Compute, Durations, Reduce, unit_duration
from motet.schedule.dependencies import Activation, Dependencies, Gradient, Value
from motet.schedule.joint_cells import put_together
from motet.schedule.order import Lanes, lanes_of, order_actions
from motet.schedule.routes import Cell, StageCells
from motet.schedule.schedule import Schedule


class Message(NamedTuple):
    """One rank's share of what a route carries, sent to another rank."""

    source: Cell
    target: Cell
    gradient: bool
    """Whether it carries gradients back; these messages are not the mirror of those forward."""
    sender: int
    receiver: int

    @property
    def value(self) -> Activation | Gradient:
        """The value that it carries a share of."""
        return Gradient(self.source, self.target) if self.gradient else Activation(self.source, self.target)

    def __str__(self) -> str:
        arrow = "<-" if self.gradient else "->"
        source, target = (f"{c.module}[{c.replica}].{c.stage}:{c.microbatch}" for c in (self.source, self.target))
        return f"{source}{arrow}{target} {self.sender}>{self.receiver}"


Step = Compute | Reduce | Message


@dataclass(frozen=True, eq=False)
class Program:
    """All steps of one iteration in one total order: action, its messages, the reductions that waited for it."""

    dependencies: Dependencies
    lanes: Lanes
    actions: Ints
    """The compute actions' numbers, in order."""
    message_starts: Ints
    """Action i has the messages [message_starts[i], message_starts[i + 1])."""
    message_value: Ints
    """The number of the value that each message carries a share of."""
    links: Ints
    """The pairs (sender, receiver) of ranks that messages go between, one a row."""
    message_link: Ints
    """For each message, its row of `links`."""
    reductions: tuple[Reduce, ...]
    reduction_after: Ints
    """For each reduction, the place of the last action that it waits for; those that wait for none come at the end."""

    @property
    def message_sender(self) -> Ints:
        return self.links[self.message_link, 0]

    @property
    def message_receiver(self) -> Ints:
        return self.links[self.message_link, 1]

    @cached_property
    def places(self) -> tuple[Ints, Ints, Ints]:
        """Position of each action, message and reduction in the total order."""
        num_reductions = np.searchsorted(self.reduction_after, np.arange(len(self.actions)))
        actions = np.arange(len(self.actions)) + self.message_starts[:-1] + num_reductions
        per_action = np.diff(self.message_starts)
        messages = ranges(actions + 1, per_action)
        after = self.reduction_after
        reductions = after + 1 + self.message_starts[after + 1] + np.arange(len(after))
        return actions, messages, reductions

    @property
    def order_of_steps(self) -> Ints:
        """All actions, all messages and all reductions, put into the total order."""
        return np.argsort(np.concatenate(self.places))

    @property
    def num_steps(self) -> int:
        return len(self.actions) + len(self.message_value) + len(self.reductions)

    def in_order(self, actions: Floats, messages: Floats, reductions: Floats) -> Floats:
        """Numbers for each action, message and reduction, put into the total order."""
        result = np.empty(self.num_steps)
        for found, values in zip(self.places, (actions, messages, reductions), strict=True):
            result[found] = values
        return result

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        num_routes, cells = self.dependencies.routes.num_routes, self.dependencies.routes.cells
        source = self.dependencies.routes.route_source[self.message_value % num_routes].tolist() if num_routes else []
        target = self.dependencies.routes.route_target[self.message_value % num_routes].tolist() if num_routes else []
        gradient = (self.message_value >= num_routes).tolist()
        ends = zip(self.message_sender.tolist(), self.message_receiver.tolist(), strict=True)
        return tuple(
            Message(cells[a], cells[b], back, sender, receiver)
            for a, b, back, (sender, receiver) in zip(source, target, gradient, ends, strict=True)
        )

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        result: list[Step] = [*self.dependencies.actions(self.actions), *self.messages, *self.reductions]
        return tuple(result[i] for i in self.order_of_steps.tolist())

    def participants(self, step: Step) -> tuple[int, ...]:
        return (step.sender, step.receiver) if isinstance(step, Message) else self.dependencies.ranks(step)

    @cached_property
    def projections(self) -> tuple[tuple[Step, ...], ...]:
        """Steps of each rank, in the total order."""
        ranks: list[list[Step]] = [[] for _ in range(self.dependencies.routes.plan.num_ranks)]
        for step in self.steps:
            for rank in self.participants(step):
                ranks[rank].append(step)
        return tuple(tuple(steps) for steps in ranks)

    def digest(self) -> str:
        """Equal digests: the same steps, and the same cells whose forward ran in the iteration before."""
        ran_before = self.dependencies.routes.ran_before
        texts = (
            f"{step} ran before" if getattr(step, "cell", None) in ran_before else str(step) for step in self.steps
        )
        return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def lower(schedule: Schedule, dependencies: Dependencies, duration_s: Durations = unit_duration) -> Program:
    """The program of a schedule. `duration_s` makes the order follow expected times; every rank must use the same.

    Raises `CyclicScheduleError` if actions wait for each other."""
    lanes = lanes_of(schedule, dependencies)
    carriers = _Carriers(dependencies)
    actions = order_actions(schedule, lanes, dependencies, carriers.num_messages > 0, duration_s)
    actions = put_together(actions, lanes.actions, dependencies)
    written = dependencies.carried_writes.selected(actions)
    num_messages = carriers.num_messages[written.values]
    values = np.repeat(written.values, num_messages)
    member = ranges(carriers.first_pair[written.values], num_messages)
    reductions, after = _place_reductions(actions, dependencies)
    return Program(
        dependencies=dependencies,
        lanes=lanes,
        actions=actions,
        message_starts=starts_of(num_messages)[written.starts],
        message_value=values,
        links=carriers.links,
        message_link=carriers.link[member],
        reductions=reductions,
        reduction_after=after,
    )


def _place_reductions(actions: Ints, dependencies: Dependencies) -> tuple[tuple[Reduce, ...], Ints]:
    """Each reduction goes right after the last action that writes one of the gradients it sums.

    Of several after one action the last layers' comes first, as their gradients do; shared parameters come last. A run
    of layers that no microbatch reached (a batch without images) still takes part at the end, with zeros."""
    in_order = sorted(dependencies.reductions, key=lambda reduce: (reduce.tied, -reduce.first))
    written = dependencies.kept_write[actions]
    first_weight_gradient = 2 * dependencies.routes.num_routes + 2 * dependencies.routes.num_cells
    place = np.full(dependencies.routes.num_cells, len(actions) - 1)
    is_weight_gradient = written >= first_weight_gradient
    place[written[is_weight_gradient] - first_weight_gradient] = np.flatnonzero(is_weight_gradient)
    last = [int(place[cells].max()) if len(cells := dependencies.summed_cells(reduce)) else None for reduce in in_order]
    waiting = sorted((i for i, at in enumerate(last) if at is not None), key=lambda i: last[i])  # type: ignore[arg-type, return-value]
    waiting += [i for i, at in enumerate(last) if at is None]
    after = [len(actions) - 1 if (at := last[i]) is None else at for i in waiting]
    return tuple(in_order[i] for i in waiting), np.array(after, dtype=np.int64)


class _Carriers:
    """The pairs of ranks between which the value of each route is sent."""

    def __init__(self, dependencies: Dependencies) -> None:
        routes = dependencies.routes
        num_stages = len(routes.stages)
        codes, pair = routes.stage_pairs
        pairs: list[tuple[int, int]] = []
        first, count = [], []
        for gradient in (False, True):
            for code in codes.tolist():
                source, target = (routes.stages[i] for i in divmod(code, num_stages))
                first.append(len(pairs))
                pairs += pairs_of_route(routes.plan, source, target, gradient=gradient)
                count.append(len(pairs) - first[-1])
        which = np.concatenate([pair, len(codes) + pair])
        self.first_pair = np.array(first, dtype=np.int64)[which]
        """For each value, the index of its first link in `link`."""
        self.num_messages = np.array(count, dtype=np.int64)[which]
        row = {link: i for i, link in enumerate(sorted(set(pairs)))}
        self.links = np.array(list(row), dtype=np.int64).reshape(-1, 2)
        self.link = np.array([row[link] for link in pairs], dtype=np.int64)


def messages(value: Value, dependencies: Dependencies) -> list[Message]:
    """The messages that carry a value between ranks; none for what stays on a rank."""
    if not isinstance(value, Activation | Gradient):
        return []
    gradient = isinstance(value, Gradient)
    source, target = (
        dependencies.stage_cells[cell.module, cell.replica, cell.stage] for cell in (value.source, value.target)
    )
    pairs = pairs_of_route(dependencies.routes.plan, source, target, gradient=gradient)
    return [Message(value.source, value.target, gradient, sender, receiver) for sender, receiver in pairs]


def pairs_of_route(plan: Plan, source: StageCells, target: StageCells, *, gradient: bool) -> list[tuple[int, int]]:
    """(sender, receiver) of the messages between two stages.

    Nothing is sent into or out of a loss: its members hold their own features, and exchange rows within the action."""
    if plan.modules[target.module].kind == "loss":
        return []
    same_module = source.module == target.module
    return _member_pairs(source.planned, target.planned, gradient=gradient, same_module=same_module)


def _member_pairs(source: Stage, target: Stage, *, gradient: bool, same_module: bool) -> list[tuple[int, int]]:
    """(sender, receiver) between the groups at the two ends of a route.

    Members of a tensor-parallel group all hold the whole tensor (or each its share of the rows, which the one at the
    same place needs), so each receiver needs one sender: itself if it is one of them, else the one at its own place in
    the group, modulo the group's size. Forwards the consumers choose among the producers, backwards the producers
    choose among the consumers. `row_shares` says what of the rows each receiver gets.

    Between stages of one module, members of context-parallel groups hold shares of the tokens. In groups of one size
    the members of one place hold the same share. Groups of unequal size are resharded: each receiver gets a piece from
    every place of the sending group but those that it holds itself (`motet.parallel.context.context_rows` derives their
    rows).
    What enters another module is whole on every sender.
    """
    begin, end = (target, source) if gradient else (source, target)
    if same_module and max(begin.cp_size, end.cp_size) > 1:
        all_places = range(begin.cp_size)
        return [
            (begin.ranks[place * begin.tp_size + i % end.tp_size % begin.tp_size], receiver)
            for i, receiver in enumerate(end.ranks)
            for place in (all_places if is_resharded(source, target) else [i // end.tp_size])
            if receiver not in begin.ranks[place * begin.tp_size : (place + 1) * begin.tp_size]
        ]
    senders, receivers = places(begin.ranks), places(end.ranks)
    return [(senders[i % len(senders)], receiver) for i, receiver in enumerate(receivers) if receiver not in senders]


def row_shares(source: Stage, target: Stage, *, gradient: bool, same_module: bool) -> int:
    """Number of shares in which a value's rows travel: each member of the receiving tensor-parallel group gets one.

    The receiving group puts them together. A value is sent whole (1) where some receiver made it itself, and between
    context-parallel groups of unequal size.
    """
    end = source if gradient else target
    if not set(source.ranks).isdisjoint(target.ranks) or (same_module and is_resharded(source, target)):
        return 1
    return end.tp_size


def keeps_row_shares(module: ModulePlan, replica: int, stage: int) -> bool:
    """Whether, under sequence parallelism, each rank of a stage can hand its share of the rows to the next stage as it
    is: both have blocks and groups of one size, and no rank changes its place."""
    stages = module.replicas[replica].stages
    if not module.sequence_parallel or stage + 1 >= len(stages):
        return False
    source, target = stages[stage], stages[stage + 1]
    return (
        source.tp_size == target.tp_size > 1
        and not is_resharded(source, target)
        and (source.ranks == target.ranks or set(source.ranks).isdisjoint(target.ranks))
        and all(max(each.layers[0], 1) < min(each.layers[1], module.num_layers - 1) for each in (source, target))
    )


def is_resharded(source: Stage, target: Stage) -> bool:
    """Whether two stages of one module, one after the other, share the tokens of a sequence differently."""
    return source.cp_size != target.cp_size
