"""Whoever folds pipelines sees the same as whoever simulates them all."""

from dataclasses import dataclass, replace
from random import Random

import pytest
from drawing import Limits, Problem, draw_problem
from plans import chain, language_model, module, replica, samples
from random_costs import RandomCosts
from sampling import in_campaigns

from motet.assignment.batch_assignment import BatchAssignment, contiguous_assignment
from motet.assignment.sample import kinds_of_samples
from motet.plan import Edge, Plan, Replica
from motet.schedule.action import Compute
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators import GENERATORS
from motet.schedule.generators.list_schedule import MemoryLimit
from motet.schedule.lower import Message, lower
from motet.schedule.program import make_program, make_schedule
from motet.schedule.routes import Cell, Routes, derive_routes
from motet.simulator.costs import Disturbances, UniformCosts
from motet.simulator.replica_folding import Folding, copy_schedule, fold
from motet.simulator.simulate import simulate
from motet.timeline import BUSY_KINDS, Timeline


def repeated(problem: Problem, times: int) -> Problem:
    """The same pipelines several times, on ranks and samples of their own."""
    plan, size = problem.plan, problem.plan.num_ranks
    modules = {
        name: replace(
            part,
            replicas=tuple(
                Replica(
                    stages=tuple(replace(s, ranks=tuple(rank + k * size for rank in s.ranks)) for s in copied.stages)
                )
                for k in range(times)
                for copied in part.replicas
            ),
        )
        for name, part in plan.modules.items()
    }
    cut = {
        name: tuple(
            tuple(tuple(i + k * len(problem.samples) for i in microbatch) for microbatch in microbatches)
            for k in range(times)
            for microbatches in replicas
        )
        for name, replicas in problem.assignment.microbatches.items()
    }
    return Problem(replace(plan, modules=modules), BatchAssignment(cut), problem.samples * times)


@dataclass(frozen=True)
class AlikeCosts(RandomCosts):
    """The same for all that a folding says to be alike."""

    folding: Folding | None = None

    def _cell(self, cell: Cell) -> Cell:
        assert self.folding is not None
        return cell._replace(replica=self.folding.replica_of[cell.module, cell.replica][1])

    def _rank(self, rank: int) -> int:
        assert self.folding is not None
        return int(self.folding.rank_of[rank])

    def _message(self, message: Message) -> Message:
        ends = self._cell(message.source), self._cell(message.target)
        return Message(*ends, message.gradient, self._rank(message.sender), self._rank(message.receiver))

    def compute_s(self, action: Compute) -> float:
        return super().compute_s(Compute(action.kind, self._cell(action.cell)))

    def message_s(self, message: Message) -> float:
        return super().message_s(self._message(message))

    def message_bytes(self, message: Message) -> int:
        return super().message_bytes(self._message(message))

    def saved_bytes(self, cell: Cell, half: bool) -> int:
        return super().saved_bytes(self._cell(cell), half)

    def static_bytes(self, rank: int) -> int:
        return super().static_bytes(self._rank(rank))

    def memory_limit(self) -> MemoryLimit:
        """Too little for all that a rank could hold, for some seeds for any of it."""
        return MemoryLimit(
            saved_bytes=lambda cell: self.saved_bytes(cell, half=False),
            limit_bytes=lambda rank: 50 * (self.seed % 5) * (1 + self._rank(rank)),
        )


def computed(timeline: Timeline, rank: int) -> list[tuple[str, float, float]]:
    return [(span.kind, span.start, span.end) for span in timeline.of_rank(rank) if span.kind in BUSY_KINDS]


def folded_problem(seed: int) -> tuple[Problem, Problem, Folding, AlikeCosts, Routes]:
    """One pipeline, three that are alike, and what is left of them when they are folded."""
    problem = draw_problem(Random(seed), Limits(max_modules=3, max_ranks=5, max_samples=5, tied=True))
    whole = repeated(problem, 3)
    folding = fold(whole.plan, whole.assignment, kinds_of_samples(whole.samples))
    costs = AlikeCosts(seed, fixed_s=0.5, folding=folding)
    return problem, whole, folding, costs, derive_routes(whole.plan, folding.assignment, whole.samples)


USUAL = ("1f1b", "zero_bubble_v", "bubble_filling", "distmm_pipe")
"""One schedule of each kind: one order, split backwards, list scheduling, contrastive towers."""


