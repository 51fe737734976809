"""Parameters of which each rank of a group keeps some rows: they are gathered to compute, and dropped after.

Every parameter is cut along its first dimension into equal runs of rows, the last ones shorter or empty; so embedding
and head are shared as evenly as blocks are. What an optimizer updates is a parameter of its own, this rank's rows. A
unit's rows lie in one flat tensor: one all-gather brings the unit, and one reduce-scatter sums its gradients.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from motet.parallel.main_gradients import gradient_dtype


class ShardGroup(Protocol):
    """This rank's place among those that share parameters."""

    @property
    def group(self) -> dist.ProcessGroup | None: ...

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


@dataclass(frozen=True, eq=False)
class RowShard:
    """One parameter's rows on this rank."""

    rows: nn.Parameter
    """[number of own rows, ...]; what an optimizer updates."""
    shape: torch.Size
    """Shape of the whole parameter."""
    members: ShardGroup

    @property
    def rows_each(self) -> int:
        """Number of rows of a rank; the last ones may have fewer."""
        return _rows_each(self.shape, self.members.size)

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's rows of a tensor that has the parameter's shape."""
        first = self.members.rank * self.rows_each
        return _as_rows(whole)[first : first + self.rows_each].clone()

    def gather(self, rows: Tensor) -> Tensor:
        """The whole tensor from the rows of all ranks; collective over the group."""
        width = _as_rows(torch.empty(self.shape, device="meta"))[0].shape
        mine = rows.new_zeros(self.rows_each, *width)
        mine[: rows.shape[0]] = rows.detach()
        whole = rows.new_empty(self.members.size * self.rows_each, *width)
        dist.all_gather_into_tensor(whole, mine, group=self.members.group)
        return whole[: _num_rows(self.shape)].reshape(self.shape)


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() else tensor[None]


def _num_rows(shape: torch.Size) -> int:
    return shape[0] if shape else 1


def _rows_each(shape: torch.Size, size: int) -> int:
    return -(-_num_rows(shape) // size)


class RowUnit:
    """Parameters that are gathered together. Collective: all ranks of the group gather and drop alike."""

    def __init__(self, parameters: Sequence[nn.Parameter], members: ShardGroup) -> None:
        self._members = members
        self.parameters = frozenset(parameters)
        by_kind: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in parameters:
            by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        self._flats = [_FlatRows(of_kind, members) for of_kind in by_kind.values()]
        self.is_whole = True
        self._is_started = False

    def shards(self) -> Iterator[tuple[nn.Parameter, RowShard]]:
        for flat in self._flats:
            yield from flat.shards.items()

    def start_gather(self) -> None:
        """Begins what `gather` will wait for."""
        if not self.is_whole and not self._is_started:
            for flat in self._flats:
                flat.start_gather()
            self._is_started = True

    def gather(self) -> None:
        if self.is_whole:
            return
        self.start_gather()
        for flat in self._flats:
            flat.finish_gather()
        self.is_whole, self._is_started = True, False

    def sum_gradients(self) -> None:
        """Sums gradients over the group, and adds each rank's rows to those of its shards."""
        for flat in self._flats:
            flat.sum_gradients()

    def take_reached(self) -> set[Tensor]:
        """The rows of parameters to which this rank has brought gradients since the last call."""
        reached = {rows for flat in self._flats for rows in flat.reached}
        for flat in self._flats:
            flat.reached.clear()
        return reached

    def drop(self) -> None:
        """Frees the whole parameters; the rows stay."""
        if self._is_started:
            self.gather()  # Nobody needed what was begun ahead.
        for flat in self._flats:
            flat.drop()
        self.is_whole = False


class _FlatRows:
    """The rows of a unit's parameters of one dtype, the trainable ones first."""

    def __init__(self, parameters: Sequence[nn.Parameter], members: ShardGroup) -> None:
        self._members = members
        self._parameters = sorted(parameters, key=lambda p: not p.requires_grad)
        sizes = [_rows_each(p.shape, members.size) * _row_size(p) for p in self._parameters]
        self._trainable_size = sum(s for p, s in zip(self._parameters, sizes, strict=True) if p.requires_grad)
        self._own = self._parameters[0].new_zeros(sum(sizes))
        """This rank's rows, one parameter's after the other's, each padded to the rows of the largest share."""
        self._whole: list[Tensor] = []
        """The memory of each parameter, padded likewise: [ranks, size]."""
        self.shards: dict[nn.Parameter, RowShard] = {}
        self.reached: set[Tensor] = set()
        self._pending: tuple[Tensor, dist.Work | None] | None = None
        """What a gather that was started brings."""
        for parameter, own in zip(self._parameters, self._own.split(sizes), strict=True):
            values = parameter.detach()
            whole = values.new_zeros(members.size, own.numel())
            whole.view(-1)[: values.numel()] = values.reshape(-1)
            own.copy_(whole[members.rank])
            parameter.data = whole.view(-1)[: values.numel()].view(values.shape)
            self._whole.append(whole)
            first = members.rank * _rows_each(values.shape, members.size)
            num_rows = min(_rows_each(values.shape, members.size), max(0, _num_rows(values.shape) - first))
            rows = own[: num_rows * _row_size(parameter)].view(num_rows, *values.shape[1:])
            shard = nn.Parameter(rows, requires_grad=parameter.requires_grad)
            shard.grad_dtype = parameter.grad_dtype
            self.shards[parameter] = RowShard(shard, values.shape, members)
        self._num_bytes = [whole.untyped_storage().nbytes() for whole in self._whole]

    @torch.no_grad()
    def start_gather(self) -> None:
        gathered = self._own.new_empty(self._members.size * self._own.numel())
        work = dist.all_gather_into_tensor(gathered, self._own, group=self._members.group, async_op=True)
        self._pending = gathered, work

    @torch.no_grad()
    def finish_gather(self) -> None:
        assert self._pending is not None
        (gathered, work), self._pending = self._pending, None
        assert work is not None
        work.wait()
        parts = gathered.view(self._members.size, -1).split([whole.shape[1] for whole in self._whole], dim=1)
        for whole, num_bytes, values in zip(self._whole, self._num_bytes, parts, strict=True):
            whole.untyped_storage().resize_(num_bytes)
            whole.copy_(values)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        if not self._trainable_size:
            return
        dtype = gradient_dtype(self._parameters[0])
        flat = self._own.new_zeros(self._members.size * self._trainable_size, dtype=dtype)
        sizes = [w.shape[1] for p, w in zip(self._parameters, self._whole, strict=True) if p.requires_grad]
        trainable = self._parameters[: len(sizes)]
        parts = flat.view(self._members.size, -1).split(sizes, dim=1)
        for parameter, into in zip(trainable, parts, strict=True):
            if parameter.grad is not None:
                padded = nn.functional.pad(parameter.grad.reshape(-1), (0, into.numel() - parameter.numel()))
                into.copy_(padded.view_as(into))
                parameter.grad = None
                self.reached.add(self.shards[parameter].rows)
        total = flat.new_empty(self._trainable_size)
        dist.reduce_scatter_tensor(total, flat, group=self._members.group)
        for parameter, own in zip(trainable, total.split(sizes), strict=True):
            rows = self.shards[parameter].rows
            gradient = own[: rows.numel()].view_as(rows)
            rows.grad = gradient if rows.grad is None else rows.grad.add_(gradient)

    def drop(self) -> None:
        for whole in self._whole:
            whole.untyped_storage().resize_(0)


def _row_size(parameter: Tensor) -> int:
    """Elements of one row."""
    return parameter.numel() // max(1, _num_rows(parameter.shape))
