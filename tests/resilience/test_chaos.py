"""Random kills at random moments: no hang, no lost or doubled sample, the losses of the undisturbed run.

`MOTET_CHAOS_TRIALS` sets the number of trials, `MOTET_CHAOS_SEED` the seed; both are printed, `MOTET_CHAOS_FIRST` the
trial to begin with. What came of each trial is printed, and appended to the file `MOTET_CHAOS_LOG`, from which
benchmarks/chaos.py makes a report. Every failure says how to run its trial again. `make chaos` runs 200.
"""

import os
import time
from collections import Counter

import pytest
from chaos import LEFT_OUT, Outcome, Trial, draw_trial, note, run_trial, with_last
from sampling import in_campaigns
from victims import PHASES

NUM_TRIALS = int(os.environ.get("MOTET_CHAOS_TRIALS", "200"))
FIRST = int(os.environ.get("MOTET_CHAOS_FIRST", "0"))
NUM_WARNINGS = int(os.environ.get("MOTET_CHAOS_WARNINGS", "12"))
SEED = os.environ.get("MOTET_CHAOS_SEED") or str(time.time_ns())


def run(trial: Trial) -> Outcome:
    print(f"run_trial({trial})", flush=True)
    try:
        return run_trial(trial)
    except BaseException as error:
        error.add_note(f"run_trial({trial})")
        raise


@pytest.mark.parametrize("phase", [PHASES[2], *in_campaigns([*PHASES[:2], *PHASES[3:6]])])
def test_one_trial_for_each_phase(phase: str) -> None:
    outcome = run(draw_trial("11", phase, "alike"))
    assert outcome.killed


@pytest.mark.campaign
def test_pipelines_become_others_when_two_nodes_are_lost() -> None:
    """The second one during the recovery from the first; some pipelines have tensor parallelism, others none."""
    outcome = run(draw_trial("11", "recovery", "shards"))
    assert "recovery" in outcome.killed_in
    assert outcome.moved_bytes > 0


@pytest.mark.campaign
def test_states_that_not_all_pipelines_keep() -> None:
    outcome = run(draw_trial("11", "optimizer step", "shards", zero1=True))
    assert outcome.killed
    assert outcome.moved_bytes > 0


@pytest.mark.campaign
@pytest.mark.timeout(4 * 3600)
def test_many_trials() -> None:
    print(f"MOTET_CHAOS_SEED={SEED} MOTET_CHAOS_FIRST={FIRST} MOTET_CHAOS_TRIALS={NUM_TRIALS}")
    killed: Counter[str] = Counter()
    for i in range(FIRST, FIRST + NUM_TRIALS):
        outcome = run(draw_trial(f"{SEED}/{i}", PHASES[i % 6]))
        note(outcome)
        killed.update(outcome.killed_in)
    print("killed in", dict(killed))
    assert all(killed[phase] >= NUM_TRIALS // 20 for phase in PHASES[:-1]), killed


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_warnings() -> None:
    """The last node to go is told to end (SIGTERM to its agent), and leaves."""
    print(f"MOTET_CHAOS_SEED={SEED}")
    for i in range(NUM_WARNINGS):
        trial = with_last(draw_trial(f"warning/{SEED}/{i}", PHASES[i % 6]), "warning")
        outcome = run(trial)
        note(outcome)
        left = {change["node"] for line in outcome.log for change in line["changes"] if change["kind"] == "left"}
        warned = trial.kills[-1].node
        # Its pipeline is left out with it where pipelines are alike.
        assert left <= ({warned, warned ^ 1} if trial.layout in LEFT_OUT else {warned}), (trial, outcome.log)
