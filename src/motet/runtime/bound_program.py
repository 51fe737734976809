"""A rank's program bound to its stages: the part of each step that does not depend on the batch, derived once for all
iterations with equal cells and routes.

Values have numbers, which are looked up faster. Routes are numbered among those that enter or leave their cell, since
each batch has routes of its own.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from motet.runtime.communication.gradient_reduction import GradientReducer
from motet.runtime.communication.messages import Address, Carried, LocalProgram, addresses_of
from motet.runtime.stage_runner import StageRunner
from motet.schedule.action import Compute, Kind, Reduce
from motet.schedule.communicators import Link
from motet.schedule.dependencies import Activation, Gradient
from motet.schedule.lower import Message
from motet.schedule.routes import Cell, Route, Routes


class BoundMessage(NamedTuple):
    message: Message
    value: int
    """Number of the value that it carries, or a piece of it."""
    route: int
    """Number of the route among those that leave the message's source."""
    is_sent: bool
    runner: StageRunner
    """Of the stage at this rank's end."""
    num_shares: int
    """As `StageRunner.num_row_shares`."""
    is_resharded: bool
    is_whole: bool
    """Whether all rows that the sender has are sent."""
    is_plain: bool
    """Whether it carries the whole value: neither a piece nor a share of the rows."""
    dtype: torch.dtype
    is_answered: bool
    """Whether a gradient will come back for what is sent."""

    def __str__(self) -> str:
        return str(self.message)


class BoundRead(NamedTuple):
    """A value that an action reads."""

    value: int
    is_gradient: bool
    route: int
    """Its number: of an activation among the routes that enter the cell, of a gradient among those that leave it."""
    messages: tuple[Message, ...]
    """Those that bring it, or pieces of it, from other ranks."""
    num_shares: int
    is_resharded: bool
    is_whole: bool
    """Whether this rank reads all rows of what it made itself."""


class BoundCompute(NamedTuple):
    action: Compute
    kind: str
    """Of its span, a key of `SPAN_KINDS`."""
    runner: StageRunner
    is_split: bool
    """Whether the cell's backward runs in two halves."""
    ran_before: bool
    """Whether the cell's forward ran in the iteration before."""
    is_ahead: bool
    """Whether the cell is one of the next batch."""
    reducers: tuple[GradientReducer, ...]
    """The reductions whose gradients become final in this action."""
    reads: tuple[BoundRead, ...]
    writes: tuple[tuple[int, int], ...]
    """Of a forward: number of the route among those that leave the cell, and of the value, if this rank needs it."""
    returns: Mapping[Cell, int]
    """Of a backward: by source of the routes that enter the cell, the number of the gradient that goes back, if this
    rank needs it."""
    seed_text: bytes
    """The cell as text, from which its seed is derived; of the next batch's cells, as its own iteration names them."""

    def __str__(self) -> str:
        return str(self.action)


BoundStep = BoundMessage | BoundCompute | Reduce


class BoundProgram(NamedTuple):
    local: LocalProgram
    steps: tuple[BoundStep, ...]
    receives: tuple[BoundMessage, ...]
    """Of the steps, in order."""
    uses: Mapping[int, int]
    """`LocalProgram.uses` by number of the value."""
    addresses: Mapping[Message, Address]
    """Of this rank's messages."""


def bind(
    program: LocalProgram,
    routes: Routes,
    runners: Mapping[tuple[str, int, int], StageRunner],
    overlapping: Mapping[tuple[str, int, int], tuple[GradientReducer, ...]],
    links: Mapping[Link, dist.ProcessGroup | None],
) -> BoundProgram:
    """`routes`: of any batch for which the program is. `overlapping`: by stage, the reductions whose gradients are all
    final within its last backward. `links`: this rank's communicators.

    Raises `UserError` as `addresses_of`."""
    binding = _Binding(program, routes, runners, overlapping)
    steps = tuple(binding.bound(step) for step in program.steps)
    uses = {binding.number(value): count for value, count in program.uses.items()}
    receives = tuple(step for step in steps if isinstance(step, BoundMessage) and not step.is_sent)
    return BoundProgram(program, steps, receives, uses, addresses_of(program.rank, program.tags, links))


