from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import chain, interleaved, language_model, module, replica, routes_of, samples, v_shaped, vision_audio_llm
from queue_rules import QueueRule, can_deadlock
from sampling import examples

from motet.plan import Edge, Plan
from motet.schedule.action import Compute, Durations, Kind
from motet.schedule.dependencies import Dependencies, SavedGraph
from motet.schedule.generators import Generator
from motet.schedule.generators.bubble_filling import bubble_filling
from motet.schedule.generators.fill_weights import is_within
from motet.schedule.generators.list_schedule import MemoryLimit
from motet.schedule.generators.one_f_one_b import one_f_one_b
from motet.schedule.generators.zero_bubble import zero_bubble_h1, zero_bubble_h2, zero_bubble_v
from motet.schedule.lower import lower
from motet.schedule.routes import Cell, Routes
from motet.schedule.schedule import Schedule
from motet.schedule.validate import liveness, validate
from motet.simulator.costs import UniformCosts
from motet.simulator.simulate import simulate

THREE = [zero_bubble_h1, zero_bubble_h2, zero_bubble_v]
three = pytest.mark.parametrize("generate", THREE)
seconds = st.integers(1, 9)


@dataclass(frozen=True, kw_only=True)
class HalvedCosts(UniformCosts):
    """The two halves of a backward need not take equally long."""

    input_s: float = 1.0

    def compute_s(self, action: Compute) -> float:
        if action.kind is Kind.INPUT:
            return self.input_s
        return self.backward_s - self.input_s if action.kind is Kind.WEIGHT else super().compute_s(action)


def halved(forward_s: float, input_s: float, weight_s: float) -> HalvedCosts:
    return HalvedCosts(forward_s=forward_s, input_s=input_s, backward_s=input_s + weight_s)


def idle_times(schedule: Schedule, routes: Routes, costs: UniformCosts) -> list[float]:
    """Of each rank, between its first and its last action: what zero-bubble papers call the bubble."""
    spans = simulate(lower(schedule, Dependencies(routes), costs.compute_s), costs).timeline.spans
    result = []
    for rank in range(routes.plan.num_ranks):
        own = [span for span in spans if span.rank == rank and span.kind in "FBIW"]
        result.append(own[-1].end - own[0].start - sum(span.end - span.start for span in own))
    return result


def makespan(schedule: Schedule, routes: Routes, costs: UniformCosts) -> float:
    return simulate(lower(schedule, Dependencies(routes), costs.compute_s), costs).iteration_time_s


def most_not_freed(schedule: Schedule, routes: Routes) -> list[int]:
    """The most microbatches of any stage that each rank has between forward and the end of the whole backward."""
    dependencies = Dependencies(routes)
    result = []
    for actions in schedule.ranks:
        held: set[object] = set()
        most = 0
        for action in actions:
            held |= {value for value in dependencies.writes(action) if isinstance(value, SavedGraph)}
            held -= {value for value in dependencies.reads(action) if isinstance(value, SavedGraph)}
            most = max(most, len(held))
        result.append(most)
    return result


@given(st.integers(2, 6), st.integers(0, 12), seconds, seconds, st.integers(0, 4))
@examples(40)
def test_the_bubble_of_h1(num_stages: int, more: int, forward_s: int, weight_s: int, extra_s: int) -> None:
    """(P - 1)(F + I - W) on the first rank, where W takes no longer than F and I; 1F1B's is (P - 1)(F + I + W).

    Where W takes longer than F it is (P - 1) I, for which the first rank waits before its first backward in any case.
    """
    input_s = weight_s + extra_s
    routes = routes_of(chain(num_stages, 2 * num_stages + more))
    costs = halved(forward_s, input_s, weight_s)
    idle = idle_times(zero_bubble_h1(routes, costs.compute_s), routes, costs)
    assert max(idle) == idle[0] == (num_stages - 1) * max(input_s, forward_s + input_s - weight_s)
    assert idle_times(one_f_one_b(routes), routes, costs)[0] == (num_stages - 1) * (forward_s + input_s + weight_s)


@pytest.mark.campaign
@given(st.integers(2, 6), st.integers(0, 12), seconds)
@examples(40)
def test_h2_and_zbv_leave_no_bubble(num_stages: int, more: int, slot_s: int) -> None:
    costs = halved(slot_s, slot_s, slot_s)
    for generate, plan in (
        (zero_bubble_h2, chain(num_stages, 2 * num_stages - 1 + more)),
        (zero_bubble_v, v_shaped(num_stages, 2 * num_stages + more)),
    ):
        routes = routes_of(plan)
        assert idle_times(generate(routes, costs.compute_s), routes, costs) == [0] * num_stages


