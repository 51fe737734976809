"""Buckets: what travels together, when they start, and that what is missing counts as zero."""

from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from torch import Tensor, nn

from motet.parallel.mesh import ReduceGroup
from motet.runtime.communication import gradient_reduction as gradients
from motet.runtime.communication.deadline import Deadline
from motet.runtime.communication.gradient_reduction import Bucket, GradientReducer, Portion, squared_norm

SIZE = 4
"""Elements of a parameter here; float32, so 16 bytes."""


def parameters(num: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((SIZE,), 1.0 + i, dtype=dtype)) for i in range(num)]


def everyone() -> Portion:
    return Portion(ReduceGroup(dist.group.WORLD, tuple(range(dist.get_world_size()))))


def finish(reducer: GradientReducer) -> None:
    deadline = Deadline(timedelta(seconds=20))
    deadline.start()
    reducer.finish(deadline, "the sum")


@pytest.fixture
def two_per_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 2 * SIZE * 4)


@pytest.mark.usefixtures("two_per_bucket")
def test_buckets_start_inside_the_last_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as their parameters are final, the last layers' first, although the backward has not ended."""

    def work(rank: int) -> tuple[list[str], list[list[float]]]:
        weights = parameters(5)
        reducer = GradientReducer([(weight,) for weight in weights], everyone())
        assert reducer.can_overlap
        events = []
        for i, weight in enumerate(weights):
            weight.register_hook(lambda gradient, i=i: events.append(f"gradient {i}"))
        start = Bucket.start

        def start_and_tell(bucket: Bucket) -> None:
            places = [next(i for i, w in enumerate(weights) if w is copies[0]) for copies in bucket.parameters]
            events.append(f"start {places}")
            start(bucket)

        monkeypatch.setattr(Bucket, "start", start_and_tell)

        def backward() -> None:
            x = torch.ones(SIZE)
            for weight in weights:
                x = x * weight
            x.sum().backward()

        backward()  # The first microbatch.
        assert not [event for event in events if event.startswith("start")]
        events.clear()
        reducer.arm()
        backward()
        events.append("backward ended")
        reducer.disarm()
        reducer.start()
        finish(reducer)
        return events, [weight.grad.tolist() for weight in weights if weight.grad is not None]

    for events, summed in run_distributed(work, 2):
        assert events == [
            "gradient 4",
            "gradient 3",
            "start [4, 3]",
            "gradient 2",
            "gradient 1",
            "start [2, 1]",
            "gradient 0",
            "start [0]",
            "backward ended",
        ]
        # The product of the others, twice on each of two ranks.
        assert summed == [[4 * 120 / (1 + i)] * SIZE for i in range(5)]


@pytest.mark.usefixtures("two_per_bucket")
def test_what_is_final_already_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a weight half: norms had their last gradients before, and buckets wait for its own parameters."""

    def work(rank: int) -> tuple[list[list[int]], list[list[float]]]:
        weights = parameters(6)  # Buckets: 5 and 4, 3 and 2, 1 and 0.
        (other,) = parameters(1)
        reducer = GradientReducer([(weight,) for weight in weights], everyone())
        started: list[int] = []
        seen = []
        start = Bucket.start

        def start_and_tell(bucket: Bucket) -> None:
            started.append(next(i for i, w in enumerate(weights) if w is bucket.parameters[0][0]))
            start(bucket)

        monkeypatch.setattr(Bucket, "start", start_and_tell)
        for i in (5, 4, 2, 0):
            weights[i].backward(torch.ones(SIZE))
        reducer.expect({weights[3], weights[1], other})
        seen.append(list(started))
        for parameter in (weights[3], other, weights[1]):
            parameter.grad = torch.ones(SIZE)
            reducer.accumulated(parameter)
            seen.append(list(started))
        finish(reducer)
        return seen, [weight.grad.tolist() for weight in weights if weight.grad is not None]

    for seen, summed in run_distributed(work, 2):
        assert seen == [[5], [5, 3], [5, 3], [5, 3, 1]]
        assert summed == [[2.0] * SIZE] * 6


@pytest.mark.usefixtures("two_per_bucket")
def test_what_no_backward_reached_counts_as_zero() -> None:
    """Buckets start in the same order on all ranks, although on one the last parameters never get a gradient."""

    def work(rank: int) -> list[list[float]]:
        weights = parameters(4)
        reducer = GradientReducer([(weight,) for weight in weights], everyone())
        for _ in range(2):  # A reducer is used again in the next iteration.
            for weight in weights:
                weight.grad = None
            reached = weights if rank == 0 else weights[:2]
            reducer.arm()
            sum(weight.sum() for weight in reached).backward()
            reducer.disarm()
            reducer.start()
            finish(reducer)
        return [weight.grad.tolist() for weight in weights if weight.grad is not None]

    for summed in run_distributed(work, 2):
        assert summed == [[2.0] * SIZE] * 2 + [[1.0] * SIZE] * 2


def test_a_rank_without_any_backward_takes_part() -> None:
    def work(rank: int) -> list[float]:
        (weight,) = parameters(1)
        reducer = GradientReducer([(weight,)], everyone())
        if rank == 0:
            weight.grad = torch.full((SIZE,), 3.0)
        reducer.start()
        finish(reducer)
        assert weight.grad is not None
        return weight.grad.tolist()

    assert run_distributed(work, 3) == [[3.0] * SIZE] * 3


def test_local_copies_are_summed_and_end_alike() -> None:
    """Also where this rank is the only holder, and where one copy has no gradient."""

    def work(rank: int) -> list[list[float]]:
        sums = []
        for group in (everyone(), Portion(ReduceGroup(None, (rank,)))):
            first, second, third = parameters(3)
            first.grad, third.grad = torch.full((SIZE,), 1.0), torch.full((SIZE,), 2.0)
            reducer = GradientReducer([(first, second, third)], group)
            assert not reducer.can_overlap, "no copy's gradient is final in its own backward"
            reducer.start()
            finish(reducer)
            grads = [parameter.grad for parameter in (first, second, third)]
            assert len({id(grad) for grad in grads}) == 3
            sums += [grad.tolist() for grad in grads if grad is not None]
        return sums

    assert run_distributed(work, 2) == [[[6.0] * SIZE] * 3 + [[3.0] * SIZE] * 3] * 2


def test_a_bucket_has_one_dtype_and_holds_at_least_one_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes(given: Sequence[nn.Parameter]) -> list[int]:
        copies = [(parameter,) for parameter in reversed(given)]
        return [len(bucket.parameters) for bucket in gradients._buckets(copies, Portion(ReduceGroup(None, (0,))))]

    assert sizes(parameters(3)) == [3]
    assert sizes([*parameters(2), *parameters(2, torch.float64), *parameters(1)]) == [2, 2, 1]
    monkeypatch.setattr(gradients, "BUCKET_BYTES", SIZE)
    assert sizes(parameters(3)) == [1, 1, 1]
    assert sizes([]) == []


def test_squared_norm_is_of_all_elements_in_float64() -> None:
    parts: list[Tensor] = [torch.full((2, 3), 1e-4), torch.full((5,), 2.0, dtype=torch.bfloat16), torch.tensor(1e4)]
    expected = sum(float(part.double().square().sum()) for part in parts)
    assert squared_norm(parts).item() == pytest.approx(expected, rel=1e-14)
    assert squared_norm([]).item() == 0.0
