"""Finds what the blocks of a causal model read besides hidden states, by a forward on the meta device.

Most blocks read hidden states, and masks and positions that every stage computes by itself. Some read more that depends
on the tokens: embeddings of each layer (Gemma 3n), the embedded tokens (Zamba), keys and values of earlier blocks
(Gemma 4). Those travel between stages beside the hidden states. A value travels if it depends on parameters, is what an
earlier block returned, or was put by one into a dictionary that blocks share.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from motet.errors import UserError, one_line
from motet.families.discovery.language_model_parts import CausalPaths, causal_paths
from motet.families.discovery.meta_run import copy_on_meta, prepare_run, run_for_shapes, run_model, tolerate
from motet.families.discovery.structure import once_for_each_structure

Path = tuple[Any, ...]
"""Path of a tensor in a block's arguments: the position or name of the argument, then keys and positions in it."""


@dataclass(frozen=True)
class Form:
    """Layout of a value over the tokens of a microbatch."""

    rows: int
    """The dimension of the rows."""
    columns: int
    others: tuple[int, ...]
    """Sizes of its other dimensions."""
    dtype: torch.dtype | None
    """Dtype of the value; None: that of the hidden states."""

    @property
    def width(self) -> int:
        return torch.Size(self.others).numel()

    @property
    def is_packed(self) -> bool:
        """Whether a value of this form is [rows, columns, width] as it stands."""
        return (self.rows, self.columns, len(self.others), self.dtype) == (0, 1, 1, None)

    def pack(self, value: Tensor) -> Tensor:
        """[rows, columns, width]"""
        if self.is_packed:
            return value
        return value.movedim((self.rows, self.columns), (0, 1)).flatten(2)

    def unpack(self, packed: Tensor) -> Tensor:
        if self.is_packed:
            return packed
        value = packed.unflatten(2, self.others).movedim((0, 1), (self.rows, self.columns))
        return value if self.dtype is None else value.round().to(self.dtype)


@dataclass(frozen=True)
class Value:
    """A tensor that blocks read."""

    origin: int
    """The block that made it; -1: it is made before the blocks."""
    form: Form
    readers: Mapping[int, Path]
    """Path of the value in each block's arguments, by block."""


@dataclass(frozen=True)
class BlockValues:
    hidden: Form
    num_returned: Mapping[int, int]
    """0 if a block returns a tensor, else the length of the tuple that begins with it; by block."""
    values: tuple[Value, ...]

    def crossing(self, block: int) -> list[int]:
        """Indices of the values that are made before a block and read by it or a later one."""
        return [i for i, (origin, last) in enumerate(self._spans) if origin < block <= last]

    @cached_property
    def _spans(self) -> tuple[tuple[int, int], ...]:
        """Of each value: the block that made it, and the last one that reads it."""
        return tuple((value.origin, max(value.readers)) for value in self.values)

    def width(self, block: int) -> int:
        """Width of all inputs of a block, side by side."""
        return self.hidden.width + sum(self.values[i].form.width for i in self.crossing(block))

    def pack(self, block: int, hidden: Tensor, made: Mapping[int, Tensor]) -> Tensor:
        """[rows, columns, width]: what crosses the border before a block. `made`: values by index."""
        values = [self.values[i].form.pack(made[i]).to(hidden.dtype) for i in self.crossing(block)]
        packed = self.hidden.pack(hidden)
        return torch.cat([packed, *values], dim=-1) if values else packed

    def unpack(self, block: int, packed: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        crossing = self.crossing(block)
        if not crossing:
            return self.hidden.unpack(packed), {}
        widths = [self.hidden.width, *(self.values[i].form.width for i in crossing)]
        hidden, *values = packed.split(widths, dim=-1)
        unpacked = {i: self.values[i].form.unpack(value) for i, value in zip(crossing, values, strict=True)}
        return self.hidden.unpack(hidden), unpacked


def block_values(model: Any) -> BlockValues:
    """Raises `UserError` if the blocks cannot be run or read what does not lie over the tokens."""
    return _find(model, causal_paths(model))


@once_for_each_structure
def _find(model: Any, paths: CausalPaths) -> BlockValues:
    first = _trace(model, paths, 3, 5)
    other = _trace(model, paths, 4, 7)
    name = type(model).__name__
    if len(first.values) != len(other.values):
        raise UserError(f"{name}: what its blocks read depends on the number of tokens; use one stage")
    return BlockValues(
        hidden=_form(name, first.hidden, other.hidden),
        num_returned=first.num_returned,
        values=tuple(
            Value(value.origin, _form(name, value.tensor, again.tensor), value.readers)
            for value, again in zip(first.values, other.values, strict=True)
        ),
    )


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, Any]:
    """Arguments by position or name."""
    return {**dict(enumerate(args)), **kwargs}


def hidden_key(found: Mapping[Any, Any]) -> Any:
    """Position or name of a block's hidden states in its arguments."""
    return 0 if 0 in found else "hidden_states"


def value_at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def put_at(tree: Any, path: Path, value: Any) -> Any:
    """`tree` with `value` at `path`: mappings are written into, tuples are made anew."""
    if not path:
        return value
    key, *rest = path
    if isinstance(key, int) and not isinstance(tree, Mapping):
        items = [*(tree or ())]
        items += [None] * (key + 1 - len(items))
        items[key] = put_at(items[key], tuple(rest), value)
        return tuple(items)
    tree[key] = put_at(tree.get(key), tuple(rest), value)
    return tree


