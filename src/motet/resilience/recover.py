"""A training process that outlives others: it works under one membership after another, and keeps the state it holds.

    membership -> process group -> ranks exchange what they hold -> the interrupted step is finished or undone
        -> plan -> engine -> missing parameters and states are copied -> training, until something changes

An update is applied by all ranks or by none: a rank may apply it only after the sum that ends the iteration, for which
every rank needs all its gradients. So if one rank has applied it, all others can, and do; if none has, the iteration is
repeated with the same samples. What was held before a recovery is kept until all ranks have what they need, so a
recovery may be interrupted at any moment and repeated. (Thesis, section 2.5; Oobleck itself copied no optimizer state.)
Under ZeRO-1 the same holds for what each rank owns (`motet.resilience.state_transfer`).

On an accelerator the communicators are NCCL's, which are aborted when a membership is over. What an aborted operation
leaves is anything, and no error tells of it: so ranks report, agree and end each iteration on the host, over gloo, and
whoever has aborted takes no part in that.
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
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from motet.config import RunConfig
from motet.data.service.opening import open_producers
from motet.devices import free_memory_bytes, has_own_memory, on_this_stream, synchronize
from motet.errors import UserError
from motet.plan import Plan
from motet.resilience.failure_log import Recovery, write_straggler
from motet.resilience.health.device import why_unfit
from motet.resilience.health.free_memory import NO_NEEDS, MemoryNeeds, why_too_little
from motet.resilience.interruptible_wait import release_in_background
from motet.resilience.meeting_place import open_meeting_place
from motet.resilience.membership import FIRST_GENERATION, Membership, MembershipNotice, RunRecord, store_timeout_s
from motet.resilience.memory_copies import KEPT_STEPS, Copies, exchange_copies, newest_whole
from motet.resilience.process_control import AgentLink
from motet.resilience.safe_gathers import make_gathers_safe
from motet.resilience.state_transfer import (
    Item,
    ItemDescription,
    LocalState,
    RankContents,
    agree_on_state_owners,
    describe,
    needed_contents,
    parameter_groups,
    plan_transfer,
    shard_optimizer,
    tensors_of,
    transfer_state,
)
from motet.resilience.stragglers import StragglerWatch
from motet.runtime.assembly import build_engine, pick_device
from motet.runtime.checkpoint.checkpoint import read_latest
from motet.runtime.checkpoint.folder import step_of
from motet.runtime.communication.agreement import gather_values
from motet.runtime.communication.deadline import StepOverrunError, abort_communicators
from motet.runtime.training.trainer import NonFiniteError, Trainer, TrainingSummary
from motet.runtime.training.worker import (
    check_has_steps_left,
    checkpoint_to_resume,
    make_trainer,
    resume_message,
    training_result,
)

PATIENCE_S = 5.0
"""Time from a broken connection to the membership that explains it, beside an agent's wait for the store's answer."""
LEAVING_S = 60.0
"""Time to leave an obsolete membership, beside that of a step: the process may be loading a checkpoint."""
CONNECT_S = 5.0
"""Time for the ranks' meeting place to accept a rank."""
RENDEZVOUS_S = 120.0
"""Time for other ranks to come to a new membership. If one dies instead, the next membership ends the wait."""


class TooFewNodesError(RuntimeError):
    """The remaining nodes cannot continue."""


class StoppedError(RuntimeError):
    """The remaining nodes could continue, but shall not, as they are too few to survive the next failure."""


@dataclass(frozen=True)
class _Report:
    """The state that a rank reports to all others when they meet. The defaults are those of a new process."""

    restored_in: int = 0
    """The generation in which everything was last loaded or initialised. Older state is of no use."""
    finished_steps: int = -1
    settled_steps: int = -1
    is_saving: bool = False
    is_writer: bool = False
    """Whether it has written the metrics of all steps before the present one."""
    gradients_are_complete: bool = False
    was_out: bool = False
    """Whether it was left out of a membership since then, in which others may have continued without it."""


