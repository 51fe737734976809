from random import Random

import pytest
from drawing import draw_problem
from plans import chain, language_model, module, replica, routes_of, samples, vision_audio_llm

from motet.assignment.batch_assignment import BatchAssignment
from motet.plan import Edge, Plan
from motet.schedule.action import Kind
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators.gpipe import gpipe
from motet.schedule.generators.list_schedule import MemoryLimit, list_schedule
from motet.schedule.generators.one_f_one_b import one_f_one_b
from motet.schedule.lower import lower
from motet.schedule.routes import Routes, derive_routes
from motet.schedule.stage_graph import microbatches_in_flight
from motet.schedule.validate import validate
from motet.simulator.costs import UniformCosts
from motet.simulator.simulate import simulate


@pytest.mark.parametrize("plan", [chain(1, 3), chain(4, 8), vision_audio_llm(6), vision_audio_llm(1)])
def test_it_finds_the_closed_forms_where_they_hold(plan: Plan) -> None:
    routes = routes_of(plan)
    assert list_schedule(routes, in_flight=microbatches_in_flight(routes)) == one_f_one_b(routes)
    assert list_schedule(routes, all_forwards_first=True) == gpipe(routes)


def test_it_is_deterministic() -> None:
    for seed in range(20):
        problem = draw_problem(Random(seed))
        assert list_schedule(problem.routes) == list_schedule(problem.routes)


def time_of(routes: Routes) -> float:
    return simulate(lower(one_f_one_b(routes), Dependencies(routes)), UniformCosts()).iteration_time_s


def test_one_encoder_pipeline_feeds_two_language_model_pipelines() -> None:
    plan = Plan(
        modules={"vision": module(replica(0)), "llm": language_model(replica(1, 2), replica(3, 4))},
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=4,
    )
    batch = samples(8, ["vision", "llm"])
    assignment = BatchAssignment(
        {
            "vision": (tuple((i,) for i in range(8)),),
            "llm": (((0,), (2,), (4,), (6,)), ((1,), (3,), (5,), (7,))),
        }
    )
    routes = derive_routes(plan, assignment, batch)
    # Each pipeline needs 2 microbatches of it in flight, and one is being made.
    assert microbatches_in_flight(routes)["vision", 0, 0] == 5
    # The encoder works without a pause, 8 x 3, but for the time in which its last microbatch is elsewhere and
    # whatever is left to do then: at most a pass through the two stages and its own backwards of two microbatches.
    assert 24 <= time_of(routes) <= 24 + 9


def test_an_encoder_cut_finer_than_the_language_model_keeps_it_busy() -> None:
    plan = Plan(
        modules={"vision": module(replica(0)), "llm": language_model(replica(1))},
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=4,
    )
    batch = samples(8, ["vision", "llm"])
    assignment = BatchAssignment(
        {
            "vision": (tuple((i,) for i in range(8)),),
            "llm": (tuple((2 * i, 2 * i + 1) for i in range(4)),),
        }
    )
    routes = derive_routes(plan, assignment, batch)
    assert microbatches_in_flight(routes)["vision", 0, 0] == 2 + 2
    schedule = one_f_one_b(routes)
    assert validate(schedule, Dependencies(routes)).peak_activations == (4, 1)
    # Two forwards, then 8 x 3 of work of which the first two forwards are already done; the language model's own
    # 1 + 2 is hidden but for the part that nothing of the encoder can fill at either end.
    assert 8 * 3 <= time_of(routes) <= 8 * 3 + 3


def test_a_limit_that_blocks_everything_is_lifted_for_what_is_needed() -> None:
    routes = routes_of(vision_audio_llm(4))
    memory = MemoryLimit(saved_bytes=lambda cell: 1, limit_bytes=lambda rank: 0)
    schedule = list_schedule(routes, memory=memory)
    # One microbatch after the other passes through the whole pipeline.
    assert validate(schedule, Dependencies(routes)).peak_activations == (1,) * 6


def test_a_limit_in_microbatches_lower_than_the_consumer_needs_is_lifted() -> None:
    """The language model's one microbatch needs four of vision's, which may have one in flight."""
    plan = Plan(
        modules={"vision": module(replica(0)), "llm": language_model(replica(1))},
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=1,
    )
    assignment = BatchAssignment({"vision": (((0,), (1,), (2,), (3,)),), "llm": (((0, 1, 2, 3),),)})
    routes = derive_routes(plan, assignment, samples(4, ["vision", "llm"]))
    schedule = list_schedule(routes, in_flight=dict.fromkeys(microbatches_in_flight(routes), 1))
    assert validate(schedule, Dependencies(routes)).peak_activations == (4, 1)


def test_bytes_are_counted_over_all_stages_of_a_rank() -> None:
    plan = Plan(
        modules={"vision": module(replica(0)), "audio": module(replica(0)), "llm": language_model(replica(1))},
        edges=(Edge(source="vision", target="llm"), Edge(source="audio", target="llm")),
        num_microbatches=5,
    )
    routes = routes_of(plan)
    size = {"vision": 5, "audio": 2, "llm": 1}
    memory = MemoryLimit(saved_bytes=lambda cell: size[cell.module], limit_bytes=lambda rank: 14)
    liveness = validate(
        list_schedule(routes, memory=memory), Dependencies(routes), lambda cell, half: size[cell.module]
    )
    assert liveness.peak_bytes is not None
    assert liveness.peak_bytes[0] == 14


def test_what_nobody_waits_for_fills_the_bubbles() -> None:
    """Encoders replicated, tokens merged at layer 0: nothing reads the output of the copy on the second stage."""
    plan = Plan(
        modules={
            "vision": module(replica(0)),
            "vision@1": module(replica(1), copy_of="vision"),
            "llm": language_model(replica(0, 1)),
        },
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=3,
    )
    routes = routes_of(plan)
    schedule = one_f_one_b(routes)
    validate(schedule, Dependencies(routes))
    # Two while the first microbatch is on its way (it takes 2), the third when all else is done.
    assert " ".join(map(str, schedule.ranks[1])) == (
        "vision@1[0].0F0 vision@1[0].0F1 llm[0].1F0 llm[0].1B0 llm[0].1F1 llm[0].1B1 llm[0].1F2 llm[0].1B2 "
        "vision@1[0].0F2"
    )


def test_priorities_follow_the_microbatch_that_waits() -> None:
    """An encoder whose microbatches come in another order than the language model's is scheduled in the latter's."""
    plan = Plan(
        modules={"vision": module(replica(0)), "llm": language_model(replica(1))},
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=3,
    )
    assignment = BatchAssignment({"vision": (((2,), (1,), (0,)),), "llm": (((0,), (1,), (2,)),)})
    routes = derive_routes(plan, assignment, samples(3, ["vision", "llm"]))
    forwards = [a.cell.microbatch for a in one_f_one_b(routes).ranks[0] if a.kind is Kind.FORWARD]
    assert forwards == [2, 1, 0]