def _form(name: str, small: Tensor | None, large: Tensor | None) -> Form:
    assert small is not None
    assert large is not None
    changed = [dim for dim in range(small.ndim) if small.shape[dim] != large.shape[dim]]
    rows = [dim for dim in changed if (small.shape[dim], large.shape[dim]) == (3, 4)]
    columns = [dim for dim in changed if (small.shape[dim], large.shape[dim]) == (5, 7)]
    if small.ndim != large.ndim or len(changed) != 2 or not rows or not columns:
        raise UserError(
            f"{name}: its blocks read a tensor {list(small.shape)} of 3 sequences of 5 tokens that cannot be passed on "
            "token by token; use one stage"
        )
    others = tuple(size for dim, size in enumerate(small.shape) if dim not in changed)
    return Form(rows[0], columns[0], others, None if small.is_floating_point() else small.dtype)


@dataclass
class _Traced:
    origin: int
    tensor: Tensor
    readers: dict[int, Path]


def _sources(tree: Any) -> set[Any]:
    """The beginnings of the tensors' graphs. What a block returns begins there."""
    found, seen = set(), set()
    open_nodes = [leaf.grad_fn for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(node)
        open_nodes += [following for following, _ in node.next_functions]
    return found


class _Trace:
    """One forward. Blocks and other modules with parameters run on the meta device; all else on zeros on the CPU."""

    def __init__(self) -> None:
        self.hidden: Tensor | None = None
        self.values: list[_Traced] = []
        self.num_returned: dict[int, int] = {}
        self._returned: dict[int, int] = {}
        """By the identity of a tensor: the block that returned it."""
        self._known: dict[int, _Traced] = {}
        self._others: set[int] = set()
        self._alive: list[Any] = []
        self._behind: set[Any] | None = None
        """After the last block has run: the sources of the hidden states, and of everything made from them."""

    def run_block(self, index: int, num_blocks: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            found = arguments(args, kwargs)
            key = hidden_key(found)
            if self.hidden is not None and self.hidden.shape != found[key].shape:
                raise ValueError(f"hidden states become {list(found[key].shape)} in block {index}")
            self.hidden = found[key]
            self._read(index, {name: value for name, value in found.items() if name != key})
            output = run_for_shapes(forward, args, kwargs)
            self._alive.append((found, output))
            self.num_returned[index] = 0 if isinstance(output, Tensor) else len(output)
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor):
                    self._returned.setdefault(id(leaf), index)
            if index == num_blocks - 1:
                self._behind = _sources(output if isinstance(output, Tensor) else output[0])
            return output

        return run

    def read_behind(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Called before a module that is none of the blocks'. Behind them, nothing but hidden states may be read."""
        if self._behind is not None and not _sources(args) <= self._behind:
            raise ValueError(f"{type(module).__name__} behind the blocks reads what they do not return")

    def returned_behind(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._behind is not None:
            self._behind |= _sources(output)

    def _read(self, index: int, found: Mapping[Any, Any]) -> None:
        for path, leaf, is_shared in _tensors(found):
            if id(leaf) in self._known:
                self._known[id(leaf)].readers[index] = path
                continue
            if id(leaf) in self._others:
                continue
            self._others.add(id(leaf))
            origin = self._returned.get(id(leaf), index - 1 if is_shared else -1)
            if origin >= 0 or leaf.requires_grad:
                self._known[id(leaf)] = _Traced(origin, leaf, {index: path})
                self.values.append(self._known[id(leaf)])


def _tensors(tree: Any, path: Path = (), is_shared: bool = False) -> Iterator[tuple[Path, Tensor, bool]]:
    """Path, tensor, and whether it stands in a dictionary."""
    if isinstance(tree, Tensor):
        yield path, tree, is_shared
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _tensors(value, (*path, key), bool(path))
    elif isinstance(tree, tuple | list):
        for place, value in enumerate(tree):
            yield from _tensors(value, (*path, place), is_shared)


def _trace(model: Any, paths: CausalPaths, rows: int, columns: int) -> _Trace:
    base, trace = copy_on_meta(model.get_submodule(paths.base)), _Trace()
    inside = paths.blocks.removeprefix(f"{paths.base}.")
    blocks = list(base.get_submodule(inside).children())
    prepare_run(base, inside)
    tolerate([module for block in blocks for module in block.modules() if module is not block])
    of_blocks = {module for block in blocks for module in block.modules()}
    for path, module in base.named_modules():
        if module not in of_blocks and not f"{inside}.".startswith(f"{path}.") and path:
            module.register_forward_pre_hook(trace.read_behind)
            module.register_forward_hook(trace.returned_behind)
    for index, block in enumerate(blocks):
        block.forward = trace.run_block(index, len(blocks), block.forward)
    try:
        with torch.enable_grad():
            run_model(base, rows, columns)
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)[:100]}"
        raise UserError(f"{type(model).__name__}: cannot be cut into stages ({reason}); use one stage") from None
    if list(trace.num_returned) != sorted(trace.num_returned) or not trace.num_returned:
        raise UserError(f"{type(model).__name__}: its blocks do not run one after the other; use one stage")
    return trace
