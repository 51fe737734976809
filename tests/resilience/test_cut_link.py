"""The cable of a host is cut: nobody gets a word of it. Needs root and iproute2: part of `make chaos` alone."""

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from chaos import Trial, draw_trial, note, run_trial, with_last
from hosts import Hosts, separate_hosts
from victims import PHASES, Board

NUM_TRIALS = int(os.environ.get("MOTET_CUT_LINK_TRIALS", "18"))
SEED = os.environ.get("MOTET_CHAOS_SEED") or str(time.time_ns())


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_survivors_of_a_cut_go_on() -> None:
    print(f"MOTET_CHAOS_SEED={SEED} MOTET_CUT_LINK_TRIALS={NUM_TRIALS}")
    cut_in: Counter[str] = Counter()
    num_missed = 0
    for i in range(NUM_TRIALS):
        trial = with_last(draw_trial(f"cut/{SEED}/{i}", PHASES[i % 6]), "cut")
        board = Board()
        with separate_hosts(trial.num_nodes) as hosts, cutting(trial, board, hosts):
            outcome = run_trial(trial, board)
        cut_in.update(phase for phase, kill in outcome.killed if kill.how == "cut")
        num_missed += any(change["node"] == trial.kills[-1].node for line in outcome.log for change in line["changes"])
        note(outcome)
    print("cut in", dict(cut_in), "missed", num_missed)
    assert num_missed >= NUM_TRIALS // 2  # Others were over before anyone missed the host.


@contextmanager
def cutting(trial: Trial, board: Board, hosts: Hosts) -> Iterator[None]:
    """Meanwhile hosts are cut off as the board tells."""

    def cut() -> None:
        last = len(trial.kills) - 1
        while not board.is_fired(last):
            time.sleep(0.001)
        time.sleep(trial.kills[last].delay_s)
        hosts.cut(trial.kills[last].node)

    cutter = multiprocessing.get_context("fork").Process(target=cut, daemon=True)
    cutter.start()
    yield
    if board.is_fired(len(trial.kills) - 1):
        cutter.join(timeout=300)
        assert cutter.exitcode == 0, "the cable was not cut"
    cutter.kill()
    cutter.join()
