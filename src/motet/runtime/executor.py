"""Runs a rank's projection of the program on torch.distributed and measures it.

Every step stands in the total order (motet.schedule.lower), so running them in order cannot deadlock.

A step that does not end in time, or whose peer has died, raises `StepFailedError`, which says what this rank was doing
and for which message of which rank it waited.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from motet.devices import has_own_memory, seed_generators, to_device
from motet.models.stages.stage import Batch
from motet.parallel.context.context_rows import Piece
from motet.parallel.mesh import Mesh, pairs_by_tag
from motet.parallel.tensor.tensor_collectives import rows_of_share
from motet.plan import places
from motet.runtime.bound_program import BoundCompute, BoundMessage, BoundProgram, BoundRead, BoundStep, bind
from motet.runtime.communication.deadline import Deadline, StepFailedError, StepOverrunError, StepTimeoutError
from motet.runtime.communication.gradient_reduction import GradientReducer
from motet.runtime.communication.messages import LocalProgram, Mailbox
from motet.runtime.span_recorder import SpanRecorder
from motet.runtime.stage_runner import StageRunner
from motet.schedule.action import Kind, Reduce
from motet.schedule.dependencies import Holder
from motet.schedule.lower import Message
from motet.schedule.routes import Route, Routes

Doing = BoundStep | str | None
"""The activity of a rank: a step of its program, or a description of something outside of it."""

END = "the end of the iteration"

MAX_BYTES_AHEAD = 2**22
"""Largest size of the buffers of receives that are posted before the program reaches them."""


class Executor:
    """Executes programs on this rank's stages.

    `runners`: by (module, replica, stage). `reducers`: this rank's reductions, `holders`: who takes part in them.
    """

    def __init__(
        self,
        mesh: Mesh,
        runners: Mapping[tuple[str, int, int], StageRunner],
        reducers: Mapping[Reduce, GradientReducer],
        holders: Mapping[Reduce, tuple[Holder, ...]],
        device: torch.device,
    ) -> None:
        self.mesh, self.runners, self.reducers, self.device = mesh, runners, reducers, device
        self._overlapping = _overlapping(mesh.rank, runners, reducers, holders)
        self._bound: WeakKeyDictionary[LocalProgram, BoundProgram] = WeakKeyDictionary()
        self.deadline = Deadline(mesh.timeout, self.describe)
        self._hosts: dist.ProcessGroup | None = None
        """The group in which values on the host are summed; None: all ranks' own."""
        if has_own_memory(device) and dist.get_backend() != "gloo":
            self._hosts = dist.new_group(backend="gloo", timeout=mesh.timeout)
        # Elsewhere receives are paired with sends by their order, which is the program's.
        self._max_bytes_ahead = MAX_BYTES_AHEAD if pairs_by_tag() else 0
        self._doing: Doing = None
        self.recorder = SpanRecorder(mesh.rank, device)
        """Of the iteration that was started last."""

    def run(
        self,
        program: LocalProgram,
        routes: Routes,
        batch: Batch,
        loss_tokens: Mapping[str, int],
        seed: tuple[int, ...] | None = None,
        next_seed: tuple[int, ...] | None = None,
    ) -> None:
        """One iteration. Afterwards `.grad` of every trainable parameter is the gradient of the global loss, but for
        the sums inside tensor-parallel groups, and each runner's `loss_sum` is its own share of the loss.

        Args:
            routes: of this batch; the program is one for routes of their form.
            batch: with the next batch's samples behind its own, if the routes have cells of it.
            loss_tokens: for each module with a loss, the loss tokens of the global batch.
            seed: what dropout depends on, beside stage and microbatch, and noise, beside sample and item; None: the
                state of torch's generator, and the noise of evaluation.
            next_seed: that of the next batch's cells.
        """
        self._routes = routes
        self._seed_digest, self._next_seed_digest = _seed_digest(seed), _seed_digest(next_seed)
        self.deadline.start()
        self.recorder = SpanRecorder(self.mesh.rank, self.device)
        with self.doing("the beginning of the iteration"):
            for stage, runner in self.runners.items():
                by_block = stage in program.gathered_by_block
                runner.begin_iteration(routes, batch, loss_tokens, seed, next_draw_key=next_seed, by_block=by_block)
            if program not in self._bound:
                self._bound[program] = bind(program, routes, self.runners, self._overlapping, self.mesh.links)
        bound = self._bound[program]
        self._mailbox = Mailbox(bound.addresses, bound.uses, self.deadline)
        self._to_receive = deque(bound.receives)
        self._room, self._sizes_ahead = self._max_bytes_ahead, deque[int]()
        with self._naming_errors():
            for step in bound.steps:
                self._doing = step
                if isinstance(step, BoundMessage):
                    if step.is_sent:
                        self._send(step)
                    else:
                        self._receive_next()
                elif not isinstance(step, BoundCompute):
                    if not self.reducers[step].is_late:
                        self.reducers[step].start()
                elif step.action.kind is Kind.FORWARD:
                    self._forward(step)
                elif step.action.kind is Kind.WEIGHT:
                    self._weight_half(step)
                else:
                    self._backward(step)
        self._doing = None
        with self.doing(END):
            self._mailbox.finish()
            for runner in self.runners.values():
                runner.end_iteration()
            if not routes.forward_only:
                for reducer in self.reducers.values():
                    reducer.start()
                for reduce, reducer in self.reducers.items():
                    reducer.finish(self.deadline, reduce)

    def _forward(self, bound: BoundCompute) -> None:
        action, runner = bound.action, bound.runner
        cell = action.cell
        incoming = self._routes.incoming[cell]
        if bound.ran_before:
            runner.hand_on(cell)
            self._put_output(bound)
            return
        inputs = {incoming[read.route]: self._take(read, incoming[read.route], runner) for read in bound.reads}
        self._seed_dropout(bound)
        start = self.recorder.mark()
        runner.forward(cell, inputs, is_split=bound.is_split)
        self._put_output(bound)
        self.recorder.record(action, bound.kind, start)

    def _put_output(self, bound: BoundCompute) -> None:
        cell = bound.action.cell
        outgoing = self._routes.outgoing[cell]
        for number, value in bound.writes:
            self._mailbox.put(value, bound.runner.output(outgoing[number]))
        bound.runner.forget_output(cell)

    def _backward(self, bound: BoundCompute) -> None:
        """A whole backward, or its input half."""
        action, runner = bound.action, bound.runner
        cell = action.cell
        outgoing = self._routes.outgoing[cell]
        gradients = {outgoing[read.route]: self._take(read, outgoing[read.route], runner) for read in bound.reads}
        if runner.runs_again(cell):
            self._seed_dropout(bound)
        start = self.recorder.mark()
        for reducer in bound.reducers:
            reducer.arm()
        returned = runner.backward(cell, gradients)
        for reducer in bound.reducers:
            reducer.disarm()
        self.recorder.record(action, bound.kind, start)
        for route, gradient in returned.items():
            value = bound.returns.get(route.source)
            if value is not None:
                self._mailbox.put(value, gradient)
        self._mailbox.release(cell)

    def _weight_half(self, bound: BoundCompute) -> None:
        action, runner = bound.action, bound.runner
        start = self.recorder.mark()
        for reducer in bound.reducers:
            reducer.expect(runner.parameters_left(action.cell))
        for parameter in runner.backward_weight(action.cell):
            for reducer in bound.reducers:
                reducer.accumulated(parameter)
        self.recorder.record(action, bound.kind, start)

    def _take(self, read: BoundRead, route: Route, runner: StageRunner) -> torch.Tensor:
        """Receives what a route, or its gradient route, brings to this rank."""
        value, gradient, rank = read.value, read.is_gradient, self.mesh.rank
        received: list[torch.Tensor] = []
        # Groups of unequal size that hold nothing alike exchange nothing.
        messages = self._mailbox.awaited(value) if read.is_resharded else read.messages
        if messages:
            start = self.recorder.mark()
            received = self._mailbox.take(value)
            if read.num_shares > 1:
                shape = runner.output_shape(route) if gradient else runner.input_shape(route)
                received = [runner.whole_rows(received[0], shape[-2])]
            self.recorder.record(messages[0], "wait", start)
        if not read.is_resharded:
            if received:
                return received[0]
            made = self._mailbox.use(value)
            piece = None if read.is_whole else runner.rows.piece(route, rank, rank, gradient=gradient)
            return _rows_of_piece(made, piece)
        # The pieces of all places of the sending group, this rank's own among them.
        shape = runner.output_shape(route) if gradient else runner.input_shape(route)
        result = torch.zeros(shape, dtype=runner.message_dtype(route), device=self.device)
        pieces = [(message.sender, tensor) for message, tensor in zip(messages, received, strict=True)]
        if rank in self._routes.stage(route.target if gradient else route.source).ranks:
            own = runner.rows.piece(route, rank, rank, gradient=gradient)
            pieces.append((rank, _rows_of_piece(self._mailbox.use(value), own)))
        for sender, tensor in pieces:
            piece = runner.rows.piece(route, sender, rank, gradient=gradient)
            if piece is None:
                result += tensor
            else:
                result.index_add_(-2, to_device(torch.from_numpy(piece.kept), self.device), tensor)
        return result

    def _send(self, bound: BoundMessage) -> None:
        message = bound.message
        tensor = self._mailbox.use(bound.value)
        if not bound.is_plain:
            route = self._routes.outgoing[message.source][bound.route]
            tensor = _rows_of_piece(tensor, self._piece(bound, route))
            if bound.num_shares > 1:
                end = self._routes.stage(route.source if message.gradient else route.target)
                share = places(end.ranks).index(message.receiver) % bound.num_shares
                tensor = rows_of_share(tensor, share, bound.num_shares)
            if not tensor.numel() and bound.is_resharded:
                return
        self._mailbox.send(message, tensor, answered=bound.is_answered)

    def _receive_next(self) -> None:
        """Posts the next receive of the program, unless it was posted ahead, and ahead of the program as many of those
        behind it as there is room for.

        gloo answers a send whose receive comes later by two more messages, during which its thread can keep a core
        busy for milliseconds (docs/decisions/messages.md)."""
        if self._sizes_ahead:
            self._room += self._sizes_ahead.popleft()
        else:
            bound = self._to_receive.popleft()
            self._post(bound, self._received_shape(bound))
        while self._to_receive and self._room > 0:
            bound = self._to_receive[0]
            shape = self._received_shape(bound)
            size = prod(shape) * bound.dtype.itemsize
            if size > self._room:
                return
            self._post(self._to_receive.popleft(), shape)
            self._sizes_ahead.append(size)
            self._room -= size

    def _post(self, bound: BoundMessage, shape: tuple[int, ...]) -> None:
        # Of a resharded value nothing is sent where a piece has no rows.
        if not bound.is_resharded or 0 not in shape:
            self._mailbox.receive(bound.message, bound.value, shape, bound.dtype, self.device)

    def _received_shape(self, bound: BoundMessage) -> tuple[int, ...]:
        message, runner = bound.message, bound.runner
        route = self._routes.outgoing[message.source][bound.route]
        shape = runner.output_shape(route) if message.gradient else runner.input_shape(route)
        if bound.is_plain:
            return shape
        if bound.num_shares > 1:
            shape = (*shape[:-2], -(-shape[-2] // bound.num_shares), shape[-1])
        if bound.is_resharded and (piece := self._piece(bound, route)) is not None:
            shape = (*shape[:-2], len(piece.kept), shape[-1])
        return shape

    def _piece(self, bound: BoundMessage, route: Route) -> Piece | None:
        """The rows that a message carries of those that its sender has; None: all."""
        message = bound.message
        if bound.is_whole:
            return None
        return bound.runner.rows.piece(route, message.sender, message.receiver, gradient=message.gradient)

    def _seed_dropout(self, bound: BoundCompute) -> None:
        """Seeds torch with a digest of seed and cell, so that all ranks of a stage, and resumed runs, draw alike."""
        known = self._next_seed_digest if bound.is_ahead else self._seed_digest
        if known is None:
            return
        digest = known.copy()
        digest.update(bound.seed_text)
        seed = int.from_bytes(digest.digest(), "little", signed=True)
        seed_generators(self.device, seed)

    def sum_over_ranks(self, values: torch.Tensor, what: str) -> None:
        """Sums in place over all ranks, before the deadline of the last iteration. Values may be on the host."""
        self.start_sum(values, what)()

    def start_sum(self, values: torch.Tensor, what: str) -> Callable[[], None]:
        """As `sum_over_ranks`, except that the sum is there when the function that this returns was called."""
        with self.doing(END):
            group = None if has_own_memory(values.device) else self._hosts
            work = dist.all_reduce(values, group=group, async_op=True)
        assert work is not None

        def finish() -> None:
            with self.doing(END):
                self.wait_for(work, f"the sum {what}", range(self.mesh.world_size))

        return finish

    def wait_for(self, work: dist.Work, what: str, peers: Sequence[int]) -> None:
        """Waits until the deadline of the last iteration. `what`: names the work in errors."""
        self.deadline.wait(work, what, peers)

    @contextmanager
    def doing(self, what: Doing) -> Iterator[None]:
        """Turns errors of torch.distributed and of stages into a `StepFailedError` that names the activity `what`."""
        self._doing = what
        with self._naming_errors():
            yield
        self._doing = None

    @contextmanager
    def _naming_errors(self) -> Iterator[None]:
        """As `doing`, of the activity in which an error comes."""
        try:
            yield
        except StepFailedError:
            raise
        except RuntimeError as error:
            kind = StepTimeoutError if self.deadline.has_passed else StepFailedError
            raise kind(f"{self.describe()}: {error}") from error

    def overrun(self, seconds: float) -> StepTimeoutError:
        """The error for a step that took longer than `seconds`."""
        kind = StepOverrunError if self.deadline.waiting_for is None else StepTimeoutError
        return kind(f"{self.describe()} after {seconds:g} s (train.step_timeout_s)")

    def describe(self) -> str:
        """A message that says what this rank is doing, and for what it waits."""
        doing = self._doing
        text = f"rank {self.mesh.rank} is at {doing}"
        if isinstance(doing, BoundCompute) and len(group := doing.runner.stage.ranks) > 1:
            text += f" (together with ranks {_listed(group)})"
        waiting_for = self.deadline.waiting_for
        if waiting_for is None:
            return text
        what, peers = waiting_for
        told = what if isinstance(what, str) else f"{'message' if isinstance(what, Message) else 'the sum'} {what}"
        others = [rank for rank in peers if rank != self.mesh.rank]
        return f"{text} and waits for {told} with rank{'s' * (len(others) > 1)} {_listed(others)}"


def _seed_digest(seed: tuple[int, ...] | None) -> "hashlib.blake2b | None":
    """Of the first half of the text of (seed, cell)."""
    return None if seed is None else hashlib.blake2b(f"({seed!r}, ".encode(), digest_size=8)


def _rows_of_piece(tensor: torch.Tensor, piece: Piece | None) -> torch.Tensor:
    """[..., rows, width]: those of the piece."""
    return tensor if piece is None else tensor.index_select(-2, to_device(torch.from_numpy(piece.sent), tensor.device))


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _overlapping(
    rank: int,
    runners: Mapping[tuple[str, int, int], StageRunner],
    reducers: Mapping[Reduce, GradientReducer],
    holders: Mapping[Reduce, tuple[Holder, ...]],
) -> dict[tuple[str, int, int], tuple[GradientReducer, ...]]:
    """By stage of this rank: the reductions whose gradients are all final within the stage's last backward."""
    result: dict[tuple[str, int, int], tuple[GradientReducer, ...]] = {}
    for reduce, reducer in reducers.items():
        here = [(h.module, h.replica, h.stage) for h in holders[reduce] if rank in h.ranks]
        if len(here) == 1 and reducer.can_overlap and not runners[here[0]].is_sharded:
            result[here[0]] = (*result.get(here[0], ()), reducer)
    return result
