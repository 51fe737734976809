from dataclasses import dataclass
from math import inf
from random import Random

import numpy as np
import pytest
from drawing import Limits, draw_problem
from plans import chain, language_model, module, replica, routes_of, samples, vision_audio_llm
from random_costs import RandomCosts
from reference_simulator import reference_times

from motet.plan import Edge, Plan
from motet.ragged_arrays import Floats, Ints
from motet.schedule.action import Compute, Kind
from motet.schedule.dependencies import Dependencies, Gradient
from motet.schedule.generators import GENERATORS
from motet.schedule.lower import Message, Program, lower
from motet.schedule.schedule import Schedule
from motet.simulator.costs import Disturbances, UniformCosts
from motet.simulator.event_loop import SharedCards
from motet.simulator.simulate import SimulationResult, simulate
from motet.timeline import Span


def program_of(plan: Plan, generator: str = "1f1b", num_samples: int | None = None) -> Program:
    routes = routes_of(plan, None if num_samples is None else samples(num_samples, list(plan.modules)))
    return lower(GENERATORS[generator](routes), Dependencies(routes))


def when(result: SimulationResult, name: str, rank: int | None = None) -> tuple[float, float]:
    spans = [s for s in result.timeline.spans if s.name == name and rank in (None, s.rank)]
    assert len({(s.start, s.end) for s in spans}) == 1, spans
    return spans[0].start, spans[0].end


@pytest.mark.parametrize("generator", ["1f1b", "gpipe"])
def test_makespan_of_a_chain_and_of_a_dag(generator: str) -> None:
    costs = UniformCosts(forward_s=1, backward_s=2)
    assert simulate(program_of(chain(4, 8), generator), costs).iteration_time_s == (8 + 3) * 3
    assert simulate(program_of(vision_audio_llm(6), generator), costs).iteration_time_s == (6 + 4) * 3


def test_bubble_fraction_of_a_chain() -> None:
    result = simulate(program_of(chain(4, 8)), UniformCosts())
    assert result.bubble_fraction == pytest.approx(3 / 11)  # (p - 1) / (m + p - 1)


def test_messages_delay_what_reads_them_and_not_who_sends_them() -> None:
    result = simulate(program_of(chain(2, 1)), UniformCosts(message_seconds=0.5))
    assert when(result, "llm[0].1F0") == (1.5, 2.5)
    assert when(result, "llm[0].0B0") == (5.0, 7.0)


def test_messages_of_a_link_follow_each_other() -> None:
    result = simulate(program_of(chain(2, 2), "gpipe"), UniformCosts(message_seconds=3))
    assert when(result, "llm[0].0F1") == (1, 2)
    assert when(result, "llm[0].0:0->llm[0].1:0 0>1") == (1, 4)
    assert when(result, "llm[0].0:1->llm[0].1:1 0>1") == (4, 7)  # made at 2
    assert when(result, "llm[0].1F1") == (7, 8)


def test_a_transfer_begins_when_both_ends_are_posted() -> None:
    """Rank 0 is at its own forward until 5; by the order of the program its receive comes after that."""
    plan = Plan(
        modules={"other": module(replica(0), trainable=()), "llm": language_model(replica(1, 0), trainable=())},
        edges=(Edge(source="other", target="llm", layers=(1,)),),
        num_microbatches=1,
    )
    program = program_of(plan)

    class Costs(UniformCosts):
        def compute_s(self, action: Compute) -> float:
            return 5.0 if action.cell.module == "other" else 1.0

    result = simulate(program, Costs(message_seconds=2))
    assert when(result, "other[0].0F0") == (0, 5)
    assert when(result, "llm[0].0:0->llm[0].1:0 1>0") == (5, 7)
    assert when(result, "llm[0].1F0") == (7, 8)


def test_a_group_computes_together() -> None:
    plan = Plan(modules={"llm": language_model(replica((0, 1), (1, 2)))}, edges=(), num_microbatches=2)
    result = simulate(program_of(plan, "gpipe"), UniformCosts())
    spans = [s for s in result.timeline.spans if s.name == "llm[0].1F0"]
    assert [s.rank for s in spans] == [1, 2]
    assert len({(s.start, s.end) for s in spans}) == 1


def test_reductions_run_beside_the_computation_and_end_the_iteration() -> None:
    plan = Plan(modules={"llm": language_model(replica(0, 1), replica(2, 3))}, edges=(), num_microbatches=1)
    result = simulate(program_of(plan, num_samples=2), UniformCosts(reduce_seconds=4, fixed_s=1))
    # F 0-1, 1-2; B of the last stage 2-4, of the first 4-6.
    assert when(result, "llm.R[1:2)") == (4, 8)
    assert when(result, "llm.R[0:1)") == (6, 10)
    assert when(result, "optimizer") == (10, 11)
    assert result.iteration_time_s == 11
    assert result.bubble_fraction == pytest.approx(1 - 4 / 11)


