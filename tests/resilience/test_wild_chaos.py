"""Random losses beyond nodes, and beyond what is tolerated: training goes on while each layer lives, else from a
checkpoint.

`MOTET_CHAOS_TRIALS`, `MOTET_CHAOS_FIRST`, `MOTET_CHAOS_SEED` and `MOTET_CHAOS_LOG` are those of test_chaos.py.
benchmarks/chaos.py makes a report of the log.
"""

import os
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from nccl_rules import SilentGroup, under_rules
from wild_chaos import WildOutcome, WildTrial, draw_wild, left_behind, run_wild

NUM_TRIALS = int(os.environ.get("MOTET_CHAOS_TRIALS", "300"))
NUM_WITH_ETCD = int(os.environ.get("MOTET_CHAOS_ETCD_TRIALS", "100"))
NUM_UNDER_RULES = int(os.environ.get("MOTET_CHAOS_RULES_TRIALS", "20"))
FIRST = int(os.environ.get("MOTET_CHAOS_FIRST", "0"))
SEED = os.environ.get("MOTET_CHAOS_SEED") or str(time.time_ns())


def run(trial: WildTrial) -> WildOutcome:
    print(f"run_wild({trial})", flush=True)
    try:
        outcome = run_wild(trial)
    except BaseException as error:
        error.add_note(f"run_wild({trial})")
        raise
    print(outcome.to_json(), flush=True)
    if path := os.environ.get("MOTET_CHAOS_LOG"):
        with Path(path).open("a") as file:
            file.write(outcome.to_json() + "\n")
    return outcome


def run_all(trials: Iterable[WildTrial]) -> list[WildOutcome]:
    """Runs all of them, and then raises what failed."""
    outcomes, failed = [], []
    for trial in trials:
        try:
            outcomes.append(run(trial))
        except Exception as error:
            traceback.print_exc()
            failed.append(error)
    if failed:
        told = "\n".join(f"{error}"[:1000] + "".join(error.__notes__) for error in failed)
        raise AssertionError(f"{len(failed)} of {len(failed) + len(outcomes)} trials failed:\n{told}")
    return outcomes


def test_a_node_is_left_behind_where_others_trained_without_it() -> None:
    def recovery(nodes: list[int], step: int, done: str = "went on") -> dict[str, Any]:
        return {"changes": [], "done": done, "nodes": nodes, "step": step}

    finding = {"changes": [], "done": "nothing"}
    restart = {"changes": [], "done": "restarting all nodes"}
    first, second = recovery([0, 1, 2, 3], 2), recovery([0, 1], 3)
    assert left_behind([first, second]) == set()
    assert left_behind([first, second, recovery([0, 1, 2, 3], 3, "went back from step 2 to step 1")]) == set()
    assert left_behind([first, second, finding, recovery([0, 1, 2, 3], 5)]) == {2, 3}
    assert left_behind([first, second, recovery([2, 3], 2, "went back from step 4 to step 1")]) == {2, 3}
    assert left_behind([first, second, restart, recovery([0, 1, 2, 3], 5)]) == set()


@pytest.mark.campaign
@pytest.mark.timeout(8 * 3600)
def test_many_wild_trials() -> None:
    print(f"MOTET_CHAOS_SEED={SEED} MOTET_CHAOS_FIRST={FIRST} MOTET_CHAOS_TRIALS={NUM_TRIALS}")
    outcomes = run_all(
        draw_wild(f"{SEED}/{i}", is_double=True if i % 3 == 0 else None) for i in range(FIRST, FIRST + NUM_TRIALS)
    )
    assert all(outcome.killed or outcome.num_starved for outcome in outcomes)


@pytest.mark.campaign
@pytest.mark.timeout(8 * 3600)
def test_many_wild_trials_with_etcd() -> None:
    print(f"MOTET_CHAOS_SEED={SEED} MOTET_CHAOS_FIRST={FIRST} MOTET_CHAOS_ETCD_TRIALS={NUM_WITH_ETCD}")
    outcomes = run_all(draw_wild(f"etcd/{SEED}/{i}", "etcd") for i in range(FIRST, FIRST + NUM_WITH_ETCD))
    assert all(outcome.went_on for outcome in outcomes if outcome.survives)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_wild_trials_whose_communicators_are_aborted() -> None:
    """Under NCCL's rules on gloo; aborted operations end silently and leave anything."""
    print(f"MOTET_CHAOS_SEED={SEED} MOTET_CHAOS_FIRST={FIRST} MOTET_CHAOS_RULES_TRIALS={NUM_UNDER_RULES}")
    with under_rules(SilentGroup):
        outcomes = run_all(
            draw_wild(f"{SEED}/{i}", is_double=i % 3 == 0) for i in range(FIRST, FIRST + NUM_UNDER_RULES)
        )
    assert all(outcome.killed or outcome.num_starved for outcome in outcomes)
