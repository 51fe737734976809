"""The cable of a host is cut: nobody gets a word of it. Needs root and iproute2: part of `make chaos` alone."""

import multiprocessing
import os
import time
from pathlib import Path
from random import Random

import pytest
from chaos import check_replicas, config_of, undisturbed
from hosts import separate_hosts
from test_recover import before_each_step, failures
from training import plan_of

from motet.resilience.launch_nodes import train_on_nodes
from motet.runtime.trainer import Trainer

NUM_TRIALS = int(os.environ.get("MOTET_CUT_LINK_TRIALS", "6"))
SEED = os.environ.get("MOTET_CHAOS_SEED") or str(time.time_ns())


@pytest.mark.campaign
def test_survivors_of_a_cut_go_on(tmp_path: Path) -> None:
    print(f"MOTET_CHAOS_SEED={SEED} MOTET_CUT_LINK_TRIALS={NUM_TRIALS}")
    missed = [cut_one(tmp_path / str(i), Random(f"{SEED}/{i}")) for i in range(NUM_TRIALS)]
    assert any(missed), "every training was over before a cut could be noticed"


def cut_one(folder: Path, rng: Random) -> bool:
    """Whether the host was missed."""
    config = config_of(folder, 1)
    plan = plan_of(config)
    host, step, delay_s = rng.randrange(plan.num_ranks), rng.randrange(1, 4), rng.random() * 0.05
    print(f"host {host} in step {step}", flush=True)
    context = multiprocessing.get_context("fork")
    due = context.Event()

    def when_due(trainer: Trainer) -> None:
        if trainer.finished_steps == step:
            due.set()
        if trainer.finished_steps > step:
            check_replicas(trainer)

    with separate_hosts(plan.num_ranks) as hosts:

        def cut() -> None:
            due.wait()
            time.sleep(delay_s)
            hosts.cut(host)

        cutter = context.Process(target=cut, daemon=True)
        cutter.start()
        with before_each_step(when_due):
            result = train_on_nodes(config, plan, None, num_nodes=plan.num_ranks, node_size=1)
        cutter.join(timeout=60)
    assert cutter.exitcode == 0, "the cable was not cut"
    assert result["losses"] == pytest.approx(undisturbed(1), rel=1e-6)
    lost = [change["node"] for line in failures(config) for change in line["changes"] if change["kind"] == "lost"]
    assert lost in ([host], [])  # [] if the training was over before anyone missed it.
    assert lost or result["world_size"] == plan.num_ranks
    return bool(lost)
