"""Iterations that run the next batch's forwards ahead: their cells, routes and order, by hand and drawn."""

from dataclasses import replace
from random import Random

import pytest
from drawing import Limits, draw_problem
from plans import language_model, module, replica, samples

from motet.assignment.batch_assignment import BatchAssignment, contiguous_assignment
from motet.assignment.next_batch import NO_RUN_AHEAD, RunAhead, stages_ahead, why_not_ahead, with_run_ahead
from motet.assignment.sample import Sample
from motet.errors import UserError
from motet.plan import Edge, ModulePlan, Plan, Replica, Stage
from motet.schedule.action import Compute, Kind
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators import CONTRASTING, GENERATORS
from motet.schedule.lower import lower
from motet.schedule.order import iteration_s
from motet.schedule.program import make_schedule
from motet.schedule.routes import Routes, derive_routes
from motet.schedule.validate import check_complete
from motet.simulator.costs import UniformCosts
from motet.simulator.simulate import simulate

FIRST, STEADY, LAST = (False, True), (True, True), (True, False)
"""Whether the batch's own forwards ran in the iteration before, and whether the next batch's run in this one."""


def plan_of(*encoders: ModulePlan, llm: tuple[int, ...], num_microbatches: int = 4, schedule: str = "1f1b") -> Plan:
    names = [f"encoder{i}" for i in range(len(encoders))]
    return Plan(
        modules={**dict(zip(names, encoders, strict=True)), "llm": language_model(replica(*llm))},
        edges=tuple(Edge(source=name, target="llm") for name in names),
        num_microbatches=num_microbatches,
        schedule=schedule,
        run_ahead=True,
    )


ONE_STAGE = replace(
    module(Replica(stages=(Stage(layers=(0, 4), ranks=(0,)),)), trainable=((3, 4),)),
    num_layers=4,
)
"""Three frozen layers and a trainable one, in one stage."""


def test_stages_are_cut_where_frozen_layers_end() -> None:
    plan = with_run_ahead(replace(plan_of(ONE_STAGE, llm=(1,)), run_ahead=False))
    assert [(s.layers, s.ranks) for s in plan.modules["encoder0"].replicas[0].stages] == [
        ((0, 3), (0,)),
        ((3, 4), (0,)),
    ]
    assert stages_ahead(plan) == {("encoder0", 0): 1}
    assert with_run_ahead(plan) == plan
    with pytest.raises(UserError, match=r"parallel\.run_ahead: no encoder begins with a frozen layer; freeze encoder0"):
        with_run_ahead(plan_of(module(replica(0)), llm=(1,)))


def routes_of(
    plan: Plan, kind: tuple[bool, bool], lacking: tuple[int, ...] = (), lacking_next: tuple[int, ...] = ()
) -> Routes:
    def batch(without: tuple[int, ...]) -> list[Sample]:
        encoders = [name for name in plan.modules if name != "llm"]
        return samples(plan.num_microbatches, list(plan.modules), dict.fromkeys(without, encoders))

    def assigned(batch: list[Sample]) -> BatchAssignment:
        return contiguous_assignment(plan, batch)

    own, following = batch(lacking), batch(lacking_next)
    ahead = RunAhead(kind[0], assigned(following), following) if kind[1] else RunAhead(kind[0])
    return derive_routes(plan, assigned(own), own, ahead=ahead)


def text_of(routes: Routes, schedule: str = "1f1b") -> list[str]:
    return make_schedule(schedule, routes).text().splitlines()


FROZEN = module(replica(0), trainable=())
BESIDE = plan_of(FROZEN, llm=(1, 2))
SHARED = plan_of(module(replica(0, 1), trainable=()), llm=(0, 1))


def test_frozen_leading_stages_of_encoders_run_ahead() -> None:
    half = module(replica(0, 1, 2), trainable=((2, 3),))
    begins_trainable = module(replica(3), trainable=((0, 1),))
    assert stages_ahead(plan_of(half, begins_trainable, llm=(4,))) == {("encoder0", 0): 2}
    assert stages_ahead(replace(BESIDE, run_ahead=False)) == {}
    reads_another = replace(
        plan_of(FROZEN, module(replica(1), trainable=()), llm=(2,)),
        edges=(Edge(source="encoder0", target="encoder1"), Edge(source="encoder1", target="llm")),
    )
    assert stages_ahead(reads_another) == {("encoder0", 0): 1}


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (plan_of(module(replica(0)), llm=(1,)), "no encoder begins with a frozen layer"),
        (plan_of(llm=(0, 1)), "the model has no encoder"),
        (
            plan_of(ONE_STAGE, llm=(1,)),
            "first stage of encoder0 goes beyond its frozen layers, [0, 3); let a stage end",
        ),
    ],
)
def test_what_cannot_run_ahead_is_refused_with_the_reason(plan: Plan, why: str) -> None:
    assert why in (why_not_ahead(plan) or "")


