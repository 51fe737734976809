"""What holds of every schedule, for any sizes, durations and drawn problems."""

from dataclasses import dataclass
from random import Random

from drawing import draw_problem
from hypothesis import given
from hypothesis import strategies as st
from plans import chain, routes_of, vision_audio_llm
from sampling import examples

from motet.schedule.action import Compute, Reduce
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators import GENERATORS, SPLIT_BACKWARDS
from motet.schedule.generators.list_schedule import MemoryLimit
from motet.schedule.lower import Message, lower
from motet.schedule.schedule import Schedule
from motet.schedule.validate import liveness
from motet.simulator.costs import UniformCosts
from motet.simulator.lower_bound import lower_bound_s
from motet.simulator.simulate import simulate

generators = st.sampled_from(sorted(GENERATORS))
seeds = st.integers(0, 10**9)


@dataclass(frozen=True)
class DrawnCosts(UniformCosts):
    """Durations between 1 and 5 s, messages and reductions up to 1 s; some of them `slower` than else."""

    seed: int = 0
    slower: float = 0.0

    def _seconds(self, key: object, longest: float) -> float:
        rng = Random(f"{self.seed}/{key}")
        return rng.random() * longest + (self.slower if rng.random() < 0.3 else 0.0)

    def compute_s(self, action: Compute) -> float:
        return 1 + self._seconds(str(action), 4)

    def message_s(self, message: Message) -> float:
        return self._seconds(str(message), 1)

    def reduce_s(self, reduce: Reduce) -> float:
        return self._seconds(str(reduce), 1)


@given(
    st.sampled_from(sorted(GENERATORS.keys() - SPLIT_BACKWARDS)),
    st.integers(1, 6),
    st.integers(1, 10),
    st.integers(1, 5),
    st.integers(1, 9),
)
def test_equal_stages_take_stages_plus_microbatches_minus_one_slots(
    generator: str, num_stages: int, num_microbatches: int, forward_s: int, backward_s: int
) -> None:
    routes = routes_of(chain(num_stages, num_microbatches))
    program = lower(GENERATORS[generator](routes), Dependencies(routes))
    time_s = simulate(program, UniformCosts(forward_s=forward_s, backward_s=backward_s)).iteration_time_s
    assert time_s == (num_stages + num_microbatches - 1) * (forward_s + backward_s)


@given(st.integers(1, 8), st.integers(1, 12))
def test_1f1b_never_holds_more_than_the_stages_that_follow(num_stages: int, num_microbatches: int) -> None:
    routes = routes_of(chain(num_stages, num_microbatches))
    peak = liveness(GENERATORS["1f1b"](routes), Dependencies(routes)).peak_activations
    assert peak == tuple(min(num_microbatches, num_stages - s) for s in range(num_stages))


@given(generators, st.integers(1, 7), st.integers(1, 7))
def test_a_limit_in_bytes_that_one_microbatch_fits_is_kept(generator: str, num_microbatches: int, limit: int) -> None:
    routes = routes_of(vision_audio_llm(num_microbatches))
    memory = MemoryLimit(saved_bytes=lambda cell: 1, limit_bytes=lambda rank: limit)
    schedule = GENERATORS[generator](routes, memory=memory)
    if generator == "gpipe":
        limit = num_microbatches  # It lifts the limit: all forwards come first.
    assert max(liveness(schedule, Dependencies(routes)).peak_activations) <= limit


@given(seeds, generators)
@examples(50)
def test_text_parses_back(seed: int, generator: str) -> None:
    schedule = GENERATORS[generator](draw_problem(Random(seed)).routes)
    assert Schedule.parse(schedule.text()) == schedule


@given(seeds, generators)
@examples(50)
def test_no_schedule_is_faster_than_the_lower_bound(seed: int, generator: str) -> None:
    problem = draw_problem(Random(seed))
    costs = DrawnCosts(seed=seed, fixed_s=0.25)
    program = lower(GENERATORS[generator](problem.routes, costs.compute_s), problem.dependencies, costs.compute_s)
    result = simulate(program, costs)
    bound_s = lower_bound_s(problem.routes, costs, split_backward=generator in SPLIT_BACKWARDS)
    assert bound_s <= result.iteration_time_s + 1e-9
    assert 0 <= result.bubble_fraction < 1


@given(seeds, generators, st.floats(0, 5))
@examples(50)
def test_what_takes_longer_never_makes_the_iteration_shorter(seed: int, generator: str, slower: float) -> None:
    problem = draw_problem(Random(seed))
    program = lower(GENERATORS[generator](problem.routes), problem.dependencies)
    before = simulate(program, DrawnCosts(seed=seed)).iteration_time_s
    after = simulate(program, DrawnCosts(seed=seed, slower=slower)).iteration_time_s
    assert after >= before - 1e-9


@given(seeds, generators, st.integers(1, 4))
@examples(50)
def test_fewer_cores_take_no_more_than_all_the_work_one_after_the_other(
    seed: int, generator: str, num_cores: int
) -> None:
    problem = draw_problem(Random(seed))
    program = lower(GENERATORS[generator](problem.routes), problem.dependencies)
    costs = DrawnCosts(seed=seed)
    work_s = sum(len(program.participants(s)) * costs.compute_s(s) for s in program.steps if isinstance(s, Compute))
    rest_s = sum(costs.message_s(s) for s in program.steps if isinstance(s, Message))
    rest_s += sum(costs.reduce_s(s) for s in program.steps if isinstance(s, Reduce))
    time_s = simulate(program, costs, num_cores=num_cores).iteration_time_s
    assert work_s / num_cores <= time_s + 1e-9
    assert time_s <= work_s + rest_s + 1e-9
