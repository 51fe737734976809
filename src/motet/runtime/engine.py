"""One iteration: batch -> assignment -> routes -> schedule -> program -> execution -> loss and gradients."""

import hashlib
import math
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from motet.assignment.batch_assignment import BatchAssignment, contiguous_assignment
from motet.assignment.next_batch import NO_RUN_AHEAD, RunAhead, check_run_ahead
from motet.assignment.sample import Sample, members_of_cell
from motet.balancing.policies import check_assignment
from motet.devices import HostCopy, has_own_memory, peak_memory_bytes, to_device
from motet.models.stages.stage import Batch
from motet.parallel.mesh import build_mesh, pairs_by_tag
from motet.plan import Plan
from motet.runtime.batch_copies import BatchCopies, DeviceBatch
from motet.runtime.communication.agreement import gather_values, is_same_on_all_ranks
from motet.runtime.communication.deadline import StepFailedError
from motet.runtime.communication.messages import LocalProgram, local_program
from motet.runtime.communication.preflight import open_communicators
from motet.runtime.executor import Executor
from motet.runtime.local_model import LocalModel, StageMaker
from motet.runtime.next_batch import JoinedBatch, NextBatch
from motet.runtime.router_corrections import RouterCorrections
from motet.runtime.span_recorder import SpanRecorder
from motet.runtime.stage_runner import LossRunner, StageRunner
from motet.schedule.action import Compute
from motet.schedule.dependencies import reductions
from motet.schedule.generators.list_schedule import MemoryLimit
from motet.schedule.lower import Program
from motet.schedule.program import make_program
from motet.schedule.routes import Routes, derive_routes
from motet.timeline import Span, Timeline

MAX_PROGRAMS = 64
"""Number of programs that are kept; batches whose microbatches have the same modalities share one."""

PEAK_INTERVAL_S = 1.0
"""Seconds between two questions after a process's resident memory."""

MIN_ASSIGNMENTS = 4
"""Smallest number of assignments that are kept; see `Engine.keep_ahead`."""

Assign = Callable[[Plan, Sequence[Sample]], BatchAssignment]


class Expectation(Protocol):
    """Predicted times and memory of an iteration. Every rank must derive the same."""

    def compute_s(self, action: Compute) -> float:
        """Seconds of a compute action."""

    def memory_limit(self) -> MemoryLimit: ...


Expect = Callable[[Routes, Sequence[Sample]], Expectation]


@dataclass(frozen=True)
class IterationResult:
    """Loss and gradient norm of an iteration, equal on every rank."""

    loss: float
    """Weighted sum over modules of the sum of the global batch's losses over its number of loss tokens."""
    loss_sums: Mapping[str, float]
    """By module with a loss, the sum of the global batch's losses, neither weighted nor averaged."""
    loss_tokens: Mapping[str, int]
    """By module with a loss, what its sum is divided by: the loss tokens of the global batch."""
    gradient_norm: float
    """Norm of the whole model's gradient; 0 for a forward-only iteration."""
    pause: bool = False
    """Whether some rank wants all to pause after this iteration."""
    peak_memory_bytes: tuple[int, ...] = ()
    """By rank, the most that it has held so far (`motet.devices.peak_memory_bytes`)."""


class StartedIteration:
    """An iteration of which all that the device has to do was issued. Its results are on their way to the host.

    `samples`: those of the routes, with the next batch's if some of them were run ahead."""

    def __init__(
        self,
        totals: Tensor,
        num_losses: int,
        routes: Routes,
        samples: Sequence[Sample],
        recorder: SpanRecorder,
        to_result: Callable[[list[float]], IterationResult],
    ) -> None:
        self._on_device, self._num_losses = totals, num_losses
        self.routes, self.samples, self.recorder = routes, samples, recorder
        """The spans of the iteration, and of what was recorded after it: the optimizer's step."""
        self._totals, self._to_result = HostCopy(totals), to_result

    @cached_property
    def gradient_norm(self) -> Tensor:
        """As of `IterationResult`, on the device."""
        return self._on_device[self._num_losses].sqrt()

    @cached_property
    def is_finite(self) -> Tensor:
        """Whether losses and norm are finite, on the device."""
        return self._on_device[: self._num_losses + 1].isfinite().all()

    def read(self) -> IterationResult:
        """Waits for the device."""
        self.recorder.wait()
        return self._to_result(self._totals.read().tolist())


