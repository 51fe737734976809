"""Sums gradients over all that hold the same layers, in flat buckets, overlapped with the backward pass.

The buckets of a reduction are started in a fixed order, the same on every holder: a bucket as soon as its parameters
have their final gradient in this rank's last backward of the stage, and the rest when the program reaches the
reduction. A parameter that no microbatch of this rank reached takes part with zeros. Sums, never averages: the loss is
already divided by the loss tokens of the global batch. (Li et al. 2020, "PyTorch Distributed", section 3.2.3.)

Holders may have tensor-parallel groups of different sizes. A parameter that all of them cut evenly, along one
dimension, is summed in the pieces of all cuts together: each piece by those who hold it, in buckets, within the
backward, as others are. A parameter that is whole somewhere and cut elsewhere, or whose gradients first need a sum
inside the group (norms), is put together inside each group after the backward, summed over the groups' first ranks and
handed back; so all holders get the same bits. (The thesis, section 2.6.1, sums layer by layer among holders whose
groups have one size.)

Limits: ZeRO-1 does not shard the state of layers that groups of different sizes hold.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from motet.costs.communication import BUCKET_BYTES
from motet.devices import has_own_memory
from motet.parallel.main_gradients import gradient_dtype, zero_gradient
from motet.parallel.mesh import Mesh, ReduceGroup, ReduceGroups
from motet.parallel.tensor.tensor_collectives import TensorParallel, gather_full, shard_parameter
from motet.parallel.tensor.tensor_plans import Shard, local_ranges
from motet.runtime.communication.agreement import gather_values
from motet.runtime.communication.deadline import Deadline
from motet.schedule.action import Reduce

Copies = tuple[nn.Parameter, ...]
"""The local copies of one parameter: one, or those of a module that this rank holds several times."""


@dataclass(frozen=True)
class Part:
    """Ranges of one dimension of a local tensor."""

    dim: int
    ranges: tuple[tuple[int, int], ...]

    def views(self, tensor: Tensor) -> Iterator[Tensor]:
        for start, stop in self.ranges:
            yield tensor.narrow(self.dim, start, stop - start)


@dataclass(frozen=True)
class Portion:
    """The part of each parameter that one group sums: all of it, or ranges where tensor-parallel sizes differ."""

    group: ReduceGroup
    parts: Sequence[Part] = ()
    """One for each parameter; (): all of each."""
    only: Sequence[Copies] | None = None
    """The parameters, if they are not those of the reduction's other portions (experts that replicas share)."""


@dataclass
class Bucket:
    """Gradients that travel together, as one flat tensor while they do."""

    group: ReduceGroup
    parameters: list[Copies]
    parts: list[Part | None]
    """One for each parameter: the part that is summed; None: all."""
    elsewhere: Set[Tensor] = frozenset()
    """Parameters whose sums are of no use here: another rank of a fully sharded stage keeps them."""
    missing: set[Tensor] = field(default_factory=set)
    """Parameters of an armed reduction that await their final gradient."""
    reached: set[Tensor] = field(default_factory=set)
    """Parameters to which a microbatch of this rank has brought a gradient."""
    _flat: Tensor | None = None
    _work: dist.Work | None = None

    def start(self) -> None:
        self.reached = {p for copies in self.parameters for p in copies if p.grad is not None}
        if self.group.group is None:
            for copies in self.parameters:
                if len(copies) > 1 or copies[0].grad is None:
                    _set_gradients(copies, None, _local_sum(copies).reshape(-1))
            return
        self._flat = torch.cat(list(map(_flattened, self.parameters, self.parts)))
        self._work = dist.all_reduce(self._flat, group=self.group.group, async_op=True)

    def finish(self, deadline: Deadline, what: object) -> None:
        if self.group.group is None:
            return
        assert self._work is not None
        assert self._flat is not None
        deadline.wait(self._work, what, self.group.ranks)
        place = 0
        for copies, part in zip(self.parameters, self.parts, strict=True):
            size = _num_elements(copies, part)
            if copies[0] not in self.elsewhere:
                _set_gradients(copies, part, self._flat[place : place + size])
            place += size
        self._flat = self._work = None


