"""Replicas that share experts compute their microbatches together, whatever samples each has."""

from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from random import Random

import pytest

from motet.assignment.batch_assignment import BatchAssignment, contiguous_assignment
from motet.assignment.sample import Sample, Segment
from motet.plan import Edge, ModulePlan, Plan, Replica, Stage
from motet.schedule.action import Compute, Kind
from motet.schedule.generators import GENERATORS
from motet.schedule.lower import Program
from motet.schedule.program import make_program
from motet.schedule.routes import Routes, derive_routes

LLM = "language_model"


def plan_of(schedule: str, *, dp: int = 2, pp: int = 2, num_microbatches: int = 2, ep: int = 2, **options) -> Plan:
    """Each replica's encoder is on the first of its ranks."""
    ranks = [range(r * pp, (r + 1) * pp) for r in range(dp)]
    stages = [
        tuple(Stage(layers=(6 * s // pp, 6 * (s + 1) // pp), ranks=(rank,)) for s, rank in enumerate(own))
        for own in ranks
    ]
    encoders = tuple(Replica(stages=(Stage(layers=(0, 3), ranks=(own[0],)),)) for own in ranks)
    return Plan(
        modules={
            "vision": ModulePlan(kind="encoder", num_layers=3, replicas=encoders, trainable=((0, 3),)),
            LLM: ModulePlan(
                kind="language_model",
                num_layers=6,
                replicas=tuple(Replica(stages=own) for own in stages),
                trainable=options.get("trainable", ((0, 6),)),
                loss_weight=1.0,
                ep=ep,
            ),
        },
        edges=(Edge(source="vision", target=LLM),),
        num_microbatches=num_microbatches,
        schedule=schedule,
    )


def samples_with(images: str) -> list[Sample]:
    """A sample for each letter; `x` has an image."""
    return [
        Sample(str(i), {LLM: (Segment(5 + i),)} | ({"vision": (Segment(4),)} if letter == "x" else {}), {LLM: 4})
        for i, letter in enumerate(images)
    ]


def routes_of(plan: Plan, images: str) -> Routes:
    samples = samples_with(images)
    return derive_routes(plan, contiguous_assignment(plan, samples), samples)


def check_meetings(program: Program, number_together: int) -> None:
    """Every rank runs its steps in the program's order, and cells that meet take all of their ranks at once: no step
    may wait for itself."""
    meeting, before, latest = {}, defaultdict(set), {}
    for i, step in enumerate(program.steps):
        place = i
        if isinstance(step, Compute) and step.cell.module == LLM:
            block = step.cell.replica // number_together
            place = meeting.setdefault(step._replace(cell=step.cell._replace(replica=block)), i)
        for rank in program.participants(step):
            if latest.get(rank, place) != place:
                before[place].add(latest[rank])
            latest[rank] = place
    tuple(TopologicalSorter(before).static_order())  # Raises CycleError.
    own = [[] for _ in program.projections]
    for rank, steps in enumerate(program.projections):
        for step in steps:
            if isinstance(step, Compute) and step.cell.module == LLM:
                own[rank].append((step.kind, step.cell.stage, step.cell.microbatch))
    size = len(own) // number_together
    assert all(own[rank] == own[rank % size] for rank in range(len(own)))


@pytest.mark.parametrize("schedule", sorted(GENERATORS))
@pytest.mark.parametrize("pp", [1, 2])
def test_cells_that_meet_are_run_in_one_order(schedule: str, pp: int) -> None:
    """Without this, a replica without images would run ahead of the other one in some of these."""
    rng = Random(0)
    for images in ("xxxx", "x...", ".x..", "...x", "xx..xxxx", "".join(rng.choices("x.", k=12))):
        plan = plan_of(schedule, pp=pp, num_microbatches=len(images) // 2)
        routes = routes_of(plan, images)
        program = make_program(schedule, routes, lambda action: 1.0 + action.cell.replica + action.cell.microbatch % 3)
        check_meetings(program, 2)


def test_replicas_that_share_nothing_have_orders_of_their_own() -> None:
    plan = plan_of("gpipe", pp=1, num_microbatches=2, ep=1)
    with pytest.raises(CycleError):
        check_meetings(make_program("gpipe", routes_of(plan, "x..."), None), 2)


def test_two_pairs_of_four_replicas() -> None:
    plan = plan_of("1f1b", dp=4, pp=1)
    program = make_program("1f1b", routes_of(plan, "x.......xx......"), None)
    for ranks in ((0, 1), (2, 3)):
        orders = {
            tuple(
                (step.kind, step.cell.microbatch)
                for step in program.projections[rank]
                if isinstance(step, Compute) and step.cell.module == LLM
            )
            for rank in ranks
        }
        assert len(orders) == 1


def test_a_replica_without_samples_has_idle_cells() -> None:
    plan = plan_of("1f1b", num_microbatches=2)
    samples = samples_with("xx.")
    assignment = BatchAssignment({"vision": (((0,), (1,)), ((), ())), LLM: (((0,), (1,)), ((2,),))})
    routes = derive_routes(plan, assignment, samples)
    cells = [cell for cell in routes.cells if cell.module == LLM and cell.replica == 1]
    assert [cell.microbatch for cell in cells if cell.stage == 0] == [0, 1]
    assert [routes.samples(cell) for cell in cells if cell.stage == 0] == [(2,), ()]
    assert all(cell in routes.with_backward for cell in cells)
    program = make_program("1f1b", routes, None)
    check_meetings(program, 2)
    assert sum(isinstance(s, Compute) and s.kind is Kind.FORWARD and s.cell.module == LLM for s in program.steps) == 8
    alone = derive_routes(plan_of("1f1b", num_microbatches=2, ep=1), assignment, samples)
    assert len([cell for cell in alone.cells if cell.module == LLM]) == 6


def test_one_replicas_gradients_need_all() -> None:
    """Only the first sample's image has something to learn: the language model is frozen."""
    for ep, expected in ((1, 1), (2, 4)):
        routes = routes_of(plan_of("1f1b", ep=ep, pp=1, trainable=()), "x...")
        assert sum(cell.module == LLM for cell in routes.with_backward) == expected
