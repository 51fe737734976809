"""Trials in which the machine of the store is lost, with all that is on it: once, twice, with another node, or while
others recover. One that is held up wakes when all is over, and must end by itself.

A machine has one node; another process on the first one listens (machines.py).
"""

import json
import os
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from chaos import Trial, _import_models, config_of, draw_trial, plan_and_templates, undisturbed
from ledger import applied_ids, recorded
from machines import Machines, machines, processes_of
from victims import Board, Victim, observed

from motet.resilience.failure_log import FAILURES

DETECT_S = float(os.environ.get("MOTET_CHAOS_MACHINE_DETECT_S", "4"))
MOST_NODES = 7
"""Each has three processes; one more would be too slow for a machine of two cores."""
LONGEST_S = 240.0


def draw_machine_trial(seed: str, phase: str | None = None) -> Trial:
    """The last loss, or every one, is that of the store's machine."""
    for attempt in range(1000):
        trial = draw_trial(f"{seed}/{attempt}", phase)
        if trial.num_nodes <= MOST_NODES:
            break
    rng = Random(f"machine of {trial.seed}")
    kills = list(trial.kills)
    for i, kill in enumerate(kills):
        if i == len(kills) - 1 or rng.random() < 0.3:
            how = kill.how if trial.tolerate == 2 and len(kills) == 1 and rng.random() < 0.5 else "none"
            machine = "SIGSTOP" if rng.random() < 0.3 else "SIGKILL"
            kills[i] = replace(kill, how=how, machine=machine)
    return replace(trial, kills=tuple(kills))


def run_machine_trial(trial: Trial) -> dict[str, Any]:
    """What came of it. Raises `AssertionError` if something is not as it must be."""
    _import_models()
    losses, ids = undisturbed(trial.tolerate, trial.layout, trial.zero1)
    plan, templates = plan_and_templates(trial.layout, trial.tolerate, trial.pipelines, trial.zero1)
    board = Board()
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(Path(folder), trial.tolerate, trial.layout, trial.zero1)
        failures = {"tolerate": trial.tolerate, "detect_s": DETECT_S, "store_patience_s": 45}
        values = config.model_dump(exclude_unset=True)
        values["train"]["failures"] = failures
        config = type(config).model_validate(values)
        started = time.monotonic()
        with (
            recorded(Path(folder)),
            observed(Victim(trial.kills, board)),
            machines(config, plan, templates, number=trial.num_nodes) as running,
        ):
            result, pause_s = _watched(running, Path(folder))
            seconds = time.monotonic() - started
            woken_s = _wake(running)
            codes = running.exit_codes(LONGEST_S)
        path = Path(folder) / FAILURES
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        assert applied_ids(Path(folder)) == ids, trial  # No sample lost or doubled, and their order.
    fired = [kill for i, kill in enumerate(trial.kills) if board.is_fired(i)]
    moves = [line for line in lines if "took its place" in line["done"]]
    log = [line for line in lines if "generation" in line]
    lost = {change["node"] for line in log for change in line["changes"] if change["kind"] == "lost"}
    told = (trial, lines)
    assert len(result["losses"]) == len(losses), told
    error = max(abs(a - b) / abs(b) for a, b in zip(result["losses"], losses, strict=True))
    assert error <= 1e-6, (error, told)
    assert len(moves) <= sum(kill.machine != "" for kill in fired), told
    assert len(lost) <= sum((kill.machine != "") + (kill.how != "none") for kill in fired), told
    for line in log:
        assert line["done"].startswith(("went on", "nothing had been trained")), told
    return {
        "seed": trial.seed,
        "layout": trial.layout,
        "tolerate": trial.tolerate,
        "zero1": trial.zero1,
        "nodes": trial.num_nodes,
        "kills": [(kill.phase, kill.how, kill.machine) for kill in fired],
        "moves": len(moves),
        "max_loss_error": error,
        "longest_pause_s": pause_s,
        "woken_s": woken_s,
        "exit_codes": codes,
        "seconds": seconds,
    }


def _wake(running: Machines) -> float | None:
    """Machines that were stopped end by themselves. Within so many seconds; None: none was stopped."""
    stopped = [group for group in running.groups if running.is_stopped(group)]
    for group in stopped:
        os.killpg(group, signal.SIGCONT)
    started = time.monotonic()
    while any(processes_of(group) for group in stopped):
        assert time.monotonic() - started < LONGEST_S, "a machine that came back does not end"
        time.sleep(0.1)
    return time.monotonic() - started if stopped else None


def _watched(running: Machines, folder: Path) -> tuple[dict[str, Any], float]:
    """The result, and the longest time in which no process began a step or applied an update."""
    size, since, longest_s = 0, time.monotonic(), 0.0

    def is_over() -> bool:
        nonlocal size, since, longest_s
        now, seen = time.monotonic(), sum(path.stat().st_size for path in folder.glob("*.ledger"))
        if seen > size:
            longest_s = max(longest_s, now - since) if size else 0.0
            size, since = seen, now
        return running.has_result

    running.wait_until(is_over, LONGEST_S)
    return running.result(LONGEST_S), longest_s