class GradientReducer:
    """One reduction on this rank. `parameters`: in the order of the forward, the same on every holder. `portions`: what
    of them is summed in which group. `elsewhere`: parameters that another rank of a fully sharded stage keeps.
    `is_late`: gradients may be complete only when the step ends, because replicas share the parameters."""

    def __init__(
        self,
        parameters: Sequence[Copies],
        *portions: Portion,
        elsewhere: Set[Tensor] = frozenset(),
        is_late: bool = False,
    ) -> None:
        self.is_late = is_late
        # Portion after portion for each run of parameters, so that none waits for the end of the backward.
        runs = zip_longest(*(_buckets(parameters, portion) for portion in portions))
        self._buckets = [bucket for run in runs for bucket in run if bucket is not None]
        for bucket in self._buckets:
            bucket.elsewhere = elsewhere
        self._buckets_of: dict[Tensor, list[Bucket]] = {}
        for bucket in self._buckets:
            for copies in bucket.parameters:
                for parameter in copies:
                    self._buckets_of.setdefault(parameter, []).append(bucket)
        self._num_started = 0
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    @property
    def can_overlap(self) -> bool:
        """Whether every parameter has one local copy, so that its gradient is final in one backward."""
        return all(b.group.group is not None and all(len(c) == 1 for c in b.parameters) for b in self._buckets)

    def launches(self, group: ReduceGroup) -> str:
        """Describes the sums that are launched in a group in each iteration, in order."""
        return ", ".join(
            f"{sum(map(_num_elements, bucket.parameters, bucket.parts))} of {bucket.parameters[0][0].dtype}"
            for bucket in self._buckets
            if bucket.group == group
        )

    def reached(self) -> set[Tensor]:
        """Parameters to which a microbatch of this rank brought a gradient in the iteration; after `start`."""
        return set().union(*(bucket.reached for bucket in self._buckets))

    def arm(self) -> None:
        """Called before this rank's last backward of the layers, if it is a whole one: buckets may start within it."""
        self.expect(self._buckets_of.keys())
        for parameter in self._buckets_of:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self.accumulated))

    def expect(self, parameters: Set[Tensor]) -> None:
        """Called before this rank's last backward: `parameters`, and maybe others, get their final gradients in it.

        Those of the reduction that are not among them have theirs already."""
        for bucket in self._buckets:
            bucket.missing = {p for copies in bucket.parameters for p in copies if p in parameters}
        self._start_final()

    def accumulated(self, parameter: Tensor) -> None:
        """Called after `expect`, when the parameter has got its final gradient. It may be another reduction's."""
        for bucket in self._buckets_of.get(parameter, ()):
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
        """Starts the buckets that have not been started."""
        while self._num_started < len(self._buckets):
            self._start_next()

    def _start_next(self) -> None:
        self._buckets[self._num_started].start()
        self._num_started += 1

    def finish(self, deadline: Deadline, what: object) -> None:
        """Waits for the sums and puts them into `.grad`. `what`: the reduction's name, for when it fails."""
        for bucket in self._buckets:
            bucket.finish(deadline, what)
        self._num_started = 0


def _local_sum(copies: Copies) -> Tensor:
    """Sum of the copies' gradients; zeros for those that have none."""
    gradients = [parameter.grad for parameter in copies if parameter.grad is not None]
    if not gradients:
        return zero_gradient(copies[0])
    return gradients[0] if len(gradients) == 1 else torch.stack(gradients).sum(0)


def _num_elements(copies: Copies, part: Part | None) -> int:
    if part is None:
        return copies[0].numel()
    # By the shape alone: the memory of a parameter that another rank keeps is not there.
    of_one = copies[0].numel() // copies[0].shape[part.dim]
    return of_one * sum(stop - start for start, stop in part.ranges)


def _flattened(copies: Copies, part: Part | None) -> Tensor:
    total = _local_sum(copies)
    if part is None:
        return total.reshape(-1)
    return torch.cat([view.reshape(-1) for view in part.views(total)])


def _set_gradients(copies: Copies, part: Part | None, total: Tensor) -> None:
    """`total`: as `_flattened` lays it out."""
    for parameter in copies:
        if parameter.grad is None:
            parameter.grad = zero_gradient(parameter)
        views = [parameter.grad] if part is None else list(part.views(parameter.grad))
        for view, values in zip(views, total.split([view.numel() for view in views]), strict=True):
            view.copy_(values.view_as(view))


