"""Recovery where communicators have to be aborted, as NCCL's: shown on gloo under NCCL's rules.

An aborted operation ends silently, and leaves anything.
"""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from interrupted_training import at, before_each_step, config_of, die, failures, undisturbed
from nccl_rules import RuledGroup, SilentGroup, under_rules
from sampling import in_campaigns
from training import plan_of

from motet.config import RunConfig
from motet.resilience import recover
from motet.resilience.launch_nodes import train_on_nodes


def train_under_rules(config: RunConfig, at_step: Any, kind: type[RuledGroup]) -> dict[str, Any]:
    plan = plan_of(config)
    with under_rules(kind), before_each_step(at_step):
        return train_on_nodes(config, plan, None, num_nodes=plan.num_ranks, node_size=1)


@pytest.mark.parametrize("kind", [SilentGroup, *in_campaigns([RuledGroup])])
def test_a_node_dies_and_the_others_make_new_communicators(tmp_path: Path, kind: type[RuledGroup]) -> None:
    config, abort = config_of(tmp_path), recover.abort_communicators

    def counted() -> None:
        (tmp_path / f"{os.getpid()}.aborted").touch()
        abort()

    with mock.patch.object(recover, "abort_communicators", counted):
        result = train_under_rules(config, at(2, 3, die), kind)
    assert len([*tmp_path.glob("*.aborted")]) == 3
    assert result["losses"] == pytest.approx(undisturbed(), rel=1e-12)
    [line] = failures(config)
    assert line["done"].startswith("went on with step 3")