def test_a_steady_iteration_hands_on_what_was_kept_and_runs_the_next_batch() -> None:
    plan = plan_of(module(replica(0, 1, 2), trainable=((2, 3),)), llm=(3,), num_microbatches=2)
    routes = routes_of(plan, STEADY)
    assert [f"{c.module}.{c.stage}.{c.microbatch}" for c in routes.cells if c.module == "encoder0"] == [
        *("encoder0.0.2", "encoder0.0.3"),
        *("encoder0.1.0", "encoder0.1.1", "encoder0.1.2", "encoder0.1.3"),
        *("encoder0.2.0", "encoder0.2.1"),
    ]
    assert {(cell.stage, cell.microbatch) for cell in routes.ran_before} == {(1, 0), (1, 1)}
    assert {(cell.stage, cell.microbatch) for cell in routes.ahead} == {(0, 2), (0, 3), (1, 2), (1, 3)}
    assert {(cell.stage, cell.microbatch) for cell in routes.kept} == {(1, 2), (1, 3)}
    assert {routes.next_name(cell).microbatch for cell in routes.kept} == {0, 1}
    assert all(routes.incoming[cell] == () for cell in routes.ran_before)
    assert {cell.stage for cell in routes.with_backward if cell.module == "encoder0"} == {2}


def test_the_first_iteration_runs_both_batches_and_the_last_one_neither() -> None:
    first, last = routes_of(BESIDE, FIRST), routes_of(BESIDE, LAST)
    assert text_of(first)[0] == "0: " + " ".join(f"encoder0[0].0F{i}" for i in range(8))
    assert (len(first.ran_before), len(first.kept)) == (0, 4)
    assert text_of(last)[0] == "0: " + " ".join(f"encoder0[0].0F{i}" for i in range(4))
    assert (len(last.ran_before), len(last.kept)) == (4, 0)


def test_the_language_model_does_not_wait_for_an_encoder_that_ran_ahead() -> None:
    """By hand: two stages, four microbatches, 1 s forward and 2 s backward: (4 + 2 - 1) x 3 s; an encoder beside takes
    1 s before."""
    costs = UniformCosts()
    seconds = {}
    for name, routes in {
        "without": derive_routes(
            BESIDE, contiguous_assignment(BESIDE, (batch := samples(4, list(BESIDE.modules)))), batch
        ),
        "first": routes_of(BESIDE, FIRST),
        "steady": routes_of(BESIDE, STEADY),
        "last": routes_of(BESIDE, LAST),
    }.items():
        program = lower(make_schedule("1f1b", routes), Dependencies(routes))
        seconds[name] = simulate(program, costs).iteration_time_s
    assert seconds == {"without": 16.0, "first": 16.0, "steady": 15.0, "last": 15.0}


def test_forwards_of_the_next_batch_fill_the_cool_down() -> None:
    """Two stages on two ranks, an encoder on both: after its last forward, rank 0 waits 2 s for rank 1's backward, and
    rank 1 waits 2 s for rank 0's last one."""
    assert text_of(routes_of(replace(SHARED, num_microbatches=2), STEADY)) == [
        "0: llm[0].0F0 llm[0].0F1 encoder0[0].0F2 encoder0[0].0F3 llm[0].0B0 llm[0].0B1",
        "1: encoder0[0].1F0 encoder0[0].1F1 llm[0].1F0 llm[0].1B0 llm[0].1F1 llm[0].1B1 "
        "encoder0[0].1F2 encoder0[0].1F3",
    ]


def test_batches_may_differ_in_which_microbatches_have_the_modality() -> None:
    routes = routes_of(BESIDE, STEADY, lacking=(0, 2), lacking_next=(1,))
    assert text_of(routes)[0] == "0: " + " ".join(f"encoder0[0].0F{i}" for i in (1, 3, 4, 6, 7))
    nothing = routes_of(BESIDE, STEADY, lacking=(0, 1, 2, 3), lacking_next=(0, 1, 2, 3))
    assert text_of(nothing)[0] == "0:"


