"""The worker of `motet train`: runs on every rank, inside the process group that the launcher made."""

import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from motet.config import RunConfig
from motet.data.loader import Loader, held_out_batches
from motet.data.run_file import data_to_prepare
from motet.data.service.opening import Producers, open_producers
from motet.devices import barrier, peak_memory_bytes
from motet.errors import UserError
from motet.plan import Plan
from motet.planner.from_run_file import shortest_seconds
from motet.runtime.assembly import build_engine, build_optimizer, pick_device
from motet.runtime.checkpoint.checkpoint import read_latest, read_training_state
from motet.runtime.checkpoint.folder import TrainingState, changes_of_training, computation_of
from motet.runtime.communication.agreement import gather_values
from motet.runtime.communication.deadline import StepFailedError, StepOverrunError, StepTimeoutError
from motet.runtime.communication.preflight import check_memory
from motet.runtime.engine import Engine
from motet.runtime.training.rates import Rates
from motet.runtime.training.trainer import Trainer, TrainingSummary, settled_median

REPORT_S = 2.0
"""Seconds that a rank lives on after a wait timed out, so that the rank that was late fails first, and all others can
report what they were doing."""


def train_worker(config: RunConfig, plan: Plan, forecast_bytes: Sequence[int] = ()) -> dict[str, Any]:
    """Trains and returns what `motet train --json` prints, on every rank.

    `forecast_bytes`: by rank, the peak memory that the planner expects."""
    if not any(module.trainable for module in plan.modules.values()):
        raise UserError("model: everything is frozen, so there is nothing to train; set a part's train.module: true")
    device = pick_device(config, int(os.environ.get("LOCAL_RANK", "0")))
    check_memory(forecast_bytes, device, config.cluster.memory_bytes)
    producers = open_producers(config)
    try:
        trainer = make_trainer(config, build_engine(config, plan, device), producers)
        found = checkpoint_to_resume(config.train.resume, trainer.output)
        if found is not None:
            check_has_steps_left(config.train.steps, *found)
            trainer.resume(*found)
        elif config.train.start_from is not None:
            trainer.start_from(Path(config.train.start_from))
        if config.train.resume is not None and dist.get_rank() == 0:
            print(resume_message(found, trainer), file=sys.stderr, flush=True)
        barrier()  # Links are tried with little patience for a rank that is late.
        trainer.engine.open_communicators()
        return training_result(config, trainer.train(), producers, device)
    except StepFailedError as error:
        if not isinstance(error, StepTimeoutError):
            time.sleep(REPORT_S)  # A rank that died has a better cause to tell, and the launcher ends this one.
        print(f"motet: {error}", file=sys.stderr, flush=True)
        if not isinstance(error, StepOverrunError):
            time.sleep(REPORT_S)
        raise
    finally:
        producers.close()


def make_trainer(config: RunConfig, engine: Engine, producers: Producers) -> Trainer:
    """Collective. At the start of the data, with the weights that the engine has."""
    train = config.train
    loader = Loader(
        producers.train,
        train.global_batch_size,
        seed=config.order_seed,
        wanted=engine.wanted,
        batches_ahead=data_to_prepare(config).batches_ahead,
    )
    held_out = None
    if producers.held_out is not None and train.eval_every:
        contrasts = engine.plan.loss_module is not None
        held_out = held_out_batches(
            producers.held_out, train.global_batch_size, train.eval_samples, engine.wanted, whole=contrasts
        )
        num_samples = min(train.eval_samples, len(producers.held_out))
        if contrasts and num_samples < train.global_batch_size and dist.get_rank() == 0:
            print(
                f"train.eval_samples: the held-out loss is that of {num_samples} samples, which are cut into smaller "
                f"contrastive batches than the {train.global_batch_size} of a step: the two losses cannot be compared",
                file=sys.stderr,
                flush=True,
            )
    optimizer = build_optimizer(config, engine.model)
    rates = Rates(engine.plan, shortest_seconds(config, engine.plan))
    return Trainer(engine, optimizer, loader, held_out, train, rates, computation_of(config))


def _data_report(summary: TrainingSummary, producers: Producers) -> dict[str, Any]:
    """The key `data` of `motet train --json`. Collective."""
    received = gather_values(dict[str, int], dict(producers.train.received_bytes))
    failures = gather_values(int, producers.num_failures())
    return {
        "wait_fraction": 1 - sum(summary.iteration_s) / max(sum(summary.step_s), 1e-9),
        "received_bytes": received,
        "failures": failures,
        "skipped_samples": summary.skipped_samples,
    }


def checkpoint_to_resume(resume: str | None, output: Path) -> tuple[Path, TrainingState] | None:
    """`resume`: as in the run file; `latest` is the newest of the output folder that is whole, if it has one.
    Collective."""
    if resume is None:
        return None
    if resume == "latest":
        return read_latest(output / "checkpoints")
    folder = Path(resume).resolve()
    if not folder.is_dir():
        raise UserError(f"train.resume: {resume} is not a folder; give a checkpoint's, such as .../step_00000100")
    return folder, read_training_state(folder)


def check_has_steps_left(steps: int, checkpoint: Path, state: TrainingState) -> None:
    """Raises `UserError` if a run that the user resumes has been finished."""
    if state.step >= steps:
        raise UserError(f"train.steps: is {steps}, but {checkpoint} has finished {state.step} steps; give more")


def resume_message(resumed: tuple[Path, TrainingState] | None, trainer: Trainer) -> str:
    """A line for users. Data that changed since the checkpoint are mentioned, and not refused."""
    if resumed is None:
        return "no checkpoint yet: beginning with step 1"
    checkpoint, state = resumed
    text = f"going on from {checkpoint}"
    if state.plan != trainer.engine.plan.to_json():
        text += ", which was written under another plan"
    for change in changes_of_training(state.model, trainer.computation):
        text += f"; {change}"
    if not state.data:
        text += "; it does not say which data were seen, so they begin anew"
    if trainer.loader.has_changed_since(state.data):
        text += "; the data or what prepares them have changed since, so samples may come again or not at all"
    return text


def _finite(value: float) -> float | None:
    """JSON has no other numbers. Times are none where no step was left after a restart."""
    return value if math.isfinite(value) else None


def training_result(
    config: RunConfig, summary: TrainingSummary, producers: Producers, device: torch.device
) -> dict[str, Any]:
    """The result of a training, as `motet train --json` prints it. Collective."""
    peaks = gather_values(int, peak_memory_bytes(device))
    iteration_s = settled_median(summary.iteration_s)
    return {
        "steps": summary.steps,
        "losses": [_finite(loss) for loss in summary.losses],
        "evaluations": {step: _finite(loss) for step, loss in summary.evaluations.items()},
        "skipped_steps": summary.skipped_steps,
        "steps_per_s": _finite(1 / settled_median(summary.step_s)),
        "world_size": dist.get_world_size(),
        "measured": {
            "iteration_time_s": _finite(iteration_s),
            "throughput_samples_per_s": _finite(config.train.global_batch_size / iteration_s),
            "bubble_fraction": summary.timeline.bubble_fraction,
            "peak_memory_bytes": peaks,
            "num_devices": dist.get_world_size(),
            "mfu": settled_median(summary.mfu) if summary.mfu else None,
            "timeline": summary.timeline.to_json(),
        },
        "checkpoint": str(summary.checkpoint) if summary.checkpoint else None,
        "data": _data_report(summary, producers),
    }