class Engine:
    """Runs a plan on this rank. Collective: every rank makes one with the same arguments.

    `expect`: by what actions are ordered, as where the plan was evaluated; None: all take equally long, and memory is
    no limit. Batches of one form are ordered as the first of them. `keeps_unreached`: a parameter that no sample of a
    batch reaches has no gradient after an iteration, as in a plain loop; otherwise its gradient is zero.
    `router_bias_update_rate`: of the corrections of routers' scores; 0: they stay."""

    def __init__(
        self,
        plan: Plan,
        make_stage: StageMaker,
        *,
        device: torch.device,
        boundary_dtype: torch.dtype = torch.float32,
        timeout: timedelta = timedelta(minutes=5),
        assign: Assign = contiguous_assignment,
        expect: Expect | None = None,
        num_spare_ranks: int = 0,
        keeps_unreached: bool = False,
        router_bias_update_rate: float = 0.0,
    ) -> None:
        check_assignment(plan)
        check_run_ahead(plan)
        self.plan, self.device, self._assign, self._expect = plan, device, assign, expect
        mesh = build_mesh(plan, timeout, num_spare_ranks=num_spare_ranks)
        self.model = LocalModel(plan, mesh, make_stage)
        runners = {
            key: (LossRunner if plan.modules[key[0]].kind == "loss" else StageRunner)(
                key[0],
                plan.modules[key[0]],
                plan.modules[key[0]].replicas[key[1]].stages[key[2]],
                stage,
                boundary_dtype=boundary_dtype,
                device=device,
                tp=self.model.tensor_parallel[key],
                kept_shares=self.model.kept_shares.get(key, frozenset()),
                cp=self.model.context_parallel.get(key),
                sharded=self.model.sharded.get(key),
            )
            for key, stage in self.model.stages.items()
        }
        self.executor = Executor(mesh, runners, self.model.reducers, reductions(plan), device)
        self._trained: list[str] = []
        """Names of all trainable parameters of the model, if those that are not reached are to be found."""
        if keeps_unreached:
            mine = sorted({p.name for p in self.model.parameters if p.reduce is not None})
            self._trained = sorted({name for names in gather_values(list[str], mine) for name in names})
        self.router_corrections = RouterCorrections(self.model, router_bias_update_rate)
        if not pairs_by_tag():
            self.open_communicators()
        self.wants_pause: Callable[[], bool] = lambda: False
        """Asked at the end of every iteration; all ranks learn whether it is true of any."""
        self.was_aborted: Callable[[], bool] | None = None
        """Where communicators may be aborted while training is to go on: whether they were, so that what the device has
        computed means nothing. Iterations then end with an agreement of the hosts that they were not."""
        self.gradients_are_complete = False
        """Whether this rank has all sums of the last iteration: then it can be finished without other ranks."""
        self._asked_s, self._known_peak = -math.inf, 0
        self._programs: OrderedDict[Hashable, LocalProgram] = OrderedDict()
        """Programs by the form of their routes; the last used at the end."""
        self._compared: set[Hashable] = set()
        self._assigned: deque[tuple[Sequence[Sample], BatchAssignment]] = deque(maxlen=MIN_ASSIGNMENTS)
        """Assignments of the last batches, some of which are prepared ahead."""
        self._routed: deque[tuple[Sequence[Sample], Routes, Hashable, int]] = deque(maxlen=MIN_ASSIGNMENTS)
        self._prepared: deque[tuple[Sequence[Sample], list[object]]] = deque(maxlen=MIN_ASSIGNMENTS)
        """Keeps context sequences alive for the stages, which find them by their contents."""
        self._copies = BatchCopies(device, MIN_ASSIGNMENTS) if has_own_memory(device) else None
        self._copied_ahead: DeviceBatch | None = None
        """The next batch, on the device."""
        self._ran_ahead: tuple[Sequence[Sample], tuple[int, ...] | None] | None = None
        """Samples and seed of the batch that the last iteration ran ahead."""

    def open_communicators(self) -> int:
        """Tries every link and group of the plan, and returns how many this rank has. Collective.

        Raises `StepFailedError` naming a link or a group that does not work. Where communicators have to be opened, a
        new engine has done it."""
        return open_communicators(self.model.mesh, self.device, self.model.reducers)

    def keep_ahead(self, num_batches: int) -> None:
        """Keeps what was derived for so many batches in advance and for the running one, so that none is derived twice.

        Threads that derive it may overtake each other, so twice as many are kept."""
        number = max(MIN_ASSIGNMENTS, 2 * num_batches + 1)
        self._assigned, self._prepared = deque(self._assigned, number), deque(self._prepared, number)
        self._routed = deque(self._routed, number)
        if self._copies is not None:
            self._copies.keep(number)

    def assignment(self, samples: Sequence[Sample]) -> BatchAssignment:
        """The microbatches that a batch is cut into."""
        for known, assignment in tuple(self._assigned):
            if known is samples:
                return assignment
        assignment = self._assign(self.plan, samples)
        self._assigned.append((samples, assignment))
        return assignment

    def _routes(
        self, samples: Sequence[Sample], *, forward_only: bool, ahead: RunAhead = NO_RUN_AHEAD
    ) -> tuple[Routes, Hashable, int]:
        """The routes of a batch, their form, and a digest of its assignment."""
        if ahead != NO_RUN_AHEAD:
            routes = derive_routes(self.plan, self.assignment(samples), samples, ahead=ahead)
            return routes, _form(routes), _digest(f"{ahead.ran_before} {routes.assignment!r}")
        for known, routes, form, cut in tuple(self._routed):
            if known is samples and routes.forward_only == forward_only:
                return routes, form, cut
        assignment = self.assignment(samples)
        routes = derive_routes(self.plan, assignment, samples, forward_only=forward_only)
        form, cut = _form(routes), _digest(repr(assignment))
        self._routed.append((samples, routes, form, cut))
        return routes, form, cut

    def _local_program(self, routes: Routes, form: Hashable, samples: Sequence[Sample]) -> LocalProgram:
        """This rank's program. The first one of each kind (with and without backward, and what ran before or runs
        ahead) is compared between ranks."""
        if form in self._programs:
            self._programs.move_to_end(form)
            return self._programs[form]
        program = self._program(routes, samples)
        kind = routes.forward_only, bool(routes.ran_before), bool(routes.ahead)
        if kind not in self._compared:
            self._compared.add(kind)
            with self.executor.doing("the comparison of the ranks' programs"):
                _compare(program, samples, self.device)
        self._programs[form] = local_program(program, self.model.mesh.rank)
        if len(self._programs) > MAX_PROGRAMS:
            self._programs.popitem(last=False)
        return self._programs[form]

    def _program(self, routes: Routes, samples: Sequence[Sample]) -> Program:
        if self._expect is None:
            return make_program(self.plan.schedule, routes)
        expected = self._expect(routes, samples)
        return make_program(self.plan.schedule, routes, expected.compute_s, memory=expected.memory_limit())

    def run(
        self,
        batch: Batch,
        *,
        forward_only: bool = False,
        seed: tuple[int, ...] | None = None,
        following: NextBatch | None = None,
    ) -> IterationResult:
        """One iteration. Gradients are *added* to `.grad` of the local parameters, unless `forward_only`.

        `seed`: what dropout and the noise of generators depend on, beside stage and microbatch, or sample and item;
        None: the state of torch's generator, and the noise of evaluation.
        `following`: the batch of the next iteration, if it is known; encoders run ahead of it, if the plan says so.
        Raises `StepFailedError` if a rank died, or the iteration did not end in time."""
        with self.executor.deadline.guarded():
            started = self.start(batch, forward_only=forward_only, seed=seed, following=following)
            return self.finish(started, forward_only=forward_only)

    def finish(self, started: StartedIteration, *, forward_only: bool = False) -> IterationResult:
        """Waits for the results of an iteration."""
        result = started.read()
        if self.was_aborted is not None:
            self._agree_on_end(self.was_aborted(), forward_only)
        return result

    def _agree_on_end(self, was_aborted: bool, forward_only: bool) -> None:
        """Whoever has aborted its communicators has read anything; whoever has not can finish the iteration alone, and
        does so if anyone may. Collective."""
        if was_aborted:
            raise StepFailedError(f"rank {dist.get_rank()}: communicators were aborted during the iteration")
        self.gradients_are_complete = not forward_only
        self.executor.sum_over_ranks(torch.zeros(1), "that ends the iteration")

    def start(
        self,
        batch: Batch,
        *,
        forward_only: bool = False,
        seed: tuple[int, ...] | None = None,
        following: NextBatch | None = None,
    ) -> StartedIteration:
        """As `run`, without waiting for a device that computes beside the host."""
        with self.executor.deadline.guarded():
            if not self.plan.run_ahead or forward_only:
                following = None
            ahead = NO_RUN_AHEAD if forward_only else self._run_ahead(batch.samples, seed, following)
            self._prepare_attention(batch.samples, self._routes(batch.samples, forward_only=forward_only)[0])
            joined = batch
            if following is not None:
                next_samples = following.batch.samples
                self._prepare_attention(next_samples, self._routes(next_samples, forward_only=False)[0])
                joined = JoinedBatch(batch, following.batch)
            routes, form, cut = self._routes(batch.samples, forward_only=forward_only, ahead=ahead)
            program = self._local_program(routes, form, joined.samples)
            losses = {name: module for name, module in self.plan.modules.items() if module.loss_weight}
            tokens = {
                name: sum(sample.num_loss_tokens.get(module.data_module(name), 0) for sample in batch.samples)
                for name, module in losses.items()
            }
            self.gradients_are_complete = False
            self.router_corrections.begin()
            next_seed = None if following is None else following.seed
            if self._copies is None:
                self.executor.run(program, routes, joined, tokens, seed, next_seed)
            else:
                known = self._copied_ahead if ahead.ran_before else None
                copied = self._to_device(batch) if known is None else known
                both: Batch = copied
                if following is not None:
                    self._copied_ahead = self._to_device(following.batch)
                    both = JoinedBatch(copied, self._copied_ahead)
                self.executor.run(program, routes, both, tokens, seed, next_seed)
                copied.release()
            if not forward_only:
                self._ran_ahead = None if following is None else (following.batch.samples, following.seed)
            # Losses, squared norm, ranks that want to pause, digests, peak memory of each rank.
            peaks = [0.0] * dist.get_world_size()
            peaks[dist.get_rank()] = self._peak_memory_bytes()
            totals = torch.tensor([0.0] * (len(losses) + 1) + [self.wants_pause(), cut, *peaks], dtype=torch.float64)
            totals = to_device(totals, self.device)
            for (name, _, _), runner in self.executor.runners.items():
                if name in losses and runner.reports_loss(self.model.mesh.rank):
                    totals[list(losses).index(name)] += runner.loss_sum
            if not forward_only:
                forget_unreached = self._find_unreached() if self._trained else lambda: None
                with self.executor.doing("the sums inside tensor-parallel groups"):
                    self.model.finish_gradients()
                self.router_corrections.sum_counts(self.executor, self.device)
                totals[len(losses)] = to_device(self.model.counted_squared_norm(), self.device)
                forget_unreached()
                self.gradients_are_complete = self.was_aborted is None
            self.executor.sum_over_ranks(totals, "of losses")

            def result(values: list[float]) -> IterationResult:
                of_losses, (norm, wish, digests, *peaks) = values[: len(losses)], values[len(losses) :]
                if digests != cut * len(peaks):
                    raise StepFailedError(
                        f"rank {dist.get_rank()}: the ranks cut the batch into different microbatches; "
                        "do all processes read the same costs, data and version of motet?"
                    )
                sums = dict(zip(losses, of_losses, strict=True))
                loss, memory = self.weighted_loss(sums, tokens), tuple(map(int, peaks))
                return IterationResult(loss, sums, tokens, norm**0.5, wish > 0, memory)

            return StartedIteration(totals, len(losses), routes, joined.samples, self.executor.recorder, result)

    def _run_ahead(
        self, samples: Sequence[Sample], seed: tuple[int, ...] | None, following: NextBatch | None
    ) -> RunAhead:
        """What the iteration shares with the one before and the one after it. The same on every rank."""
        known, self._ran_ahead = self._ran_ahead, None
        ran_before = known is not None and known[0] is samples and known[1] == seed
        if following is None:
            return RunAhead(ran_before)
        return RunAhead(ran_before, self.assignment(following.batch.samples), following.batch.samples)

    def _to_device(self, batch: Batch) -> DeviceBatch:
        assert self._copies is not None
        return self._copies.to_device(batch, self._wanted_on_device(batch.samples), self._integers_on_host)

    def _peak_memory_bytes(self) -> int:
        """As `motet.devices.peak_memory_bytes`. An operating system takes its time to tell, so it is asked rarely."""
        now_s = time.monotonic()
        if has_own_memory(self.device) or now_s - self._asked_s > PEAK_INTERVAL_S:
            self._asked_s, self._known_peak = now_s, peak_memory_bytes(self.device)
        return self._known_peak

    def weighted_loss(self, sums: Mapping[str, float], tokens: Mapping[str, int]) -> float:
        """The weighted sum of the modules' mean losses."""
        return sum(self.plan.modules[name].loss_weight * value / max(1, tokens[name]) for name, value in sums.items())

    def _find_unreached(self) -> Callable[[], None]:
        """Looks for parameters that no rank's microbatches have reached; what it returns leaves them without gradient,
        which was zero. Collective.

        All ranks learn it before gradients are complete: after a failure, each of them finishes the step alone."""
        mine = self.model.reached()
        reached = torch.tensor(list(map(mine.__contains__, self._trained)), dtype=torch.float32)
        finish = self.executor.start_sum(reached, "of reached parameters")

        def forget() -> None:
            finish()
            counts = reached.tolist()
            if 0.0 in counts:
                unreached = {name for name, count in zip(self._trained, counts, strict=True) if not count}
                self.model.forget_gradients(unreached)

        return forget

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scales the gradients so that their norm over the whole model is at most `max_norm`. Collective.

        Returns the norm before clipping."""
        squared = to_device(self.model.counted_squared_norm(), self.device)
        dist.all_reduce(squared)
        norm = squared.sqrt()
        self.model.clip_gradients(norm, max_norm)
        return norm

    def prepare(self, batch: Batch) -> None:
        """Derives what an iteration needs of a coming batch: its microbatches, their routes, and for attention who
        holds which tokens, and their masks; and packs what goes to the device. For the thread that loads the batch;
        `run` does it otherwise."""
        routes, _, _ = self._routes(batch.samples, forward_only=False)
        if self._copies is not None:
            self._copies.pack(batch, self._wanted_on_device(batch.samples), self._integers_on_host)
        # Views that are made when they are asked for.
        assert routes.incoming.keys() == routes.outgoing.keys() >= routes.with_backward
        self._prepare_attention(batch.samples, routes)

    def _prepare_attention(self, samples: Sequence[Sample], routes: Routes) -> None:
        if not self.model.attending or any(known is samples for known, _ in tuple(self._prepared)):
            return
        contexts: list[object] = [
            self.model.attending[cell[:3]].prepare(members_of_cell(samples, routes.samples(cell), cell.module))
            for cell in routes.cells
            if cell[:3] in self.model.attending
        ]
        self._prepared.append((samples, contexts))

    def wanted(self, samples: Sequence[Sample]) -> dict[str, list[int]]:
        """Returns, for each module, the indices of the samples whose tensors this rank's stages read."""
        assignment = self.assignment(samples)
        places: dict[str, set[int]] = {}
        for (module, replica, _), runner in self.executor.runners.items():
            if runner.module.needs_features:
                own = places.setdefault(runner.data_module, set())
                own.update(i for microbatch in assignment.microbatches[module][replica] for i in microbatch)
        return {module: sorted(own) for module, own in places.items()}

    def _wanted_on_device(self, samples: Sequence[Sample]) -> dict[str, list[int]]:
        """Of `wanted`, what no stage of this rank reads on the host."""
        on_host = {runner.data_module for runner in self.executor.runners.values() if runner.reads_on_host}
        return {module: indices for module, indices in self.wanted(samples).items() if module not in on_host}

    @property
    def _integers_on_host(self) -> set[str]:
        """Modules whose stages keep the values of integers on the host."""
        return {runner.data_module for runner in self.executor.runners.values() if runner.integers_on_host}

    def timeline(self) -> Timeline:
        """The measured timeline of the last iteration, of all ranks. Collective; waits for the device."""
        mine = (socket.gethostname(), *self.executor.recorder.read())
        known = gather_values(tuple[str, float, list[Span]], mine)
        # The monotonic clock is one per machine: between machines, iterations are taken to begin together.
        one_clock = len({host for host, _, _ in known}) == 1
        origin = min(start for _, start, _ in known)
        spans = []
        for _, start, rank_spans in known:
            shift = start - origin if one_clock else 0.0
            spans += [replace(span, start=span.start + shift, end=span.end + shift) for span in rank_spans]
        return Timeline(tuple(spans), self.plan.num_ranks)


def _form(routes: Routes) -> Hashable:
    """The part of routes that a program depends on: cells and what flows between them, not samples."""
    numbers = (routes.cell_stage, routes.cell_microbatch, routes.route_source, routes.route_target)
    stages = tuple(stage[:3] for stage in routes.stages)
    ahead: tuple[bytes, ...] = routes.cell_is_ahead.tobytes(), routes.cell_ran_before.tobytes()
    if routes.runs_ahead:  # The names of the next batch's cells in its own iteration, from which they are seeded.
        ahead += (str(sorted(routes.num_microbatches.items())).encode(),)
    return routes.forward_only, stages, *ahead, *(array.tobytes() for array in (*numbers, routes.route_has_gradient))


def _digest(text: str) -> int:
    """A digest so small that sums over thousands of ranks are exact in float64."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:9], 16)


def _compare(program: Program, samples: Sequence[Sample], device: torch.device) -> None:
    """Raises `StepFailedError` unless all ranks have derived the same program from the same samples."""
    text = f"{program.digest()} {list(samples)}"
    if not is_same_on_all_ranks(text, device):
        raise StepFailedError(
            f"rank {dist.get_rank()}: the ranks derived different programs from plan and batch; "
            "do all processes read the same plan, data and version of motet?"
        )
