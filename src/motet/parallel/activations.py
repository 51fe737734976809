"""Treatment of a stage's blocks: activation checkpointing (`motet.recomputation`), of which offloading is a kind, and
compilation.

The forward of a block, or of its attention, is replaced by one that keeps less. Hooks of the module stay outside, so
that they run once. Recomputation is torch's non-reentrant kind.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from motet.errors import UserError
from motet.parallel.offloading import OffloadLane
from motet.recomputation import treatment

ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
"""Names of classes of attention modules."""


class HasBlocks(Protocol):
    """A stage with transformer blocks."""

    @property
    def name(self) -> str: ...

    @property
    def running_blocks(self) -> Mapping[int, nn.Module]:
        """Its blocks that run, by their numbers in the whole module."""


def compile_blocks(stage: HasBlocks, backend: str) -> None:
    """From now on the stage's blocks run compiled by `torch.compile`, each separately, for sequences of any length.

    Blocks of one shape share their code, which takes batch and length as symbols (`dynamic=True`), so that a new length
    compiles nothing; one row and several rows are two cases, and so are forwards with and without a graph. Call it
    before `treat_activations`, so that recomputation runs the compiled block again."""
    for block in stage.running_blocks.values():
        block.forward = torch.compile(block.forward, backend=backend, dynamic=True)


def treat_activations(stage: HasBlocks, kind: str) -> None:
    """From now on the stage's blocks keep what this kind of recomputation says.

    Raises `UserError` if their attention is to be recomputed, but is no module of its own."""
    lane = OffloadLane()
    carry = getattr(stage, "carry_state", None)
    for number, block in stage.running_blocks.items():
        own = treatment(kind, number)
        if own == "recomputed":
            _recompute(block, carry)
        elif own == "offloaded":
            _offload(block, number, lane)
        elif own == "attention":
            found = list(attentions(block))
            if not found:
                raise UserError(
                    f"parallel.recompute: blocks of {stage.name} ({type(block).__name__}) have no attention module; "
                    "give the kind blocks"
                )
            for attention in found:
                _recompute(attention, carry)


def attentions(block: nn.Module) -> Iterator[nn.Module]:
    """The attention modules of a block, those inside of others left out."""
    for child in block.children():
        if ATTENTION.search(type(child).__name__):
            yield child
        else:
            yield from attentions(child)


def _recompute(module: nn.Module, carry: Callable[[], Callable[[], None]] | None) -> None:
    """`carry`: returns what puts a stage's state back to what it is now: other microbatches may run before the
    backward."""
    forward = module.forward

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if carry is None:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        put_back = carry()

        def again(*args: Any, **kwargs: Any) -> Any:
            put_back()
            return forward(*args, **kwargs)

        return checkpoint(again, *args, use_reentrant=False, **kwargs)

    module.forward = checkpointed


def _offload(block: nn.Module, number: int, lane: OffloadLane) -> None:
    forward = block.forward

    def offloaded(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with lane.offloading(block, number, args, kwargs):
            return forward(*args, **kwargs)

    block.forward = offloaded