def _buckets(parameters: Sequence[Copies], portion: Portion) -> list[Bucket]:
    """The last parameters' first: their gradients are."""
    parameters = parameters if portion.only is None else portion.only
    parts: Sequence[Part | None] = portion.parts or [None] * len(parameters)
    buckets: list[Bucket] = []
    num_bytes = 0
    for copies, part in reversed(list(zip(parameters, parts, strict=True))):
        dtype = gradient_dtype(copies[0])
        size = _num_elements(copies, part) * dtype.itemsize
        if not buckets or num_bytes + size > BUCKET_BYTES or gradient_dtype(buckets[-1].parameters[0][0]) != dtype:
            buckets.append(Bucket(portion.group, [], []))
            num_bytes = 0
        buckets[-1].parameters.append(copies)
        buckets[-1].parts.append(part)
        num_bytes += size
    return buckets


def squared_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Sum of squares in float64, so that the order of summation does not show.

    On an accelerator each gradient's norm is of its own precision: torch would first copy it whole to float64 there."""
    alike: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        alike.setdefault(gradient.dtype, []).append(gradient)
    norms: list[Tensor] = []
    for dtype, own in alike.items():
        wide = torch.promote_types(dtype, torch.float32) if has_own_memory(own[0].device) else torch.float64
        norms += torch._foreach_norm(own, 2, dtype=wide)
    return torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)


Key = tuple[Reduce, str]
"""A reduction, and a parameter's name in the whole model."""


@dataclass(frozen=True)
class HeldParameter:
    """The share of a parameter that one rank holds."""

    shard: Shard | None
    tp_size: int
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    is_partial: bool
    """Whether its gradient is a share, to be summed inside the group."""


def evenly_cut(mine: Mapping[Key, HeldParameter], mesh: Mesh) -> dict[Key, Shard]:
    """Collective: the parameters that all groups with several ranks cut alike, and how."""
    held: dict[Key, list[HeldParameter]] = {}
    for of_rank in gather_values(list[tuple[Key, HeldParameter]], list(mine.items())):
        for key, parameter in of_rank:
            held.setdefault(key, []).append(parameter)
    result = {}
    for key, holders in held.items():
        shards = {holder.shard for holder in holders if holder.tp_size > 1}
        shard = shards.pop() if len(shards) == 1 else None
        groups = mesh.reduce.get(key[0])
        if groups is None or shard is None or any(holder.is_partial for holder in holders):
            continue
        unit, rest = divmod(holders[0].shape[shard.dim], sum(shard.sections))
        if rest == 0 and all(section * unit % groups.common_size == 0 for section in shard.sections):
            result[key] = shard
    return result


def portions(groups: ReduceGroups, parameters: Sequence[Copies], shards: Sequence[Shard]) -> list[Portion]:
    """For evenly cut parameters: the part of this rank's shard that each group sums."""
    number = len(groups.pieces)
    return [
        Portion(
            group,
            [
                Part(shard.dim, tuple(local_ranges(copies[0].shape[shard.dim], shard, piece, number)))
                for copies, shard in zip(parameters, shards, strict=True)
            ],
        )
        for piece, group in enumerate(groups.pieces)
    ]


@dataclass(frozen=True)
class WholeSum:
    """The parameters of one reduction that are summed whole, on this rank."""

    firsts: ReduceGroup | None
    tp: TensorParallel
    parameters: Sequence[tuple[Copies, Shard | None]]

    def reached(self) -> set[Tensor]:
        """Parameters to which a microbatch of this rank brought a gradient; before `run`."""
        return {parameter for copies, _ in self.parameters for parameter in copies if parameter.grad is not None}

    @torch.no_grad()
    def run(self) -> None:
        """Collective over all holders; after the sums inside tensor-parallel groups."""
        if not self.parameters:
            return
        wholes = [gather_full(_local_sum(copies), shard, self.tp) for copies, shard in self.parameters]
        flat = torch.cat([whole.reshape(-1) for whole in wholes])
        if self.firsts is not None and self.firsts.group is not None:
            dist.all_reduce(flat, group=self.firsts.group)
        if self.tp.size > 1:
            dist.broadcast(flat, group_src=0, group=self.tp.group)
        totals = flat.split([whole.numel() for whole in wholes])
        for (copies, shard), whole, total in zip(self.parameters, wholes, totals, strict=True):
            mine = shard_parameter(total.view_as(whole), shard, self.tp.rank, self.tp.size)
            for parameter in copies:
                parameter.grad = mine.clone()
