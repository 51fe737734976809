"""Steps that do not end say who waits for what; programs are kept; dropout depends on the seed alone."""

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from nccl_rules import run_under_nccl_rules
from one_process import Run
from torch import Tensor
from toy_model import WIDTH, ToyBatch, ToyStage, reference
from waiting import wait_until

from motet.assignment.sample import Sample, Segment
from motet.models.stages.stage import StageInput, StageOutput
from motet.parallel.tensor.tensor_parallel import TensorParallel
from motet.plan import Edge, ModulePlan, Plan, Replica, Stage
from motet.runtime import engine as engine_module
from motet.runtime import executor as executor_module
from motet.runtime.communication import deadline as deadline_module
from motet.runtime.communication.deadline import (
    Deadline,
    StepFailedError,
    StepOverrunError,
    Watchdog,
    interrupted_after,
)
from motet.runtime.communication.messages import Mailbox
from motet.runtime.engine import Engine
from motet.runtime.executor import Executor
from motet.runtime.local_model import StageMaker
from motet.schedule.lower import Message

TIMEOUT_S = 3.0
"""Of a step that does not end; one that does takes milliseconds."""


def llm(*stages: tuple[int, ...], replicas: int = 1) -> ModulePlan:
    """Two layers per stage; `stages`: the ranks of the first replica's."""
    size = len({rank for ranks in stages for rank in ranks})

    def replica(r: int) -> Replica:
        return Replica(
            stages=tuple(
                Stage(
                    layers=(2 * s, 2 * s + 2),
                    ranks=tuple(rank + r * size for rank in ranks),
                    tp_size=len(ranks),
                )
                for s, ranks in enumerate(stages)
            )
        )

    num_layers = 2 * len(stages)
    return ModulePlan(
        kind="language_model",
        num_layers=num_layers,
        replicas=tuple(replica(r) for r in range(replicas)),
        trainable=((0, num_layers),),
        loss_weight=1.0,
    )


def plan_of(module: ModulePlan, schedule: str = "1f1b") -> Plan:
    return Plan(modules={"llm": module}, edges=(), num_microbatches=2, schedule=schedule)


BATCH = ToyBatch([Sample(str(i), {"llm": (Segment(3),)}, {"llm": 3}) for i in range(4)])


class Disturbed(ToyStage):
    """`disturb(stage, x)` is called with the first layer's input, and returns what goes on."""

    disturb: Callable[["Disturbed", Tensor], Tensor]
    tp: TensorParallel

    def forward(self, inputs: StageInput) -> StageOutput:
        if inputs.hidden is None:
            features = [{"x": self.disturb(self, feature["x"])} for feature in inputs.features]
            inputs = inputs._replace(features=features)
        else:
            inputs = inputs._replace(hidden=self.disturb(self, inputs.hidden))
        return super().forward(inputs)


def disturbed_maker(plan: Plan, disturb: Callable[[Disturbed, Tensor], Tensor]) -> StageMaker:
    def make(name: str, module: ModulePlan, stage: Stage, tp: TensorParallel) -> Disturbed:
        made = Disturbed(plan, name, module, stage)
        made.disturb, made.tp = disturb, tp  # type: ignore[method-assign]
        return made

    return make


def failures(
    folder: Path,
    plan: Plan,
    disturb: Callable[[Disturbed, Tensor], Tensor],
    batch: ToyBatch = BATCH,
    *,
    who: Sequence[int],
    timeout_s: float = TIMEOUT_S,
    run: Run = run_distributed,
) -> list[str]:
    """What these ranks say. Groups are broken afterwards, so it goes by files."""

    def work(rank: int) -> None:
        engine = Engine(
            plan,
            disturbed_maker(plan, disturb),
            device=torch.device("cpu"),
            boundary_dtype=torch.float64,
            timeout=timedelta(seconds=timeout_s),
        )
        dist.barrier()
        try:
            engine.run(batch)
        except StepFailedError as error:
            (folder / str(rank)).write_text(str(error))
            wait_until_said(folder, who)  # Whoever leaves disturbs the others.
            raise

    with suppress(AssertionError):
        run(work, plan.num_ranks, last_words_s=30.0)
    return [(folder / str(rank)).read_text() for rank in who]


