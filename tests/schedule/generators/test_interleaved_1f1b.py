from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import interleaved, language_model, module, replica, routes_of, samples
from queue_rules import QueueRule, can_deadlock
from sampling import examples

from motet.plan import Edge, Plan, Replica, Stage
from motet.schedule.action import Compute, Kind
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators import Generator
from motet.schedule.generators.interleaved_1f1b import interleaved_1f1b, interleaved_1f1b_adjusted
from motet.schedule.generators.list_schedule import MemoryLimit
from motet.schedule.generators.one_f_one_b import one_f_one_b
from motet.schedule.lower import lower
from motet.schedule.routes import Routes
from motet.schedule.validate import liveness, validate
from motet.simulator.costs import UniformCosts
from motet.simulator.simulate import simulate

BOTH = [interleaved_1f1b, interleaved_1f1b_adjusted]
WARM_UP_PER_PLACE = {interleaved_1f1b: 2, interleaved_1f1b_adjusted: 1}
both = pytest.mark.parametrize("generate", BOTH)


def makespan(generate: Generator, routes: Routes) -> float:
    return simulate(lower(generate(routes), Dependencies(routes)), UniformCosts()).iteration_time_s


@both
@given(st.integers(2, 5), st.integers(2, 4), st.integers(1, 13))
@examples(50)
def test_the_fill_shrinks_by_the_number_of_chunks(
    generate: Generator, num_groups: int, num_chunks: int, num_microbatches: int
) -> None:
    routes = routes_of(interleaved(num_groups, num_chunks, num_microbatches))
    if num_microbatches >= num_groups:
        # In slots of one chunk: all work of a group, and P - 1 slots in which its first and last are elsewhere.
        slots = num_chunks * num_microbatches + num_groups - 1
    else:
        # Each microbatch must have been everywhere before the first is back.
        slots = num_chunks * num_groups + num_microbatches - 1
    assert makespan(generate, routes) == 3 * slots


@both
@given(st.integers(2, 5), st.integers(2, 4), st.integers(2, 4))
@examples(50)
def test_what_a_group_holds(generate: Generator, num_groups: int, num_chunks: int, num_rounds: int) -> None:
    """(V - 1) P microbatches of chunks, one, and one or two for each place after its own."""
    routes = routes_of(interleaved(num_groups, num_chunks, num_groups * num_rounds))
    peak = liveness(generate(routes), Dependencies(routes)).peak_activations
    per_place = WARM_UP_PER_PLACE[generate]
    assert peak == tuple(
        min(
            (num_chunks - 1) * num_groups + 1 + per_place * (num_groups - 1 - place),
            num_chunks * len(peak) * num_rounds,
        )
        for place in range(num_groups)
    )


def test_the_adjusted_warm_up_defers_the_first_chunks_last_microbatches() -> None:
    """Optimus, Figure 12: four devices, two chunks, eight microbatches; F5 to F8 (4 to 7, counted from 0)."""
    routes = routes_of(interleaved(4, 2, 8))

    def before_the_first_backward(actions: Sequence[Compute]) -> list[int]:
        kinds = [action.kind for action in actions]
        return [a.cell.microbatch for a in actions[: kinds.index(Kind.BACKWARD)] if a.cell.stage == 0]

    assert before_the_first_backward(interleaved_1f1b(routes).ranks[0]) == [0, 1, 2, 3, 4, 5, 6]
    assert before_the_first_backward(interleaved_1f1b_adjusted(routes).ranks[0]) == [0, 1, 2, 3]
    assert makespan(interleaved_1f1b, routes) == makespan(interleaved_1f1b_adjusted, routes)


@both
def test_an_encoder_before_it_does_not_hold_it_up(generate: Generator) -> None:
    """An encoder as fast as a chunk: two stages more to fill and to drain, and nothing else."""
    routes = routes_of(interleaved(4, 2, 8, num_encoder_stages=2))
    assert makespan(generate, routes) == 3 * (2 * 8 + 3 + 2)
    peak = liveness(generate(routes), Dependencies(routes)).peak_activations
    assert max(peak[4:]) <= 8