def test_reductions_of_a_rank_follow_each_other() -> None:
    plan = Plan(modules={"llm": language_model(replica(0, 0), replica(1, 1))}, edges=(), num_microbatches=1)
    result = simulate(program_of(plan, num_samples=2), UniformCosts(reduce_seconds=4))
    assert when(result, "llm.R[1:2)") == (4, 8)
    assert when(result, "llm.R[0:1)") == (8, 12)


def test_ranks_share_cores() -> None:
    """Two stages, two microbatches, GPipe on one core: it never idles; one that computes alone has it all."""
    result = simulate(program_of(chain(2, 2), "gpipe"), UniformCosts(), num_cores=1)
    assert result.iteration_time_s == pytest.approx(2 * 2 * 3)
    assert when(result, "llm[0].0F0") == (0, 1)
    # From 1 on, F1 of stage 0 and F0 of stage 1 share the core.
    assert when(result, "llm[0].0F1") == pytest.approx((1, 3))
    assert when(result, "llm[0].1F0") == pytest.approx((1, 3))
    assert when(result, "llm[0].1F1") == pytest.approx((3, 4))


def test_enough_cores_are_as_good_as_cores_of_ones_own() -> None:
    program = program_of(vision_audio_llm(5))
    assert simulate(program, UniformCosts(), num_cores=6).iteration_time_s == pytest.approx(
        simulate(program, UniformCosts()).iteration_time_s
    )


def test_split_backwards() -> None:
    """Zero-bubble by hand: the input halves first, so the first stage begins its own earlier; weight halves fill."""
    routes = routes_of(chain(2, 2))
    text = """
    0: llm[0].0F0 llm[0].0F1 llm[0].0I0 llm[0].0W0 llm[0].0I1 llm[0].0W1
    1: llm[0].1F0 llm[0].1I0 llm[0].1F1 llm[0].1I1 llm[0].1W0 llm[0].1W1
    """
    result = simulate(lower(Schedule.parse(text), Dependencies(routes)), UniformCosts())
    assert when(result, "llm[0].0I0") == (3, 4)
    assert when(result, "llm[0].0I1") == (5, 6)
    assert result.iteration_time_s == 7


def test_it_is_deterministic() -> None:
    program = program_of(vision_audio_llm(5))
    costs = RandomCosts(3)
    assert simulate(program, costs, num_cores=2).timeline == simulate(program, costs, num_cores=2).timeline


