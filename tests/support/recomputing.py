"""Stages whose activations are recomputed, for tests that make stages themselves."""

from typing import Any

from motet.parallel.activations import treat_activations
from motet.recomputation import BLOCKS


def recomputing(stage: Any, how: bool | str) -> Any:
    """The stage, treated as `parallel.recompute` says; True: all blocks are recomputed."""
    if how:
        treat_activations(stage, BLOCKS if how is True else how)
    return stage
