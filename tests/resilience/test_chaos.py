"""Random kills at random moments: no hang, no lost or doubled sample, the losses of the undisturbed run.

`MOTET_CHAOS_TRIALS` sets the number of trials, `MOTET_CHAOS_SEED` the seed; both are printed, `MOTET_CHAOS_FIRST` the
trial to begin with. Every failure says how to run its trial again. `make chaos` runs 200.
"""

import os
import time
from collections import Counter

import pytest
from chaos import Layout, Outcome, draw_trial, run_trial
from victims import PHASES

NUM_TRIALS = int(os.environ.get("MOTET_CHAOS_TRIALS", "200"))
FIRST = int(os.environ.get("MOTET_CHAOS_FIRST", "0"))
SEED = os.environ.get("MOTET_CHAOS_SEED") or str(time.time_ns())


def run(seed: str, phase: str, layout: Layout | None = None) -> Outcome:
    trial = draw_trial(seed, phase, layout)
    print(f"draw_trial({seed!r}, {phase!r}, {layout!r}) = {trial}", flush=True)
    try:
        return run_trial(trial)
    except BaseException as error:
        error.add_note(f"draw_trial({seed!r}, {phase!r}, {layout!r})")
        raise


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES[:-1])
def test_one_trial_for_each_phase(phase: str) -> None:
    outcome = run("11", phase, "alike")
    assert outcome.killed


@pytest.mark.slow
def test_pipelines_become_others_when_two_nodes_are_lost() -> None:
    """The second one during the recovery from the first."""
    outcome = run("11", "recovery", "unlike")
    assert "recovery" in outcome.killed_in
    assert outcome.moved_bytes > 0


@pytest.mark.campaign
@pytest.mark.timeout(4 * 3600)
def test_many_trials() -> None:
    print(f"MOTET_CHAOS_SEED={SEED} MOTET_CHAOS_FIRST={FIRST} MOTET_CHAOS_TRIALS={NUM_TRIALS}")
    counts: dict[str, Counter[str]] = {name: Counter() for name in ("phase", "how", "trials")}
    worst = 0.0
    for i in range(FIRST, FIRST + NUM_TRIALS):
        started = time.monotonic()
        outcome = run(f"{SEED}/{i}", PHASES[i % 6])
        seconds = time.monotonic() - started
        count(counts, outcome)
        worst = max(worst, outcome.max_loss_error)
        done = [line["done"] for line in outcome.log]
        print(i, outcome.killed_in, f"{outcome.max_loss_error:.1e} {seconds:.0f} s", done, flush=True)
    for name, counter in counts.items():
        print(name, dict(counter))
    print(f"worst loss error {worst:.1e}")
    assert all(counts["phase"][phase] >= NUM_TRIALS // 20 for phase in PHASES[:-1]), counts


def count(counts: dict[str, Counter[str]], outcome: Outcome) -> None:
    """Adds what happened in one trial."""
    counts["phase"].update(outcome.killed_in)
    counts["how"].update(kill.how for _, kill in outcome.killed)
    kills = [kill for _, kill in outcome.killed]
    counts["trials"].update([outcome.trial.layout])
    counts["trials"].update(
        what
        for what, is_so in {
            "two losses": len(kills) == 2,
            "two losses in one step": len({kill.after_steps for kill in kills}) == 1 and len(kills) == 2,
            "loss of node 0": any(kill.node == 0 for kill in kills),
            "with copies": outcome.moved_bytes > 0,
        }.items()
        if is_so
    )
