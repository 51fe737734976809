"""The order against an event loop over objects; what the loop cannot do (an action of no duration) by hand."""

import heapq
from random import Random

import pytest
from drawing import Limits, draw_problem
from plans import chain, routes_of
from random_costs import RandomCosts
from sampling import in_campaigns

from motet.schedule.action import Compute, Durations
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators import GENERATORS
from motet.schedule.lower import lower, messages
from motet.schedule.schedule import Schedule


def order_by_events(schedule: Schedule, dependencies: Dependencies, duration_s: Durations) -> list[Compute]:
    """Every action in the order in which it ends; ties by rank."""
    position = [0] * len(schedule.ranks)
    free = [(0.0, 0)] * len(schedule.ranks)
    arrived: dict = {}
    running: list = []
    started: set[Compute] = set()
    ordered: list[Compute] = []
    while True:
        for actions, at in zip(schedule.ranks, position, strict=True):
            for action in actions[at : at + 1]:
                group, reads = dependencies.ranks(action), dependencies.reads(action)
                heads = all(schedule.ranks[r][position[r] : position[r] + 1] == (action,) for r in group)
                if heads and action not in started and all(value in arrived for value in reads):
                    begin, ticks = max(*(arrived[value] for value in reads), *(free[r] for r in group), (0.0, 0))
                    heapq.heappush(running, ((begin + duration_s(action), ticks), min(group), action))
                    started.add(action)
        if not running:
            return ordered
        end, _, action = heapq.heappop(running)
        ordered.append(action)
        for rank in dependencies.ranks(action):
            position[rank] += 1
            free[rank] = end
        for value in dependencies.writes(action):
            arrived[value] = (end[0], end[1] + bool(messages(value, dependencies)))


@pytest.mark.parametrize("seeds", [range(20), *in_campaigns([range(20, 200)])], ids=str)
@pytest.mark.parametrize("generator", sorted(GENERATORS))
def test_it_equals_an_event_loop_on_drawn_problems(generator: str, seeds: range) -> None:
    for seed in seeds:
        problem = draw_problem(Random(seed), Limits(tied=True))
        dependencies, costs = problem.dependencies, RandomCosts(seed)
        schedule = GENERATORS[generator](problem.routes)
        steps = lower(schedule, dependencies, costs.compute_s).steps
        expected = order_by_events(schedule, dependencies, costs.compute_s)
        assert [step for step in steps if isinstance(step, Compute)] == expected, seed


def test_actions_of_no_duration_come_after_what_they_wait_for() -> None:
    dependencies = Dependencies(routes_of(chain(4, 3)))
    schedule = GENERATORS["1f1b"](dependencies.routes)
    steps = lower(schedule, dependencies, lambda action: 0.0).steps
    place = {step: i for i, step in enumerate(steps)}
    written = {value: step for step in steps if isinstance(step, Compute) for value in dependencies.writes(step)}
    for step in steps:
        if isinstance(step, Compute):
            assert all(place[written[value]] < place[step] for value in dependencies.reads(step))


def test_numbers_and_actions_are_two_forms_of_one_schedule() -> None:
    for seed in range(30):
        dependencies = draw_problem(Random(seed)).dependencies
        schedule = GENERATORS["1f1b"](dependencies.routes)
        numbered = Schedule.of_numbers(dependencies, schedule.numbers(dependencies))
        assert numbered == schedule
        assert Schedule.parse(numbered.text()) == schedule
        assert lower(numbered, dependencies).steps == lower(schedule, dependencies).steps