def wait_until_said(folder: Path, who: Sequence[int]) -> None:
    wait_until(lambda: all((folder / str(rank)).exists() for rank in who))


def does_not_come(folder: Path, rank: int, who: Sequence[int]) -> Callable[[Disturbed, Tensor], Tensor]:
    """Until the others have said that they waited: so they do in time."""

    def disturb(stage: Disturbed, x: Tensor) -> Tensor:
        if dist.get_rank() == rank:
            wait_until_said(folder, who)
        return x

    return disturb


def test_a_message_that_does_not_come(tmp_path: Path) -> None:
    plan, who = plan_of(llm((0,), (1,), (2,))), (0, 2)
    first, last = failures(tmp_path, plan, does_not_come(tmp_path, 1, who), who=who)
    assert "rank 0 is at llm[0].0B0 and waits for message llm[0].0:0<-llm[0].1:0 1>0 with rank 1: " in first
    assert "rank 2 is at llm[0].2F0 and waits for message llm[0].1:0->llm[0].2:0 1>2 with rank 1: " in last


def test_a_watchdog_ends_waits_that_have_no_limit(tmp_path: Path) -> None:
    """As on NCCL, whose waits return at once while the device hangs: it aborts the communicators."""
    plan = plan_of(llm((0,), (1,)))
    (said,) = failures(tmp_path, plan, does_not_come(tmp_path, 1, (0,)), who=(0,), run=run_under_nccl_rules)
    assert "rank 0 is at llm[0].0B0 and waits for message llm[0].0:0<-llm[0].1:0 1>0 with rank 1" in said
    assert "was aborted during" in said


def test_a_watchdog_is_quiet_until_the_time_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted = threading.Event()
    monkeypatch.setattr(deadline_module, "abort_communicators", aborted.set)
    watchdog = Watchdog(lambda: "rank 7 is late")
    watchdog.watch_until(time.monotonic() + 1000.0)
    watchdog.watch_until(float("inf"))
    assert watchdog.said is None
    watchdog.watch_until(time.monotonic())
    assert aborted.wait(20.0)
    assert watchdog.said == "rank 7 is late; the time of the step is over (train.step_timeout_s)"


def test_a_watchdog_keeps_nothing_alive() -> None:
    """Not the executor, and with it the model, of a training that has ended."""

    class Owner:
        def describe(self) -> str:
            return "rank 7 is late"

    owner = Owner()
    watchdog, is_alive = Watchdog(owner.describe), weakref.ref(owner)
    watchdog.watch_until(time.monotonic() + 1000.0)
    watchdog.watch_until(float("inf"))
    del owner, watchdog
    wait_until(lambda: is_alive() is None)


def test_a_tensor_parallel_member_that_does_not_come(tmp_path: Path) -> None:
    waits = does_not_come(tmp_path, 1, (0,))

    def disturb(stage: Disturbed, x: Tensor) -> Tensor:
        dist.all_reduce(waits(stage, x).clone(), group=stage.tp.group)
        return x

    (said,) = failures(tmp_path, plan_of(llm((0, 1))), disturb, who=(0,))
    assert "rank 0 is at llm[0].0F0 (together with ranks 0, 1): " in said


class WaitInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, folder: Path) -> Tensor:
        ctx.folder = folder
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        wait_until_said(ctx.folder, (0,))
        return gradient, None


def test_a_sum_that_does_not_come(tmp_path: Path) -> None:
    def disturb(stage: Disturbed, x: Tensor) -> Tensor:
        return WaitInBackward.apply(x.requires_grad_(), tmp_path) if dist.get_rank() == 1 else x

    (said,) = failures(tmp_path, plan_of(llm((0,), replicas=2)), disturb, who=(0,))
    assert "rank 0 is at the end of the iteration and waits for the sum llm.R[0:2) with rank 1: " in said


