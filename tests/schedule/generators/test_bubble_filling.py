from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import interleaved, language_model, module, replica, routes_of, samples
from queue_rules import QueueRule, can_deadlock
from sampling import examples

from motet.assignment.batch_assignment import BatchAssignment
from motet.plan import Edge, Plan
from motet.schedule.action import Compute, Durations, Kind, unit_duration
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators.bubble_filling import bubble_filling
from motet.schedule.generators.fill_bubbles import BubblesToFill, FillingClock, Policy
from motet.schedule.generators.interleaved_1f1b import interleaved_1f1b, interleaved_1f1b_adjusted, order_in_rounds
from motet.schedule.generators.list_schedule import MemoryLimit, list_schedule
from motet.schedule.lower import lower
from motet.schedule.order import iteration_s
from motet.schedule.routes import Routes, derive_routes
from motet.schedule.schedule import Schedule
from motet.schedule.stage_graph import microbatches_in_flight
from motet.schedule.validate import validate


def seconds(**forward_s: float) -> Durations:
    """By module; a backward takes twice as long."""
    return lambda action: forward_s[action.cell.module] * (1 if action.kind is Kind.FORWARD else 2)


def colocated(
    num_groups: int, num_chunks: int, num_microbatches: int, layers_per_group: int, *, frozen: bool = False
) -> Routes:
    """An encoder in stages of one layer, several in a row on each of the language model's ranks."""
    ranks = [rank for rank in range(num_groups) for _ in range(layers_per_group)]
    plan = Plan(
        modules={
            "vision": module(replica(*ranks), trainable=() if frozen else None),
            "llm": language_model(replica(*list(range(num_groups)) * num_chunks)),
        },
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=num_microbatches,
    )
    return routes_of(plan)


def listed(routes: Routes, costs: Durations) -> Schedule:
    return list_schedule(routes, costs, in_flight=microbatches_in_flight(routes))


def of_module(actions: tuple[Compute, ...], name: str) -> list[Compute]:
    return [action for action in actions if action.cell.module == name]


def test_by_hand() -> None:
    """Two ranks, three microbatches; the language model alone takes (3 + 1) x 3; a frozen encoder on the second rank.

    Microbatch 0 is encoded before all else (1 s), 1 while the second rank waits for 0's tokens, 2 where it costs 1 s:
    the second rank is busy from its first action on."""
    plan = Plan(
        modules={"vision": module(replica(1), trainable=()), "llm": language_model(replica(0, 1))},
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=3,
    )
    routes = routes_of(plan)
    assert iteration_s(bubble_filling(routes), Dependencies(routes), unit_duration) == 12 + 1 + 1


@pytest.mark.parametrize(
    ("num_groups", "num_chunks", "layers_per_group", "vision_s", "llm_s"),
    [(4, 1, 3, 0.3, 3.0), (4, 2, 3, 0.3, 2.0), (4, 2, 6, 0.2, 2.0), (2, 3, 2, 0.2, 1.0)],
)
def test_it_beats_list_scheduling(
    num_groups: int, num_chunks: int, layers_per_group: int, vision_s: float, llm_s: float
) -> None:
    routes = colocated(num_groups, num_chunks, 16, layers_per_group)
    costs = seconds(vision=vision_s, llm=llm_s)
    alone = routes_of(interleaved(num_groups, num_chunks, 16))
    dependencies = Dependencies(routes)
    filled, by_list = bubble_filling(routes, costs), listed(routes, costs)
    assert iteration_s(filled, dependencies, costs) < iteration_s(by_list, dependencies, costs)
    # The language model's own order stays as it is, with one of the two warm-ups.
    orders = [interleaved_1f1b(alone).text(), interleaved_1f1b_adjusted(alone).text()]
    assert Schedule([of_module(actions, "llm") for actions in filled.ranks]).text() in orders


def test_a_frozen_encoder_costs_little_more_than_its_work() -> None:
    """Interleaved, 16 microbatches: what it adds to the language model's time is 9% more than its own work."""
    routes = colocated(4, 2, 16, 6, frozen=True)
    costs = seconds(vision=0.2, llm=2.0)
    work_s = 16 * (6 * 0.2 + 2 * 3 * 2.0)
    fill_s = 4 * 6 * 0.2 + 3 * 2.0  # Until the last rank begins with the language model...
    drain_s = 3 * 4.0  # ... and while the last microbatch comes back.
    time_s = iteration_s(bubble_filling(routes, costs), Dependencies(routes), costs)
    assert time_s <= work_s + fill_s + drain_s


