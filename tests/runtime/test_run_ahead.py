"""Encoders that run ahead: every iteration's loss and gradients are those of one process, whatever came before it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from distributed import run_distributed
from drawing import Limits, draw_problem
from plans import language_model, module, replica
from toy_model import ToyBatch, ToyStage, reference, toy_stage_maker

from motet.assignment.batch_assignment import BatchAssignment, Microbatch, contiguous_assignment
from motet.assignment.next_batch import RunAhead, why_not_ahead
from motet.assignment.sample import Sample, Segment
from motet.errors import UserError
from motet.models.stages.stage import StageInput, StageOutput
from motet.plan import Edge, Plan
from motet.runtime.engine import Engine, _form
from motet.runtime.next_batch import NextBatch
from motet.runtime.stage_runner import StageRunner
from motet.schedule.routes import Routes, derive_routes

CPU = torch.device("cpu")
PLAN = Plan(
    modules={
        "vision": module(replica(0), trainable=()),
        "audio": module(replica(0), trainable=((0, 1),)),
        "llm": language_model(replica(1)),
    },
    edges=(Edge(source="vision", target="llm"), Edge(source="audio", target="llm")),
    num_microbatches=2,
    run_ahead=True,
)
"""One encoder runs ahead, the other is trained."""


def batch(seed: int, *, num: int = 4, lacking: Sequence[int] = ()) -> ToyBatch:
    names = ["vision", "audio", "llm"]
    return ToyBatch(
        [
            Sample(
                f"{seed}.{i}",
                {name: (Segment(2 + (seed + i) % 3),) for name in names if name == "llm" or i not in lacking},
                {"llm": 3},
            )
            for i in range(num)
        ],
        seed=seed,
    )


Pieces = tuple[Microbatch, ...]

Steps = Sequence[tuple[ToyBatch, ToyBatch | None]]
"""Batches that are run, and what is said to follow each."""


def in_order(batches: Sequence[ToyBatch]) -> Steps:
    return list(zip(batches, [*batches[1:], None], strict=True))


def differences(plan: Plan, steps: Steps, between: Callable[[Engine], None] = lambda engine: None) -> list[float]:
    """The largest relative difference of loss and gradients from one process, by iteration."""
    expected = [reference(plan, own) for own, _ in steps]

    def work(rank: int) -> list[float]:
        engine = Engine(plan, toy_stage_maker(plan), device=CPU, boundary_dtype=torch.float64)
        found = []
        for number, ((own, following), (loss, gradients)) in enumerate(zip(steps, expected, strict=True)):
            engine.model.zero_gradients()
            announced = None if following is None else NextBatch(following, (7, number + 1))
            result = engine.run(own, seed=(7, number), following=announced)
            worst = abs(result.loss / loss - 1)
            for p in engine.model.parameters:
                if p.parameter.requires_grad:
                    assert p.parameter.grad is not None
                    size = float(gradients[p.name].abs().max()) or 1.0
                    worst = max(worst, float((p.parameter.grad - gradients[p.name]).abs().max()) / size)
            found.append(worst)
            between(engine)
        return found

    return [max(of_ranks) for of_ranks in zip(*run_distributed(work, plan.num_ranks), strict=True)]


def test_batches_in_a_row_equal_one_process() -> None:
    """The third one has no image at all, the second and fourth lack some, the fifth is smaller."""
    batches = [
        batch(1),
        batch(2, lacking=(0, 1)),
        batch(3, lacking=range(4)),
        batch(4, lacking=(3,)),
        batch(5, num=3),
    ]
    assert max(differences(PLAN, in_order(batches))) < 1e-12


def test_an_encoder_runs_each_batch_once_and_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [batch(i) for i in range(3)]

    def work(rank: int) -> list[list[str]]:
        seen: list[str] = []
        forward = ToyStage.forward

        def counted(self: ToyStage, inputs: StageInput) -> StageOutput:
            if self.data_name == "vision":
                seen.extend(sample.id for sample in inputs.samples)
            return forward(self, inputs)

        monkeypatch.setattr(ToyStage, "forward", counted)
        engine = Engine(PLAN, toy_stage_maker(PLAN), device=CPU, boundary_dtype=torch.float64)
        of_iterations = []
        for number, (own, following) in enumerate(in_order(batches)):
            engine.run(own, seed=(number,), following=following and NextBatch(following, (number + 1,)))
            of_iterations.append(list(seen))
            seen.clear()
        return of_iterations

    of_vision = run_distributed(work, 2)[0]
    names = [[sample.id for sample in each.samples] for each in batches]
    assert of_vision == [names[0] + names[1], names[2], []]


def test_another_batch_or_seed_than_was_said_runs_its_own_forwards() -> None:
    batches = [batch(i) for i in range(4)]
    steps = [(batches[0], batches[1]), (batches[2], batches[3]), (batches[3], None), (batches[1], None)]
    assert max(differences(PLAN, steps)) < 1e-12


def test_draws_are_those_without_run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an encoder that draws whatever its mode, as frozen parts have no dropout: same batch, another seed a step."""
    forward = ToyStage.forward

    def noisy(self: ToyStage, inputs: StageInput) -> StageOutput:
        output = forward(self, inputs)
        if self.data_name != "vision":
            return output
        assert output.hidden is not None
        return StageOutput(output.hidden + torch.rand_like(output.hidden))

    monkeypatch.setattr(ToyStage, "forward", noisy)
    steps = in_order([batch(1) for _ in range(3)])

    def work(rank: int, plan: Plan) -> list[float]:
        engine = Engine(plan, toy_stage_maker(plan), device=CPU, boundary_dtype=torch.float64)
        return [
            engine.run(own, seed=(7, number), following=following and NextBatch(following, (7, number + 1))).loss
            for number, (own, following) in enumerate(steps)
        ]

    ahead = run_distributed(lambda rank: work(rank, PLAN), 2)
    assert ahead == run_distributed(lambda rank: work(rank, replace(PLAN, run_ahead=False)), 2)
    assert len(set(ahead[0])) == len(steps)


