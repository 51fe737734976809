"""Finds the list of blocks of an encoder of the user's own, so that it can be cut into stages.

A module is regular if its forward runs some modules, then each block of one list once, each with the one before's
output alone, and then other modules, which read nothing but the last block's output. That is observed in a run on the
meta device; a module that does anything else is one stage.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class OwnBlocks:
    """Paths in the module."""

    path: str
    """The list of blocks."""
    number: int
    before: tuple[str, ...]
    """Modules that run before the first block."""
    after: tuple[str, ...]
    """Modules that run after the last block, or never."""


def find_own_blocks(module: nn.Module, run: Callable[[], Any]) -> OwnBlocks | None:
    """`module`: on the meta device, where `run` calls it. None: it is not regular."""
    lists = [
        (sum(p.numel() for p in child.parameters()), path)
        for path, child in module.named_modules()
        if isinstance(child, nn.ModuleList | nn.Sequential) and len({type(block) for block in child}) == 1 < len(child)
    ]
    if not lists:
        return None
    path = max(lists)[1]
    blocks = list(module.get_submodule(path).children())
    around, siblings = _around(module, path)
    if any(next(part.parameters(recurse=False), None) is not None for part in around):
        return None
    watch = _Watch(blocks)
    called: dict[str, set[int]] = {sibling: set() for sibling in siblings}
    hooks = [
        module.get_submodule(s).register_forward_pre_hook(lambda *_, s=s: called[s].add(watch.phase)) for s in siblings
    ]
    try:
        with watch:
            run()
    finally:
        for hook in hooks:
            hook.remove()
        watch.remove()
    last = 2 * len(blocks)
    if not watch.is_regular or watch.phase != last or any(len(p) > 1 or p - {0, last} for p in called.values()):
        return None
    before = tuple(s for s, phases in called.items() if phases == {0})
    return OwnBlocks(path, len(blocks), before, tuple(s for s in siblings if s not in before))


def _around(module: nn.Module, path: str) -> tuple[list[nn.Module], list[str]]:
    """The modules that hold the list, and the paths of all others in them."""
    around, siblings, prefix = [module], [], ""
    for name in path.split("."):
        siblings += [f"{prefix}{other}" for other, _ in around[-1].named_children() if other != name]
        around.append(around[-1].get_submodule(name))
        prefix += f"{name}."
    return around, siblings


@dataclass
class _Handed:
    """Tensors by identity; they are kept, so that no other takes it over."""

    tensors: dict[int, Tensor] = field(default_factory=dict)

    def add(self, tensor: Tensor) -> None:
        self.tensors[id(tensor)] = tensor


class _Watch(TorchDispatchMode):
    """Follows a run: phase 2 i - 1 is that of block i, counted from 1; even ones lie between."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.phase, self.is_regular = 0, True
        self._made: dict[int, _Handed] = {}
        """By phase, the tensors that were made in it."""
        self._passed: Tensor | None = None
        self._last = 2 * len(blocks)
        self._hooks: list[Any] = []
        for index, block in enumerate(blocks):
            self._hooks += [
                block.register_forward_pre_hook(self._enter(index), with_kwargs=True),
                block.register_forward_hook(self._leave),
            ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, index: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            is_alone = len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and args[0].dim() == 3
            follows = self.phase == 2 * index and (index == 0 or (is_alone and args[0] is self._passed))
            self.is_regular &= is_alone and follows
            self._passed = args[0] if is_alone else None
            self.phase += 1

        return hook

    def _leave(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        is_same = isinstance(output, Tensor) and self._passed is not None and output.shape == self._passed.shape
        self.is_regular &= is_same
        self._passed = output if is_same else None
        self.phase += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf is not self._passed:
                made = next((phase for phase, own in self._made.items() if id(leaf) in own.tensors), self.phase)
                self.is_regular &= made == self.phase
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._made.setdefault(self.phase, _Handed()).add(leaf)
        return output
