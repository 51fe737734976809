from random import Random

from drawing import Limits, draw_problem
from hypothesis import given
from hypothesis import strategies as st
from plans import chain, language_model, module, replica, routes_of, vision_audio_llm
from sampling import examples

from motet.plan import Edge, Plan
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators.eager_1f1b import eager_1f1b
from motet.schedule.generators.list_schedule import MemoryLimit
from motet.schedule.generators.one_f_one_b import one_f_one_b
from motet.schedule.lower import lower
from motet.schedule.routes import Routes
from motet.schedule.schedule import Schedule
from motet.schedule.validate import liveness, validate
from motet.simulator.costs import UniformCosts
from motet.simulator.simulate import simulate


def makespan(schedule: Schedule, routes: Routes, message_s: float) -> float:
    costs = UniformCosts(message_seconds=message_s)
    return simulate(lower(schedule, Dependencies(routes)), costs).iteration_time_s


def test_without_a_limit_twice_as_many_forwards_come_first() -> None:
    routes = routes_of(chain(4, 12))
    assert liveness(eager_1f1b(routes), Dependencies(routes)).peak_activations == (7, 5, 3, 1)
    routes = routes_of(vision_audio_llm(12))
    assert liveness(eager_1f1b(routes), Dependencies(routes)).peak_activations == (9, 7, 7, 5, 3, 1)


def test_it_hides_messages_that_1f1b_waits_for() -> None:
    routes = routes_of(chain(4, 12))
    eager, plain = eager_1f1b(routes), one_f_one_b(routes)
    assert makespan(eager, routes, 0) == makespan(plain, routes, 0) == (12 + 3) * 3
    # A message takes as long as a forward: three there, three back, and nothing more.
    assert makespan(eager, routes, 1) == (12 + 3) * 3 + 6 < makespan(plain, routes, 1)


@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 12))
@examples(50)
def test_as_many_forwards_as_fit(num_stages: int, num_microbatches: int, limit: int) -> None:
    routes = routes_of(chain(num_stages, num_microbatches))
    memory = MemoryLimit(saved_bytes=lambda cell: 10, limit_bytes=lambda rank: 10 * limit + 5)
    peak = liveness(eager_1f1b(routes, memory=memory), Dependencies(routes)).peak_activations
    # The first rank's forwards wait for nothing, and it needs no more in hand;
    # the others get theirs while they are not behind with their backwards.
    assert peak[0] == min(limit, num_microbatches, 2 * num_stages - 1)
    assert max(peak) <= limit


@given(st.integers(0, 10**9), st.integers(0, 20))
@examples(60)
def test_the_limit_holds_on_ranks_that_stages_share(seed: int, more: int) -> None:
    rng = Random(seed)
    size = {"vision": rng.randint(1, 5), "audio": rng.randint(1, 5), "llm": rng.randint(1, 9)}
    plan = Plan(
        modules={
            "vision": module(replica(*rng.choice([(0, 1), (0, 0), (1, 0)]))),
            "audio": module(replica(*rng.choice([(0, 1), (1,), (1, 0)]))),
            "llm": language_model(replica(0, 1, 0)),
        },
        edges=(Edge(source="vision", target="llm"), Edge(source="audio", target="llm")),
        num_microbatches=rng.randint(1, 8),
    )
    routes = routes_of(plan)
    # One microbatch of each stage, at least.
    limit = [sum(size[name] for name, *_ in plan.stages_of_rank(rank)) + more for rank in range(2)]
    memory = MemoryLimit(saved_bytes=lambda cell: size[cell.module], limit_bytes=limit.__getitem__)
    schedule = eager_1f1b(routes, memory=memory)
    peak = validate(schedule, Dependencies(routes), lambda cell, half: size[cell.module]).peak_bytes
    assert peak is not None
    assert all(bytes_held <= limit[rank] for rank, bytes_held in enumerate(peak))


@given(st.integers(0, 10**9))
@examples(30)
def test_any_problem_has_a_schedule_under_any_limit(seed: int) -> None:
    problem = draw_problem(Random(seed), Limits())
    memory = MemoryLimit(saved_bytes=lambda cell: 1 + cell.stage, limit_bytes=lambda rank: rank)
    validate(eager_1f1b(problem.routes, memory=memory), problem.dependencies)
