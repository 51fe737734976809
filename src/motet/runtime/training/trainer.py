"""The training loop: steps, evaluation, metrics, checkpoints, and what to do when numbers are no longer finite.

A device that computes beside the host is given the next step before the host reads the results of this one, except
where an evaluation or a checkpoint comes first, and under `train.failures`.

Dropout depends on seed, step, stage and microbatch alone, so a resumed run draws what the undisturbed one would have.
"""

import contextlib
import json
import math
import os
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from motet.config import TrainConfig
from motet.data.loader import LoadedBatch, Loader
from motet.devices import has_own_memory
from motet.errors import UserError
from motet.models.stages.stage import Batch
from motet.runtime.checkpoint.checkpoint import (
    CheckpointWriter,
    checkpoint_bytes,
    load_checkpoint,
    load_weights,
    read_training_state,
)
from motet.runtime.checkpoint.folder import TrainingState, check_free_space, check_same_computation
from motet.runtime.communication.agreement import is_same_on_all_ranks, on_first_rank
from motet.runtime.communication.deadline import StepFailedError, interrupted_after
from motet.runtime.engine import Engine, IterationResult, StartedIteration
from motet.runtime.next_batch import NextBatch
from motet.runtime.span_recorder import SpanRecorder
from motet.runtime.training.metrics import OutputError, Progress, Sink, Values, append_line, keep_lines, open_sinks
from motet.runtime.training.optimizer import Optimizer
from motet.runtime.training.rates import Rates
from motet.timeline import Timeline

WARM_UP_STEPS = 3
"""Steps whose time is not counted: allocators, caches and connections settle."""


NON_FINITE = "non_finite.jsonl"
"""File in the output folder: a line for each step whose loss or gradient is not finite, with its samples' ids."""


SKIPPED_SAMPLES = "skipped_samples.jsonl"
"""File in the output folder: a line for each step with samples that could not be prepared, and why."""


class NonFiniteError(RuntimeError):
    """The loss or a gradient is no longer a finite number."""


@dataclass
class TrainingSummary:
    """Progress and results of a run. Times are each rank's own; everything else is equal on every rank."""

    steps: int = 0
    """Number of finished steps, including those before a resumed checkpoint."""
    losses: list[float] = field(default_factory=list)
    """Loss of every step of this run."""
    evaluations: dict[int, float] = field(default_factory=dict)
    """Held-out loss by finished steps."""
    skipped_steps: list[int] = field(default_factory=list)
    """Steps without an update; the first step is 1."""
    skipped_samples: list[str] = field(default_factory=list)
    """For each sample that this run skipped, the reason."""
    step_s: list[float] = field(default_factory=list)
    """Duration of every step of this run, including the wait for its data."""
    iteration_s: list[float] = field(default_factory=list)
    """Duration of every step of this run, without the wait for its data."""
    mfu: list[float] = field(default_factory=list)
    """Model FLOPs utilization in `iteration_s`, on the first rank, where the devices' peak is known."""
    timeline: Timeline = field(default_factory=lambda: Timeline(()))
    """Measured timeline of the last step."""
    checkpoint: Path | None = None
    """The last checkpoint."""
    best_loss: float = math.inf
    """The lowest held-out loss."""
    best_step: int | None = None
    """Finished steps at which this run measured it."""
    settled_steps: int = 0
    """Number of steps whose evaluation and saving are finished too."""
    save_again: bool = False
    """Whether a failure interrupted a checkpoint."""
    write_again: bool = False
    """Whether the metrics of the last finished step may not have been written, as the rank that writes them was lost.
    It is at most one step behind: a step ends with a sum over all ranks."""
    data: dict[str, Any] = field(default_factory=dict)
    """The loader's state after the last finished step."""
    last: IterationResult | None = None
    """Result of the last finished step."""

    def keep_record(self, before: "TrainingSummary") -> None:
        """Takes over the results of the finished steps of `before`, of the same run, that are not repeated."""
        num_kept = max(0, len(before.losses) - (before.steps - self.steps))
        self.losses = before.losses[:num_kept] + self.losses
        self.step_s = before.step_s[:num_kept] + self.step_s
        self.iteration_s = before.iteration_s[:num_kept] + self.iteration_s
        self.evaluations = {
            step: loss for step, loss in before.evaluations.items() if step <= self.steps
        } | self.evaluations
        self.skipped_steps = [step for step in before.skipped_steps if step <= self.steps] + self.skipped_steps


