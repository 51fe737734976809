"""Deferral at run time: what is deferred has a graph of its own, which its own backward frees; ranks that cut a batch
differently are told; batches in which few samples have an image, or none that a rank sees.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_distributed
from plans import language_model, module, replica
from sampling import in_campaigns
from toy_model import ToyBatch, reference, toy_stage_maker

from motet.assignment.batch_assignment import BatchAssignment
from motet.assignment.sample import Sample, Segment
from motet.balancing.policies import ASSIGNMENTS
from motet.balancing.sample_work import SampleWork
from motet.plan import Edge, Plan
from motet.runtime.communication.deadline import StepFailedError
from motet.runtime.engine import Engine
from motet.runtime.stage_runner import StageRunner
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators import GENERATORS
from motet.schedule.routes import derive_routes
from motet.schedule.validate import liveness

Assign = Callable[[Plan, Sequence[Sample]], BatchAssignment]


def by_tokens(plan: Plan, samples: Sequence[Sample]) -> BatchAssignment:
    """The plan's assignment with costs in proportion to tokens."""

    def works() -> dict[str, SampleWork]:
        tokens = {
            name: np.array([[float(s.num_tokens(name))] * len(part.replicas[0].stages) for s in samples])
            for name, part in plan.modules.items()
        }
        return {name: SampleWork(forward_s=each, backward_s=2 * each) for name, each in tokens.items()}

    return ASSIGNMENTS[plan.assignment](plan, samples, works)


def vision_and_llm(num_vision: int = 1, num_llm: int = 1, **values: Any) -> Plan:
    return Plan(
        modules={
            "vision": module(*(replica(r) for r in range(num_vision)), trainable=((0, 1),)),
            "llm": language_model(*(replica(num_vision + r) for r in range(num_llm))),
        },
        edges=(Edge(source="vision", target="llm"),),
        **values,
    )


def uneven(num: int, has_image: Callable[[int], bool], seed: int = 0) -> tuple[Sample, ...]:
    rng = Random(seed)
    samples = []
    for i in range(num):
        length = rng.choice([1, 2, 3, 5, 21])
        layouts = {"llm": (Segment(length),)}
        if has_image(i):
            image = rng.randint(1, 9)
            layouts = {"vision": (Segment(image),), "llm": (Segment(length), Segment(image, source="vision"))}
        samples.append(Sample(str(i), layouts, {"llm": rng.randint(1, 9)}))
    return tuple(samples)


def toy_engine(plan: Plan, assign: Assign, **options: Any) -> Engine:
    cpu = torch.device("cpu")
    return Engine(plan, toy_stage_maker(plan), device=cpu, boundary_dtype=torch.float64, assign=assign, **options)


class Held:
    """A tensor that a graph keeps."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Graphs:
    """Counts the forwards of a rank whose graphs keep tensors: a context for forwards, each entered once."""

    def __init__(self) -> None:
        self.held: list[list[weakref.ref[Held]]] = []
        self.most = 0

    def __call__(self) -> AbstractContextManager[object]:
        held: list[weakref.ref[Held]] = []
        self.held.append(held)

        def keep(tensor: torch.Tensor) -> Held:
            kept = Held(tensor)
            held.append(weakref.ref(kept))
            self.most = max(self.most, self.num_alive)
            return kept

        return torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor)

    @property
    def num_alive(self) -> int:
        return sum(any(kept() is not None for kept in held) for held in self.held)


def watch(runner: StageRunner, graphs: Graphs) -> None:
    """Makes the runner's forwards tell `graphs` what they keep."""
    computing = runner._computing

    @contextmanager
    def watched(*args: Any, **kwargs: Any) -> Iterator[None]:
        with graphs(), computing(*args, **kwargs):
            yield

    runner._computing = watched  # type: ignore[method-assign]
    runner._computes_plainly = False


