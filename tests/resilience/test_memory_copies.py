"""A plan with one pipeline goes on from copies in the neighbour's memory when a spare takes a lost node's place."""

from pathlib import Path

import pytest
from interrupted_training import STEPS, at, before_each_step, die, failures, once_a_node_has_joined, undisturbed
from joining_nodes import one_that_joins
from training import plan_of, run_config

from motet.config import RunConfig
from motet.errors import UserError
from motet.resilience.launch_nodes import train_on_nodes
from motet.resilience.succession import check_survivable


def one_pipeline(output: Path, **settings: object) -> RunConfig:
    failing = {"tolerate": 1, "detect_s": 10, "copy_every": 2}
    return run_config(
        output, train__steps=STEPS, train__dtype="float64", train__failures=failing, cluster__num_devices=2,
        cluster__num_nodes=2, **settings,
    )  # fmt: skip


def test_the_language_model_comes_from_the_neighbour(tmp_path: Path) -> None:
    config = one_pipeline(tmp_path, train__checkpoint_every=0)
    plan, lose = plan_of(config), once_a_node_has_joined(tmp_path, at(5, 1, die))
    with before_each_step(lose), one_that_joins(config, plan, lambda: None):
        result = train_on_nodes(config, plan, None, num_nodes=2, node_size=1)
    assert result["losses"] == pytest.approx(undisturbed(), rel=1e-12)
    done = failures(config)[-1]["done"]
    assert done.startswith("no node held language_model.")
    assert done.endswith("any more: went back from step 5 to the copies in memory of step 4")


def test_zero1_is_refused(tmp_path: Path) -> None:
    config = one_pipeline(tmp_path)
    check_survivable(config, plan_of(config))
    config = one_pipeline(tmp_path, parallel__zero1=True)
    with pytest.raises(UserError, match="copy_every: is not supported with"):
        check_survivable(config, plan_of(config))
