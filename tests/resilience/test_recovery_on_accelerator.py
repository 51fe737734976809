"""A node is lost whose ranks compute on a pretend accelerator and talk under NCCL's rules; the others go on."""

import multiprocessing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from interrupted_training import at, before_each_step, config_of, die, failures, undisturbed
from nccl_rules import SilentGroup, under_rules
from pretend_accelerator import install
from training import plan_of

from motet.config import RunConfig
from motet.resilience import recover
from motet.resilience.launch_nodes import train_on_nodes


def test_survivors_go_on(tmp_path: Path) -> None:
    # The lost one's agent tells of it at once; slow machines are not to lose others.
    config = config_of(tmp_path, train__failures={"tolerate": 1, "detect_s": 60})
    cluster = config.cluster.model_copy(update={"device": "gpu"})
    plan, on_gpu = plan_of(config), config.model_copy(update={"cluster": cluster})
    expected = undisturbed()

    def work(results: Any, config: RunConfig) -> None:
        device = install()
        picked = mock.patch.object(recover, "pick_device", return_value=device)
        with under_rules(SilentGroup), picked, before_each_step(at(2, 3, die)):
            result = train_on_nodes(config, plan, None, num_nodes=plan.num_ranks, node_size=1)
        kind = torch.accelerator.current_accelerator()
        results.put((kind and kind.type, result["losses"]))

    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=work, args=(results, on_gpu))  # type: ignore[attr-defined]
    process.start()
    process.join()
    assert process.exitcode == 0
    kind, losses = results.get()
    assert kind == "gpu"
    assert losses == pytest.approx(expected, rel=1e-9)
    [line] = failures(config)
    assert line["done"].startswith("went on with step 3")
