"""Runs a whole causal model's own forward on a stage that holds a part of its layers.

Modules of other stages stay where they are as stand-ins without parameters, so nothing is renumbered or renamed, and
masks, positions, multipliers and configuration are the whole model's. Blocks before the stage return what came from the
stage before; behind the stage's last block the forward is left. Parts of the embedding that are held elsewhere give
zeros of the right shape, which are never read.
"""

from collections.abc import Hashable, MutableMapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from motet.errors import UserError
from motet.families.discovery.block_values import (
    BlockValues,
    Path,
    arguments,
    block_values,
    hidden_key,
    put_at,
    value_at,
)
from motet.families.discovery.language_model_parts import CausalPaths, causal_layer_parts, num_causal_layers
from motet.families.discovery.meta_run import run_for_shapes
from motet.parallel.tensor.sequence_parallel import note_length


class LeftForward(Exception):
    """Not an error: the forward has come to the end of the stage, or to the head, which the stage calls itself.

    `packed`: what the next stage, or the head, receives."""

    def __init__(self, packed: Tensor) -> None:
        self.packed = packed


@dataclass
class Handover:
    """Values that cross the borders of a stage during its forward."""

    own: range
    """The stage's blocks."""
    forms: BlockValues
    received: Tensor | None = None
    """Hidden states from the stage before; None: they have been put in, or there are none."""
    whole_length: int | None = None
    """Columns of the whole hidden states, where each tensor-parallel rank receives its share of them; None: they are
    received whole."""
    is_passed_on: bool = False
    """Whether a stand-in has returned them, so that they come to the stage's blocks by themselves, with what the model
    adds between blocks (deepstack)."""
    hidden: Tensor | None = None
    """Result of the stage's last block."""
    values: dict[int, Tensor] = field(default_factory=dict)
    """Those that are known, by their index in `forms`."""

    def __post_init__(self) -> None:
        self._leaving = self.forms.crossing(self.own.stop)
        crossing = {*self.forms.crossing(self.own.start), *self._leaving}
        self._read: dict[int, list[tuple[int, Path]]] = {}
        """By block, the values among its arguments that cross a border of the stage, and where they stand."""
        for index in sorted(crossing):
            for block, path in self.forms.values[index].readers.items():
                self._read.setdefault(block, []).append((index, path))

    def begin(self, packed: Tensor | None) -> None:
        self.received, self.hidden, self.values, self.is_passed_on = None, None, {}, False
        if packed is not None:
            self.received, self.values = self.forms.unpack(self.own.start, packed)
            if self.whole_length is not None:
                note_length(self.received, self.whole_length)

    def read(self, block: int, found: MutableMapping[Any, Any]) -> None:
        """Puts known values into a block's arguments, and takes from them those that are not known yet."""
        for index, path in self._read.get(block, ()):
            if index in self.values:
                put_at(found, path, self.values[index])
            else:
                self.values[index] = value_at(found, path)

    def enters(self, block: int) -> bool:
        """Whether anything is to be put into one of the stage's blocks, or taken from it."""
        return self.received is not None or block in self._read

    def leave_if_complete(self, fallback: Tensor | None = None) -> None:
        """Leaves the forward if all is known that the next stage reads. `fallback`: the hidden states where the model
        skipped the stage's blocks."""
        hidden = fallback if self.hidden is None else self.hidden
        if hidden is not None and all(i in self.values for i in self._leaving):
            raise LeftForward(self.forms.pack(self.own.stop, hidden, self.values))


