"""A training process that outlives others: works under one membership after another, and keeps what it holds.

    membership -> process group -> everyone tells what it holds -> the interrupted step is finished or taken back
        -> plan -> engine -> missing layers and optimizer states are copied -> training, until something changes

An update is applied by all or by none: a rank may apply it only after the sum that ends the iteration, for which every
rank needs all its gradients. So if one rank has applied it, all others can, and do; if none has, the iteration is done
again with the same samples. What was held before a recovery is kept until all ranks have what they need, so a recovery
may be interrupted at any moment and done again. (Thesis, section 2.5; Oobleck itself copied no optimizer state.)

Under ZeRO-1 the same holds of what each rank keeps: `motet.resilience.optimizer_state`.

Limits: gloo.
"""

import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from motet.config import RunConfig
from motet.data.service.opening import open_producers
from motet.errors import UserError
from motet.plan import Plan
from motet.resilience.control import Control
from motet.resilience.failure_log import Recovery, write_recovery, write_straggler
from motet.resilience.handover import Described, Holding, describe, hand_over, plan_handover, tensors_of
from motet.resilience.interruptible_wait import release_in_background
from motet.resilience.membership import Address, Call, Membership, call_s, unlogged_changes
from motet.resilience.optimizer_state import (
    Groups,
    agree_on_state_owners,
    groups_of,
    keep_alone,
    without_others_moments,
)
from motet.resilience.store.run_record import RunRecord, earlier_checkpoints
from motet.resilience.store.store import is_listening
from motet.resilience.stragglers import StragglerWatch
from motet.runtime.agreement import on_first_rank
from motet.runtime.assembly import build_engine, pick_device
from motet.runtime.checkpoint.checkpoint import read_latest
from motet.runtime.deadline import StepOverrunError
from motet.runtime.engine import Engine
from motet.runtime.executor import Executor
from motet.runtime.training.trainer import NonFiniteError, Trainer, TrainingSummary
from motet.runtime.training.worker import checkpoint_to_resume, make_trainer, resume_message, training_result

T = TypeVar("T")

PATIENCE_S = 5.0
"""After a connection broke, for the membership that explains it, beside the time for which an agent may wait for the
store's answer."""
LEAVING_S = 60.0
"""Beside the time of a step, for a process to leave a membership that is over: it may be loading a checkpoint."""
CONNECT_S = 5.0
"""For the store to accept a client."""
RETRY_S = 0.05
"""Between two looks for the store."""
RENDEZVOUS_S = 120.0
"""For other ranks to come to a new membership. Whoever dies instead ends the wait by the next one."""


class TooFewNodesError(RuntimeError):
    """The nodes that are left cannot go on."""


class StoppedError(RuntimeError):
    """They could, but are not to, as too few are left to survive the next failure."""


@dataclass(frozen=True)
class _Report:
    """What a rank tells all others when they meet. The defaults: of a new process."""

    restored_in: int = 0
    """The generation in which everything was last loaded or started anew. What was held before is of no use."""
    finished_steps: int = -1
    settled_steps: int = -1
    is_saving: bool = False
    gradients_are_complete: bool = False