@given(st.integers(1, 6), st.integers(1, 14))
@examples(40)
def test_what_ranks_hold(num_stages: int, num_microbatches: int) -> None:
    routes = routes_of(chain(num_stages, num_microbatches))
    places = range(num_stages)
    h1, h2 = zero_bubble_h1(routes), zero_bubble_h2(routes)
    # Whole activations, until the input half: in H1 as 1F1B.
    assert liveness(h1, Dependencies(routes)) == liveness(one_f_one_b(routes), Dependencies(routes))
    assert liveness(h2, Dependencies(routes)).peak_activations == tuple(
        min(num_microbatches, 2 * (num_stages - 1 - s) + 1) for s in places
    )
    # With what waits for the weight half: as 1F1B's first rank, and not quite twice that.
    assert max(most_not_freed(h1, routes)) == min(num_microbatches, num_stages)
    assert max(most_not_freed(h2, routes)) == min(num_microbatches, 2 * num_stages - 1)
    v = routes_of(v_shaped(num_stages, num_microbatches))
    assert max(most_not_freed(zero_bubble_v(v), v)) <= 2 * num_stages


@given(st.integers(1, 6), st.integers(1, 10), st.booleans())
@examples(40)
def test_it_is_not_slower_than_1f1b_for_equal_costs(num_stages: int, num_microbatches: int, over_a_dag: bool) -> None:
    plan = vision_audio_llm(num_microbatches) if over_a_dag else chain(num_stages, num_microbatches)
    routes, costs = routes_of(plan), UniformCosts()
    h1, h2 = (makespan(generate(routes), routes, costs) for generate in (zero_bubble_h1, zero_bubble_h2))
    assert h2 <= h1 <= makespan(one_f_one_b(routes), routes, costs)


def test_weight_halves_go_where_the_costs_leave_room() -> None:
    """A weight half twice as long as a forward does not fit between those of the next stage, which would wait."""
    plan, costs = chain(3, 9), halved(2, 2, 5)
    routes = routes_of(plan)
    with_costs = makespan(zero_bubble_h1(routes, costs.compute_s), routes, costs)
    assert with_costs <= makespan(zero_bubble_h1(routes), routes, costs)
    assert with_costs <= makespan(one_f_one_b(routes), routes, costs)


def test_stages_have_only_the_halves_that_their_plan_gives_them() -> None:
    """Vision is trainable, the language model's middle stage is frozen; vision's first stage has no input gradient."""
    plan = Plan(
        modules={
            "vision": module(replica(0, 1)),
            "llm": language_model(replica(2, 3, 4), trainable=((0, 1), (2, 3))),
        },
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=4,
    )
    routes = routes_of(plan)
    for generate in (zero_bubble_h1, zero_bubble_h2):
        kinds = ["".join(sorted({action.kind for action in actions})) for actions in generate(routes).ranks]
        assert kinds == ["BF", "FIW", "FIW", "BF", "FIW"]
        validate(generate(routes), Dependencies(routes))


@three
@given(st.integers(0, 10**9))
@examples(40)
def test_it_never_deadlocks_over_a_dag_with_missing_modalities(generate: Generator, seed: int) -> None:
    rng = Random(seed)
    num_groups, num_microbatches = rng.randint(1, 4), rng.randint(1, 9)
    there = list(range(num_groups))
    ranks = rng.choice([there, [*there, *reversed(there)]])
    trainable = [None, (), ((0, 1),)]
    plan = Plan(
        modules={
            "vision": module(replica(num_groups, num_groups + 1), trainable=rng.choice(trainable)),
            "audio": module(replica(num_groups + 2), trainable=rng.choice(trainable)),
            "llm": language_model(replica(*ranks), trainable=rng.choice(trainable)),
        },
        edges=(
            Edge(source="vision", target="llm", layers=(rng.randrange(len(ranks)),)),
            Edge(source="audio", target="llm"),
        ),
        num_microbatches=num_microbatches,
    )
    lacking = {i: [name for name in ("vision", "audio") if rng.random() < 0.3] for i in range(num_microbatches)}
    routes = routes_of(plan, samples(num_microbatches, list(plan.modules), lacking))
    durations = {stage: rng.choice([0.5, 1.0, 3.0]) for stage in {cell[:3] for cell in routes.cells}}
    costs: Durations = lambda action: durations[action.cell[:3]]  # noqa: E731
    schedule = generate(routes, rng.choice([None, costs]))
    validate(schedule, Dependencies(routes))
    program = lower(schedule, Dependencies(routes))
    for rule in QueueRule:
        assert not can_deadlock(program, rule), rule


