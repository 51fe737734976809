"""Checks before the first step: every link that the plan can use, and the memory forecast."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from motet.devices import has_own_memory, memory_bytes
from motet.errors import UserError
from motet.parallel.mesh import Mesh
from motet.runtime.communication.agreement import on_every_rank
from motet.runtime.communication.deadline import StepFailedError
from motet.runtime.communication.gradient_reduction import GradientReducer
from motet.schedule.action import Reduce
from motet.schedule.communicators import Link

LONGEST_TRIAL = timedelta(seconds=60)


def open_communicators(mesh: Mesh, device: torch.device, reducers: Mapping[Reduce, GradientReducer]) -> int:
    """Sends a few bytes over every link of the plan and sums a number in every group of it. Collective.

    NCCL's communicators wait on the host for all their members when they are used first. Inside the first step members
    would come to them in different orders. `reducers`: this rank's; all members of a group must launch equal buckets.

    Returns how many links and groups this rank tried. Raises `StepFailedError` naming what failed."""
    tried = 0
    # All ranks go through links and groups in the same order, so no two wait for each other.
    for link, group in mesh.links.items():
        _try_link(link, group, mesh, device)
        tried += 1
    for ranks, group in mesh.stage_groups.items():
        if group is not None:
            _try_group("the stage's group", ranks, group, mesh, device)
            tried += 1
    for reduce, groups in mesh.reduce.items():
        for member in groups.all:
            if member.group is not None:
                launches = reducers[reduce].launches(member) if reduce in reducers else ""
                _try_group(f"the sum {reduce}", member.ranks, member.group, mesh, device, launches)
                tried += 1
    return tried


def _try_link(link: Link, group: dist.ProcessGroup | None, mesh: Mesh, device: torch.device) -> None:
    sender, receiver, tag = link
    name = f"rank {mesh.rank}: the link from rank {sender} to rank {receiver}"
    is_sender = mesh.rank == sender
    probe = torch.full((4,), float(sender), device=device) if is_sender else torch.empty(4, device=device)
    try:
        if is_sender:
            work = dist.isend(probe, receiver, group=group, tag=int(tag))
        else:
            work = dist.irecv(probe, sender, group=group, tag=int(tag))
        assert work is not None
        work.wait(LONGEST_TRIAL)
    except RuntimeError as error:
        raise StepFailedError(f"{name} failed: {error}") from error
    if probe[0].item() != sender:
        raise StepFailedError(f"{name} received other bytes than were sent")


def _try_group(
    what: str, ranks: Sequence[int], group: dist.ProcessGroup, mesh: Mesh, device: torch.device, launches: str = ""
) -> None:
    """`launches`: what this rank will launch in the group in each iteration, in order; all must launch the same."""
    where = f"rank {mesh.rank}: {what} of ranks {', '.join(map(str, ranks))}"
    digest = float(int(hashlib.sha256(launches.encode()).hexdigest()[:9], 16))
    probe = torch.tensor([1.0, digest], dtype=torch.float64, device=device)
    try:
        dist.all_reduce(probe, group=group)
    except RuntimeError as error:
        raise StepFailedError(f"{where} failed: {error}") from error
    ones, digests = probe.tolist()
    if ones != len(ranks):
        raise StepFailedError(f"{where} summed ones to {ones}")
    if digests != digest * len(ranks):
        raise StepFailedError(f"{where} would launch other collectives here than on other ranks: {launches}")


def check_memory(forecast_bytes: Sequence[int], device: torch.device, limit_bytes: float | None) -> None:
    """Refuses a plan that needs more memory than there is, naming the rank. Collective; raises `UserError`.

    Args:
        forecast_bytes: by rank, the peak; empty: nothing is known.
        limit_bytes: of one device; None: what the device has."""
    if not forecast_bytes:
        return
    rank = dist.get_rank()
    available = device_memory_bytes(device) if limit_bytes is None else limit_bytes
    on_every_rank(None, lambda: _check_memory_of(rank, forecast_bytes[rank], available))


def _check_memory_of(rank: int, needed: int, available: float) -> None:
    if needed > available:
        raise UserError(
            f"cluster.memory_bytes: rank {rank} would need {needed / 2**20:.0f} MiB, but its device has "
            f"{available / 2**20:.0f} MiB; use more pipeline stages or tensor parallelism, recompute, zero1 or "
            "smaller microbatches"
        )


def device_memory_bytes(device: torch.device) -> int:
    """Of an accelerator, its own; of a CPU, this process's share of the machine's."""
    if has_own_memory(device):
        return memory_bytes(device)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
