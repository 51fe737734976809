"""Sums gradients over all that hold the same layers, in flat buckets, overlapped with the backward pass.

The buckets of a reduction are started in a fixed order, the same on every holder: a bucket as soon as its parameters
have their final gradient in this rank's last backward of the stage, and the rest when the program reaches the
reduction. A parameter that no microbatch reached takes part with zeros. Sums, never averages: the loss is already
divided by the loss tokens of the global batch. (Li et al. 2020, "PyTorch Distributed", section 3.2.3.)
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from motet.runtime.deadline import Deadline
from motet.runtime.mesh import ReduceGroup

BUCKET_BYTES = 25 * 2**20
"""A larger parameter has a bucket of its own."""

Copies = tuple[nn.Parameter, ...]
"""The local copies of one parameter: one, or those of a module that this rank holds several times."""


@dataclass
class Bucket:
    """Gradients that travel together, as one flat tensor while they do."""

    parameters: list[Copies]
    missing: set[Tensor] = field(default_factory=set)
    """In an armed reduction: the parameters whose final gradient is not there yet."""
    _flat: Tensor | None = None
    _work: dist.Work | None = None

    def start(self, group: dist.ProcessGroup) -> None:
        self._flat = torch.cat([_local_sum(copies).reshape(-1) for copies in self.parameters])
        self._work = dist.all_reduce(self._flat, group=group, async_op=True)

    def finish(self, deadline: Deadline, what: object, ranks: Sequence[int]) -> None:
        assert self._work is not None
        assert self._flat is not None
        deadline.wait(self._work, what, ranks)
        totals = self._flat.split([copies[0].numel() for copies in self.parameters])
        for copies, total in zip(self.parameters, totals, strict=True):
            _set_gradients(copies, total.view_as(copies[0]))
        self._flat = self._work = None


class GradientReducer:
    """One reduction on this rank. `parameters`: in the order of the forward, the same on every holder."""

    def __init__(self, parameters: Sequence[Copies], group: ReduceGroup) -> None:
        self._group, self._ranks = group.group, group.ranks
        self._buckets = _buckets(reversed(parameters))
        self._bucket_of: dict[Tensor, Bucket] = {
            parameter: bucket for bucket in self._buckets for copies in bucket.parameters for parameter in copies
        }
        self._num_started = 0
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    @property
    def can_overlap(self) -> bool:
        """Whether every parameter has one local copy, so that its gradient is final in one backward."""
        return self._group is not None and all(len(c) == 1 for bucket in self._buckets for c in bucket.parameters)

    def arm(self) -> None:
        """Called before this rank's last backward of the layers, if it is a whole one: buckets may start within it."""
        self.expect(self._bucket_of.keys())
        for parameter in self._bucket_of:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self.accumulated))

    def expect(self, parameters: Set[Tensor]) -> None:
        """Called before this rank's last backward: `parameters`, and maybe others, get their final gradients in it.

        Those of the reduction that are not among them have theirs already."""
        for bucket in self._buckets:
            bucket.missing = {p for copies in bucket.parameters for p in copies if p in parameters}
        self._start_final()

    def accumulated(self, parameter: Tensor) -> None:
        """Called after `expect`, when the parameter has got its final gradient. It may be another reduction's."""
        if bucket := self._bucket_of.get(parameter):
            bucket.missing.discard(parameter)
            self._start_final()

    def _start_final(self) -> None:
        while self._num_started < len(self._buckets) and not self._buckets[self._num_started].missing:
            self._start_next()

    def disarm(self) -> None:
        """Called after that backward."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def start(self) -> None:
        """Starts what has not been started."""
        if self._group is None:
            for bucket in self._buckets:
                for copies in bucket.parameters:
                    _set_gradients(copies, _local_sum(copies))
            return
        while self._num_started < len(self._buckets):
            self._start_next()

    def _start_next(self) -> None:
        assert self._group is not None
        self._buckets[self._num_started].start(self._group)
        self._num_started += 1

    def finish(self, deadline: Deadline, what: object) -> None:
        """Waits for the sums and puts them into `.grad`. `what`: the reduction's name, for when it fails."""
        if self._group is not None:
            for bucket in self._buckets:
                bucket.finish(deadline, what, self._ranks)
        self._num_started = 0


def _local_sum(copies: Copies) -> Tensor:
    """Sum of the copies' gradients; zeros for those that have none."""
    gradients = [parameter.grad for parameter in copies if parameter.grad is not None]
    if not gradients:
        return torch.zeros_like(copies[0])
    return gradients[0] if len(gradients) == 1 else torch.stack(gradients).sum(0)


def _set_gradients(copies: Copies, total: Tensor) -> None:
    for parameter in copies:
        if parameter.grad is None:
            parameter.grad = total.clone()
        elif parameter.grad is not total:
            parameter.grad.copy_(total)


def _buckets(parameters: Iterable[Copies]) -> list[Bucket]:
    buckets: list[Bucket] = []
    num_bytes = 0
    for copies in parameters:
        size = copies[0].numel() * copies[0].element_size()
        if not buckets or num_bytes + size > BUCKET_BYTES or buckets[-1].parameters[0][0].dtype != copies[0].dtype:
            buckets.append(Bucket([]))
            num_bytes = 0
        buckets[-1].parameters.append(copies)
        num_bytes += size
    return buckets


def squared_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Sum of squares in float64, so that the order of summation does not show."""
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)
