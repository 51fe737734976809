"""The machine of the store is lost with all that is on it: the other nodes go on with a store on another machine.

`MOTET_CHAOS_MACHINES` sets the number of trials, `MOTET_CHAOS_SEED` the seed; both are printed, and what came of each
trial, with the longest time in which nothing was trained.
"""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from interrupted_training import at, before_each_step, config_of, failures, undisturbed
from ledger import applied_ids, recorded
from machine_trials import LONGEST_S, draw_machine_trial, run_machine_trial
from machines import machines
from test_lost_store import begun, store_pid
from training import plan_of
from victims import PHASES

NUM_TRIALS = int(os.environ.get("MOTET_CHAOS_MACHINES", "24"))
FIRST = int(os.environ.get("MOTET_CHAOS_FIRST", "0"))
SEED = os.environ.get("MOTET_CHAOS_SEED") or str(time.time_ns())


@pytest.mark.slow
def test_the_others_go_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = config_of(tmp_path, train__failures={"tolerate": 1, "detect_s": 3})

    def end_machine() -> None:
        os.killpg(os.getpgid(pid()), signal.SIGKILL)

    with (
        store_pid() as pid,
        recorded(tmp_path),
        before_each_step(at(2, 3, end_machine)),
        machines(config, plan_of(config), number=4) as running,
    ):
        result = running.result(LONGEST_S)
        codes = running.exit_codes(LONGEST_S)
    assert result["losses"] == pytest.approx(undisturbed(), rel=1e-12)
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0, 0, 0]
    store, lost = failures(config)
    assert store["changes"][0]["kind"] == "store"
    assert store["done"].startswith("another one took its place, at 127.0.0.1:")
    assert [change["kind"] for change in lost["changes"]] == ["lost"]
    assert len(begun(tmp_path)) == len(undisturbed()) + 1
    assert applied_ids(tmp_path).keys() == set(range(1, len(undisturbed()) + 1))
    told = capfd.readouterr().err
    assert "motet: the store's machine was lost; this one keeps it now: motet train RUN.yaml --join 127.0.0.1:" in told
    assert f"motet: the training is over, after {len(undisturbed())} steps; it wrote no checkpoint" in told


@pytest.mark.slow
def test_only_who_listens_is_lost(tmp_path: Path) -> None:
    """Nodes go on, and nothing is done twice; how it has ended is told by whoever keeps the store then."""
    config = config_of(tmp_path, train__failures={"tolerate": 1, "detect_s": 3})

    def end_listener() -> None:
        os.kill(int(Path(f"/proc/{pid()}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)

    with (
        store_pid() as pid,
        recorded(tmp_path),
        before_each_step(at(2, 3, end_listener)),
        machines(config, plan_of(config), number=4) as running,
    ):
        result = running.result(LONGEST_S)
        codes = running.exit_codes(LONGEST_S)
    assert result["losses"] == pytest.approx(undisturbed(), rel=1e-12)
    assert (result["world_size"], codes) == (4, [-signal.SIGKILL, 0, 0, 0, 0])
    assert [line["changes"][0]["kind"] for line in failures(config)] == ["store"]
    assert begun(tmp_path) == list(range(1, len(undisturbed()) + 1))


@pytest.mark.campaign
@pytest.mark.timeout(4 * 3600)
def test_many_trials() -> None:
    print(f"MOTET_CHAOS_SEED={SEED} MOTET_CHAOS_FIRST={FIRST} MOTET_CHAOS_MACHINES={NUM_TRIALS}")
    num_moves = 0
    for i in range(FIRST, FIRST + NUM_TRIALS):
        trial = draw_machine_trial(f"machine/{SEED}/{i}", PHASES[i % 6])
        print(f"run_machine_trial({trial})", flush=True)
        outcome = run_machine_trial(trial)
        print(json.dumps(outcome), flush=True)
        num_moves += outcome["moves"]
    assert num_moves >= NUM_TRIALS // 2  # Nobody came into the phase, or all was over before it was missed.