def test_losses_that_do_not_come(tmp_path: Path) -> None:
    """Two towers that have nothing to do with each other but the sum of their losses."""
    towers = {name: llm((rank,)) for rank, name in enumerate(("llm", "other"))}
    plan = Plan(modules=towers, edges=(), num_microbatches=2)
    layouts = {name: (Segment(3),) for name in towers}
    batch = ToyBatch([Sample(str(i), layouts, dict.fromkeys(towers, 3)) for i in range(2)])
    (said,) = failures(tmp_path, plan, does_not_come(tmp_path, 1, (0,)), batch, who=(0,))
    assert "rank 0 is at the end of the iteration and waits for the sum of losses with rank 1: " in said


def test_a_rank_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is waited for; it does not take the timeout to notice."""
    wait, is_waited_for = Deadline.wait, tmp_path / "waits"

    def tell_and_wait(deadline: Deadline, *args: Any) -> None:
        is_waited_for.touch()
        wait(deadline, *args)

    monkeypatch.setattr(Deadline, "wait", tell_and_wait)

    def disturb(stage: Disturbed, x: Tensor) -> Tensor:
        if dist.get_rank() == 0:
            wait_until(is_waited_for.exists)
            os._exit(3)
        return x

    (said,) = failures(tmp_path, plan_of(llm((0,), (1,))), disturb, who=(1,), timeout_s=3600.0)
    assert "rank 1 is at llm[0].1F0 and waits for message llm[0].0:0->llm[0].1:0 0>1 with rank 0: " in said


def test_own_computation_is_interrupted() -> None:
    with (
        pytest.raises(StepOverrunError, match="rank 7 is late"),
        interrupted_after(0.2, lambda: StepOverrunError("rank 7 is late")),
    ):
        time.sleep(100)
    with interrupted_after(100.0, lambda: StepOverrunError("never")):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def with_images(*has_image: bool) -> ToyBatch:
    return ToyBatch(
        [
            Sample(str(i), {**({"vision": (Segment(2),)} if has else {}), "llm": (Segment(3 + i),)}, {"llm": 3 + i})
            for i, has in enumerate(has_image)
        ]
    )


def test_batches_of_one_form_share_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever samples have images, as long as the same microbatches have some."""
    vision = ModulePlan(
        kind="encoder",
        num_layers=2,
        replicas=(Replica(stages=(Stage(layers=(0, 2), ranks=(0,), tp_size=1),)),),
        trainable=((0, 2),),
    )
    plan = Plan(
        modules={"vision": vision, "llm": llm((1,))},
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=2,
    )
    batches = [
        with_images(True, False, True, True),
        with_images(False, True, True, False),
        with_images(True, True, False, False),
        with_images(True, True, True, True),
    ]
    expected = [reference(plan, batch) for batch in batches]
    lowered = []

    def counting(*args, **kwargs):  # type: ignore[no-untyped-def]
        lowered.append(args)
        return original(*args, **kwargs)

    original = engine_module.make_program
    monkeypatch.setattr(engine_module, "make_program", counting)

    def work(rank: int) -> int:
        engine = Engine(
            plan, disturbed_maker(plan, lambda stage, x: x), device=torch.device("cpu"), boundary_dtype=torch.float64
        )
        for batch, (loss, gradients) in zip(batches, expected, strict=True):
            engine.model.zero_gradients()
            assert engine.run(batch).loss == pytest.approx(loss, rel=1e-12)
            for p in engine.model.parameters:
                torch.testing.assert_close(p.parameter.grad, gradients[p.name], rtol=1e-11, atol=1e-13)
            engine.run(batch, forward_only=True)
        return len(lowered)

    assert run_distributed(work, 2) == [4, 4], "two forms, forward and backward, and forward only"


def test_only_the_last_programs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "MAX_PROGRAMS", 1)
    plan = plan_of(llm((0,)))

    def work(rank: int) -> list[float]:
        engine = Engine(
            plan, disturbed_maker(plan, lambda stage, x: x), device=torch.device("cpu"), boundary_dtype=torch.float64
        )
        losses = [engine.run(BATCH, forward_only=i % 2 == 0).loss for i in range(4)]
        assert len(engine._programs) == 1
        return losses

    losses = run_distributed(work, 1)[0]
    assert losses == [losses[0]] * 4