@dataclass(frozen=True)
class LaunchedStep:
    """A step that was given to the device."""

    number: int
    """The first step is 1."""
    batch: LoadedBatch
    started: StartedIteration
    data: dict[str, Any]
    """The loader's state after it."""
    data_s: float
    """Seconds for which the host waited for its data."""


class FetchedBatch(NamedTuple):
    batch: LoadedBatch
    state: dict[str, Any]
    """The loader's after it."""


@dataclass(frozen=True)
class FinishedStep:
    number: int
    values: Values
    """Its metrics."""


def settled_median(seconds: Sequence[float]) -> float:
    """The median without the first `WARM_UP_STEPS`, if there are more."""
    return statistics.median(seconds[WARM_UP_STEPS:] or seconds or [math.nan])


class Trainer:
    """Collective: every rank makes one with the same arguments. Rank 0 writes metrics and shows progress."""

    def __init__(
        self,
        engine: Engine,
        optimizer: Optimizer,
        loader: Loader,
        held_out: Sequence[Batch] | None,
        settings: TrainConfig,
        rates: Rates,
        computation: Mapping[str, Any] | None = None,
    ) -> None:
        """`computation`: what of the model a checkpoint has to share with it
        (`motet.runtime.checkpoint.folder`); None: only what shows in the parameters."""
        self.computation = dict(computation or {})
        self.engine, self.optimizer, self.loader, self.held_out = engine, optimizer, loader, held_out
        self.settings, self._rates = settings, rates
        loader.prepare = engine.prepare
        engine.keep_ahead(loader.batches_ahead + engine.plan.run_ahead)
        self.output = Path(settings.output)
        self.is_first = dist.get_rank() == 0
        self.is_paused = False
        """Whether some rank has asked for a pause, between two steps."""
        self.summary = TrainingSummary(data=loader.state())
        """Progress of this run so far."""
        self.after_step: Callable[[], None] = lambda: None
        """Called on every rank after every step."""
        self._checkpoints = CheckpointWriter(self.output / "checkpoints", keep=settings.keep_checkpoints)
        self._sinks: list[Sink] = []
        self._fetched: FetchedBatch | None = None
        """The next step's batch, where encoders run ahead: what they have run of it is never saved."""
        self._since_s = 0.0
        """When the time of the next step to be finished began, by `time.perf_counter`."""
        self._before: SpanRecorder | None = None
        """Spans of the step before it, if the device went from one to the other."""

    @property
    def finished_steps(self) -> int:
        return self.summary.steps

    @property
    def is_done(self) -> bool:
        return self.finished_steps >= self.settings.steps

    def resume(self, checkpoint: Path, state: TrainingState) -> None:
        """Continues from a checkpoint. Under the same plan, losses are bitwise those of an undisturbed run."""
        check_same_computation(checkpoint, state.model, self.computation)
        if state.data:  # A loop of the user's own has none (`ParallelModule.save_checkpoint`).
            self.loader.load_state(state.data)
            self._fetched = None
        load_checkpoint(checkpoint, self.engine.model, self.optimizer)
        self.summary.steps = self.summary.settled_steps = state.step
        self.summary.data = state.data
        self._checkpoints.last = checkpoint
        self.summary.best_loss = state.metrics.get("best_loss", math.inf)

    def start_from(self, checkpoint: Path) -> None:
        """Takes the weights of a checkpoint, and nothing else. Collective."""
        try:
            state = read_training_state(checkpoint)
            check_same_computation(checkpoint, state.model, self.computation)
            load_weights(checkpoint, self.engine.model)
        except UserError as error:
            message = str(error).replace("train.resume: ", "train.start_from: ", 1)
            raise UserError(message if message.startswith("train.") else f"train.start_from: {message}") from None

    def adopt_progress(self, summary: TrainingSummary, before: "Trainer | None") -> None:
        """Continues from the progress of another trainer. `before`: this process's previous trainer, if it had one."""
        self.summary = summary
        self.loader.load_state(summary.data)
        self._fetched = None
        self._checkpoints.last = summary.checkpoint
        if before is not None:
            self._checkpoints.follow(before._checkpoints)

    def save_now(self) -> Path | None:
        """Writes a checkpoint of the present state and waits for it. Collective."""
        self._make_output()
        self._save()
        return self._checkpoints.finish()

    @property
    def last_checkpoint(self) -> Path | None:
        """The last one that is complete."""
        return self._checkpoints.last

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint was begun and is not complete, or is to be begun again."""
        return self._checkpoints.is_unfinished or self.summary.save_again

    def train(self) -> TrainingSummary:
        """Runs the remaining steps, or those until a pause."""
        self._make_output()
        self.is_paused = False
        executor, timeout_s = self.engine.executor, self.settings.step_timeout_s
        progress = Progress(self.settings.steps, self.finished_steps, visible=self.is_first)
        try:
            is_settled = self.summary.settled_steps == self.finished_steps
            writes_again = not is_settled or (self.summary.write_again and self.summary.last is not None)
            self._sinks = self._open_sinks(self.finished_steps - writes_again)
            if writes_again:
                assert self.summary.last is not None
                self._write(self.finished_steps, self._metrics(self.finished_steps, self.summary.last))
            if not is_settled:  # A failure came between a step and what follows it.
                self._evaluate_and_save(progress)
            else:
                if writes_again and self.finished_steps in self.summary.evaluations:
                    self._write_evaluation()
                if self.summary.save_again:
                    self._save()
            self.summary.save_again = self.summary.write_again = False
            launched: deque[LaunchedStep] = deque()
            self._begin_timing()
            while not self.is_done and not self.is_paused:
                with (
                    executor.deadline.guarded(),
                    interrupted_after(timeout_s, lambda: executor.overrun(timeout_s)),
                ):
                    launched.append(self._launch(self.finished_steps + len(launched) + 1))
                    finished = []
                    while len(launched) > int(self._runs_ahead(launched)):
                        finished.append(self._finish(launched.popleft()))
                for step in finished:
                    progress.advance(step.number, step.values)
                    self._write(step.number, step.values)
                    self.after_step()
                if self.is_done:
                    self.summary.timeline = self.engine.timeline()
                if finished:
                    self._evaluate_and_save(progress)
                    if not launched:
                        self._begin_timing()
            self.summary.checkpoint = self._checkpoints.finish()
        except NonFiniteError:
            self._checkpoints.finish()
            raise
        except OutputError as error:
            with contextlib.suppress(UserError):
                self._checkpoints.finish()
            last = self.last_checkpoint
            saved = "no checkpoint was saved" if last is None or not last.exists() else f"the last checkpoint is {last}"
            raise UserError(
                f"train.output: {error} after step {self.finished_steps}; {saved}; free space or choose another "
                "folder, and continue with train.resume"
            ) from error
        finally:
            progress.close()
            self.loader.close()
            for sink in self._sinks:
                with contextlib.suppress(OSError):  # What a full disk did not take.
                    sink.close()
        return self.summary

    def _launch(self, number: int) -> LaunchedStep:
        """Gives a step to the device."""
        engine, began_s = self.engine, time.perf_counter()
        with engine.executor.doing("waiting for its data"):
            batch, data = self._fetched or self._fetch(number)
            self._fetched = self._fetch(number + 1) if engine.plan.run_ahead and number < self.settings.steps else None
        self._report_skipped(number, batch)
        data_s = time.perf_counter() - began_s
        engine.model.zero_gradients()
        following = None if self._fetched is None else NextBatch(self._fetched.batch, self._seed(number + 1))
        started = engine.start(batch, seed=self._seed(number), following=following)
        if self._updates_on_device:
            # Without waiting for the loss: where that is not finite, the device changes nothing.
            self._optimize(number, started.gradient_norm, started.is_finite)
        return LaunchedStep(number, batch, started, data, data_s)

    def _fetch(self, number: int) -> "FetchedBatch":
        """The batch of a step. Collective where samples may be skipped."""
        batch = next(self.loader)
        if self.loader.may_skip and not is_same_on_all_ranks(str(batch.indices()), self.engine.device):
            raise StepFailedError(
                f"step {number}: the ranks do not agree on which samples can be prepared; do all of "
                "them, or all data servers, see the same files?"
            )
        return FetchedBatch(batch, self.loader.state())

    def _seed(self, number: int) -> tuple[int, ...]:
        """The seed of a step's dropout and noise."""
        return self.settings.seed, number - 1

    def _runs_ahead(self, launched: Sequence[LaunchedStep]) -> bool:
        """Whether the host gives the device another step before it reads the results of the last one of `launched`."""
        settings = self.settings
        return (
            bool(launched)
            and self._updates_on_device
            and not self.is_paused
            and settings.failures is None
            and not self._is_due(settings.eval_every, launched[-1].number)
            and not self._is_due(settings.checkpoint_every, launched[-1].number)
            and launched[-1].number < settings.steps
        )

    def _finish(self, step: LaunchedStep) -> FinishedStep:
        """Reads the results of a step, which has updated the parameters unless numbers are not finite."""
        engine = self.engine
        with engine.executor.doing("reading the results of the step"):
            result = engine.finish(step.started)
        if not _is_finite(result):
            self._report_non_finite(step, result)
        self.is_paused |= result.pause
        self.update(result, step.data)
        if _is_finite(result):
            with engine.executor.doing("the exchange of new parameters"):
                self.optimizer.exchange()
        step_s, iteration_s = self._time(step)
        started = step.started
        rates = {}
        if self.is_first:
            rates = self._rates.of_step(started.routes, started.samples, step.batch.samples, step_s)
        if "mfu" in rates:
            self.summary.mfu.append(rates["mfu"] * step_s / iteration_s)
        self.summary.step_s.append(step_s)
        self.summary.iteration_s.append(iteration_s)
        values: Values = {
            **self._metrics(step.number, result),
            "step_s": step_s,
            "data_s": step.data_s,
            "peak_memory_bytes": result.peak_memory_bytes,
            **rates,
        }
        return FinishedStep(step.number, values)

    def _begin_timing(self) -> None:
        """What happened so far counts for no step."""
        self._since_s, self._before = time.perf_counter(), None

    def _time(self, step: LaunchedStep) -> tuple[float, float]:
        """Seconds of a step whose results were read, with and without the wait for its data.

        A host that runs ahead of the device reads results late, so there the device's times count."""
        ended_s = time.perf_counter()
        if not has_own_memory(self.engine.device):
            step_s, self._since_s = ended_s - self._since_s, ended_s
            return step_s, step_s - step.data_s
        recorder, before, self._before = step.started.recorder, self._before, step.started.recorder
        iteration_s = recorder.duration_s
        return step.data_s + iteration_s if before is None else recorder.seconds_after(before), iteration_s

    @property
    def _updates_on_device(self) -> bool:
        """Whether the device updates parameters before the host knows of the iteration's end."""
        return has_own_memory(self.engine.device) and self.engine.was_aborted is None

    def _optimize(self, number: int, gradient_norm: float | Tensor, is_finite: Tensor | None = None) -> None:
        """The optimizer's part of a step. `is_finite`: on the device; where it is false nothing changes."""
        executor = self.engine.executor
        with executor.doing("the optimizer's step"), executor.recorder.measured("optimizer", "optimizer"):
            if self.settings.clip_grad_norm:
                self.engine.model.clip_gradients(gradient_norm, self.settings.clip_grad_norm)
            self.optimizer.step(number - 1, is_finite)
            self.engine.router_corrections.update(is_finite)
            self.engine.model.after_update()

    def update(self, result: IterationResult, data: dict[str, Any]) -> None:
        """Finishes a step whose gradients are complete, without any other rank: parameters that others update are
        exchanged later. `data`: the loader's state after the step.

        Under torch's ZeRO-1 it is collective."""
        if not _is_finite(result):
            self.summary.skipped_steps.append(self.finished_steps + 1)
        elif not self._updates_on_device:
            self._optimize(self.finished_steps + 1, result.gradient_norm)
        self.summary.losses.append(result.loss)
        self.summary.last, self.summary.data = result, data
        self.summary.steps += 1

    def _report_skipped(self, number: int, batch: LoadedBatch) -> None:
        """Writes down which samples the batch lacks. Collective if it lacks any."""
        if batch.skipped:
            self.summary.skipped_samples += batch.skipped
            line = json.dumps({"step": number, "skipped": batch.skipped})
            self._append(SKIPPED_SAMPLES, line)

    def _report_non_finite(self, step: LaunchedStep, result: IterationResult) -> None:
        """Writes the batch's sample ids down; raises unless such steps are to be skipped. Collective."""
        what = {
            "step": step.number,
            "loss": repr(result.loss),
            "gradient_norm": repr(result.gradient_norm),
            "samples": [sample.id for sample in step.batch.samples],
        }
        self._append(NON_FINITE, json.dumps(what))
        if self.settings.on_nonfinite == "stop":
            raise NonFiniteError(
                f"step {step.number}: loss {result.loss}, gradient norm {result.gradient_norm}; the batch's "
                f"sample ids are in {self.output / NON_FINITE}; train.on_nonfinite: skip would leave such steps out"
            )

    def _append(self, name: str, line: str) -> None:
        """Appends a line to a file of the output folder. Collective."""
        try:
            on_first_rank(None, lambda: append_line(self.output / name, line))
        except OSError as error:
            raise OutputError(str(error)) from error

    def _evaluate_and_save(self, progress: Progress) -> None:
        if self.held_out is not None and self._is_due(self.settings.eval_every, self.finished_steps):
            loss = self.summary.evaluations[self.finished_steps] = self.evaluate()
            progress.note(f"step {self.finished_steps}: held-out loss {loss:.4f}")
            self._write_evaluation()
            if loss < self.summary.best_loss:
                self.summary.best_loss, self.summary.best_step = loss, self.finished_steps
        every = self.settings.checkpoint_every
        if every and (self._is_best or self._is_due(every, self.finished_steps)):
            self._save()
        self.summary.settled_steps = self.finished_steps

    def _write_evaluation(self) -> None:
        self._write(self.finished_steps, {"held_out_loss": self.summary.evaluations[self.finished_steps]})

    @property
    def _is_best(self) -> bool:
        return self.summary.best_step == self.finished_steps

    def _is_due(self, every: int, step: int) -> bool:
        """Whether what happens every so many steps, and after the last one, follows this step; 0: it never happens."""
        return every > 0 and (step % every == 0 or step >= self.settings.steps)

    def evaluate(self) -> float:
        """Mean loss per loss token over the held-out samples, forward only and without dropout; of several losses the
        weighted sum of their means."""
        assert self.held_out is not None
        stages = self.engine.model.modules()
        was_training = [stage.training for stage in stages]
        for stage in stages:
            stage.eval()
        sums: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        for batch in self.held_out:
            result = self.engine.run(batch, forward_only=True)
            sums.update(result.loss_sums)
            tokens.update(result.loss_tokens)
        for stage, mode in zip(stages, was_training, strict=True):
            stage.train(mode)
        return self.engine.weighted_loss(sums, tokens)

    def _save(self) -> None:
        metrics = {} if math.isinf(self.summary.best_loss) else {"best_loss": self.summary.best_loss}
        plan = self.engine.plan.to_json()
        state = TrainingState(self.finished_steps, self.summary.data, plan, metrics, self.computation)
        self._checkpoints.save(self.engine.model, self.optimizer, state, is_best=self._is_best)

    def _make_output(self) -> None:
        """The folder, with room for the checkpoints that this run will keep, one that is written, and the best."""
        num_bytes = 0
        if self.settings.checkpoint_every:
            keeps_best = self.held_out is not None and self.settings.eval_every > 0
            num_checkpoints = self.settings.keep_checkpoints + 1 + keeps_best
            num_bytes = num_checkpoints * checkpoint_bytes(self.engine.model, self.optimizer)
        on_first_rank(None, lambda: _make_folder(self.output, num_bytes))

    def _metrics(self, number: int, result: IterationResult) -> Values:
        """Of a finished step, without times."""
        return {
            "loss": result.loss,
            **_losses_by_module(result),
            "gradient_norm": result.gradient_norm,
            "learning_rate": self.settings.learning_rate * self.optimizer.factor(number - 1),
        }

    def _open_sinks(self, keep_until_step: int) -> list[Sink]:
        """`keep_until_step`: metrics of later steps are written anew."""
        if not self.is_first:
            return []
        for name in (NON_FINITE, SKIPPED_SAMPLES):
            keep_lines(self.output / name, until_step=self.finished_steps)
        return open_sinks(self.settings.metrics, self.output, keep_until_step=keep_until_step)

    def _write(self, step: int, values: Values) -> None:
        for sink in self._sinks:
            sink.write(step, values)


def _losses_by_module(result: IterationResult) -> dict[str, float]:
    """Each mean loss, unweighted, where the model has several."""
    if len(result.loss_sums) == 1:
        return {}
    tokens = result.loss_tokens
    return {f"loss_{name}": value / max(1, tokens[name]) for name, value in result.loss_sums.items()}


def _is_finite(result: IterationResult) -> bool:
    return math.isfinite(result.loss) and math.isfinite(result.gradient_norm)


def _make_folder(folder: Path, num_bytes: int) -> None:
    """Raises `UserError` if there is no room for so many bytes, beside what is there, or nothing can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = _size_of(folder / "checkpoints")
    except OSError as error:
        raise UserError(f"train.output: {folder} cannot be used ({error.strerror}); give another folder") from None
    check_free_space(folder, num_bytes - there)


def _size_of(folder: Path) -> int:
    """Bytes of all files; a checkpoint may be on its way out meanwhile."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(path, name)).st_size
    return total
