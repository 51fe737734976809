import pytest
from plans import chain, language_model, module, replica, routes_of, samples, vision_audio_llm

from motet.plan import Edge, Plan, Replica, Stage
from motet.schedule.action import unit_duration
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators.list_schedule import MemoryLimit, list_schedule
from motet.schedule.generators.one_f_one_b import one_f_one_b
from motet.schedule.lower import lower
from motet.schedule.order import iteration_s
from motet.schedule.stage_graph import cuts_alike, microbatches_in_flight, shares_ranks
from motet.schedule.validate import liveness, validate
from motet.simulator.costs import UniformCosts
from motet.simulator.simulate import simulate


def makespan(plan: Plan) -> float:
    routes = routes_of(plan)
    return simulate(lower(one_f_one_b(routes), Dependencies(routes)), UniformCosts()).iteration_time_s


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (1, 5), (4, 8), (4, 2), (3, 3)])
def test_a_chain_takes_microbatches_plus_stages_minus_one_slots(num_stages: int, num_microbatches: int) -> None:
    assert makespan(chain(num_stages, num_microbatches)) == (num_microbatches + num_stages - 1) * 3


def test_a_dag_takes_as_long_as_its_longest_way() -> None:
    assert makespan(vision_audio_llm(6)) == (6 + 5 - 1) * 3


def test_a_stage_holds_one_microbatch_more_than_stages_after_it() -> None:
    routes = routes_of(vision_audio_llm(6))
    assert liveness(one_f_one_b(routes), Dependencies(routes)).peak_activations == (5, 4, 4, 3, 2, 1)


def test_an_edge_that_enters_later_makes_the_warm_up_of_its_source_shorter() -> None:
    plan = Plan(
        modules={"vision": module(replica(0)), "llm": language_model(replica(1, 2, 3))},
        edges=(Edge(source="vision", target="llm", layers=(2,)),),
        num_microbatches=5,
    )
    routes = routes_of(plan)
    assert liveness(one_f_one_b(routes), Dependencies(routes)).peak_activations == (2, 3, 2, 1)


def test_groups_execute_the_same_list_on_each_rank() -> None:
    plan = Plan(modules={"llm": language_model(replica((0, 1), (2,)))}, edges=(), num_microbatches=3)
    schedule = one_f_one_b(routes_of(plan))
    assert schedule.ranks[0] == schedule.ranks[1] != schedule.ranks[2]


def test_replicas_that_do_not_look_alike_keep_the_closed_form() -> None:
    one_stage = Replica(stages=(Stage(layers=(0, 3), ranks=(3,)),))
    plan = Plan(modules={"llm": language_model(replica(0, 1, 2), one_stage)}, edges=(), num_microbatches=4)
    routes = routes_of(plan, samples(8, ["llm"]))
    assert not shares_ranks(routes)
    assert cuts_alike(routes)
    assert liveness(one_f_one_b(routes), Dependencies(routes)).peak_activations == (3, 2, 1, 1)


def test_colocated_encoders_are_one_stage() -> None:
    """Encoders in a chain on the same two ranks before the language model's two (encoders-colocated)."""
    plan = Plan(
        modules={
            "vision": module(replica(0, 1)),
            "audio": module(replica(0, 1)),
            "llm": language_model(replica(2, 3)),
        },
        edges=(Edge(source="vision", target="llm"), Edge(source="audio", target="llm")),
        num_microbatches=6,
    )
    routes = routes_of(plan)
    schedule = one_f_one_b(routes)
    assert validate(schedule, Dependencies(routes)).peak_activations == (8, 6, 2, 1)
    assert schedule.text().splitlines()[1].startswith("1: vision[0].1F0 audio[0].1F0 vision[0].1F1 audio[0].1F1")
    # The encoders' ranks are the slowest: 6 microbatches of 2 x 3, and nothing hides the language model's first and
    # last (1 + 1 + 2 + 2) but what the encoders have of other microbatches.
    assert makespan(plan) <= 6 * 6 + 6
    by_list = list_schedule(routes, in_flight=microbatches_in_flight(routes))
    assert makespan(plan) <= iteration_s(by_list, Dependencies(routes), unit_duration)


def test_stages_that_follow_each_other_on_a_rank_are_one_stage() -> None:
    plan = Plan(modules={"llm": language_model(replica(0, 0, 1))}, edges=(), num_microbatches=2)
    assert one_f_one_b(routes_of(plan)).text().splitlines()[0] == (
        "0: llm[0].0F0 llm[0].1F0 llm[0].0F1 llm[0].1F1 llm[0].1B0 llm[0].0B0 llm[0].1B1 llm[0].0B1"
    )


def test_a_limit_in_bytes_is_kept() -> None:
    routes = routes_of(vision_audio_llm(6))
    memory = MemoryLimit(saved_bytes=lambda cell: 10, limit_bytes=lambda rank: 20)
    peak = validate(one_f_one_b(routes, memory=memory), Dependencies(routes), lambda cell, half: 10).peak_bytes
    assert peak == (20, 20, 20, 20, 20, 10)
