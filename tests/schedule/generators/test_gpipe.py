from plans import chain, language_model, module, replica, routes_of, vision_audio_llm

from motet.plan import Edge, Plan
from motet.schedule.action import Kind
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators.gpipe import gpipe
from motet.schedule.lower import lower
from motet.schedule.validate import validate
from motet.simulator.costs import UniformCosts
from motet.simulator.simulate import simulate


def makespan(plan: Plan) -> float:
    routes = routes_of(plan)
    return simulate(lower(gpipe(routes), Dependencies(routes)), UniformCosts()).iteration_time_s


def test_makespans_of_chain_and_dag() -> None:
    assert makespan(chain(4, 8)) == (8 + 4 - 1) * 3
    assert makespan(vision_audio_llm(6)) == (6 + 5 - 1) * 3


def test_every_stage_holds_every_microbatch() -> None:
    routes = routes_of(vision_audio_llm(6))
    assert validate(gpipe(routes), Dependencies(routes)).peak_activations == (6,) * 6


def test_forwards_come_first_where_stages_share_ranks_too() -> None:
    plan = Plan(
        modules={"vision": module(replica(0, 1)), "llm": language_model(replica(1, 0))},
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=3,
    )
    routes = routes_of(plan)
    schedule = gpipe(routes)
    validate(schedule, Dependencies(routes))
    for actions in schedule.ranks:
        kinds = [action.kind for action in actions]
        assert kinds == [Kind.FORWARD] * 6 + [Kind.BACKWARD] * 6
