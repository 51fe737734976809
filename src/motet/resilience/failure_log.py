"""`failures.jsonl` in the output folder: a line for each change of membership, what died or came and what was done."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from motet.resilience.membership import FIRST_GENERATION, Change, Membership

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
    """Parameters that nobody held any more."""
    seconds: float
    """From when this rank heard of it until all had what they need."""


def write_recovery(output: Path, recovery: Recovery) -> None:
    """Appends a line, but for the start of a run."""
    membership = recovery.membership
    if membership.generation == FIRST_GENERATION:
        return
    line = {
        "generation": membership.generation,
        "changes": [asdict(change) for change in recovery.changes],
        "done": _what_was_done(recovery),
        "nodes": membership.nodes,
        "num_ranks": recovery.num_ranks,
        "step": recovery.steps + 1,
        "moved_bytes": recovery.moved_bytes,
        "recovery_s": recovery.seconds,
    }
    output.mkdir(parents=True, exist_ok=True)
    with (output / FAILURES).open("a") as file:
        file.write(json.dumps(line) + "\n")


def _what_was_done(recovery: Recovery) -> str:
    before, now = recovery.steps_before, recovery.steps
    if before is None:
        return "nothing had been trained yet: started again"
    if recovery.missing or recovery.membership.restores or now < before:
        why = f"nobody held {recovery.missing[0]} any more" if recovery.missing else "the plan could not be kept"
        return f"{why}: went back from step {before} to the checkpoint of step {now}"
    return f"went on with step {now + 1}"