class _Binding:
    def __init__(
        self,
        program: LocalProgram,
        routes: Routes,
        runners: Mapping[tuple[str, int, int], StageRunner],
        overlapping: Mapping[tuple[str, int, int], tuple[GradientReducer, ...]],
    ) -> None:
        self._program, self._routes, self._runners, self._overlapping = program, routes, runners, overlapping
        self._numbers: dict[Carried, int] = {}
        self._received: dict[Carried, tuple[Message, ...]] = {}
        for step in program.steps:
            if isinstance(step, Message) and step.receiver == program.rank:
                self._received[step.value] = (*self._received.get(step.value, ()), step)

    def number(self, value: Carried) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def bound(self, step: Message | Compute | Reduce) -> BoundStep:
        if isinstance(step, Message):
            return self._message(step)
        return self._compute(step) if isinstance(step, Compute) else step

    def _message(self, message: Message) -> BoundMessage:
        routes = self._routes.outgoing[message.source]
        number = next(i for i, route in enumerate(routes) if route.target == message.target)
        route, is_sent, gradient = routes[number], message.sender == self._program.rank, message.gradient
        runner = self._runners[(message.source if is_sent != gradient else message.target)[:3]]
        num_shares = runner.num_row_shares(route, gradient=gradient)
        is_whole = runner.rows.is_whole(route, gradient=gradient)
        return BoundMessage(
            message=message,
            value=self.number(message.value),
            route=number,
            is_sent=is_sent,
            runner=runner,
            num_shares=num_shares,
            is_resharded=runner.rows.is_resharded(route),
            is_whole=is_whole,
            is_plain=is_whole and num_shares == 1,
            dtype=runner.message_dtype(route),
            is_answered=route.carries_gradient and not gradient,
        )

    def _compute(self, action: Compute) -> BoundCompute:
        cell, kind = action.cell, action.kind
        runner = self._runners[cell[:3]]
        is_final = self._program.final_backwards.get(cell[:3]) == action
        incoming, outgoing = self._routes.incoming[cell], self._routes.outgoing[cell]
        reads: tuple[BoundRead, ...] = ()
        writes: tuple[tuple[int, int], ...] = ()
        returns: dict[Cell, int] = {}
        uses = self._program.uses
        if kind is Kind.FORWARD:
            reads = tuple(
                self._read(Activation(route.source, route.target), i, route, runner)
                for i, route in enumerate(incoming)
                if runner.receives(route)
            )
            values = [Activation(route.source, route.target) for route in outgoing]
            writes = tuple((i, self.number(value)) for i, value in enumerate(values) if uses.get(value))
        elif kind is not Kind.WEIGHT:
            reads = tuple(
                self._read(Gradient(route.source, route.target), i, route, runner)
                for i, route in enumerate(outgoing)
                if route.carries_gradient
            )
            gradients = [Gradient(route.source, route.target) for route in incoming if route.carries_gradient]
            returns = {value.source: self.number(value) for value in gradients if uses.get(value)}
        return BoundCompute(
            action=action,
            kind=kind.value,
            runner=runner,
            is_split=cell in self._program.split,
            ran_before=cell in self._routes.ran_before,
            is_ahead=cell in self._routes.ahead,
            reducers=self._overlapping.get(cell[:3], ()) if is_final else (),
            reads=reads,
            writes=writes,
            returns=returns,
            seed_text=f"{self._routes.next_name(cell) if cell in self._routes.ahead else cell!r})".encode(),
        )

    def _read(self, value: Carried, number: int, route: Route, runner: StageRunner) -> BoundRead:
        gradient = isinstance(value, Gradient)
        return BoundRead(
            value=self.number(value),
            is_gradient=gradient,
            route=number,
            messages=self._received.get(value, ()),
            num_shares=runner.num_row_shares(route, gradient=gradient),
            is_resharded=runner.rows.is_resharded(route),
            is_whole=runner.rows.is_whole(route, gradient=gradient),
        )
