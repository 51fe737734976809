from plans import chain, language_model, module, replica, routes_of

from motet.plan import Edge, Plan
from motet.schedule.action import Compute
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators import GENERATORS, WITHIN_MEMORY
from motet.schedule.generators.list_schedule import MemoryLimit
from motet.schedule.lower import lower
from motet.schedule.program import make_program


def test_durations_reach_both_the_generator_and_the_order() -> None:
    routes = routes_of(chain(3, 4))
    asked: list[Compute] = []

    def duration_s(action: Compute) -> float:
        asked.append(action)
        return 1.0 + action.cell.stage

    program = make_program("1f1b", routes, duration_s)
    expected = lower(GENERATORS["1f1b"](routes, duration_s), Dependencies(routes), duration_s)
    assert asked
    assert program.digest() == expected.digest()


def test_without_durations_all_actions_count_alike() -> None:
    routes = routes_of(chain(2, 3))
    assert make_program("gpipe", routes).digest() == lower(GENERATORS["gpipe"](routes), Dependencies(routes)).digest()


def test_a_limit_in_memory_reaches_the_schedules_that_go_by_it() -> None:
    colocated = Plan(
        modules={"vision": module(replica(0)), "llm": language_model(replica(0, 1))},
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=6,
    )
    limit = MemoryLimit(saved_bytes=lambda cell: 1, limit_bytes=lambda rank: 4 - rank)
    changed = {
        name
        for name in GENERATORS
        for routes in (routes_of(chain(3, 6)), routes_of(colocated))
        if make_program(name, routes, memory=limit).steps != make_program(name, routes).steps
    }
    assert changed == WITHIN_MEMORY
