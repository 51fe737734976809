"""Exchange of Python values between ranks, and calls that fail on all ranks if they fail on one, so that one rank's
failure leaves no other waiting.

Values travel as JSON in tensors, of a type that both sides name, and are validated on arrival: torch's own collectives
of objects would unpickle, and so run, whatever another rank sends.
"""

import hashlib
import json
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError

from motet.devices import communication_device
from motet.errors import UserError

T = TypeVar("T")

MAX_VALUE_BYTES = 2**30
"""Largest value of one rank, as JSON."""


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def gather_values(kind: Any, mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Collective over the group (None: all ranks): each rank's value, by rank. `kind`: the type of the values, of
    dataclasses, collections and what JSON knows.

    Raises `ValueError` naming the rank whose value is not of that type."""
    device = communication_device(group)
    text = json.dumps(_adapter(kind).dump_python(mine, mode="json")).encode()
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(text)], device=device), group=group)
    num_bytes = [int(size) for size in sizes]
    if not all(0 < size <= MAX_VALUE_BYTES for size in num_bytes):
        raise ValueError(f"ranks want to send {num_bytes} bytes; at most {MAX_VALUE_BYTES} each are taken")
    padded = torch.zeros(max(num_bytes), dtype=torch.uint8, device=device)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    everyone = [torch.empty_like(padded) for _ in num_bytes]
    dist.all_gather(everyone, padded, group=group)
    result = []
    for rank, (row, size) in enumerate(zip(everyone, num_bytes, strict=True)):
        try:
            result.append(cast(T, _adapter(kind).validate_python(json.loads(row[:size].cpu().numpy().tobytes()))))
        except (ValueError, ValidationError, RecursionError) as error:
            raise ValueError(f"rank {rank} sent something that is not of the type {kind}: {error}") from None
    return result


def on_every_rank(kind: Any, action: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Collective over the group (None: all ranks): what each rank's call returns, by rank. `kind`: its type.

    If some rank's raises `UserError` or `OSError`, the first such error is raised on every rank."""
    result: T | None = None
    failure: UserError | OSError | None = None
    try:
        result = action()
    except (UserError, OSError) as error:
        failure = error
    told = None if failure is None else (isinstance(failure, UserError), _arguments(failure))
    failures = gather_values(tuple[bool, list[str | int]] | None, told, group)
    for rank, other in enumerate(failures):
        if other is not None:
            if failure is not None and rank == dist.get_rank(group):
                raise failure
            is_mistake, arguments = other
            raise UserError(*arguments) if is_mistake else OSError(*arguments)
    return gather_values(kind, cast(T, result), group)


def _arguments(error: UserError | OSError) -> list[str | int]:
    if isinstance(error, OSError) and error.errno is not None and error.strerror is not None:
        return [error.errno, error.strerror]
    return [str(error)]


def on_first_rank(kind: Any, action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Collective: what the call returns on the group's rank 0, which alone makes it.

    Its errors as with `on_every_rank`."""
    wanted = None if kind is None else kind | None
    return cast(T, on_every_rank(wanted, lambda: action() if dist.get_rank(group) == 0 else None, group)[0])


def is_same_on_all_ranks(text: str, device: torch.device) -> bool:
    """Collective. `device`: that the ranks communicate with."""
    digest = int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)
    bounds = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    return bool(bounds[0].item() == digest and -bounds[1].item() == digest)
