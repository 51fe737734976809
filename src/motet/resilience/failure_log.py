"""The failure log, `failures.jsonl` in the output folder: one JSON line for each change of membership (what died or
joined, and what was done), each end and restart of all nodes, each straggler, and each finding of a health check."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from motet.resilience.membership import FIRST_GENERATION, Change, Membership
from motet.resilience.stragglers import Straggler

FAILURES = "failures.jsonl"


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Log entry of one recovery."""

    membership: Membership
    changes: tuple[Change, ...] = ()
    """Changes since the last line of the log."""
    num_ranks: int
    steps_before: int | None
    """Finished steps before it; None: nothing had been trained yet."""
    steps: int
    """Finished steps from which the training continues."""
    moved_bytes: int
    missing: tuple[str, ...]
    """Names of parameters or states that no rank held any more."""
    seconds: float
    """Seconds from the notice on this rank until all ranks had what they need."""
    restarts: int
    """How often all nodes had been restarted before."""
    is_from_memory: bool = False
    """Whether what was missing came from the copies in memory."""


def write_recovery(output: Path, recovery: Recovery) -> None:
    """Logs a recovery, but not the first start of a run."""
    membership = recovery.membership
    if membership.generation == FIRST_GENERATION and not recovery.restarts:
        return
    line = {
        "generation": membership.generation,
        "changes": _told(recovery.changes),
        "done": _what_was_done(recovery),
        "nodes": membership.nodes,
        "num_ranks": recovery.num_ranks,
        "step": recovery.steps + 1,
        "moved_bytes": recovery.moved_bytes,
        "recovery_s": recovery.seconds,
    }
    _append(output, line)


def write_end(output: Path, changes: Sequence[Change], done: str) -> None:
    """Logs that all nodes have ended, or are ended. `changes`: those that are not in the log yet."""
    _append(output, {"changes": _told(changes), "done": done})


def write_straggler(output: Path, straggler: Straggler, *, node: int, step: int) -> None:
    """Logs a straggler. `step`: the last finished one."""
    slow = {"kind": "slow", "node": node, "how": str(straggler), "noticed_at": time.time()}
    _append(output, {"changes": [slow], "done": "nothing", "step": step})


def write_finding(output: Path, kind: str, node: int | None, how: str) -> None:
    """Logs what a health check has found. `node`: None before it has a number."""
    found = {"kind": kind, "node": node, "how": how, "noticed_at": time.time()}
    _append(output, {"changes": [found], "done": "nothing"})


def _told(changes: Sequence[Change]) -> list[dict[str, object]]:
    return [{"kind": c.kind, "node": c.node, "how": c.how, "noticed_at": c.noticed_at} for c in changes]


def _append(output: Path, line: Mapping[str, object]) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
        with (output / FAILURES).open("a") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:  # Not fatal: the disk may be full for a while.
        told = f"motet: {output / FAILURES} cannot be written ({error.strerror}): {line['done']}"
        print(told, file=sys.stderr, flush=True)


def _checkpoint(step: int) -> str:
    return f"the checkpoint of step {step}" if step else "the start, as there was no checkpoint"


def _what_was_done(recovery: Recovery) -> str:
    before, now = recovery.steps_before, recovery.steps
    if before is None:
        if recovery.membership.generation == FIRST_GENERATION:
            return f"all nodes were restarted from {_checkpoint(now)}"
        return "nothing had been trained yet: started again" + (f", from {_checkpoint(now)}" if now else "")
    if recovery.missing:
        to = f"the copies in memory of step {now}" if recovery.is_from_memory else _checkpoint(now)
        return f"no node held {recovery.missing[0]} any more: went back from step {before} to {to}"
    if recovery.membership.stop is not None:
        return f"stopped before step {now + 1}: {recovery.membership.stop}"
    return f"went on with step {now + 1}: {recovery.membership.note}"
