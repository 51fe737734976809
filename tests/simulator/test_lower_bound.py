from math import prod
from random import Random

import pytest
from brute_force import all_schedules, best_time_s
from drawing import Limits, draw_problem
from plans import chain, language_model, module, replica, routes_of, vision_audio_llm
from random_costs import RandomCosts
from sampling import in_campaigns

from motet.plan import Edge, Plan
from motet.schedule.action import Compute, Kind
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators import GENERATORS, SPLIT_BACKWARDS
from motet.schedule.lower import lower
from motet.simulator.costs import UniformCosts
from motet.simulator.lower_bound import Job, lower_bound_s, preemptive_time_s
from motet.simulator.simulate import simulate


def test_one_rank_by_hand() -> None:
    assert preemptive_time_s([]) == 0
    assert preemptive_time_s([Job(1, 2, 3)]) == 6
    # The second interrupts the first at 1, ends at 3, has 10 to go; the first ends at 6.
    assert preemptive_time_s([Job(0, 4, 1), Job(1, 2, 10)]) == 13
    assert preemptive_time_s([Job(0, 4, 8), Job(1, 2, 10)]) == 14
    # A pause between the two.
    assert preemptive_time_s([Job(0, 1, 0), Job(5, 1, 2)]) == 8


@pytest.mark.parametrize("generator", sorted(GENERATORS.keys() - SPLIT_BACKWARDS))
def test_closed_forms_meet_it_where_stages_are_equal(generator: str) -> None:
    for plan in (chain(4, 8), chain(1, 3), vision_audio_llm(6)):
        routes = routes_of(plan)
        program = lower(GENERATORS[generator](routes), Dependencies(routes))
        costs = UniformCosts(fixed_s=0.5)
        assert lower_bound_s(routes, costs) == simulate(program, costs).iteration_time_s


def test_splitting_backwards_lowers_it_to_the_fill() -> None:
    """Two stages: the last has one forward to wait for, and a weight half may fill the end."""
    routes = routes_of(chain(2, 4))
    assert lower_bound_s(routes, UniformCosts()) == (4 + 1) * 3
    # The last rank begins at 1 and works 12; its gradients are what the first waits for, but not at the very end.
    assert lower_bound_s(routes, UniformCosts(), split_backward=True) == 1 + 12


def test_reductions_and_messages_count() -> None:
    routes = routes_of(chain(2, 1))
    costs = UniformCosts(message_seconds=0.5, reduce_seconds=3, fixed_s=1)
    assert lower_bound_s(routes, costs) == (1 + 0.5 + 1 + 2 + 0.5 + 2) + 3 + 1


def is_tiny(actions: list[Compute], dependencies: Dependencies) -> bool:
    per_rank = [0] * dependencies.routes.plan.num_ranks
    for action in actions:
        for rank in dependencies.ranks(action):
            per_rank[rank] += 1
    return sum(per_rank) >= 4 and max(per_rank) <= 6 and prod(2 ** max(0, n - 2) for n in per_rank) <= 600


@pytest.mark.parametrize("seeds", [range(21, 81), *in_campaigns([range(21), range(81, 600)])], ids=str)
def test_nothing_is_faster_than_it_on_tiny_drawn_problems(seeds: range) -> None:
    limits = Limits(
        max_modules=3, max_layers=2, max_replicas=2, max_ranks=3, max_group=2, max_microbatches=2, max_samples=3
    )
    num_tried = num_tight = 0
    for seed in seeds:
        problem = draw_problem(Random(seed), limits)
        routes, dependencies, costs = problem.routes, problem.dependencies, RandomCosts(seed, fixed_s=1.0)
        actions = dependencies.required()
        if not is_tiny(actions, dependencies):
            continue
        best = best_time_s(routes, costs, actions)
        bound = lower_bound_s(routes, costs)
        assert bound <= best + 1e-9, f"seed {seed}: {problem}"
        num_tried += 1
        num_tight += bound >= best - 1e-9
    assert num_tried >= len(seeds) / 8
    assert num_tight >= num_tried / 2, "it hardly ever is what can be reached"


def test_nothing_with_split_backwards_is_faster_than_it() -> None:
    for plan in (
        chain(2, 2),
        Plan(
            modules={"vision": module(replica(0)), "llm": language_model(replica(1))},
            edges=(Edge(source="vision", target="llm"),),
            num_microbatches=2,
        ),
    ):
        routes = routes_of(plan)
        forwards = [a for a in Dependencies(routes).required() if a.kind is Kind.FORWARD]
        halves = [Compute(kind, a.cell) for kind in (Kind.INPUT, Kind.WEIGHT) for a in forwards]
        for seed in range(2):
            costs = RandomCosts(seed)
            best = best_time_s(routes, costs, [*forwards, *halves])
            assert lower_bound_s(routes, costs, split_backward=True) <= best + 1e-9


def test_all_orders_are_tried() -> None:
    routes = routes_of(chain(1, 2))
    # Of F0 B0 F1 B1 in any order with each F before its B.
    assert len(list(all_schedules(Dependencies(routes), Dependencies(routes).required()))) == 6