class TrainingProcess:
    """`node_size`: processes of a node."""

    def __init__(self, config: RunConfig, control: Control, node_size: int) -> None:
        self._config, self._control = config, control
        self._node_size = node_size
        assert config.train.failures is not None
        self._detect_s = config.train.failures.detect_s
        self._slow_ratio = config.train.failures.slow_ratio
        self._step_timeout_s = config.train.step_timeout_s
        self._trainers: list[Trainer] = []
        """All that hold something of value; the last one works. Others until it has all it needs."""
        self._restored_in = 0
        """As in `_Report`."""
        self._device = pick_device(config, int(os.environ.get("LOCAL_RANK", "0")))
        self._producers = open_producers(config)

    def run(self) -> None:
        """Until the training is over. Rank 0 tells what `motet train --json` prints."""
        try:
            with self._control.waits.can_be_called_off(dist.Work):
                self._run()
        finally:
            self._producers.close()

    def _run(self) -> None:
        self._control.tell("ready")
        call = self._control.newer(None)
        while call is not None:
            membership = call.membership
            self._control.begin(membership.generation, self._num_ranks(membership), LEAVING_S + self._step_timeout_s)
            try:
                self._work(call, call.heard_at if membership.is_urgent else time.monotonic())
                call = self._control.newer(None)
            except (UserError, NonFiniteError, TooFewNodesError, StoppedError):
                raise
            except StepOverrunError as error:
                self._control.tell("hung", str(error))
                time.sleep(RENDEZVOUS_S)  # The agent ends this node.
                raise
            except (Exception, CheckpointException) as error:
                call = self._control.newer(PATIENCE_S + 3 * call_s(self._detect_s))
                if call is None and not self._control.is_finished:
                    raise
                print(f"motet: generation {membership.generation} ended here: {error}", file=sys.stderr, flush=True)
            leave_world()

    def _work(self, call: Call, started: float) -> None:
        """What there is to do under one membership."""
        membership = call.membership
        if membership.stop is not None and not membership.saves:
            raise TooFewNodesError(membership.stop)
        self._join_world(call)
        trainer = self._recovered(membership, started)
        if membership.leaving:
            # What leaving nodes held has been handed over: their processes end, and others go on without them.
            if call.rank >= len(membership.nodes) * self._node_size:
                self._control.tell("left", membership.generation)
            return
        if membership.stop is not None:
            went_back = self._restored_in == membership.generation
            lost = f", as of step {trainer.finished_steps}: what came later is lost" if went_back else ""
            raise StoppedError(f"{membership.stop}; saved as {trainer.save_now()}{lost}")
        trainer.engine.wants_pause = self._control.is_change_due
        self._watch(trainer, membership)
        summary = trainer.train()
        if trainer.is_done:
            result = training_result(self._config, summary, self._producers, self._device)
            if call.rank == 0:
                self._control.tell("result", (membership.generation, json.dumps(result)))
            dist.barrier()
            self._control.tell("done", membership.generation)

    def _watch(self, trainer: Trainer, membership: Membership) -> None:
        """Stragglers will be told of."""
        if self._slow_ratio is None:
            return
        executor, output = trainer.engine.executor, Path(self._config.train.output)
        watch = StragglerWatch(trainer.engine.plan, self._slow_ratio, lambda mine: _gathered(executor, mine))

        def after_step() -> None:
            for straggler in watch.after_step(executor.spans):
                if dist.get_rank() == 0:
                    node = membership.everyone[straggler.rank // self._node_size]
                    print(f"motet: node {node}: {straggler}", file=sys.stderr, flush=True)
                    write_straggler(output, straggler, node=node, step=trainer.finished_steps)

        trainer.after_step = after_step

    def _join_world(self, call: Call) -> None:
        store = self._store = self._connected_store(call.store)
        self._run_record = RunRecord.read(store)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(call.membership.meeting, store),
            rank=call.rank,
            world_size=self._num_ranks(call.membership),
            # Who hangs in the world before is taken out in time for the others to hear of it here.
            timeout=timedelta(seconds=RENDEZVOUS_S + self._step_timeout_s),
        )

    def _connected_store(self, address: Address) -> dist.TCPStore:
        """Waits for it, unless what it is for is over: the next store may be elsewhere."""
        deadline = time.monotonic() + RENDEZVOUS_S
        while time.monotonic() < deadline and not self._control.is_over:
            if is_listening(address):
                # If it ends at this moment, torch's client waits twice as long for another one, and nothing ends that.
                with contextlib.suppress(dist.DistError):
                    store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=CONNECT_S))
                    store.set_timeout(timedelta(seconds=RENDEZVOUS_S))
                    return store
            time.sleep(RETRY_S)
        raise ConnectionError("there is no store any more")

    def _num_ranks(self, membership: Membership) -> int:
        return len(membership.everyone) * self._node_size

    def _recovered(self, membership: Membership, started: float) -> Trainer:
        """Collective: a trainer for the membership's plan, with all that it needs; on every rank at the same step."""
        reports = self._of_newest_restore(_exchange(self._report()))
        summary = self._agree(reports)
        plan = Plan.from_json(membership.plan)
        engine = build_engine(self._config, plan, self._device, num_spare_ranks=dist.get_world_size() - plan.num_ranks)
        new = make_trainer(self._config, engine, self._producers)
        holding = Holding(engine.model, new.optimizer)
        changes = unlogged_changes(self._store, membership.generation) if dist.get_rank() == 0 else ()
        # Not before all are at the same step: what is held tells how many updates it has had.
        described = _exchange((describe(self._holdings()), holding.describe(), groups_of(holding)))
        # All have made all groups: only the next membership needs the store.
        self._control.tell("met", membership.generation)
        held = [of_rank[0] for of_rank in described]
        needed: Sequence[Described] = [of_rank[1] for of_rank in described]
        groups = [of_rank[2] for of_rank in described]
        if self._config.parallel.zero1:
            needed = self._share_states(plan, engine, holding, held, needed, groups)
        handover = plan_handover(held, needed, devices_per_node=self._node_size)
        if summary is None or handover.missing:
            self._begin(new, summary)
            self._trainers, self._restored_in = [], membership.generation
        else:
            hand_over(handover, tensors_of(self._holdings()), holding)
            new.adopt_progress(summary, self._trainers[0] if self._trainers else None)
        self._trainers.append(new)
        dist.barrier()
        if dist.get_rank() < plan.num_ranks:
            self._trainers = [new]
        # Else it is about to leave, and keeps what it held: those who have it now may be lost before it has left.
        gc.collect()
        if dist.get_rank() == 0:
            what = Recovery(
                membership=membership,
                changes=changes,
                num_ranks=plan.num_ranks,
                steps_before=None if summary is None else summary.steps,
                steps=new.finished_steps,
                moved_bytes=handover.moved_bytes,
                missing=handover.told_missing,
                restarts=self._run_record.restarts,
                seconds=time.monotonic() - started,
            )
            write_recovery(Path(self._config.train.output), what)
            self._control.tell("logged", membership.generation)
        return new

    def _share_states(
        self,
        plan: Plan,
        engine: Engine,
        new: Holding,
        held: Sequence[Described],
        could_hold: Sequence[Described],
        groups: Sequence[Groups],
    ) -> Sequence[Described]:
        """Every rank keeps some of the moments alone. What each needs then of what it could hold."""
        assert self._config.train.failures is not None
        number = self._config.train.failures.tolerate + 1
        size = self._node_size
        keepers = agree_on_state_owners(plan, held, could_hold, groups, number=number, devices_per_node=size)
        keep_alone(new, engine.executor, could_hold, keepers, devices_per_node=size)
        return without_others_moments(could_hold, keepers)

    def _holdings(self) -> list[Holding]:
        return [Holding(trainer.engine.model, trainer.optimizer) for trainer in self._trainers]

    def _report(self) -> _Report:
        if not self._trainers:
            return _Report()
        oldest = self._trainers[0]
        return _Report(
            self._restored_in,
            oldest.finished_steps,
            oldest.summary.settled_steps,
            oldest.is_saving,
            oldest.engine.gradients_are_complete,
        )

    def _of_newest_restore(self, reports: Sequence[_Report]) -> list[_Report]:
        """A failure may have come when some ranks had gone back to a checkpoint and others had not yet: what these hold
        is of another step, so they count as new."""
        newest = max(report.restored_in for report in reports)
        if self._restored_in < newest:
            self._trainers, self._restored_in = [], newest
        return [report if report.restored_in == newest else _Report() for report in reports]

    def _agree(self, reports: Sequence[_Report]) -> TrainingSummary | None:
        """Collective: brings all that had trained to the same step; its summary, None if none had."""
        newest = max(report.finished_steps for report in reports)
        if newest < 0:
            return None
        behind = [report for report in reports if 0 <= report.finished_steps < newest]
        assert all(r.finished_steps == newest - 1 and r.gradients_are_complete for r in behind), reports
        source = next(rank for rank, report in enumerate(reports) if report.finished_steps == newest)
        told: list[TrainingSummary | None] = [None]
        if dist.get_rank() == source:
            told = [replace(self._trainers[0].summary, checkpoint=self._trainers[0].last_checkpoint)]
        dist.broadcast_object_list(told, src=source)
        summary = told[0]
        assert summary is not None
        if self._trainers and self._trainers[0].finished_steps < newest:
            assert summary.last is not None
            self._trainers[0].update(summary.last, summary.data)
        settled = min(report.settled_steps for report in reports if report.finished_steps >= 0)
        return replace(summary, settled_steps=settled, save_again=any(report.is_saving for report in reports))

    def _begin(self, trainer: Trainer, before: TrainingSummary | None) -> None:
        """Collective: from this run's last checkpoint, else from where the run file says, or from the start. `before`:
        what this run had come to, if anything."""
        run = self._run_record
        earlier = on_first_rank(lambda: earlier_checkpoints(trainer.output, run.name))
        found = None if earlier is None else read_latest(trainer.output / "checkpoints", besides=earlier)
        if found is None:
            found = checkpoint_to_resume(run.resume, trainer.output)
        is_expected = run.resume is not None or run.restarts > 0 or before is not None
        if (is_expected or found is not None) and dist.get_rank() == 0:
            print(resume_message(found, trainer), file=sys.stderr, flush=True)
        if found is not None:
            trainer.resume(*found)


def _gathered(executor: Executor, mine: float) -> list[float]:
    """Collective: a number of every rank."""
    everyone = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=executor.device)
    everyone[dist.get_rank()] = mine
    executor.sum_over_ranks(everyone, "of what each rank's actions take")
    return [float(each) for each in everyone]


def _exchange(mine: T) -> list[T]:
    everyone: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return [cast(T, one) for one in everyone]


def leave_world() -> None:
    """Whatever state it is in, so that the next one can be made."""
    if dist.is_initialized():
        release_in_background(list(dist.distributed_c10d._world.pg_map))
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
    # Groups are named by their number, and one whose making failed has been counted: without this the ranks that it
    # failed on would wait for each other under other names than the rest.
    dist.distributed_c10d._world.group_count = 0