def test_all_forwards_ahead_is_the_coarse_schedule() -> None:
    routes = colocated(2, 1, 4, 2)
    given = order_in_rounds(routes, {"llm"}, forwards_per_place=1)
    assert given is not None
    clock = FillingClock(BubblesToFill(Dependencies(routes), given, unit_duration, None), Policy(lookahead=4))
    clock.run()
    first = "".join(f"{action.cell.module[0]}{action.kind.value} " for action in clock.schedule().ranks[0])
    assert first.startswith("vF " * 8)
    assert first.endswith("vB " * 8)


@given(st.integers(0, 10**9))
@examples(40)
def test_it_is_valid_never_deadlocks_and_is_never_slower_than_list_scheduling(seed: int) -> None:
    rng = Random(seed)
    num_groups, num_microbatches = rng.randint(1, 4), rng.randint(1, 8)
    modules = {}
    for name in ("vision", "audio")[: rng.randint(1, 2)]:
        layers, trainable = rng.randint(1, 3), rng.choice([None, ()])
        chain = replica(*(rank for rank in range(num_groups) for _ in range(layers)))
        pipelines = [replica(*[rank] * layers) for rank in range(num_groups)]
        modules[name] = module(*rng.choice([[chain], pipelines]), trainable=trainable)
    modules["llm"] = language_model(replica(*list(range(num_groups)) * rng.randint(1, 2)))
    plan = Plan(
        modules=modules,
        edges=tuple(Edge(source=name, target="llm") for name in modules if name != "llm"),
        num_microbatches=num_microbatches,
    )
    batch = samples(
        num_microbatches, list(modules), {i: ["vision"] for i in range(num_microbatches) if rng.random() < 0.2}
    )
    assignment = dealt(plan, num_microbatches, lambda name, i: batch[i].has(name))
    routes = derive_routes(plan, assignment, batch)
    costs = seconds(vision=rng.choice([0.1, 1.0]), audio=rng.choice([0.1, 0.5]), llm=rng.choice([1.0, 3.0]))
    dependencies = Dependencies(routes)
    schedule = bubble_filling(routes, costs)
    validate(schedule, dependencies)
    program = lower(schedule, dependencies, costs)
    for rule in QueueRule:
        assert not can_deadlock(program, rule), rule
    by_list = iteration_s(listed(routes, costs), dependencies, costs)
    assert iteration_s(schedule, dependencies, costs) <= by_list


def dealt(plan: Plan, num_samples: int, has) -> BatchAssignment:  # type: ignore[no-untyped-def]
    """Sample i is microbatch i of the language model, and goes to each module's replicas in turn."""
    return BatchAssignment(
        {
            name: tuple(
                tuple((i,) if has(name, i) else () for i in range(r, num_samples, len(m.replicas)))
                for r in range(len(m.replicas))
            )
            for name, m in plan.modules.items()
        }
    )


def test_encoder_pipelines_on_parts_of_the_language_models_groups() -> None:
    """Optimus: a language model with TP 2 on two groups; four encoder pipelines, one on each rank."""
    plan = Plan(
        modules={
            "vision": module(*(replica(rank, rank) for rank in range(4))),
            "llm": language_model(replica((0, 1), (2, 3))),
        },
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=8,
    )
    batch = samples(8, ["vision", "llm"])
    routes = derive_routes(plan, dealt(plan, 8, lambda name, i: True), batch)
    costs = seconds(vision=0.5, llm=2.0)
    schedule = bubble_filling(routes, costs)
    validate(schedule, Dependencies(routes))
    assert iteration_s(schedule, Dependencies(routes), costs) < iteration_s(
        listed(routes, costs), Dependencies(routes), costs
    )


@given(st.integers(1, 8), st.integers(0, 40), st.booleans())
@examples(40)
def test_a_limit_in_bytes_is_kept_beside_the_language_model(num_microbatches: int, more: int, chunks: bool) -> None:
    routes = colocated(2, 1 + chunks, num_microbatches, 2)
    size = {"vision": 1, "llm": 10}
    dependencies = Dependencies(routes)
    held = validate(
        bubble_filling(routes), dependencies, lambda cell, half: 10 if cell.module == "llm" else 0
    ).peak_bytes
    assert held is not None
    # Both encoder stages hold what the language model has in flight, four at most, beside what it holds itself.
    limit = max(held) + 2 * 4 + more
    memory = MemoryLimit(saved_bytes=lambda cell: size[cell.module], limit_bytes=lambda rank: limit)
    schedule = bubble_filling(routes, memory=memory)
    bytes_held = validate(schedule, dependencies, lambda cell, half: size[cell.module]).peak_bytes
    assert bytes_held is not None
    assert max(bytes_held) <= limit


def test_without_colocated_encoders_it_is_interleaved_1f1b() -> None:
    plan = Plan(
        modules={"vision": module(replica(2)), "llm": language_model(replica(0, 1, 0, 1))},
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=4,
    )
    routes = routes_of(plan)
    assert bubble_filling(routes) == interleaved_1f1b_adjusted(routes)