@pytest.mark.parametrize(
    ("num_cores", "num_cards", "slower"),
    [(None, None, {}), (1, None, {}), (3, None, {}), (None, 1, {}), (2, 2, {1: 3}), (None, None, {0: 2, 2: 3})],
)
def test_it_equals_the_reference_on_drawn_problems(
    num_cores: int | None, num_cards: int | None, slower: dict[int, int]
) -> None:
    limits = Limits(
        max_modules=3, max_layers=3, max_replicas=2, max_ranks=5, max_microbatches=3, max_samples=5, tied=True
    )
    for seed in range(30):
        problem = draw_problem(Random(seed), limits)
        program = lower(GENERATORS[problem.plan.schedule](problem.routes), problem.dependencies)
        costs = RandomCosts(seed)
        cards = None if num_cards is None else SharedCards(lambda rank: rank // 2, num_cards)
        disturbances = Disturbances(straggler_factors=slower)
        result = simulate(program, costs, num_cores=num_cores, cards=cards, disturbances=disturbances)
        reference = reference_times(program, costs, num_cores, None if num_cards is None else 2, num_cards or 1, slower)
        expected: list[Span] = []
        for step, (start, end) in zip(program.steps, reference, strict=True):
            kind = step.kind.value if isinstance(step, Compute) else type(step).__name__.lower()
            ranks = (step.sender,) if kind == "message" else program.participants(step)  # type: ignore[union-attr]
            expected += [Span(rank, str(step), kind, float(start), float(end)) for rank in ranks]
        assert [s.name for s in result.timeline.spans] == [s.name for s in expected]
        for ours, theirs in zip(result.timeline.spans, expected, strict=True):
            assert (ours.rank, ours.kind) == (theirs.rank, theirs.kind)
            assert (ours.start, ours.end) == pytest.approx((theirs.start, theirs.end), abs=1e-9), (seed, ours)


def test_one_pass_and_the_event_loop_agree_to_the_bit() -> None:
    for seed in range(60):
        problem = draw_problem(Random(seed), Limits(tied=True))
        program = lower(GENERATORS[problem.plan.schedule](problem.routes), problem.dependencies)
        costs = RandomCosts(seed, fixed_s=0.25)
        quick, slow = simulate(program, costs), simulate(program, costs, num_cores=inf)
        assert quick.timeline == slow.timeline
        for ours, theirs in zip(quick.memory, slow.memory, strict=True):
            assert ours.times_s.tolist() == theirs.times_s.tolist()
            assert ours.bytes_held.tolist() == theirs.bytes_held.tolist()
        assert quick.iteration_time_s == quick.timeline.iteration_time_s
        assert quick.bubble_fraction == pytest.approx(quick.timeline.bubble_fraction)


def test_messages_share_the_cards_of_their_nodes() -> None:
    """Ranks 0 and 1 are one node, 2 and 3 another; each of 0 and 1 sends 2 seconds from 1 on."""
    plan = Plan(modules={"llm": language_model(replica((0, 1), (2, 3)), trainable=())}, edges=(), num_microbatches=1)
    program = program_of(plan)
    costs = UniformCosts(message_seconds=2)
    alone = simulate(program, costs, cards=SharedCards(lambda rank: rank // 2, 2))
    assert when(alone, "llm[0].1F0") == (3, 4)
    shared = simulate(program, costs, cards=SharedCards(lambda rank: rank // 2, 1))
    assert when(shared, "llm[0].0:0->llm[0].1:0 0>2") == (1, 5)
    assert when(shared, "llm[0].1F0") == (5, 6)


def test_a_straggler_slows_its_group_and_those_that_wait_for_it() -> None:
    plan = Plan(modules={"llm": language_model(replica((0, 1), 2))}, edges=(), num_microbatches=1)
    result = simulate(program_of(plan), UniformCosts(), disturbances=Disturbances(straggler_factors={1: 3.0}))
    assert when(result, "llm[0].0F0") == (0, 3)
    assert when(result, "llm[0].1F0") == (3, 4)
    assert when(result, "llm[0].0B0") == (6, 12)


def test_jitter_depends_on_the_seed_alone_and_has_its_mean() -> None:
    program = program_of(chain(4, 500))

    def durations(seed: int) -> list[float]:
        result = simulate(program, UniformCosts(), disturbances=Disturbances(jitter=0.2, seed=seed))
        return [s.end - s.start for s in result.timeline.spans if s.kind == "F"]

    assert durations(1) == durations(1) != durations(2)
    assert sum(durations(1)) / len(durations(1)) == pytest.approx(1.2, abs=0.03)
    assert min(durations(1)) >= 1


@pytest.mark.parametrize("values", [{"straggler_factors": {3: 0.0}}, {"jitter": -0.1}])
def test_disturbances_that_cannot_be_are_refused(values: dict) -> None:
    with pytest.raises(ValueError, match="give"):
        Disturbances(**values)


@dataclass(frozen=True)
class ArrayRandomCosts(RandomCosts):
    """Single answers that follow from links and sizes, and the same all at once."""

    def link(self, sender: int, receiver: int) -> tuple[float, float]:
        return self._draw("latency", sender, receiver) / 4, 1.0 + self._draw("rate", sender, receiver)

    def message_bytes(self, message: Message) -> int:
        return self._draw("bytes", *message[:3])

    def message_s(self, message: Message) -> float:
        latency_s, bytes_per_s = self.link(message.sender, message.receiver)
        return latency_s + self.message_bytes(message) / bytes_per_s


class AtOnceCosts(ArrayRandomCosts):
    def compute_seconds(self, dependencies: Dependencies) -> Floats:
        every = dependencies.actions(np.arange(dependencies.num_actions))
        return np.array([self.compute_s(action) for action in every])

    def saved_sizes(self, dependencies: Dependencies) -> Ints:
        cells = dependencies.routes.cells
        return np.array([[self.saved_bytes(cell, half) for cell in cells] for half in (False, True)])

    def carried_sizes(self, dependencies: Dependencies) -> Ints:
        values = (dependencies.value(i) for i in range(2 * dependencies.routes.num_routes))
        return np.array(
            [self.message_bytes(Message(v.source, v.target, isinstance(v, Gradient), 0, 0)) for v in values],  # type: ignore[union-attr]
            dtype=np.int64,
        )


def test_answers_at_once_are_the_single_ones() -> None:
    for seed in range(30):
        problem = draw_problem(Random(seed))
        program = lower(GENERATORS[problem.plan.schedule](problem.routes), problem.dependencies)
        single, at_once = simulate(program, ArrayRandomCosts(seed)), simulate(program, AtOnceCosts(seed))
        assert single.timeline == at_once.timeline
        assert single.peak_memory_bytes == at_once.peak_memory_bytes


def test_every_action_has_a_span_on_each_of_its_ranks() -> None:
    plan = Plan(modules={"llm": language_model(replica((0, 1), 2))}, edges=(), num_microbatches=2)
    spans = simulate(program_of(plan), UniformCosts()).timeline.spans
    computed = sorted((s.rank, s.name) for s in spans if s.kind in {kind.value for kind in Kind})
    assert computed == sorted(
        (rank, f"llm[0].{stage}{kind}{m}") for rank, stage in ((0, 0), (1, 0), (2, 1)) for kind in "FB" for m in (0, 1)
    )
