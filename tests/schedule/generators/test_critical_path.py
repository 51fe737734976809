"""Critical paths first: valid anywhere, within memory, and each pipeline by itself."""

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import chain, interleaved, module, replica, routes_of, samples, vision_audio_llm
from sampling import examples

from motet.plan import Plan
from motet.schedule.action import Compute, Kind
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators import Generator
from motet.schedule.generators.critical_path import critical_path, iterated_critical_path
from motet.schedule.generators.list_schedule import MemoryLimit
from motet.schedule.generators.zero_bubble import zero_bubble_h1
from motet.schedule.lower import lower
from motet.schedule.routes import Cell, Routes
from motet.schedule.schedule import Schedule
from motet.schedule.validate import liveness, validate
from motet.simulator.costs import UniformCosts
from motet.simulator.lower_bound import lower_bound_s
from motet.simulator.simulate import simulate


@dataclass(frozen=True, kw_only=True)
class UnequalCosts(UniformCosts):
    """The runs of a chain that goes round its groups differ."""

    def compute_s(self, action: Compute) -> float:
        seconds = (3.0, 1.0, 2.0, 1.0, 4.0, 1.0)[action.cell.stage % 6]
        return 2 * seconds if action.kind is Kind.BACKWARD else seconds


@dataclass(frozen=True, kw_only=True)
class DrawnCosts(UniformCosts):
    """Stages and kinds of actions differ at random."""

    def compute_s(self, action: Compute) -> float:
        return random.Random(f"1 {action.cell.stage} {action.kind}").uniform(1, 6)


BOTH = pytest.mark.parametrize("generate", [critical_path, iterated_critical_path])


def makespan(schedule: Schedule, routes: Routes, costs: UniformCosts) -> float:
    return simulate(lower(schedule, Dependencies(routes), costs.compute_s), costs).iteration_time_s


@given(st.sampled_from([chain, interleaved, vision_audio_llm]), st.integers(1, 6), st.integers(1, 3))
@examples(20)
def test_they_are_valid_wherever_stages_are(make: object, num_microbatches: int, more: int) -> None:
    plans = {
        chain: lambda: chain(more + 1, num_microbatches),
        interleaved: lambda: interleaved(more + 1, 2, num_microbatches),
        vision_audio_llm: lambda: vision_audio_llm(num_microbatches),
    }
    routes = routes_of(plans[make]())
    first, iterated = critical_path(routes), iterated_critical_path(routes)
    validate(first, Dependencies(routes))
    validate(iterated, Dependencies(routes))
    costs = UniformCosts()
    assert makespan(iterated, routes, costs) <= makespan(first, routes, costs) * (1 + 1e-12)


def test_costs_are_asked_once_for_all_policies() -> None:
    routes, asked = routes_of(interleaved(3, 2, 4)), Counter[Compute]()

    def duration_s(action: Compute) -> float:
        asked[action] += 1
        return UnequalCosts().compute_s(action)

    critical_path(routes, duration_s)
    assert set(asked.values()) == {1}


def test_it_is_faster_where_runs_on_a_group_differ() -> None:
    routes, costs = routes_of(interleaved(3, 2, 4)), UnequalCosts()
    found = makespan(critical_path(routes, costs.compute_s), routes, costs)
    assert found < makespan(zero_bubble_h1(routes, costs.compute_s), routes, costs)
    assert found >= lower_bound_s(routes, costs, split_backward=True)


def test_disturbing_the_best_order_can_shorten_it() -> None:
    routes, costs = routes_of(interleaved(4, 3, 6)), DrawnCosts()
    first = makespan(critical_path(routes, costs.compute_s), routes, costs)
    iterated = makespan(iterated_critical_path(routes, costs.compute_s), routes, costs)
    assert lower_bound_s(routes, costs, split_backward=True) <= iterated < first


@BOTH
@pytest.mark.parametrize("limit", [4, 6, 9])
def test_what_halves_keep_stays_within_the_memory(generate: Generator, limit: int) -> None:
    """As with recomputation, an input half leaves more behind than it finds."""
    routes = routes_of(chain(3, 6))

    def saved_bytes(cell: Cell, half: bool) -> int:
        return 3 if half else 1

    memory = MemoryLimit(saved_bytes=lambda cell: 1, limit_bytes=lambda rank: limit, half_saved_bytes=lambda cell: 3)
    schedule = generate(routes, memory=memory)
    validate(schedule, Dependencies(routes))
    peaks = liveness(schedule, Dependencies(routes), saved_bytes).peak_bytes
    assert peaks is not None
    assert max(peaks) <= limit
    free = liveness(generate(routes), Dependencies(routes), saved_bytes).peak_bytes
    assert free is not None
    assert max(free) > 4


@BOTH
def test_a_pipeline_beside_another_one_is_ordered_as_if_it_were_alone(generate: Generator) -> None:
    stages = [replica(0, 1, 0, 1), replica(2, 3, 2, 3)]

    def plan(number: int, num_microbatches: int) -> Plan:
        own = module(*stages[:number], kind="language_model", loss_weight=1.0)
        return Plan(modules={"llm": own}, edges=(), num_microbatches=num_microbatches)

    costs = UnequalCosts()
    one, two = (routes_of(plan(number, 4), samples(4 * number, ["llm"])) for number in (1, 2))
    alone, beside = generate(one, costs.compute_s), generate(two, costs.compute_s)
    assert beside.ranks[:2] == alone.ranks
    assert [str(action)[6:] for action in beside.ranks[2]] == [str(action)[6:] for action in beside.ranks[0]]