@pytest.mark.parametrize("schedule", ["1f1b", "eager_1f1b", "zero_bubble_h1"])
def test_activations_go_with_their_own_backward(schedule: str) -> None:
    """No rank keeps more graphs than the schedule says, deferred ones counted by themselves, and none at the end."""
    plan = vision_and_llm(num_microbatches=4, schedule=schedule, assignment="entrain")
    samples = uneven(24, lambda i: True)
    assignment = by_tokens(plan, samples)
    pieces, microbatches = assignment.microbatches["vision"][0], assignment.microbatches["llm"][0]
    assert len(pieces) > len(microbatches), "nothing is deferred"
    routes = derive_routes(plan, assignment, samples)
    expected = liveness(GENERATORS[schedule](routes), Dependencies(routes)).peak_activations

    def work(rank: int) -> tuple[int, int, int]:
        graphs = Graphs()
        engine = toy_engine(plan, by_tokens)
        for runner in engine.executor.runners.values():
            watch(runner, graphs)
        engine.run(ToyBatch(samples))
        return graphs.most, graphs.num_alive, len(graphs.held)

    for rank, (most, at_the_end, num_forwards) in enumerate(run_distributed(work, 2)):
        assert most == expected[rank]
        assert at_the_end == 0
        assert num_forwards == (len(pieces) if rank == 0 else len(microbatches))


def test_the_backward_of_what_stays_does_not_wait_for_what_is_deferred() -> None:
    """The encoder's graphs are freed in the order in which gradients return, which is not that of the pieces alone."""
    plan = vision_and_llm(num_microbatches=4, assignment="entrain")
    samples = uneven(24, lambda i: True)
    assignment = by_tokens(plan, samples)
    routes = derive_routes(plan, assignment, samples)
    needed_by = {cell: {route.target.microbatch for route in routes.outgoing[cell]} for cell in routes.cells}
    stays = [cell for cell in routes.cells if cell.module == "vision" and len(needed_by[cell]) == 1]
    assert len(stays) == len(assignment.microbatches["vision"][0]), "a piece needs one microbatch only"


def test_ranks_that_cut_a_batch_differently_are_told() -> None:
    """Two samples of the same sizes change places on one rank: nothing else would show it."""
    plan = vision_and_llm(num_microbatches=2)
    layouts = {"vision": (Segment(2),), "llm": (Segment(3), Segment(2, source="vision"))}
    samples = [Sample(str(i), layouts, {"llm": 3}) for i in range(4)]

    def work(rank: int) -> None:
        def assign(plan: Plan, samples: Sequence[Sample]) -> BatchAssignment:
            cut = ((0, 1), (2, 3)) if rank == 0 else ((0, 2), (1, 3))
            return BatchAssignment({"vision": (cut,), "llm": (cut,)})

        engine = toy_engine(plan, assign)
        with pytest.raises(StepFailedError, match="the ranks cut the batch into different microbatches"):
            engine.run(ToyBatch(samples))

    run_distributed(work, 2)


NUM_SAMPLES = 100
MIXTURES = {
    "all have images": lambda i: True,
    "1% have none": lambda i: i != 63,
    "50% have none": lambda i: i % 2 == 0,
    "99% have none": lambda i: i == 63,
    "none has images": lambda i: False,
    "half of the replicas have none": lambda i: i < NUM_SAMPLES // 2,
}


@pytest.mark.parametrize("replicas", [(2, 1), (1, 2), *in_campaigns([((1, 1),), ((2, 2),), ((2, 3),)])])
def test_mixtures(replicas: tuple[int, int]) -> None:
    """No hang, and the gradients of one process, whoever has images."""
    num_ranks = sum(replicas)

    def work(rank: int) -> list[int]:
        microbatches_with_images = []
        for name, has_image in MIXTURES.items():
            samples = uneven(NUM_SAMPLES, has_image)
            batch = ToyBatch(samples)
            for assignment in ("contiguous", "disttrain", "entrain"):
                plan = vision_and_llm(*replicas, num_microbatches=4, assignment=assignment)
                engine = toy_engine(plan, by_tokens)
                loss, gradients = reference(plan, batch)
                result = engine.run(batch)
                assert result.loss == pytest.approx(loss, rel=1e-11), (name, assignment)
                for p in engine.model.parameters:
                    assert p.parameter.grad is not None
                    torch.testing.assert_close(p.parameter.grad, gradients[p.name], rtol=1e-10, atol=1e-13)
                own = engine.assignment(batch.samples).microbatches["vision"]
                microbatches_with_images.append(sum(map(bool, own[min(rank, len(own) - 1)])))
        return microbatches_with_images

    of_rank_0 = run_distributed(work, num_ranks)[0]
    assert min(of_rank_0) == 0
    assert max(of_rank_0) > 0
