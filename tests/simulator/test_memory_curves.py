from random import Random

import pytest
from drawing import draw_problem
from plans import chain, language_model, replica, routes_of
from random_costs import RandomCosts

from motet.plan import Plan
from motet.schedule.action import Compute
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators import GENERATORS
from motet.schedule.lower import lower
from motet.schedule.schedule import Schedule
from motet.schedule.validate import liveness
from motet.simulator.costs import UniformCosts
from motet.simulator.simulate import SimulationResult, simulate


def run(text: str, costs: UniformCosts) -> SimulationResult:
    return simulate(lower(Schedule.parse(text), Dependencies(routes_of(chain(2, 2)))), costs)


def curve(result: SimulationResult, rank: int) -> list[tuple[float, int]]:
    """The memory after all that happens at each moment."""
    return list(dict(zip(result.memory[rank].times_s, result.memory[rank].bytes_held, strict=True)).items())


def test_saved_activations_and_buffers_by_hand() -> None:
    """GPipe, two stages, two microbatches; F 1, B 2, messages 1 and of 3 bytes, 10 bytes saved, 100 static.

    0: F0 0-1, F1 1-2, B0 7-9, B1 9-11
    1: F0 2-3, F1 3-4, B0 4-6, B1 6-8
    """
    result = run(
        "0: llm[0].0F0 llm[0].0F1 llm[0].0B0 llm[0].0B1\n1: llm[0].1F0 llm[0].1F1 llm[0].1B0 llm[0].1B1",
        UniformCosts(message_seconds=1, bytes_per_message=3, saved_bytes_per_cell=10, static_bytes_per_rank=100),
    )
    # Rank 0: forwards save 10 each from 0 and 1; activations of 3 are sent 1-2 and 2-3; gradients come 6-7 and 8-9
    # and are read until 9 and 11.
    assert curve(result, 0) == [
        (0.0, 110), (1.0, 123), (2.0, 123), (3.0, 120), (6.0, 123), (8.0, 126), (9.0, 113), (11.0, 100)
    ]  # fmt: skip
    # Rank 1: receives 1-2 and 2-3, read by the forwards 2-3 and 3-4; backwards 4-6 and 6-8, gradients sent 6-7 and 8-9.
    assert curve(result, 1) == [
        (0.0, 100), (1.0, 103), (2.0, 116), (3.0, 123), (4.0, 120), (6.0, 113), (7.0, 110), (8.0, 103), (9.0, 100)
    ]  # fmt: skip
    assert result.peak_memory_bytes == (126, 123)


def test_after_the_input_half_less_is_held_until_the_weight_half() -> None:
    result = run(
        "0: llm[0].0F0 llm[0].0F1 llm[0].0B0 llm[0].0B1\n"
        "1: llm[0].1F0 llm[0].1I0 llm[0].1F1 llm[0].1I1 llm[0].1W0 llm[0].1W1",
        UniformCosts(saved_bytes_per_cell=10, half_bytes_per_cell=4),
    )
    # F0 1-2, I0 2-3, F1 3-4, I1 4-5, W0 5-6, W1 6-7.
    assert curve(result, 1) == [(0.0, 0), (1.0, 10), (3.0, 14), (5.0, 8), (6.0, 4), (7.0, 0)]


def test_what_has_no_backward_is_not_saved() -> None:
    plan = Plan(modules={"llm": language_model(replica(0, 1), trainable=())}, edges=(), num_microbatches=2)
    routes = routes_of(plan)
    program = lower(GENERATORS["1f1b"](routes), Dependencies(routes))
    assert simulate(program, UniformCosts(static_bytes_per_rank=7)).peak_memory_bytes == (7, 7)


def test_without_messages_the_peak_is_what_the_order_of_actions_says() -> None:
    for seed in range(30):
        problem = draw_problem(Random(seed))
        dependencies = problem.dependencies
        schedule = GENERATORS[problem.plan.schedule](problem.routes)

        class NoMessages(RandomCosts):
            def message_bytes(self, message: object) -> int:
                return 0

            def compute_s(self, action: Compute) -> float:
                return 1.0

        costs = NoMessages(seed)
        peak = simulate(lower(schedule, dependencies), costs).peak_memory_bytes
        expected = liveness(schedule, dependencies, costs.saved_bytes).peak_bytes
        assert expected is not None
        assert peak == tuple(costs.static_bytes(rank) + size for rank, size in enumerate(expected))


def test_everything_is_freed_in_the_end() -> None:
    for seed in range(30):
        problem = draw_problem(Random(seed))
        costs = RandomCosts(seed)
        program = lower(GENERATORS[problem.plan.schedule](problem.routes), problem.dependencies)
        for rank, memory in enumerate(simulate(program, costs).memory):
            assert memory.times_s[0] == 0
            assert memory.bytes_held[-1] == costs.static_bytes(rank)
            assert min(memory.bytes_held) >= costs.static_bytes(rank)


@pytest.mark.parametrize("num_microbatches", [4, 9])
def test_1f1b_holds_as_many_microbatches_as_stages_that_follow(num_microbatches: int) -> None:
    routes = routes_of(chain(4, num_microbatches))
    program = lower(GENERATORS["1f1b"](routes), Dependencies(routes))
    assert simulate(program, UniformCosts(saved_bytes_per_cell=1)).peak_memory_bytes == (4, 3, 2, 1)
