"""`failures.jsonl` in the output folder: a line for each change of membership, what died or came and what was done; one
for each end of all nodes, and one when they have been started anew; one for each end of the store; and one for each
rank that becomes slow."""

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
    membership: Membership
    changes: tuple[Change, ...]
    """Since the last line."""
    num_ranks: int
    steps_before: int | None
    """Finished ones when it happened; None: nothing had been trained yet."""
    steps: int
    """Finished ones from which the training goes on."""
    moved_bytes: int
    """Between ranks."""
    missing: tuple[str, ...]
    """Parameters that nobody held any more, or their states, in words."""
    seconds: float
    """From when this rank heard of it until all had what they need."""
    restarts: int
    """How often all nodes had been started anew before."""


def write_recovery(output: Path, recovery: Recovery) -> None:
    """Appends a line, but for the start of a run."""
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
    """Appends a line: all nodes have ended, or are ended. `changes`: those that no line tells of yet."""
    _append(output, {"changes": _told(changes), "done": done})


def write_store_end(output: Path, how: str, done: str) -> None:
    """Appends a line: the store was lost, and another one has taken its place."""
    lost = {"kind": "store", "node": None, "how": how, "noticed_at": time.time()}
    _append(output, {"changes": [lost], "done": done})


def write_straggler(output: Path, straggler: Straggler, *, node: int, step: int) -> None:
    """Appends a line. `step`: the last one that was finished."""
    slow = {"kind": "slow", "node": node, "how": str(straggler), "noticed_at": time.time()}
    _append(output, {"changes": [slow], "done": "nothing", "step": step})


def _told(changes: Sequence[Change]) -> list[dict[str, object]]:
    return [{"kind": c.kind, "node": c.node, "how": c.how, "noticed_at": c.noticed_at} for c in changes]


def _append(output: Path, line: Mapping[str, object]) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
        with (output / FAILURES).open("a") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:  # No reason to end the training: the disk may be full for a while.
        told = f"motet: {output / FAILURES} cannot be written ({error.strerror}): {line['done']}"
        print(told, file=sys.stderr, flush=True)


def _checkpoint(step: int) -> str:
    return f"the checkpoint of step {step}" if step else "the start, as there was no checkpoint"


def _what_was_done(recovery: Recovery) -> str:
    before, now = recovery.steps_before, recovery.steps
    if before is None:
        if recovery.membership.generation == FIRST_GENERATION:
            return f"all nodes were started anew, from {_checkpoint(now)}"
        return "nothing had been trained yet: started again" + (f", from {_checkpoint(now)}" if now else "")
    if recovery.missing:
        return f"nobody held {recovery.missing[0]} any more: went back from step {before} to {_checkpoint(now)}"
    if recovery.membership.stop is not None:
        return f"stopped before step {now + 1}: {recovery.membership.stop}"
    return f"went on with step {now + 1}: {recovery.membership.note}"
