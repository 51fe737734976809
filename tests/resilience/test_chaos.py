"""Random kills at random moments: no hang, no lost or doubled sample, the losses of the undisturbed run.

`MOTET_CHAOS_TRIALS` sets the number of trials, `MOTET_CHAOS_SEED` the seed; both are printed. Every failure says how to
run its trial again. `make chaos` runs 200.
"""

import os
import time
from collections import Counter

import pytest
from chaos import PHASES, Outcome, draw_trial, run_trial

NUM_TRIALS = int(os.environ.get("MOTET_CHAOS_TRIALS", "200"))
SEED = os.environ.get("MOTET_CHAOS_SEED") or str(time.time_ns())


def run(seed: str, phase: str) -> Outcome:
    print(f"draw_trial({seed!r}, {phase!r})")
    try:
        return run_trial(draw_trial(seed, phase))
    except BaseException as error:
        error.add_note(f"draw_trial({seed!r}, {phase!r})")
        raise


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES[:-1])
def test_one_trial_for_each_phase(phase: str) -> None:
    outcome = run("11", phase)
    assert outcome.killed_in


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_many_trials() -> None:
    print(f"MOTET_CHAOS_SEED={SEED} MOTET_CHAOS_TRIALS={NUM_TRIALS}")
    killed: Counter[str] = Counter()
    worst = 0.0
    for i in range(NUM_TRIALS):
        outcome = run(f"{SEED}/{i}", PHASES[i % 6])
        killed.update(outcome.killed_in)
        worst = max(worst, outcome.max_loss_error)
        print(i, outcome.killed_in, f"{outcome.max_loss_error:.1e}", flush=True)
    print(dict(killed), f"worst loss error {worst:.1e}")
    assert all(killed[phase] >= NUM_TRIALS // 20 for phase in PHASES[:-1]), killed