def test_memory_of_what_is_kept_counts_from_its_forward_to_the_next_iteration() -> None:
    """Four outputs of one byte: those of the batch are handed on at once, those of the next one add up."""
    routes = routes_of(BESIDE, STEADY)
    program = lower(make_schedule("1f1b", routes), Dependencies(routes))
    curve = simulate(program, UniformCosts()).memory[0]
    assert curve.bytes_held.tolist()[-1] == curve.peak_bytes == 4
    last = routes_of(BESIDE, LAST)
    program = lower(make_schedule("1f1b", last), Dependencies(last))
    assert simulate(program, UniformCosts()).memory[0].bytes_held.tolist()[-1] == 0


@pytest.mark.parametrize("kind", [FIRST, STEADY, LAST])
def test_drawn_iterations_are_complete_keep_the_own_order_and_cannot_deadlock(kind: tuple[bool, bool]) -> None:
    num_ahead = 0
    for draw in range(60):
        rng = Random(f"ahead/{draw}")
        problem = draw_problem(rng, Limits())
        modules = {
            name: replace(own, trainable=()) if own.kind == "encoder" and rng.random() < 0.7 else own
            for name, own in problem.plan.modules.items()
        }
        # Copies are as trainable as their originals.
        modules = {
            name: own if own.copy_of is None else replace(own, trainable=modules[own.copy_of].trainable)
            for name, own in modules.items()
        }
        plan = replace(problem.plan, modules=modules, run_ahead=True)
        following = contiguous_assignment(plan, problem.samples)
        ahead = RunAhead(kind[0], following, problem.samples) if kind[1] else RunAhead(kind[0])
        routes = derive_routes(plan, problem.assignment, problem.samples, ahead=ahead)
        num_ahead += len(routes.ahead) + len(routes.ran_before)
        dependencies = Dependencies(routes)
        schedules = [name for name in GENERATORS if name not in CONTRASTING]
        schedule = make_schedule(rng.choice(schedules), routes)
        check_complete(schedule, dependencies)
        lower(schedule, dependencies)
    assert num_ahead > 100


@pytest.mark.parametrize("plan", [BESIDE, SHARED])
@pytest.mark.parametrize("schedule", [name for name in GENERATORS if name not in CONTRASTING])
def test_nothing_of_the_batch_itself_is_expected_later(plan: Plan, schedule: str) -> None:
    """The order of the own actions, and their time, are those without the next batch."""
    steady, last = routes_of(plan, STEADY), routes_of(plan, LAST)
    with_next, without = make_schedule(schedule, steady), make_schedule(schedule, last)
    own = [[action for action in actions if action.cell not in steady.ahead] for actions in with_next.ranks]
    assert own == [list(actions) for actions in without.ranks]
    seconds = {
        name: iteration_s(ordered, Dependencies(routes), lambda action: 1.0 + (action.kind is Kind.BACKWARD))
        for name, ordered, routes in (("with", with_next, steady), ("without", without, last))
    }
    num_ahead = sum(action.cell in steady.ahead for action in with_next.ranks[0])
    assert seconds["without"] <= seconds["with"] <= seconds["without"] + num_ahead


def test_rounding_does_not_swap_own_actions() -> None:
    """Starts are ends without durations: those of a tiny action and of the next one may be rounded past each other."""
    tiny, seconds = 1e-18, 0.7
    end = seconds + seconds
    assert (end + seconds) - seconds < end - tiny
    plan = plan_of(FROZEN, module(replica(1), trainable=()), llm=(1,))
    plan = replace(plan, modules={**plan.modules, "encoder1": module(replica(1), trainable=((0, 1),))})
    routes = routes_of(plan, STEADY)

    def seconds_of(action: Compute) -> float:
        return tiny if action.cell.module == "encoder1" else seconds

    schedule = make_schedule("1f1b", routes, seconds_of)
    lower(schedule, Dependencies(routes), seconds_of)
    without = make_schedule("1f1b", routes_of(plan, LAST), seconds_of)
    assert [action for action in schedule.ranks[1] if action.cell not in routes.ahead] == list(without.ranks[1])


def test_programs_differ_in_what_ran_before() -> None:
    """All ranks compare the digest: one that computes what others hand on would differ."""
    digests = set()
    for kind in (LAST, (False, False)):
        routes = routes_of(BESIDE, kind)
        digests.add(lower(make_schedule("1f1b", routes), Dependencies(routes)).digest())
    assert len(digests) == 2


def test_without_run_ahead_nothing_changes() -> None:
    plan = replace(BESIDE, run_ahead=False)
    batch = samples(4, list(plan.modules))
    routes = derive_routes(plan, contiguous_assignment(plan, batch), batch, ahead=NO_RUN_AHEAD)
    assert not routes.runs_ahead
    assert Compute(Kind.FORWARD, routes.cells[0]) in make_schedule("1f1b", routes).ranks[0]
