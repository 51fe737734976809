"""Calls that succeed or fail on all ranks alike, so that one rank's failure leaves no other waiting, and the comparison
of values across ranks."""

import hashlib
from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from motet.errors import UserError

T = TypeVar("T")


def on_every_rank(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Collective over the group (None: all ranks): what each rank's call returns, by rank.

    If some rank's raises `UserError` or `OSError`, the first such error is raised on every rank."""
    result: T | None = None
    failure: Exception | None = None
    try:
        result = action()
    except (UserError, OSError) as error:
        failure = error
    everyone: list[tuple[T | None, Exception | None]] = [(None, None)] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (result, failure), group=group)
    for _, other in everyone:
        if other is not None:
            raise other
    return [cast(T, value) for value, _ in everyone]


def on_first_rank(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Collective: what the call returns on the group's rank 0, which alone makes it.

    Its errors as with `on_every_rank`."""
    return cast(T, on_every_rank(lambda: action() if dist.get_rank(group) == 0 else None, group)[0])


def is_same_on_all_ranks(text: str, device: torch.device) -> bool:
    """Collective. `device`: that the ranks communicate with."""
    digest = int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)
    bounds = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    return bool(bounds[0].item() == digest and -bounds[1].item() == digest)
