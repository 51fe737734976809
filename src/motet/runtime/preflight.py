"""Checks before the first step: every link that the plan can use, and the memory forecast."""

import os
from collections.abc import Sequence
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist

from motet.assignment.batch_assignment import BatchAssignment, contiguous_assignment, num_shares
from motet.assignment.sample import Sample, Segment
from motet.devices import has_own_memory, memory_bytes
from motet.errors import UserError
from motet.parallel.mesh import Mesh
from motet.plan import Plan
from motet.runtime.agreement import on_every_rank
from motet.runtime.deadline import StepFailedError
from motet.schedule.dependencies import Activation, Dependencies, Gradient
from motet.schedule.lower import messages
from motet.schedule.routes import derive_routes

LONGEST_TRIAL = timedelta(seconds=60)


def plan_links(plan: Plan) -> list[tuple[int, int]]:
    """The (sender, receiver) pairs that any batch may need, however it is cut."""
    everything = {module.data_module(name): (Segment(1),) for name, module in plan.modules.items()}
    if plan.loss_module is not None:
        replicas = max(len(module.replicas) for module in plan.modules.values())
        samples = [Sample(str(i), everything, {}) for i in range(replicas * plan.num_microbatches)]
        assignment = contiguous_assignment(plan, samples)
    else:
        places = _places_of_samples(plan)
        samples = [Sample(str(i), everything, {}) for i in range(len(places))]
        assignment = BatchAssignment(
            {
                name: tuple(
                    (tuple(i for i, place in enumerate(places) if place[name] == r),)
                    for r in range(len(module.replicas))
                )
                for name, module in plan.modules.items()
            }
        )
    routes = derive_routes(plan, assignment, samples)
    dependencies = Dependencies(routes)
    pairs = set()
    for route in (route for outgoing in routes.outgoing.values() for route in outgoing):
        for value in (Activation(route.source, route.target), Gradient(route.source, route.target)):
            if isinstance(value, Activation) or route.carries_gradient:
                pairs |= {(message.sender, message.receiver) for message in messages(value, dependencies)}
    return sorted(pairs)


def _places_of_samples(plan: Plan) -> list[dict[str, int]]:
    """Each sample's replica of each module, such that all replicas of a share that may meet do meet."""
    places = []
    for share in range(num_shares(plan)):
        of_share = {
            name: range(share * size, (share + 1) * size)
            for name, module in plan.modules.items()
            for size in [len(module.replicas) // num_shares(plan)]
        }
        first = {name: replicas[0] for name, replicas in of_share.items()}
        for name, replicas in of_share.items():
            places += [{**first, name: r} for r in replicas]
        for edge in plan.edges:
            pairs = product(of_share[edge.source], of_share[edge.target])
            places += [{**first, edge.source: a, edge.target: b} for a, b in pairs]
    return places


def try_links(plan: Plan, mesh: Mesh, device: torch.device) -> int:
    """Sends a few bytes over every link of the plan and sums a number in every group of it. Collective.

    Returns how many links and groups this rank tried. Raises `StepFailedError` naming what failed."""
    tried = 0
    # All ranks go through pairs and groups in the same order, so no two wait for each other.
    for tag, (sender, receiver) in enumerate(plan_links(plan)):
        if mesh.rank in (sender, receiver):
            _try_link(sender, receiver, mesh, device, tag)
            tried += 1
    for ranks, group in mesh.stage_groups.items():
        if group is not None:
            _try_group("the tensor-parallel group", ranks, group, mesh, device)
            tried += 1
    members = [(reduce, member) for reduce, groups in mesh.reduce.items() for member in groups.all]
    for reduce, member in members:
        if member.group is not None:
            _try_group(f"the sum {reduce}", member.ranks, member.group, mesh, device)
            tried += 1
    return tried


def _try_link(sender: int, receiver: int, mesh: Mesh, device: torch.device, tag: int) -> None:
    link = f"rank {mesh.rank}: the link from rank {sender} to rank {receiver}"
    is_sender = mesh.rank == sender
    probe = torch.full((4,), float(sender), device=device) if is_sender else torch.empty(4, device=device)
    try:
        work = dist.isend(probe, receiver, tag=tag) if is_sender else dist.irecv(probe, sender, tag=tag)
        assert work is not None
        work.wait(LONGEST_TRIAL)
    except RuntimeError as error:
        raise StepFailedError(f"{link} failed: {error}") from error
    if probe[0].item() != sender:
        raise StepFailedError(f"{link} brought other bytes than were sent")


def _try_group(what: str, ranks: Sequence[int], group: dist.ProcessGroup, mesh: Mesh, device: torch.device) -> None:
    where = f"rank {mesh.rank}: {what} of ranks {', '.join(map(str, ranks))}"
    probe = torch.ones(1, device=device)
    try:
        dist.all_reduce(probe, group=group)
    except RuntimeError as error:
        raise StepFailedError(f"{where} failed: {error}") from error
    if probe.item() != len(ranks):
        raise StepFailedError(f"{where} summed ones to {probe.item()}")


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
