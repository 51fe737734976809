"""Shards the parameters of a stage over the context-parallel ranks that share its tokens (FSDP).

What Oobleck's code has in the place of tensor parallelism (thesis 2.6): every rank computes its own tokens with whole
layers, keeps the parameters and the optimizer's state of its share alone, and gets the others' when a block is about to
be computed. A block's parameters are dropped after its forward, and, in the backward, when the block before it begins;
then its gradients are summed inside the group, and the owner of each keeps it. What belongs to no block (embedding,
head, projector) is there for the whole action. Where a backward is split, the weight half sums, block by block; what
the input half has left of gradients (of norms and embeddings) waits for it.

Every parameter has one owner, found by giving the largest to whom has least so far: so an owner's optimizer state is
whole, and checkpoints, copies to other nodes and AdamW's rules need to know nothing of sharding.

Not torch's `fully_shard`: it sums gradients by itself in each backward, where pipelines that do not look alike have to
sum them layer by layer among all who hold them (`motet.runtime.communication.gradient_reduction`).

Over replicas, the block that is needed next is gathered while one computes.

Limits: within a context-parallel group nothing is gathered ahead of its use, one large embedding is not cut, and sums
over replicas send zeros for what others keep, and do not begin within the backward.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from motet.parallel.main_gradients import zero_gradient
from motet.parallel.row_shards import RowShard, RowUnit, ShardGroup
from motet.parallel.split_backward import SplitBackward


class _Unit:
    """Parameters that are gathered together. Collective: all ranks of the group gather and drop alike."""

    def __init__(self, parameters: Sequence[nn.Parameter], owners: Sequence[int], members: ShardGroup) -> None:
        self._members = members
        self.parameters = frozenset(parameters)
        self._flat: dict[int, Tensor] = {}
        """Flat memory of each owner's parameters, by owner."""
        self._trainable: dict[int, list[nn.Parameter]] = {}
        """Trainable parameters by owner."""
        for owner in sorted(set(owners)):
            own = [p for p, o in zip(parameters, owners, strict=True) if o == owner]
            flat = torch.cat([p.detach().reshape(-1) for p in own])
            for parameter, values in zip(own, flat.split([p.numel() for p in own]), strict=True):
                parameter.data = values.view_as(parameter)
            self._flat[owner] = flat
            if trainable := [p for p in own if p.requires_grad]:
                self._trainable[owner] = trainable
        self._num_bytes = {owner: flat.untyped_storage().nbytes() for owner, flat in self._flat.items()}
        self._reached: set[Tensor] = set()
        self._sums: dict[Tensor, tuple[Tensor, int]] = {}
        """The gradients that this rank has kept since the step began, and their versions then."""
        self.is_whole = True

    def gather(self) -> None:
        if self.is_whole:
            return
        works = []
        for owner, flat in self._flat.items():
            if owner != self._members.rank:
                flat.untyped_storage().resize_(self._num_bytes[owner])
            works.append(dist.broadcast(flat, group=self._members.group, group_src=owner, async_op=True))
        for work in works:
            assert work is not None
            work.wait()
        self.is_whole = True

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sums gradients over the group; afterwards only owners have them."""
        sums: dict[int, tuple[dist.Work | None, Tensor]] = {}
        for owner, parameters in self._trainable.items():
            self._reached.update(p for p in parameters if self._is_reached(p))
            flat = torch.cat([(zero_gradient(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])
            work = dist.reduce(flat, group=self._members.group, group_dst=owner, async_op=True)
            sums[owner] = work, flat
            for parameter in parameters:
                parameter.grad = None
        for owner, (work, flat) in sums.items():
            assert work is not None
            work.wait()
            if owner == self._members.rank:
                parameters = self._trainable[owner]
                for parameter, total in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                    # Views of one tensor share its version, their data have one each.
                    kept = parameter.grad = total.view_as(parameter).data
                    self._sums[parameter] = kept, kept._version

    def _is_reached(self, parameter: Tensor) -> bool:
        """Whether its gradient is more than the sum of earlier microbatches, which may be zeros."""
        gradient = parameter.grad
        if gradient is None:
            return False
        kept, version = self._sums.get(parameter, (None, 0))
        return gradient is not kept or gradient._version != version

    def take_reached(self) -> set[Tensor]:
        """The parameters to which this rank has brought gradients since the last call."""
        reached, self._reached = self._reached, set()
        self._sums.clear()
        return reached

    def drop(self) -> None:
        """Frees the parameters that other ranks own."""
        for owner, flat in self._flat.items():
            if owner != self._members.rank:
                flat.untyped_storage().resize_(0)
        self.is_whole = False


Unit = _Unit | RowUnit


class FullySharded:
    """The parameters of one stage, sharded over its group, on this rank."""

    def __init__(
        self, stage: nn.Module, members: ShardGroup, *, by_rows: bool = False, whole_parameters: bool = False
    ) -> None:
        """`by_rows`: every rank keeps some rows of each parameter; otherwise each parameter has one owner.
        `whole_parameters`: they are gathered when a step begins and dropped when it ends, whatever is done with
        gradients (ZeRO-2)."""
        self._members, self._by_rows, self._whole_parameters = members, by_rows, whole_parameters
        self._is_by_block = self._gathers_blocks = True
        self._is_backward = self._is_split = False
        self._in_backward: nn.Module | None = None
        """The block whose gradients are being computed."""
        blocks = _outermost(stage, GradientCheckpointingLayer)
        inside = {p for block in blocks for p in block.parameters()}
        rest = [p for p in stage.parameters() if p not in inside]
        self._owners = {} if by_rows else _owners(stage.parameters(), members.size)
        self._shards: dict[nn.Parameter, RowShard] = {}
        self._rest = self._unit(rest)
        self._blocks: dict[nn.Module, Unit] = {block: self._unit(list(block.parameters())) for block in blocks}
        self._units: tuple[Unit, ...] = (self._rest, *self._blocks.values())
        self._in_order = blocks
        self._places = {block: place for place, block in enumerate(blocks)}
        self._with_backward: set[nn.Module] = set()
        """Blocks through which gradients go."""
        for block in blocks:
            block.register_forward_pre_hook(self._before_forward)
            block.register_forward_hook(self._after_forward)
        self._drop_all()

    def _unit(self, parameters: Sequence[nn.Parameter]) -> Unit:
        if not self._by_rows:
            return _Unit(parameters, [self._owners[p] for p in parameters], self._members)
        unit = RowUnit(parameters, self._members)
        self._shards.update(unit.shards())
        return unit

    def keeps(self, parameter: nn.Parameter) -> bool:
        """Whether this rank is the parameter's owner, or keeps some of its rows."""
        return self._by_rows or self._owners[parameter] == self._members.rank

    def rows_of(self, parameter: nn.Parameter) -> RowShard | None:
        """This rank's rows; None where parameters have one owner."""
        return self._shards.get(parameter)

    def begin_step(self, *, by_block: bool) -> None:
        """Collective. `by_block`: all ranks of the group run the same actions in this step, and gather each block in
        each of them. Otherwise everything is gathered now, and gradients are summed when the step ends."""
        self._is_by_block = by_block
        self._gathers_blocks = by_block and not self._whole_parameters
        self.take_reached()
        if not self._gathers_blocks:
            for parameter in self._shards:
                parameter.grad = None  # The step before may have failed.
            for unit in self._units:
                unit.drop()
            for unit in self._units:
                unit.gather()

    def take_reached(self) -> set[Tensor]:
        """After a step: the parameters, or this rank's rows of them, to which this rank has brought gradients."""
        return {parameter for unit in self._units for parameter in unit.take_reached()}

    def end_step(self, *, with_gradients: bool) -> None:
        """Collective."""
        if not self._gathers_blocks:
            for unit in self._units:
                if with_gradients and not self._is_by_block:
                    unit.sum_gradients()
                unit.drop()

    @contextmanager
    def forward(self) -> Iterator[None]:
        if not self._gathers_blocks:
            yield
            return
        self._rest.gather()
        yield
        self._drop_all()

    @contextmanager
    def backward(self, *, is_split: bool) -> Iterator[None]:
        """`is_split`: its input half."""
        if not self._is_by_block:
            yield
            return
        self._is_backward, self._is_split, self._in_backward = True, is_split, None  # The one before may have failed.
        self._rest.gather()
        yield
        self._end_block()
        if not is_split:
            self._rest.sum_gradients()
        self._drop_all()
        self._is_backward = False

    def weight_half(self, split: SplitBackward) -> Iterator[Tensor]:
        """`SplitBackward.weight_half`, unit by unit, in the same order on every rank."""
        if not self._is_by_block:
            yield from split.weight_half()
            return
        for unit in (self._rest, *reversed(self._blocks.values())):
            yield from split.weight_half(unit.parameters)
            unit.sum_gradients()
        assert not split.parameters, "every parameter of the stage is in a unit"

    def _end_block(self) -> None:
        """Called when all gradients of the current block have been computed."""
        if self._in_backward is not None and not self._is_split:
            self._blocks[self._in_backward].sum_gradients()
        self._in_backward = None

    def _drop_all(self) -> None:
        if self._gathers_blocks:
            for unit in self._units:
                unit.drop()

    def _before_forward(self, block: nn.Module, _: object) -> None:
        if self._gathers_blocks:
            self._blocks[block].gather()
            if not self._is_backward:
                self._start_gather(self._places[block] + 1)

    def _start_gather(self, place: int) -> None:
        """Begins to gather the block that is needed next, while the one before it computes."""
        if 0 <= place < len(self._in_order) and isinstance(unit := self._blocks[self._in_order[place]], RowUnit):
            unit.start_gather()

    def _after_forward(self, block: nn.Module, _: object, output: Any) -> None:
        if not self._is_by_block:
            return
        hidden = output if isinstance(output, Tensor) else output[0]
        if hidden.requires_grad and torch.is_grad_enabled():
            hidden.register_hook(lambda gradient: self._before_backward(block))
            self._with_backward.add(block)
        # What is computed again in a backward is needed there.
        if not self._is_backward and self._gathers_blocks:
            self._blocks[block].drop()

    def _before_backward(self, block: nn.Module) -> None:
        """The gradient of its output is complete: the blocks after it have done all that takes their parameters."""
        if block is not self._in_backward:
            self._end_block()
        if self._gathers_blocks:
            for other, unit in self._blocks.items():
                if other is not block and unit.is_whole:
                    unit.drop()
            self._blocks[block].gather()
            place = self._places[block] - 1
            if place >= 0 and self._in_order[place] in self._with_backward:
                self._start_gather(place)
        self._in_backward = block


def _outermost(module: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        found += [child] if isinstance(child, kind) else _outermost(child, kind)
    return found


def _owners(parameters: Iterable[nn.Parameter], size: int) -> dict[nn.Parameter, int]:
    """Assigns parameters to ranks, largest first, each to the rank with the least so far; equal on every rank."""
    loads = [0] * size
    owners = {}
    for parameter in sorted(parameters, key=lambda p: -p.numel()):
        owner = min(range(size), key=loads.__getitem__)
        loads[owner] += parameter.numel()
        owners[parameter] = owner
    return owners