def test_an_evaluation_between_two_iterations_changes_nothing() -> None:
    held_out = batch(9, lacking=(1,))
    loss, _ = reference(PLAN, held_out)

    def evaluate(engine: Engine) -> None:
        assert engine.run(held_out, forward_only=True).loss == pytest.approx(loss, rel=1e-12)

    assert max(differences(PLAN, in_order([batch(i) for i in range(3)]), evaluate)) < 1e-12


def test_what_the_wrong_batch_left_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: an encoder hands on what it has kept for the batch before, of the same shapes."""
    keep, stale = StageRunner.forget_output, {}

    def keep_older(self: StageRunner, cell: Any) -> None:
        keep(self, cell)
        if cell in self._routes.kept:
            name = self._routes.next_name(cell)
            self._kept[name], stale[name] = stale.get(name, self._kept[name]), self._kept[name]

    monkeypatch.setattr(StageRunner, "forget_output", keep_older)
    alike = [ToyBatch(batch(0).samples, seed) for seed in range(3)]
    found = differences(PLAN, in_order(alike))
    assert max(found[:2]) < 1e-12
    assert found[2] > 1e-3


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_1f1b", "zero_bubble_h1", "bubble_filling", "dip"])
def test_schedules(schedule: str) -> None:
    """An encoder in two stages, the first of which runs ahead, on the language model's ranks."""
    plan = replace(
        PLAN,
        modules={
            "vision": module(replica(0, 1), trainable=((1, 2),)),
            "audio": module(replica(1, 0), trainable=()),
            "llm": language_model(replica(0, 1)),
        },
        num_microbatches=4,
        schedule=schedule,
    )
    assert max(differences(plan, in_order([batch(1), batch(2, lacking=(0, 1)), batch(3)]))) < 1e-12


@pytest.mark.parametrize("draw", range(5))
def test_drawn_plans(draw: int) -> None:
    rng, number = Random(f"run-ahead/{draw}"), 0
    while True:
        problem = draw_problem(rng, Limits(max_ranks=4, equal_groups=True, copies=True))
        modules = {
            name: replace(own, trainable=()) if own.kind == "encoder" else own
            for name, own in problem.plan.modules.items()
        }
        plan = replace(problem.plan, modules=modules, run_ahead=True)
        if why_not_ahead(plan) is None:
            break
        number += 1
    batches = [ToyBatch(problem.samples, 0), ToyBatch(problem.samples[1:], 1), ToyBatch(problem.samples, 2)]
    assert all(contiguous_assignment(plan, each.samples) for each in batches)
    assert max(differences(plan, in_order(batches))) < 1e-10


def test_programs_are_told_apart_by_the_names_of_the_next_cells() -> None:
    """Of microbatches cut by work there are not always as many: cell 3 may be the second of the next batch or the
    first. Its dropout is seeded from that name, which the bound program keeps."""

    def routes(own: Pieces, following: Pieces) -> Routes:
        of_others = {"audio": (((0, 1),),), "llm": (((0, 1),),)}
        first, second = batch(1, num=2), batch(2, num=2)
        ahead = RunAhead(True, BatchAssignment({"vision": (following,), **of_others}), second.samples)
        return derive_routes(PLAN, BatchAssignment({"vision": (own,), **of_others}), first.samples, ahead=ahead)

    two, three = routes(((0,), (1,)), ((), (0,), (1,))), routes(((0,), (1,), ()), ((0,), (1,)))
    assert two.cells == three.cells
    assert [two.next_name(cell) for cell in two.cells if cell in two.ahead] != [
        three.next_name(cell) for cell in three.cells if cell in three.ahead
    ]
    assert _form(two) != _form(three)
    assert _form(two) == _form(routes(((0,), (1,)), ((), (0,), (1,))))


def test_an_engine_refuses_a_plan_in_which_nothing_can_run_ahead() -> None:
    trained = replace(PLAN, modules={**PLAN.modules, "vision": module(replica(0))})

    def work(rank: int) -> str:
        try:
            Engine(trained, toy_stage_maker(trained), device=CPU)
        except UserError as error:
            return str(error)
        return ""

    assert all("parallel.run_ahead: no encoder begins with a frozen layer" in text for text in run_distributed(work, 2))