@both
def test_a_module_after_it_has_its_microbatches_in_flight(generate: Generator) -> None:
    plan = Plan(
        modules={
            "llm": language_model(replica(0, 1, 0, 1)),
            "generator": module(replica(2, 3, 4), loss_weight=1.0),
        },
        edges=(Edge(source="llm", target="generator"),),
        num_microbatches=9,
    )
    routes = routes_of(plan)
    validate(generate(routes), Dependencies(routes))
    # The language model's groups have twice the generator's work: they are busy but for the way there and back.
    assert makespan(generate, routes) <= 9 * 6 + 3 * (1 + 3 + 1) + 6


@both
@given(st.integers(0, 10**9))
@examples(30)
def test_it_never_deadlocks_over_a_dag_with_missing_modalities(generate: Generator, seed: int) -> None:
    rng = Random(seed)
    num_groups, num_microbatches = rng.randint(1, 4), rng.randint(1, 9)
    num_stages = rng.randint(num_groups, 3 * num_groups)
    trainable = rng.choice([None, (), ((0, 1),)])
    # Vision goes round its own two ranks.
    vision = [num_groups + s % 2 for s in range(rng.randint(2, 5))]
    audio = [num_groups + 2 + s for s in range(rng.randint(1, 3))]
    layers = sorted({rng.randrange(num_stages) for _ in range(2)})
    plan = Plan(
        modules={
            "vision": module(replica(*vision), trainable=trainable),
            "audio": module(replica(*audio)),
            "llm": language_model(replica(*(s % num_groups for s in range(num_stages)))),
        },
        edges=(Edge(source="vision", target="llm", layers=tuple(layers)), Edge(source="audio", target="llm")),
        num_microbatches=num_microbatches,
    )
    lacking = {i: [name for name in ("vision", "audio") if rng.random() < 0.3] for i in range(num_microbatches)}
    routes = routes_of(plan, samples(num_microbatches, list(plan.modules), lacking))
    schedule = generate(routes)
    validate(schedule, Dependencies(routes))
    program = lower(schedule, Dependencies(routes))
    for rule in QueueRule:
        assert not can_deadlock(program, rule), rule


@both
def test_without_repeated_groups_it_is_1f1b(generate: Generator) -> None:
    routes = routes_of(interleaved(4, 1, 6, num_encoder_stages=2))
    assert generate(routes) == one_f_one_b(routes)


@both
def test_a_limit_in_bytes_and_other_placements_go_to_the_list_scheduler(generate: Generator) -> None:
    routes = routes_of(interleaved(2, 2, 6))
    memory = MemoryLimit(saved_bytes=lambda cell: 1, limit_bytes=lambda rank: 3)
    assert max(validate(generate(routes, memory=memory), Dependencies(routes)).peak_activations) <= 3
    v_shaped = Plan(modules={"llm": language_model(replica(0, 1, 1, 0))}, edges=(), num_microbatches=5)
    validate(generate(routes_of(v_shaped)), Dependencies(routes_of(v_shaped)))


def test_groups_of_several_ranks_and_replicas_that_do_not_look_alike() -> None:
    plain = Replica(stages=(Stage(layers=(0, 1), ranks=(4,)), Stage(layers=(1, 4), ranks=(5,))))
    plan = Plan(
        modules={"llm": language_model(replica((0, 1), (2, 3), (0, 1), (2, 3)), plain)}, edges=(), num_microbatches=4
    )
    routes = routes_of(plan, samples(8, ["llm"]))
    schedule = interleaved_1f1b(routes)
    assert schedule.ranks[0] == schedule.ranks[1] != schedule.ranks[2] == schedule.ranks[3]
    validate(schedule, Dependencies(routes))