@pytest.mark.parametrize("generator", [*USUAL, *in_campaigns(name for name in GENERATORS if name not in USUAL)])
def test_folded_and_whole_are_the_same_on_drawn_problems(generator: str) -> None:
    for seed in range(30):
        problem, whole, folding, costs, routes = folded_problem(seed)
        assert len(routes.cells) <= len(problem.routes.cells)
        limit = costs.memory_limit()
        expected = simulate(make_program(generator, whole.routes, costs.compute_s, memory=limit), costs)
        program = make_program(generator, routes, costs.compute_s, memory=limit)
        folded = simulate(program, costs, folding=folding)
        assert folded.iteration_time_s == expected.iteration_time_s, seed
        assert folded.bubble_fraction == pytest.approx(expected.bubble_fraction)
        assert folded.peak_memory_bytes == expected.peak_memory_bytes
        assert set(folded.timeline.spans) == set(expected.timeline.spans), seed
        assert sorted(rank for ranks in folded.alike_ranks for rank in ranks) == list(range(whole.plan.num_ranks))
        for result in (folded, expected):
            first = {ranks[0] for ranks in result.alike_ranks}
            of_first = {span for span in expected.timeline.spans if span.rank in first}
            assert set(result.timeline_of(first).spans) == of_first, seed
            for first_rank, *others in result.alike_ranks:
                for rank in others:
                    assert computed(expected.timeline, rank) == computed(expected.timeline, first_rank), seed
        for ours, theirs in zip(folded.memory, expected.memory, strict=True):
            assert ours.times_s.tolist() == theirs.times_s.tolist()
            assert ours.bytes_held.tolist() == theirs.bytes_held.tolist()


@pytest.mark.parametrize("generator", [*USUAL, *in_campaigns(name for name in GENERATORS if name not in USUAL)])
def test_a_schedule_of_fewer_pipelines_is_that_of_all(generator: str) -> None:
    for seed in range(20):
        _, whole, folding, costs, routes = folded_problem(seed)
        limit = costs.memory_limit()
        fewer = make_schedule(generator, routes, costs.compute_s, memory=limit)
        copied = copy_schedule(fewer, Dependencies(routes), Dependencies(whole.routes), folding)
        assert copied == make_schedule(generator, whole.routes, costs.compute_s, memory=limit), seed


def test_pipelines_of_other_samples_are_not_alike() -> None:
    plan = Plan(
        modules={"llm": language_model(*(replica(2 * r, 2 * r + 1) for r in range(4)))}, edges=(), num_microbatches=2
    )
    batch = samples(8, ["llm"], {5: ["llm"]})  # The second sample of replica 2 is empty.
    folding = fold(plan, contiguous_assignment(plan, batch), kinds_of_samples(batch))
    assert dict(folding.copies) == {("llm", 0): [("llm", 0), ("llm", 1), ("llm", 3)], ("llm", 2): [("llm", 2)]}
    assert folding.rank_of.tolist() == [0, 1, 0, 1, 4, 5, 0, 1]


def test_pipelines_that_lie_otherwise_on_the_nodes_are_not_alike() -> None:
    plan = Plan(
        modules={"llm": language_model(*(replica(2 * r, 2 * r + 1) for r in range(3)))}, edges=(), num_microbatches=2
    )
    batch = samples(6, ["llm"])
    folding = fold(plan, contiguous_assignment(plan, batch), kinds_of_samples(batch), node=lambda rank: rank // 3)
    assert folding.rank_of.tolist() == [0, 1, 2, 3, 0, 1]


def test_replicas_that_feed_each_other_are_one_pipeline() -> None:
    plan = Plan(
        modules={
            "vision": module(*(replica(r) for r in range(4))),
            "llm": language_model(replica(4, 5), replica(6, 7)),
        },
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=2,
    )
    batch = samples(8, ["vision", "llm"])
    folding = fold(plan, contiguous_assignment(plan, batch), kinds_of_samples(batch))
    assert folding.rank_of.tolist() == [0, 1, 0, 1, 4, 5, 4, 5]


def test_what_makes_ranks_different_is_refused() -> None:
    plan = chain(2, 2)
    batch = samples(2, ["llm"])
    folding = fold(plan, contiguous_assignment(plan, batch), kinds_of_samples(batch))
    routes = derive_routes(plan, folding.assignment, batch)
    program = lower(GENERATORS["1f1b"](routes), Dependencies(routes))
    with pytest.raises(ValueError, match="without folding"):
        simulate(program, UniformCosts(), disturbances=Disturbances(straggler_factors={0: 2.0}), folding=folding)
