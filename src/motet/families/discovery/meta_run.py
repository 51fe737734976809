"""Runs models for the shapes of their tensors, without weights: what has parameters runs on the meta device."""

import copy
import inspect
from collections.abc import Callable, Collection, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

CPU = torch.device("cpu")


def copy_on_meta(model: nn.Module) -> Any:
    """A copy without weights, in which every parameter is trained."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        meta = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(meta) if isinstance(tensor, nn.Parameter) and meta.is_floating_point() else meta
    return copy.deepcopy(model, memo)


def prepare_run(model: nn.Module, blocks: str) -> None:
    """Lets the modules of a copy on the meta device that do not hold the list `blocks`, nor are in it, be called with
    tensors on the CPU. Those without parameters run there: rotary positions ask for the largest position."""
    on_meta: list[str] = []
    for path, module in model.named_modules():
        if path.startswith(f"{blocks}."):
            continue
        buffers = dict(module.named_buffers(recurse=False))
        holds_blocks = not path or f"{blocks}.".startswith(f"{path}.")
        has_parameters = any(True for _ in module.parameters())
        is_inside = any(path.startswith(f"{outer}.") for outer in on_meta)
        if holds_blocks or not (has_parameters or is_inside):
            for key, buffer in buffers.items():
                setattr(module, key, torch.zeros(buffer.shape, dtype=buffer.dtype))
        elif buffers or any(True for _ in module.parameters(recurse=False)):
            on_meta.append(path)
            module.forward = _for_shapes(module.forward, has_parameters)


def run_model(model: nn.Module, rows: int, columns: int) -> None:
    """A forward over token ids, as of a batch without padding."""
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    with torch.random.fork_rng(devices=[]):
        model(input_ids=torch.ones(rows, columns, dtype=torch.long), **options)


def _for_shapes(forward: Callable[..., Any], depends: bool) -> Callable[..., Any]:
    return lambda *args, **kwargs: run_for_shapes(forward, args, kwargs, depends=depends, device=CPU)


def run_for_shapes(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    depends: bool = False,
    device: torch.device | None = None,
) -> Any:
    """Runs a module on the meta device and returns its result as zeros on `device`, or on that of the arguments: some
    models send ids to where the embedding is (Llama 4). What depends on parameters requires gradients, as it would;
    mappings among the arguments get what was put into them.

    `depends`: whether all of it counts as depending on parameters, also on those that are never trained."""
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    device = device or (leaves[0].device if leaves else CPU)
    there = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (args, kwargs))

    def back(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        zeros = torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
        # Not a leaf of the graph: models write into what the embedding gave (CTRL).
        is_tracked = leaf.requires_grad or (depends and leaf.is_floating_point())
        return zeros.requires_grad_() * 1 if is_tracked and torch.is_grad_enabled() else zeros

    made = tree_map(back, forward(*there[0], **there[1]))
    for here, changed in zip((*args, *kwargs.values()), (*there[0], *there[1].values()), strict=True):
        if isinstance(here, MutableMapping):
            here.update({key: tree_map(back, changed[key]) for key in changed if key not in here})
    return made


def tolerate(modules: Collection[nn.Module]) -> None:
    """Modules that cannot run on the meta device (experts ask which tokens are theirs) return what they got."""
    for module in modules:
        module.forward = _tolerant(module.forward)


def _tolerant(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except Exception:
            taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if not taken or not taken[0].is_floating_point():
                raise
            return taken[0] * 1

    return run