def test_ranks_with_different_data_are_found_out() -> None:
    plan = plan_of(llm((0,), (1,)))

    def work(rank: int) -> str:
        engine = Engine(plan, disturbed_maker(plan, lambda stage, x: x), device=torch.device("cpu"))
        batch = ToyBatch([Sample(str(i), {"llm": (Segment(3 + rank),)}, {"llm": 3}) for i in range(4)])
        with pytest.raises(StepFailedError) as failure:
            engine.run(batch)
        return str(failure.value)

    for rank, said in enumerate(run_distributed(work, 2)):
        assert said.startswith(f"rank {rank}: the ranks derived different programs from plan and batch")


def test_dropout_depends_on_the_seed_and_nothing_else() -> None:
    """Neither on what was drawn before nor on the order of the schedule; members of a group draw alike."""

    def disturb(stage: Disturbed, x: Tensor) -> Tensor:
        dropped = torch.nn.functional.dropout(x, 0.5)
        drawn.append(dropped.sum().item())
        return dropped

    drawn: list[float] = []

    def work(rank: int) -> tuple[list[float], list[float]]:
        losses = []
        for schedule in ("1f1b", "gpipe"):
            plan = plan_of(llm((0, 1), (2,)), schedule)
            maker = disturbed_maker(plan, disturb)
            engine = Engine(plan, maker, device=torch.device("cpu"), boundary_dtype=torch.float64)
            for seed in ((0, 1), (0, 1), (0, 2)):
                torch.rand(rank + 1)
                losses.append(engine.run(BATCH, seed=seed).loss)
        return losses, drawn

    (losses, first), (_, second), _ = run_distributed(work, 3)
    once, again, other, *gpipe = losses
    assert once == again != other
    assert gpipe == [once, again, other]
    assert first == second


@pytest.mark.parametrize(("run", "room", "num_ahead"), [(run_distributed, 2, 2), (run_under_nccl_rules, 2, 0)])
def test_receives_are_posted_ahead_where_tags_pair_them(
    monkeypatch: pytest.MonkeyPatch, run: Run, room: int, num_ahead: int
) -> None:
    """In the program's order, as far as there is room, which is here that of two messages."""
    message_bytes = 3 * WIDTH * torch.float64.itemsize
    monkeypatch.setattr(executor_module, "MAX_BYTES_AHEAD", (room + 1) * message_bytes - 1)
    plan = replace(plan_of(llm((0,), (1,))), num_microbatches=6)
    batch = ToyBatch([Sample(str(i), {"llm": (Segment(3),)}, {"llm": 3}) for i in range(6)])

    def work(rank: int) -> tuple[list[int], list[str], list[str], float, float]:
        engine = Engine(
            plan,
            lambda name, module, stage, tp: ToyStage(plan, name, module, stage),
            device=torch.device("cpu"),
            boundary_dtype=torch.float64,
        )
        ahead: list[int] = []
        posted: list[str] = []
        receive, receive_next = Mailbox.receive, Executor._receive_next

        def note_receive(box: Mailbox, message: Message, *args: Any) -> None:
            posted.append(str(message))
            receive(box, message, *args)

        def note_next(executor: Executor) -> None:
            receive_next(executor)
            ahead.append(len(posted) - len(ahead) - 1)

        with (
            mock.patch.object(Mailbox, "receive", note_receive),
            mock.patch.object(Executor, "_receive_next", note_next),
        ):
            loss = engine.run(batch).loss
        (program,) = engine._programs.values()
        planned = [str(step) for step in program.steps if isinstance(step, Message) and step.receiver == rank]
        return ahead, posted, planned, loss, reference(plan, batch)[0]

    for ahead, posted, planned, loss, expected in run(work, 2):
        assert ahead == [num_ahead] * (6 - num_ahead) + list(range(num_ahead))[::-1]
        assert posted == planned
        assert loss == pytest.approx(expected)