def test_other_placements_are_split_too() -> None:
    routes = routes_of(interleaved(2, 2, 5))
    for generate in THREE:
        schedule = generate(routes)
        validate(schedule, Dependencies(routes))
        assert {action.kind for actions in schedule.ranks for action in actions} == set(Kind)


@pytest.mark.campaign
@given(st.integers(2, 5), st.integers(1, 3), seconds)
@examples(30)
def test_over_shared_ranks_last_stages_put_weight_halves_off(num_groups: int, turns: int, slot_s: int) -> None:
    """With equal halves no rank waits but for the first microbatch to reach it, and none holds more than before."""
    num_microbatches = turns * num_groups + num_groups
    routes, costs = routes_of(interleaved(num_groups, 2, num_microbatches)), halved(slot_s, slot_s, slot_s)
    before = max(most_not_freed(bubble_filling(routes, costs.compute_s), routes))
    for generate, times in ((zero_bubble_h1, 1), (zero_bubble_h2, 2)):
        schedule = generate(routes, costs.compute_s)
        assert makespan(schedule, routes, costs) == (6 * num_microbatches + num_groups - 1) * slot_s
        assert max(most_not_freed(schedule, routes)) <= times * before


@three
@given(st.integers(1, 7), st.integers(2, 7))
@examples(40)
def test_a_limit_in_bytes_counts_what_waits_for_its_weight_half(
    generate: Generator, num_microbatches: int, limit: int
) -> None:
    routes = routes_of(vision_audio_llm(num_microbatches))
    memory = MemoryLimit(saved_bytes=lambda cell: 10, limit_bytes=lambda rank: 10 * limit)
    assert max(most_not_freed(generate(routes, memory=memory), routes)) <= limit


@pytest.mark.parametrize("generate", [zero_bubble_h1, zero_bubble_h2])
@pytest.mark.parametrize("limit", range(7, 12))
def test_a_half_that_keeps_more_than_the_forward_did_stays_within_the_limit(generate: Generator, limit: int) -> None:
    """As with recomputation. Without a limit three halves wait at once, or more."""
    routes = routes_of(chain(3, 8))

    def saved_bytes(cell: Cell, half: bool) -> int:
        return 5 if half else 1

    def peak(schedule: Schedule) -> int:
        found = liveness(schedule, Dependencies(routes), saved_bytes).peak_bytes
        assert found is not None
        return max(found)

    memory = MemoryLimit(
        saved_bytes=lambda cell: saved_bytes(cell, False),
        limit_bytes=lambda rank: limit,
        half_saved_bytes=lambda cell: saved_bytes(cell, True),
    )
    schedule = generate(routes, memory=memory)
    assert peak(generate(routes)) > 11
    assert peak(schedule) <= limit
    assert is_within(schedule, routes, memory)


@pytest.mark.parametrize("encoder_rank", [None, 0])
def test_zbv_stays_within_the_limit(encoder_rank: int | None) -> None:
    """Also where an encoder shares the first rank, so that another schedule orders the V."""
    v = v_shaped(3, 12)
    if encoder_rank is not None:
        v = Plan(
            modules={"vision": module(replica(encoder_rank)), **v.modules},
            edges=(Edge(source="vision", target="llm"),),
            num_microbatches=12,
        )
    routes = routes_of(v)
    memory = MemoryLimit(saved_bytes=lambda cell: 1, limit_bytes=lambda rank: 5)
    schedule = zero_bubble_v(routes, memory=memory)
    validate(schedule, Dependencies(routes))
    assert is_within(schedule, routes, memory)
    assert not is_within(zero_bubble_v(routes), routes, memory)


def test_groups_that_overlap_in_part_keep_whole_backwards() -> None:
    plan = Plan(
        modules={"llm": language_model(replica((0, 1), (1, 2)))},
        edges=(),
        num_microbatches=3,
    )
    routes = routes_of(plan)
    schedule = zero_bubble_h1(routes)
    validate(schedule, Dependencies(routes))
    assert {action.kind for actions in schedule.ranks for action in actions} == {Kind.FORWARD, Kind.BACKWARD}
