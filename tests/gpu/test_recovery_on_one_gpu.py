"""Nodes are lost whose ranks talk over NCCL; the others abort, make new communicators and go on.

All ranks share one GPU, each as if on a host of its own: NCCL then takes sockets. `make gpu` sets
`MOTET_TEST_DEVICE=cuda`; elsewhere the same lines run on the CPU, under NCCL's rules on gloo.
"""

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import pytest
import torch
from interrupted_training import at, before_each_step, config_of, die, failures, undisturbed
from nccl_rules import SilentGroup, under_rules
from training import plan_of

from motet.config import RunConfig
from motet.resilience import recover
from motet.resilience.launch_nodes import train_on_nodes

DEVICE = os.environ.get("MOTET_TEST_DEVICE", "cpu")


def shared_device(config: RunConfig, local_rank: int) -> torch.device:
    os.environ["NCCL_HOSTID"] = f"process {os.getpid()}"
    torch.accelerator.set_device_index(0)
    return torch.device(DEVICE, 0)


def communicators() -> AbstractContextManager[object]:
    return under_rules(SilentGroup) if DEVICE == "cpu" else mock.patch.object(recover, "pick_device", shared_device)


def hang() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.campaign
@pytest.mark.parametrize("lose", [die, hang])
def test_survivors_go_on(tmp_path: Path, lose: Callable[[], None]) -> None:
    config = config_of(tmp_path, cluster__device=DEVICE, train__failures={"tolerate": 1, "detect_s": 5})
    plan = plan_of(config_of(tmp_path))  # A process that has looked at a GPU cannot fork others that use it.
    with communicators(), before_each_step(at(2, 3, lose)):
        result = train_on_nodes(config, plan, None, num_nodes=plan.num_ranks, node_size=1)
    assert result["losses"] == pytest.approx(undisturbed(), rel=1e-9)
    [line] = failures(config)
    assert line["done"].startswith("went on with step 3")
    print(f"recovered in {line['recovery_s']:.2f} s")
