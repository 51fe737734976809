"""Finds the parts of a causal language model in its modules: embedding, list of blocks, head.

Nothing is looked up by the model's name, unless a package says it (`motet.families.entry_points`). The blocks are the
largest list of modules beside the table of tokens; the modules that run before the first block are the embedding's,
found by a forward of two tokens that ends there; all others with parameters are the head's. Modules on the meta device
run there, for their shapes, so a model without weights can be searched too.

A text model inside of a model of several modalities is found by the same rules: its parts are those beside its table of
tokens, and the head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from motet.errors import UserError
from motet.families.discovery.meta_run import copy_on_meta, prepare_run, run_model
from motet.families.discovery.structure import once_for_each_structure
from motet.families.language_models import exceptional_families


@dataclass(frozen=True, kw_only=True)
class CausalPaths:
    """Paths of the parts of a causal model."""

    base: str
    """The model under the head."""
    words: str
    """The table of tokens."""
    blocks: str
    embed_parts: tuple[str, ...]
    head_parts: tuple[str, ...]
    output: str
    """The linear onto the vocabulary."""


_FOUND: WeakKeyDictionary[nn.Module, CausalPaths] = WeakKeyDictionary()


def causal_paths(model: Any) -> CausalPaths:
    """The paths of a causal model's parts in it. Found once: a model that has been cut keeps those of the whole.

    Args:
        model: a `...ForCausalLM` of transformers, or a model of several modalities with a text model in it; on the meta
            device or with weights.

    Raises `UserError` for a model that is not made of an embedding, a list of blocks and a head, or that stores tables
    of whole numbers, which are neither loaded nor exported."""
    if model not in _FOUND:
        _check_buffers(model)
        find_exception = exceptional_families().get(model.config.model_type, _find)
        _FOUND[model] = find_exception(model)
    return _FOUND[model]


def _check_buffers(model: nn.Module) -> None:
    stored = model.state_dict()
    for name, buffer in model.named_buffers():
        is_counter = name.endswith("num_batches_tracked")
        if not buffer.is_floating_point() and not is_counter and name in stored:
            raise UserError(
                f"{type(model).__name__}: its checkpoints hold whole numbers ({name}), which motet does not load; "
                "it is not supported"
            )


def num_causal_layers(model: Any) -> int:
    """embed, the blocks, and the head."""
    return _num_blocks(model) + 2


def causal_layer_parts(model: Any, layer: int) -> tuple[str, ...]:
    """The paths of the sub-modules that make up one layer."""
    paths = causal_paths(model)
    if 1 <= layer <= _num_blocks(model):
        return (f"{paths.blocks}.{layer - 1}",)
    return paths.embed_parts if layer == 0 else paths.head_parts


def _num_blocks(model: Any) -> int:
    return len(list(model.get_submodule(causal_paths(model).blocks).children()))


@once_for_each_structure
def _find(model: Any) -> CausalPaths:
    name = type(model).__name__
    words, output = (_path_of(model, x) for x in (model.get_input_embeddings(), model.get_output_embeddings()))
    if words is None or output is None:
        raise UserError(f"{name}: has no token embedding or no output head; give a causal language model")
    base, blocks = _blocks_beside(model, words)
    before = _run_before_blocks(model.get_submodule(base), blocks.removeprefix(f"{base}."))
    if before is None:
        # In the order of registration, which is that of the forward in all but a few models.
        before = _registered_before(model.get_submodule(base), blocks.removeprefix(f"{base}."))
    before = {f"{base}.{path}" for path in before} | {words}
    is_composite = model.config.get_text_config() is not model.config
    root, inside = (base, _owners(model, base)) if is_composite else ("", _owners(model, ""))
    inside = [path for path in inside if path != blocks and not path.startswith(f"{blocks}.")]
    loose = [path for path in inside if f"{blocks}.".startswith(f"{path}.") or not path]
    if loose:
        parameter = next(iter(dict(model.get_submodule(loose[0]).named_parameters(recurse=False))))
        raise UserError(f"{name}: its parameter {parameter} belongs neither to a block nor to embedding or head")
    embed_parts, head_parts = _cover(model, root, blocks, inside, before)
    return CausalPaths(
        base=base,
        words=words,
        blocks=blocks,
        embed_parts=tuple(embed_parts),
        head_parts=(*head_parts, *([output] if is_composite else [])),
        output=output,
    )


def _path_of(model: nn.Module, wanted: nn.Module | None) -> str | None:
    return next((path for path, module in model.named_modules() if module is wanted and path), None)


def _blocks_beside(model: Any, words: str) -> tuple[str, str]:
    """The innermost module that holds both the table of tokens and a list of blocks, and the list."""
    text_config = type(model.config.get_text_config())
    base = words
    while base:
        base = base.rpartition(".")[0]
        found = [path for path in _lists_in(model, base) if type(_config_over(model, path)) is text_config]
        if not found:
            continue
        sizes = {path: sum(p.numel() for p in model.get_submodule(path).parameters()) for path in found}
        blocks = max(found, key=sizes.__getitem__)
        alike = [path for path in found if len(model.get_submodule(path)) == len(model.get_submodule(blocks))]
        if len(alike) > 1:
            raise UserError(f"{type(model).__name__}: its layers are spread over the lists {', '.join(alike)}")
        return base, blocks
    raise UserError(f"{type(model).__name__}: has no list of blocks; its layers cannot be identified")


def _lists_in(model: nn.Module, root: str) -> Iterator[str]:
    """Paths of the outermost lists of modules with parameters, leaves apart."""
    for name, child in model.get_submodule(root).named_children():
        path = f"{root}.{name}" if root else name
        members = list(child.children())
        if isinstance(child, nn.ModuleList) and members and all(map(_is_block, members)):
            yield path
        elif not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _lists_in(model, path)


def _is_block(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def _config_over(model: nn.Module, path: str) -> Any:
    """The configuration of the innermost transformers model that holds the module."""
    while path:
        path = path.rpartition(".")[0]
        owner = model.get_submodule(path)
        if isinstance(owner, PreTrainedModel):
            return owner.config
    return None


def _owners(model: nn.Module, root: str) -> list[str]:
    """Paths of all modules below `root` that have parameters of their own."""
    prefix = f"{root}." if root else ""
    return [
        prefix + path if path else root
        for path, module in model.get_submodule(root).named_modules()
        if any(True for _ in module.parameters(recurse=False))
    ]


def _cover(
    model: nn.Module, root: str, blocks: str, owners: list[str], before: set[str]
) -> tuple[list[str], list[str]]:
    """The largest modules whose owners of parameters all run before the blocks, and those of which none does."""
    embed_parts: list[str] = []
    head_parts: list[str] = []
    for name, child in model.get_submodule(root).named_children():
        path = f"{root}.{name}" if root else name
        is_one = not isinstance(child, nn.ModuleList | nn.ModuleDict) and not f"{blocks}.".startswith(f"{path}.")
        own = [owner for owner in owners if f"{owner}.".startswith(f"{path}.")]
        early = [any(f"{owner}.".startswith(f"{part}.") for part in before) for owner in own]
        if not own:
            continue
        if all(early) and is_one:
            embed_parts.append(path)
        elif not any(early) and is_one:
            head_parts.append(path)
        else:
            inner = _cover(model, path, blocks, owners, before)
            embed_parts += inner[0]
            head_parts += inner[1]
    return embed_parts, head_parts


def _registered_before(base: nn.Module, blocks: str) -> set[str]:
    paths = [path for path, _ in base.named_modules()]
    return {path for path in paths[: paths.index(blocks)] if path and not f"{blocks}.".startswith(f"{path}.")}


class _Reached(Exception):
    """Not an error: the forward has come to the first block."""


@torch.no_grad()
def _run_before_blocks(base: nn.Module, blocks: str) -> set[str] | None:
    """Returns the modules under `base` that run before the first block; None if it cannot be run."""
    called: set[str] = set()
    copied = copy_on_meta(base)
    prepare_run(copied, blocks)
    for path, module in copied.named_modules():
        if path and not f"{blocks}.".startswith(f"{path}."):
            module.register_forward_pre_hook(lambda *_, path=path: called.add(path))

    def stop(*_: Any) -> None:
        raise _Reached

    copied.get_submodule(blocks)[0].register_forward_pre_hook(stop, prepend=True)
    try:
        run_model(copied, 1, 2)
    except _Reached:
        return called
    except Exception:  # Whatever a model raises that cannot be called so.
        return None
    return None
