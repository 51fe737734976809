"""Refuses optimizers that need whole matrices if a rank holds only parts of them.

Under tensor parallelism a parameter of a rank is a part of a matrix. Optimizers that work element by element (AdamW,
SGD, Lion) update it as they would update the whole. Muon, Shampoo, SOAP and Adafactor, which compute with rows and
columns, and LAMB, LARS and L-BFGS, which compute with norms and products of whole tensors, would train something else,
without an error.

Limits: optimizers are known by the names of their classes, and of the classes that they derive from.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from motet.errors import UserError
from motet.runtime.local_model import LocalParameter

NEED_WHOLE = ("muon", "shampoo", "soap", "adafactor", "galore", "lamb", "lars", "lbfgs")
"""Parts of the names of optimizers' classes."""

PART_OF = "motet_part_of"
"""Attribute of parameters that are parts: the whole's name."""

_is_watching = False


def watch_optimizers(parameters: Iterable[LocalParameter]) -> None:
    """From now on such optimizers are refused when they step with one of these parameters that is a part."""
    global _is_watching
    parts = [p for p in parameters if p.shard is not None or p.rows is not None]
    for p in parts:
        setattr(p.parameter, PART_OF, p.name)
    if parts and not _is_watching:
        register_optimizer_step_pre_hook(_check)
        _is_watching = True


def _check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    kind = type(optimizer)
    if not any(name in base.__name__.lower() for base in kind.__mro__ for name in NEED_WHOLE):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (name := getattr(parameter, PART_OF, None)) is not None:
                raise UserError(
                    f"optimizer: {kind.__name__} needs whole tensors, but this rank holds a part of {name}; use an "
                    "optimizer that works element by element, such as AdamW, or a plan without tensor parallelism"
                )
