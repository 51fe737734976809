"""Compares the memory that is free on this machine and its devices with what a node's ranks will need.

The need is the planner's prediction for the rank of the first plan that needs most: a node may get any place, and the
plan in which it gets one is not known when it joins. On CPUs the ranks of a node share the memory of the machine, so
the need of all of them counts. What is free on a host is the smallest of what the kernel calls available and what the
limits of this process's control groups (a container, a Slurm job) leave.

Limits: memory that another program takes after the check; temporary memory that predictions leave out
(`motet.costs.memory`). It imports no torch.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from motet.config import RunConfig
from motet.errors import UserError

if TYPE_CHECKING:
    from motet.planner.evaluate import Evaluation

MIB = 2**20
NUM_COPIES = 4
"""States that a rank keeps on its host with `train.failures.copy_every` (`motet.resilience.memory_copies`)."""


@dataclass(frozen=True, kw_only=True)
class MemoryNeeds:
    """Largest predicted need of one rank, in bytes; 0: unknown."""

    device_bytes: int = 0
    """Of its accelerator's memory."""
    host_bytes: int = 0
    """Of the machine's memory."""

    @staticmethod
    def largest(needs: "Sequence[MemoryNeeds]") -> "MemoryNeeds":
        return MemoryNeeds(
            device_bytes=max((each.device_bytes for each in needs), default=0),
            host_bytes=max((each.host_bytes for each in needs), default=0),
        )


NO_NEEDS = MemoryNeeds()


def needs_of_ranks(config: RunConfig, evaluation: "Evaluation") -> list[MemoryNeeds]:
    """Returns what each rank of an evaluated plan is predicted to need."""
    has_copies = config.train.failures is not None and config.train.failures.copy_every is not None
    needs = []
    for rank, peak in enumerate(evaluation.result.peak_memory_bytes):
        static = evaluation.costs.static_by_kind(rank)
        copies = NUM_COPIES * (static["weights"] + static["moments"]) if has_copies else 0
        if config.cluster.device == "cpu":
            needs.append(MemoryNeeds(host_bytes=peak + copies))
        else:
            needs.append(MemoryNeeds(device_bytes=peak, host_bytes=copies))
    return needs


def check_this_machine(needs: Sequence[MemoryNeeds]) -> None:
    """Raises `UserError` unless the machine has room for all these ranks, which are to run on it."""
    needed, free = sum(each.host_bytes for each in needs), free_host_bytes()
    if free is not None and needed > free:
        raise UserError(
            f"cluster.num_devices: the {len(needs)} ranks need {-(-needed // MIB)} MiB of this machine by the plan's "
            f"prediction, and {free // MIB} MiB are free; end other programs, use several machines (--listen), or "
            "recompute, zero1 or smaller microbatches"
        )


def why_too_little(needs: MemoryNeeds, num_ranks: int, free_device_bytes: int | None) -> str | None:
    """Describes which memory is too small; None if there is enough, or if what is free is not known.

    `num_ranks`: of this machine that start now. `free_device_bytes`: of the accelerator of this process; None: it has
    none."""
    if free_device_bytes is not None and needs.device_bytes > free_device_bytes:
        return (
            f"its device has {free_device_bytes // MIB} MiB of free memory, and a rank needs "
            f"{-(-needs.device_bytes // MIB)} MiB by the plan's prediction"
        )
    needed, free = num_ranks * needs.host_bytes, free_host_bytes()
    if free is not None and needed > free:
        ranks = "its rank needs" if num_ranks == 1 else f"its {num_ranks} ranks need"
        return (
            f"its machine has {free // MIB} MiB of free memory, and {ranks} {-(-needed // MIB)} MiB by the plan's "
            "prediction"
        )
    return None


def free_host_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Returns the memory that this process may still take; None if the system does not tell."""
    free = list(_free_in_groups(proc, groups))
    with suppress(OSError, ValueError, KeyError):
        rows = (line.split() for line in (proc / "meminfo").read_text().splitlines())
        free.append(1024 * {row[0]: int(row[1]) for row in rows if len(row) > 1}["MemAvailable:"])
    return min(free, default=None)


def _free_in_groups(proc: Path, groups: Path) -> Iterator[int]:
    """Yields what the limit of each control group leaves; the kernel frees the inactive part of the page cache first,
    so that counts as free. Both versions of control groups are read."""
    try:
        memberships = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in memberships:
        if not controllers:
            root, limit, used, cache = groups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit, used = groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            with suppress(OSError, ValueError, KeyError):  # Without a limit ("max"), or not in this container.
                left = int((folder / limit).read_text()) - int((folder / used).read_text())
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                yield max(0, left + int(stat[cache]))
