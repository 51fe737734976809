"""Remembers what was found in a model for all models of the same structure: each stage builds the whole model again."""

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from transformers import PretrainedConfig

P = ParamSpec("P")
T = TypeVar("T")


def once_for_each_structure(find: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """`find`: takes a model and hashable arguments, and reads of the model no more than `structure_of` says."""
    found: dict[Hashable, T] = {}

    @wraps(find)
    def remembered(model: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        structure = structure_of(model)
        if structure is None:
            return find(model, *args, **kwargs)
        key = structure, args, tuple(kwargs.items())
        if key not in found:
            found[key] = find(model, *args, **kwargs)
        return found[key]

    return remembered


def structure_of(model: Any) -> Hashable | None:
    """All that a model's forward on the meta device depends on; None for a model with hooks, or with a forward that is
    not its class's."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    modules = [*model.named_modules(remove_duplicate=False)]
    if any("forward" in vars(each) or each._forward_hooks or each._forward_pre_hooks for _, each in modules):
        return None
    first: dict[int, str] = {}
    for path, part in (*modules, *tensors):
        first.setdefault(id(part), path)
    return (
        type(model),
        _described(model.config),
        tuple((path, first[id(module)], type(module), _attributes(module)) for path, module in modules),
        tuple((path, first[id(tensor)], tensor.shape, tensor.dtype) for path, tensor in tensors),
    )


def _attributes(module: Any) -> tuple[tuple[str, Any], ...]:
    """Such as a block's number and its kind of attention."""
    return tuple((name, value) for name, value in vars(module).items() if isinstance(value, int | float | str | None))


def _described(value: Any) -> str:
    """A configuration's own `repr` makes another configuration, to show what differs."""
    inner = vars(value) if isinstance(value, PretrainedConfig) else value
    if not isinstance(inner, dict):
        return repr(value)
    return f"{type(value)}({', '.join(f'{key}={_described(item)}' for key, item in inner.items())})"