class TrainingProcess:
    """One training process. `node_size`: processes per node; `needs`: of one process."""

    def __init__(self, config: RunConfig, link: AgentLink, node_size: int, needs: MemoryNeeds = NO_NEEDS) -> None:
        self._config, self._link = config, link
        self._node_size, self._needs = node_size, needs
        assert config.train.failures is not None
        self._failures, self._output = config.train.failures, Path(config.train.output)
        self._step_timeout_s = config.train.step_timeout_s
        self._trainers: list[Trainer] = []
        """All that hold useful state; the last one trains. Others are kept until it has all it needs."""
        self._copies: dict[int, Copies] = {}
        """By step."""
        self._restored_in = 0
        self._member_since = 0
        self._hosts: dist.ProcessGroup | None = None
        """The group in which hosts agree; None: all ranks' own, which is gloo."""
        self._device = pick_device(config, int(os.environ.get("LOCAL_RANK", "0")))
        self._producers = open_producers(config)

    def run(self) -> None:
        """Runs until the training is over. Rank 0 sends the JSON of `motet train` to its agent."""
        try:
            waits = self._link.waits.make_interruptible(dist.Work, partial(on_this_stream, self._device))
            with waits, make_gathers_safe():
                self._run()
        finally:
            self._producers.close()

    def _run(self) -> None:
        gc.freeze()  # Of what the parent had there is nothing to collect, and a recovery would wait for the search.
        if (reason := self._why_unfit()) is not None:
            self._link.send("hung", reason)
            time.sleep(RENDEZVOUS_S)  # The agent ends this node.
        self._link.send("ready")
        notice = self._link.wait_for_next(None)
        while notice is not None:
            membership = notice.membership
            patience_s, is_gloo = LEAVING_S + self._step_timeout_s, backend_for(self._device) == "gloo"
            abort = None if is_gloo else abort_communicators
            self._link.begin(membership.generation, self._num_ranks(membership), patience_s, abort)
            if notice.rank is None:
                notice = self._link.wait_for_next(None)
                continue
            try:
                self._train_under(notice, notice.heard_at if membership.is_urgent else time.monotonic())
                notice = self._link.wait_for_next(None)
            except (UserError, NonFiniteError, TooFewNodesError, StoppedError):
                raise
            except StepOverrunError as error:
                self._link.send("hung", str(error))
                time.sleep(RENDEZVOUS_S)  # The agent ends this node.
                raise
            except (Exception, CheckpointException) as error:
                self._link.send("interrupted", membership.generation)
                notice = self._link.wait_for_next(PATIENCE_S + 3 * store_timeout_s(self._failures.detect_s))
                if notice is None and not self._link.is_finished:
                    raise
                print(f"motet: generation {membership.generation} ended here: {error}", file=sys.stderr, flush=True)
            self._link.leave(leave_world)

    def _why_unfit(self) -> str | None:
        free = free_memory_bytes(self._device) if has_own_memory(self._device) else None
        return why_unfit(self._device) or why_too_little(self._needs, self._node_size, free)

    def _train_under(self, notice: MembershipNotice, started: float) -> None:
        """Recovers and trains under one membership, until something changes."""
        membership = notice.membership
        assert notice.rank is not None
        if membership.stop is not None and not membership.saves_checkpoint:
            raise TooFewNodesError(membership.stop)
        self._join_world(notice)
        trainer = self._recovered(notice, started)
        if membership.leaving:
            # What leaving nodes held has been copied: their processes end, and others continue without them.
            if notice.rank >= len(membership.nodes) * self._node_size:
                self._link.send("left", membership.generation)
            return
        if membership.stop is not None:
            went_back = self._restored_in == membership.generation
            lost = f", as of step {trainer.finished_steps}: what came later is lost" if went_back else ""
            raise StoppedError(f"{membership.stop}; saved as {trainer.save_now()}{lost}")
        trainer.engine.wants_pause = self._link.is_change_due
        if self._failures.slow_ratio is not None:
            self._watch_stragglers(trainer, membership, self._failures.slow_ratio)
        if self._failures.copy_every is not None:
            self._keep_copies(trainer, self._failures.copy_every)
        summary = trainer.train()
        if trainer.is_done:
            result = training_result(self._config, summary, self._producers, self._device)
            if notice.rank == 0:
                self._link.send("result", (membership.generation, json.dumps(result)))
            self._meet()
            self._link.send("done", membership.generation)

    def _watch_stragglers(self, trainer: Trainer, membership: Membership, slow_ratio: float) -> None:
        executor = trainer.engine.executor

        def gather(mine: float) -> list[float]:
            everyone = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=executor.device)
            everyone[dist.get_rank()] = mine
            executor.sum_over_ranks(everyone, "of what each rank's actions take")
            return [float(each) for each in everyone]

        watch = StragglerWatch(trainer.engine.plan, slow_ratio, gather)

        def after_step() -> None:
            for straggler in watch.after_step(executor.recorder.read()[1]):
                if dist.get_rank() == 0:
                    node = membership.all_nodes[straggler.rank // self._node_size]
                    print(f"motet: node {node}: {straggler}", file=sys.stderr, flush=True)
                    write_straggler(self._output, straggler, node=node, step=trainer.finished_steps)
            patience_s = self._failures.replace_stragglers_after_s
            if patience_s is not None and watch.slow_s(dist.get_rank()) >= patience_s:
                self._link.send("slow", membership.generation)

        trainer.after_step = after_step

    def _keep_copies(self, trainer: Trainer, every: int) -> None:
        before = trainer.after_step

        def after_step() -> None:
            before()
            if trainer.finished_steps % every == 0:
                state = LocalState.of(trainer.engine, trainer.optimizer)
                made = exchange_copies(state, trainer.summary, self._node_size, self._hosts)
                kept = sorted([*self._copies, trainer.finished_steps])[-KEPT_STEPS:]
                self._copies = {step: made if step == trainer.finished_steps else self._copies[step] for step in kept}

        trainer.after_step = after_step

    def _join_world(self, notice: MembershipNotice) -> None:
        assert notice.rank is not None
        backend = backend_for(self._device)
        dist.init_process_group(
            backend,
            store=self._meeting_place(notice),
            rank=notice.rank,
            world_size=self._num_ranks(notice.membership),
            # Long enough to notice here that a rank hangs under the previous membership, and was taken out.
            timeout=timedelta(seconds=RENDEZVOUS_S + self._step_timeout_s),
        )
        self._hosts = None if backend == "gloo" else dist.new_group(backend="gloo")

    def _meet(self) -> None:
        """Waits for all ranks. Raises `ConnectionError` where what was done since the last meeting may be anything."""
        synchronize(self._device)
        if self._link.is_obsolete:
            raise ConnectionError("the membership ended meanwhile")
        dist.barrier(self._hosts)

    def _meeting_place(self, notice: MembershipNotice) -> dist.TCPStore:
        """Opens the store through which the ranks of a membership find each other, or connects to it. It is with rank
        0: if that is lost, the membership is over."""
        if notice.rank == 0:
            store, port = open_meeting_place(notice.host)
            self._link.send("opened", (notice.membership.generation, port))
        else:
            address = self._link.wait_for_meeting(RENDEZVOUS_S)
            # If rank 0 ends at this moment, torch's client waits twice this time, and nothing interrupts that.
            store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=CONNECT_S))
        store.set_timeout(timedelta(seconds=RENDEZVOUS_S))
        return store

    def _num_ranks(self, membership: Membership) -> int:
        return len(membership.all_nodes) * self._node_size

    def _recovered(self, notice: MembershipNotice, started: float) -> Trainer:
        """Makes a trainer for the membership's plan, with all that it needs, at the same step on every rank;
        collective."""
        membership, run = notice.membership, notice.run
        was_out = self._member_since != notice.member_since
        reports = self._useful(gather_values(_Report, replace(self._report(), was_out=was_out), self._hosts))
        self._member_since = notice.member_since
        summary = self._agree(reports)
        plan = Plan.from_json(membership.plan)
        engine = build_engine(self._config, plan, self._device, num_spare_ranks=dist.get_world_size() - plan.num_ranks)
        if self._hosts is not None:
            engine.was_aborted = lambda: self._link.is_obsolete
        new = make_trainer(self._config, engine, self._producers)
        local = LocalState.of(engine, new.optimizer)
        # Only once all ranks are at the same step: descriptions contain the number of updates.
        held: Sequence[RankContents] = _exchange_contents(describe(self._states()), self._hosts)
        needed: Sequence[RankContents] = _exchange_contents(local.describe(), self._hosts)
        groups = gather_values(dict[str, tuple[int, ...]], dict(parameter_groups(local)), self._hosts)
        if self._config.parallel.zero1:
            could_hold, size = needed, self._node_size
            number = self._failures.tolerate + 1
            owners = agree_on_state_owners(plan, held, could_hold, groups, number=number, devices_per_node=size)
            shard_optimizer(local, engine.executor, could_hold, owners, devices_per_node=size)
            needed = needed_contents(could_hold, owners)
        transfer = plan_transfer(held, needed, devices_per_node=self._node_size)
        is_from_memory = False
        if summary is not None and transfer.missing:
            is_from_memory = self._restore_from_memory(new, local, needed, summary)
        if summary is None or transfer.missing:
            if not is_from_memory:
                self._begin(new, summary, membership.generation, run)
            self._trainers, self._restored_in = [], membership.generation
        else:
            transfer_state(transfer, tensors_of(self._states()), local)
            new.adopt_progress(summary, self._trainers[0] if self._trainers else None)
        self._trainers.append(new)
        self._meet()
        if dist.get_rank() < plan.num_ranks:
            self._trainers = [new]
        # Else it is about to leave, and keeps what it held: ranks that have it now may be lost before it has left.
        gc.collect()
        if dist.get_rank() == 0:
            what = Recovery(
                membership=membership,
                num_ranks=plan.num_ranks,
                steps_before=None if summary is None else summary.steps,
                steps=new.finished_steps,
                moved_bytes=transfer.moved_bytes,
                missing=transfer.missing_descriptions,
                restarts=run.restarts,
                is_from_memory=is_from_memory,
                seconds=time.monotonic() - started,
            )
            self._link.send("recovered", what)
        return new

    def _restore_from_memory(
        self, new: Trainer, local: LocalState, needed: Sequence[RankContents], summary: TrainingSummary
    ) -> bool:
        """Goes back to the newest step whose copies in memory are whole, if no checkpoint is newer; collective."""
        if self._failures.copy_every is None:
            return False
        found = newest_whole(self._copies, needed, self._node_size, self._hosts)
        if found is None or found[0] < (step_of(summary.checkpoint) if summary.checkpoint is not None else 0):
            return False
        step, transfer, progress = found
        tensors = self._copies[step].tensors if step in self._copies else {}
        held = {item: [tensor.to(self._device) for tensor in of_item] for item, of_item in tensors.items()}
        transfer_state(transfer, held, local)
        before = self._trainers[0] if self._trainers else None
        new.adopt_progress(replace(progress, checkpoint=summary.checkpoint), before)
        self._copies = {kept: copies for kept, copies in self._copies.items() if kept <= step}
        return True

    def _states(self) -> list[LocalState]:
        return [LocalState.of(trainer.engine, trainer.optimizer) for trainer in self._trainers]

    def _report(self) -> _Report:
        if not self._trainers:
            return _Report()
        oldest = self._trainers[0]
        return _Report(
            self._restored_in,
            oldest.finished_steps,
            oldest.summary.settled_steps,
            oldest.is_saving,
            oldest.is_first and not oldest.summary.write_again,
            oldest.engine.gradients_are_complete,
        )

    def _useful(self, reports: Sequence[_Report]) -> list[_Report]:
        """Treats ranks whose state is of another step as new processes: those that have not yet returned to the newest
        checkpoint, as a failure may have come when only some ranks had returned to it, and spares without which others
        have gone on."""
        restored_in = max(report.restored_in for report in reports)
        steps = [(not r.was_out, r.finished_steps) for r in reports if r.restored_in == restored_in]
        newest = max(((is_in, step) for is_in, step in steps if step >= 0), default=(True, -1))[1]
        useful = [r.restored_in == restored_in and (not r.was_out or r.finished_steps in (-1, newest)) for r in reports]
        if not useful[dist.get_rank()]:
            self._trainers, self._restored_in = [], restored_in
        return [report if is_so else _Report() for report, is_so in zip(reports, useful, strict=True)]

    def _agree(self, reports: Sequence[_Report]) -> TrainingSummary | None:
        """Brings all ranks that had trained to the same step; collective. Returns its summary; None if none had
        trained."""
        newest = max(report.finished_steps for report in reports)
        if newest < 0:
            return None
        behind = [report for report in reports if 0 <= report.finished_steps < newest]
        assert all(r.finished_steps == newest - 1 and r.gradients_are_complete for r in behind), reports
        source = next(rank for rank, report in enumerate(reports) if report.finished_steps == newest)
        told: TrainingSummary | None = None
        if dist.get_rank() == source:
            told = replace(self._trainers[0].summary, checkpoint=self._trainers[0].last_checkpoint)
        summary = gather_values(TrainingSummary | None, told, self._hosts)[source]
        assert summary is not None
        if self._trainers and self._trainers[0].finished_steps < newest:
            assert summary.last is not None
            self._trainers[0].update(summary.last, summary.data)
        having = [report for report in reports if report.finished_steps >= 0]
        return replace(
            summary,
            settled_steps=min(report.settled_steps for report in having),
            save_again=any(report.is_saving for report in having),
            write_again=not any(report.is_writer for report in having),
        )

    def _begin(self, trainer: Trainer, before: TrainingSummary | None, generation: int, run: RunRecord) -> None:
        """Starts from this run's last checkpoint, else from where the run file says, or from the beginning; collective.
        `before`: the progress of this run, if any. Checkpoints in the output folder are this run's
        (`motet.runtime.training.output_folder`)."""
        is_first_start = generation == FIRST_GENERATION and run.restarts == 0
        found = None if is_first_start else read_latest(trainer.output / "checkpoints")
        if found is None:
            found = checkpoint_to_resume(run.resume, trainer.output)
        is_expected = run.resume is not None or run.restarts > 0 or before is not None
        if (is_expected or found is not None) and dist.get_rank() == 0:
            print(resume_message(found, trainer), file=sys.stderr, flush=True)
        if found is not None:
            if is_first_start:  # Else what was lost after the last checkpoint is only the end of the run.
                check_has_steps_left(self._config.train.steps, *found)
            trainer.resume(*found)
            if before is not None:
                trainer.summary.keep_record(before)


def _exchange_contents(mine: RankContents, hosts: dist.ProcessGroup | None) -> list[RankContents]:
    return [dict(items) for items in gather_values(list[tuple[Item, ItemDescription]], list(mine.items()), hosts)]


def backend_for(device: torch.device) -> str:
    """The backend of torch.distributed that exchanges this device's tensors."""
    return "gloo" if device.type == "cpu" else dist.get_default_backend_for_device(device)


def leave_world() -> None:
    """Destroys the process groups, whatever state they are in, so that the next ones can be made."""
    if dist.is_initialized():
        release_in_background(list(dist.distributed_c10d._world.pg_map))
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
    # Groups are named by a counter, which a group whose creation failed has raised: without this, the ranks on which it
    # failed would use other names than the rest.
    dist.distributed_c10d._world.group_count = 0