class _Result(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype


MAX_RESULTS = 256
"""Forms of arguments for which a stand-in remembers its result."""


def _form(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
    """What the result's form depends on, of the commonest call, with one tensor; None: another."""
    if kwargs or len(args) != 1 or not isinstance(args[0], Tensor) or args[0].is_meta:
        return None
    return args[0].shape, args[0].dtype, torch.is_autocast_enabled(args[0].device.type)


class StandIn(nn.Module):
    """Stands in for a module that another stage holds."""

    def __init__(self, original: nn.Module, handover: Handover | None = None) -> None:
        super().__init__()
        # Outside of what nn.Module knows, so that nothing finds parameters in it.
        self.__dict__.update(original=original.to("meta"), handover=handover, results={})

    def __getattr__(self, name: str) -> Any:
        """Answers attributes that the model reads of its layers (`attention_type`, `layer_idx`)."""
        if name in ("_parameters", "_buffers", "_modules", "original", "handover", "results"):
            raise AttributeError(name)
        return getattr(self.__dict__["original"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        handover: Handover | None = self.__dict__["handover"]
        device = None if handover is None or handover.received is None else handover.received.device
        form = _form(args, kwargs)
        results: dict[Hashable, _Result] = self.__dict__["results"]
        if form is not None and form in results:
            shape, dtype = results[form]
            return torch.zeros(shape, dtype=dtype, device=device or args[0].device)
        with torch.no_grad():
            result = run_for_shapes(self.__dict__["original"], args, kwargs, device=device)
        if form is not None and isinstance(result, Tensor) and len(results) < MAX_RESULTS:
            results[form] = _Result(result.shape, result.dtype)
        return result


class BlockStandIn(StandIn):
    """Stands in for a block."""

    def __init__(self, original: nn.Module, block: int, handover: Handover) -> None:
        super().__init__(original, handover)
        self.__dict__.update(
            block=block, is_before=block < handover.own.start, num_returned=handover.forms.num_returned.get(block, 0)
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        handover: Handover = self.handover
        if self.is_before:
            hidden, handover.is_passed_on = handover.received, True
        else:
            found = arguments(args, kwargs)
            hidden = found[hidden_key(found)]
            handover.read(self.block, found)
            handover.leave_if_complete(hidden)
        return (hidden, *[None] * (self.num_returned - 1)) if self.num_returned else hidden

    __call__ = forward
    """Without hooks: nothing runs here."""


class Behind(StandIn):
    """Stands in for the head. Reached where the model skipped all blocks behind the stage."""

    def forward(self, hidden: Tensor) -> Any:
        self.__dict__["handover"].leave_if_complete(hidden)
        raise AssertionError("the blocks behind the stage did not get what they read")


def put_stand_ins(model: Any, paths: CausalPaths, own: range, *, is_first: bool, is_last: bool) -> Handover:
    """Leaves of the model the blocks `own`, and embedding and head where the stage is the first or the last.

    Raises `UserError` for a model that cannot be cut."""
    _check_sharing(model)
    handover = Handover(own, block_values(model))
    blocks: Any = model.get_submodule(paths.blocks)
    if type(blocks) is nn.ModuleList:
        blocks.__class__ = _Blocks
    for index, block in enumerate(blocks):
        if index in own:
            _enter_and_leave(block, _Place(index, handover, not is_last and index == own.stop - 1))
        else:
            blocks[index] = BlockStandIn(block, index, handover)
    for path in () if is_first else paths.embed_parts:
        model.set_submodule(path, StandIn(model.get_submodule(path), handover))
    for path in () if is_last else paths.head_parts:
        model.set_submodule(path, Behind(model.get_submodule(path), handover))
    return handover


class _Blocks(nn.ModuleList):
    """A list of blocks whose slices are plain lists: many models' forwards take a slice, and a new `ModuleList` for it
    is slow to make."""

    def __getitem__(self, index: Any) -> Any:
        return [*self][index] if isinstance(index, slice) else super().__getitem__(index)


def _check_sharing(model: Any) -> None:
    """Only embedding and head may share a parameter, the words' table."""
    first: dict[int, int] = {}
    words = id(model.get_input_embeddings().weight)
    for layer in range(num_causal_layers(model)):
        for path in causal_layer_parts(model, layer):
            for name, parameter in model.get_submodule(path).named_parameters():
                before = first.setdefault(id(parameter), layer)
                if before != layer and id(parameter) != words:
                    raise UserError(
                        f"{type(model).__name__}: layers {before} and {layer} share the parameter {path}.{name}, which "
                        "several stages do not support; use one stage"
                    )


class _Place(NamedTuple):
    """The place of one of the stage's blocks."""

    number: int
    handover: Handover
    leaves: bool
    """Its output leaves the stage."""


def _enter_and_leave(block: nn.Module, place: _Place) -> None:
    """Puts in what was received, where no block before the stage's own was called, and leaves the forward behind the
    last one. Around the block's whole call: hooks and recomputation are inside."""
    block_class: Any = type(block)
    block.motet_place = place  # type: ignore[assignment]
    block.__class__ = _class_with_place(block_class)


@cache
def _class_with_place(block_class: Any) -> type[nn.Module]:
    """One class for all blocks of a class: `torch.compile` makes code for each."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        number, handover, leaves = self.motet_place
        if handover.enters(number):
            found = arguments(args, kwargs)
            if handover.received is not None:
                if not handover.is_passed_on:
                    found[hidden_key(found)] = handover.received
                handover.received = None
            handover.read(number, found)
            args, kwargs = tuple(found.pop(place) for place in range(len(args))), found
        output = block_class.__call__(self, *args, **kwargs)
        if leaves:
            handover.hidden = output if isinstance(output, Tensor) else output[0]
            handover.leave_if_complete()
        return output

    names = {"__call__": call, "__module__": block_class.__module__}
    made: Any = type(block_class.__name__, (block_class,), names)
    # transformers wraps the forward of every new class; that of `block_class` is wrapped already.
    if "forward" in vars(made):
        del made.forward
    return made
