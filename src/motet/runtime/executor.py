"""Runs a rank's projection of the program on torch.distributed and measures it.

Every step stands in the total order (motet.schedule.lower), so running them in order cannot deadlock.

A step that does not end in time, or whose peer has died, raises `StepFailedError`, which says what this rank was doing
and for which message of which rank it waited.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from motet.devices import has_own_memory, seed_generators, to_device
from motet.models.stages.stage import Batch
from motet.parallel.context_rows import Piece
from motet.parallel.mesh import Mesh
from motet.parallel.tensor_collectives import rows_of_share
from motet.plan import Stage, places
from motet.runtime.deadline import Deadline, StepFailedError, StepOverrunError, StepTimeoutError
from motet.runtime.gradient_reduction import GradientReducer
from motet.runtime.messages import LocalProgram, Mailbox
from motet.runtime.span_recorder import SpanRecorder
from motet.runtime.stage_runner import StageRunner
from motet.schedule.action import Compute, Kind, Reduce
from motet.schedule.dependencies import Activation, Gradient, Holder
from motet.schedule.lower import Message, Step
from motet.schedule.routes import Cell, Route, Routes

Doing = Step | str | None
"""The activity of a rank: a step of its program, or a description of something outside of it."""


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
        self.deadline = Deadline(mesh.timeout, self.describe)
        self._hosts: dist.ProcessGroup | None = None
        """The group in which values on the host are summed; None: all ranks' own."""
        if has_own_memory(device) and dist.get_backend() != "gloo":
            self._hosts = dist.new_group(backend="gloo", timeout=mesh.timeout)
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
    ) -> None:
        """One iteration. Afterwards `.grad` of every trainable parameter is the gradient of the global loss, but for
        the sums inside tensor-parallel groups, and each runner's `loss_sum` is its own share of the loss.

        Args:
            routes: of this batch; the program is one for routes of their form.
            loss_tokens: for each module with a loss, the loss tokens of the global batch.
            seed: what dropout depends on, beside stage and microbatch, and noise, beside sample and item; None: the
                state of torch's generator, and the noise of evaluation.
        """
        self._program, self._routes, self._seed = program, routes, seed
        self.deadline.start()
        self._mailbox = Mailbox(program, self.deadline, self.mesh.links)
        self.recorder = SpanRecorder(self.mesh.rank, self.device)
        with self.doing("the beginning of the iteration"):
            for stage, runner in self.runners.items():
                by_block = stage in program.gathered_by_block
                runner.begin_iteration(routes, batch, loss_tokens, seed, by_block=by_block)
        for step in program.steps:
            with self.doing(step):
                if isinstance(step, Message):
                    self._exchange(step)
                elif isinstance(step, Reduce):
                    if not self.reducers[step].is_late:
                        self.reducers[step].start()
                elif step.kind is Kind.FORWARD:
                    self._forward(step)
                elif step.kind is Kind.WEIGHT:
                    self._weight_half(step)
                else:
                    self._backward(step)
        with self.doing("the end of the iteration"):
            self._mailbox.finish()
            for runner in self.runners.values():
                runner.end_iteration()
            if not routes.forward_only:
                for reducer in self.reducers.values():
                    reducer.start()
                for reduce, reducer in self.reducers.items():
                    reducer.finish(self.deadline, reduce)

    def _forward(self, action: Compute) -> None:
        cell = action.cell
        runner = self.runners[cell[:3]]
        inputs = {
            route: self._take(route, Activation) for route in self._routes.incoming[cell] if runner.receives(route)
        }
        if self._seed is not None:
            self._seed_dropout(cell)
        with self.recorder.measured(action, action.kind.value):
            runner.forward(cell, inputs, is_split=cell in self._program.split)
            for route in self._routes.outgoing[cell]:
                value = Activation(route.source, route.target)
                if self._mailbox.is_needed(value):
                    self._mailbox.put(value, runner.output(route))
        runner.forget_output(cell)

    def _backward(self, action: Compute) -> None:
        """A whole backward, or its input half."""
        cell = action.cell
        runner = self.runners[cell[:3]]
        gradients = {
            route: self._take(route, Gradient) for route in self._routes.outgoing[cell] if route.carries_gradient
        }
        reducers = self._overlapping_with(action)
        if self._seed is not None and runner.runs_again(cell):
            self._seed_dropout(cell)
        with self.recorder.measured(action, action.kind.value):
            for reducer in reducers:
                reducer.arm()
            returned = runner.backward(cell, gradients)
            for reducer in reducers:
                reducer.disarm()
        for route, gradient in returned.items():
            self._mailbox.put(Gradient(route.source, route.target), gradient)
        self._mailbox.release(cell)

    def _weight_half(self, action: Compute) -> None:
        runner = self.runners[action.cell[:3]]
        reducers = self._overlapping_with(action)
        with self.recorder.measured(action, action.kind.value):
            for reducer in reducers:
                reducer.expect(runner.parameters_left(action.cell))
            for parameter in runner.backward_weight(action.cell):
                for reducer in reducers:
                    reducer.accumulated(parameter)

    def _overlapping_with(self, action: Compute) -> tuple[GradientReducer, ...]:
        """The reductions whose gradients become final in this action."""
        stage = action.cell[:3]
        is_final = self._program.final_backwards.get(stage) == action
        return self._overlapping.get(stage, ()) if is_final else ()

    def _take(self, route: Route, kind: type[Activation] | type[Gradient]) -> torch.Tensor:
        """Receives what a route, or its gradient route, brings to this rank."""
        value, gradient, rank = kind(route.source, route.target), kind is Gradient, self.mesh.rank
        runner = self.runners[(route.source if gradient else route.target)[:3]]
        messages = self._mailbox.awaited(value)
        received: list[torch.Tensor] = []
        shape = runner.output_shape(route) if gradient else runner.input_shape(route)
        if messages:
            with self.recorder.measured(messages[0], "wait"):
                received = self._mailbox.take(value)
                if runner.num_row_shares(route, gradient=gradient) > 1:
                    received = [runner.whole_rows(received[0], shape[-2])]
        if not runner.rows.is_resharded(route):
            if received:
                return received[0]
            return _rows_of_piece(self._mailbox.use(value), runner.rows.piece(route, rank, rank, gradient=gradient))
        # The pieces of all places of the sending group, this rank's own among them.
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

    def _exchange(self, message: Message) -> None:
        route = next(r for r in self._routes.outgoing[message.source] if r.target == message.target)
        is_sent = message.sender == self.mesh.rank
        here = self.runners[(message.source if is_sent != message.gradient else message.target)[:3]]
        piece = here.rows.piece(route, message.sender, message.receiver, gradient=message.gradient)
        num_shares = here.num_row_shares(route, gradient=message.gradient)
        if is_sent:
            tensor = _rows_of_piece(self._mailbox.use(message.value), piece)
            if num_shares > 1:
                end = self._routes.stage(route.source if message.gradient else route.target)
                tensor = rows_of_share(tensor, places(end.ranks).index(message.receiver) % num_shares, num_shares)
            if tensor.numel() or not here.rows.is_resharded(route):
                self._mailbox.send(message, tensor, answered=route.carries_gradient and not message.gradient)
            return
        shape = here.output_shape(route) if message.gradient else here.input_shape(route)
        shape = (*shape[:-2], -(-shape[-2] // num_shares), shape[-1])
        if here.rows.is_resharded(route) and piece is not None:
            shape = (*shape[:-2], len(piece.kept), shape[-1])
            if not len(piece.kept):  # Groups of unequal size that hold nothing alike exchange nothing.
                return
        self._mailbox.receive(message, shape, here.message_dtype(route), self.device)

    def _seed_dropout(self, cell: Cell) -> None:
        """Seeds torch with a digest of seed and cell, so that all ranks of a stage, and resumed runs, draw alike."""
        digest = hashlib.blake2b(repr((self._seed, cell)).encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little", signed=True)
        seed_generators(self.device, seed)

    def sum_over_ranks(self, values: torch.Tensor, what: str) -> None:
        """Sums in place over all ranks, before the deadline of the last iteration. Values may be on the host."""
        with self.doing("the end of the iteration"):
            group = None if has_own_memory(values.device) else self._hosts
            work = dist.all_reduce(values, group=group, async_op=True)
            assert work is not None
            self.wait_for(work, f"the sum {what}", range(self.mesh.world_size))

    def wait_for(self, work: dist.Work, what: str, peers: Sequence[int]) -> None:
        """Waits until the deadline of the last iteration. `what`: names the work in errors."""
        self.deadline.wait(work, what, peers)

    @contextmanager
    def doing(self, what: Doing) -> Iterator[None]:
        """Turns errors of torch.distributed and of stages into a `StepFailedError` that names the activity `what`."""
        self._doing = what
        try:
            yield
        except StepFailedError:
            raise
        except RuntimeError as error:
            kind = StepTimeoutError if self.deadline.has_passed else StepFailedError
            raise kind(f"{self.describe()}: {error}") from error
        self._doing = None

    def overrun(self, seconds: float) -> StepTimeoutError:
        """The error for a step that took longer than `seconds`."""
        kind = StepOverrunError if self.deadline.waiting_for is None else StepTimeoutError
        return kind(f"{self.describe()} after {seconds:g} s (train.step_timeout_s)")

    def describe(self) -> str:
        """A message that says what this rank is doing, and for what it waits."""
        text = f"rank {self.mesh.rank} is at {self._doing}"
        if isinstance(self._doing, Compute) and len(group := self._stage(self._doing.cell).ranks) > 1:
            text += f" (together with ranks {_listed(group)})"
        waiting_for = self.deadline.waiting_for
        if waiting_for is None:
            return text
        what, peers = waiting_for
        told = what if isinstance(what, str) else f"{'message' if isinstance(what, Message) else 'the sum'} {what}"
        others = [rank for rank in peers if rank != self.mesh.rank]
        return f"{text} and waits for {told} with rank{'s' * (len(others) > 1)} {_listed(others)}"

    def _stage(self, cell: Cell) -> Stage:
        return self.runners[cell[:3]].stage


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
