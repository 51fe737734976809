"""Kinds of activation checkpointing: what a module's blocks keep for their backward.

A module is listed by its name (all blocks are recomputed) or as `name:kind`:

| kind | |
|---|---|
| `blocks` | every block keeps its input and runs again in the backward |
| `attention` | the attention of every block keeps its input and runs again; the rest of the block is kept |
| `every_2`, `every_3`, ... | every n-th block, counted from the module's first, is recomputed; the others are kept |
| `offload` | what blocks save travels to the host's memory, and back before their backward |

Numbers are those of blocks in the whole module, so that what is kept does not depend on how it is cut into stages.
"""

import re
from collections.abc import Iterable
from typing import Literal

BLOCKS = "blocks"
BlockTreatment = Literal["kept", "recomputed", "attention", "offloaded"]
"""What becomes of one block's activations; `attention`: that of its attention alone is recomputed."""

_EVERY = re.compile(r"every_([1-9][0-9]*)")


def of_module(entries: Iterable[str], module: str) -> str | None:
    """The kind that is listed for a module; None: it keeps everything."""
    return next((kind for name, kind in map(split_entry, entries) if name == module), None)


def split_entry(entry: str) -> tuple[str, str]:
    """`name` or `name:kind` -> (name, kind)."""
    name, colon, kind = entry.rpartition(":")
    return (name, kind) if colon else (entry, BLOCKS)


def with_kind(name: str, kind: str) -> str:
    """The entry of a module, in its shortest form."""
    return name if kind == BLOCKS else f"{name}:{kind}"


def treatment(kind: str | None, block: int) -> BlockTreatment:
    """What a kind says of the block with this number in its module."""
    if kind is None:
        return "kept"
    if kind == "attention":
        return "attention"
    if kind == "offload":
        return "offloaded"
    every = _EVERY.fullmatch(kind)
    assert every or kind == BLOCKS, kind
    return "recomputed" if every is None or block % int(every[1]) == 0 else "kept"


def check_entries(entries: Iterable[str]) -> None:
    """Raises `ValueError` for a kind that does not exist, or a module that is listed twice."""
    seen = set()
    for name, kind in map(split_entry, entries):
        every = _EVERY.fullmatch(kind)
        if kind not in (BLOCKS, "attention", "offload") and (every is None or int(every[1]) < 2):
            raise ValueError(
                f"recompute: {name} has the kind {kind!r}; give blocks, attention, offload, or every_2, every_3, ..."
            )
        if name in seen:
            raise ValueError(f"recompute: {name} is listed twice; give it once")
        seen.add(name)
