"""Where time goes: small pipelines by hand, and that nothing is lost on drawn problems."""

from dataclasses import dataclass
from random import Random

import pytest
from drawing import draw_problem
from plans import chain, language_model, replica, routes_of, samples
from random_costs import RandomCosts

from motet.plan import Plan
from motet.schedule.action import Compute
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators import GENERATORS
from motet.schedule.lower import lower
from motet.simulator.costs import UniformCosts
from motet.simulator.result import TimeShares
from motet.simulator.simulate import simulate

IDLE = ("warm_up", "cool_down", "imbalance", "reduction", "gather")
"""The causes; what tensor-parallel groups exchange counts as busy."""


def shares(plan: Plan, costs: UniformCosts, num_samples: int | None = None) -> dict[str, list[float]]:
    routes = routes_of(plan, None if num_samples is None else samples(num_samples, ["llm"]))
    result = simulate(lower(GENERATORS["1f1b"](routes), Dependencies(routes)), costs).time_shares
    return {name: getattr(result, name).tolist() for name in TimeShares.__dataclass_fields__}


def test_a_chain_by_hand() -> None:
    """Four stages, eight microbatches, F 1 and B 2: rank p begins at p and ends 2 p before the end, at 33 - 2 p."""
    found = shares(chain(4, 8), UniformCosts(fixed_s=5))
    assert found["warm_up"] == [0, 1, 2, 3]
    assert found["cool_down"] == [0, 2, 4, 6]
    assert found["imbalance"] == [9, 6, 3, 0]  # After the warm-up's forwards each waits for its first backward.
    assert found["compute"] == [24] * 4
    assert found["optimizer"] == [5] * 4
    assert found["tensor_parallel"] == found["reduction"] == found["gather"] == [0] * 4


def test_reductions_and_gathers_at_the_ends_by_hand() -> None:
    """Two replicas of two stages, one microbatch: B of the last stage 2-4, of the first 4-6, each reduced in 4; then
    the optimizer until 11, then gathers of 3, beside each other as no rank is in both."""
    plan = Plan(modules={"llm": language_model(replica(0, 1), replica(2, 3))}, edges=(), num_microbatches=1)
    found = shares(plan, UniformCosts(reduce_seconds=4, gather_seconds=3, fixed_s=1), num_samples=2)
    assert found["reduction"] == [4] * 4
    assert found["gather"] == [3] * 4
    assert found["warm_up"] == [0, 1, 0, 1]
    assert found["cool_down"] == [0, 2, 0, 2]
    assert found["imbalance"] == [3, 0, 3, 0]


def test_gathers_of_a_rank_follow_each_other_in_the_order_of_the_layers() -> None:
    plan = Plan(modules={"llm": language_model(replica(0, 0), replica(1, 1))}, edges=(), num_microbatches=1)
    routes = routes_of(plan, samples(2, ["llm"]))
    program = lower(GENERATORS["1f1b"](routes), Dependencies(routes))
    result = simulate(program, UniformCosts(gather_seconds=3, fixed_s=1))
    spans = {(s.name, s.rank): (s.start, s.end) for s in result.timeline.spans if s.kind == "gather"}
    # F 0-1, 1-2; B 2-4, 4-6; optimizer 6-7.
    assert spans == {
        ("llm.G[0:1)", 0): (7, 10),
        ("llm.G[0:1)", 1): (7, 10),
        ("llm.G[1:2)", 0): (10, 13),
        ("llm.G[1:2)", 1): (10, 13),
    }
    assert result.iteration_time_s == result.timeline.iteration_time_s == 13


@dataclass(frozen=True, kw_only=True)
class GroupedCosts(UniformCosts):
    def group_communication_s(self, action: Compute) -> float:
        return 0.25 * self.compute_s(action)


def test_communication_inside_groups_is_idle_time() -> None:
    found = shares(chain(2, 4), GroupedCosts())
    assert found["tensor_parallel"] == [3, 3]
    assert found["compute"] == [9, 9]


@pytest.mark.parametrize("num_cores", [None, 2])
def test_nothing_is_lost_on_drawn_problems(num_cores: int | None) -> None:
    for seed in range(40):
        problem = draw_problem(Random(seed))
        program = lower(GENERATORS[problem.plan.schedule](problem.routes), problem.dependencies)
        result = simulate(program, RandomCosts(seed, fixed_s=0.5), num_cores=num_cores)
        found = result.time_shares
        total = sum(getattr(found, name) for name in TimeShares.__dataclass_fields__)
        assert total == pytest.approx(result.iteration_time_s)
        assert all((getattr(found, name) > -1e-9).all() for name in TimeShares.__dataclass_fields__)
        idle_s = sum(getattr(found, name).sum() for name in IDLE)
        assert idle_s / (len(total) * result.iteration_time_s) == pytest.approx(result.bubble_fraction)
