"""Buffers that belong to the weights are in checkpoints; those of older versions have none."""

from pathlib import Path

import pytest
import torch
from distributed import run_distributed
from one_process import perturb
from scenario import Scenario

from motet.families.stored_weights import CORRECTION
from motet.runtime.assembly import build_engine, build_optimizer
from motet.runtime.checkpoint.checkpoint import load_weights, tensors_to_save, write_checkpoint
from motet.runtime.checkpoint.folder import TrainingState

SCENARIO = Scenario(llm="glm4_moe", placement="shared", dtype="float32")


def saved_and_loaded(folder: Path, *, with_corrections: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The corrections that were saved, and those that another model has after loading."""
    config = SCENARIO.config()
    plan = SCENARIO.plan(config)
    first, second = (build_engine(config, plan, torch.device("cpu")) for _ in range(2))
    perturb(first)
    tensors = dict(tensors_to_save(first.model, build_optimizer(config, first.model)))
    assert any(CORRECTION in name for name in tensors)
    if not with_corrections:
        tensors = {name: tensor for name, tensor in tensors.items() if CORRECTION not in name}
    load_weights(write_checkpoint(folder, tensors, TrainingState(1, {}, plan.to_json(), {}, {}), keep=1), second.model)
    found = [[p.parameter.clone() for p in e.model.parameters if CORRECTION in p.name] for e in (first, second)]
    for ours, theirs in zip(first.model.parameters, second.model.parameters, strict=True):
        assert CORRECTION in ours.name or torch.equal(ours.parameter, theirs.parameter)
    return found[0], found[1]


@pytest.mark.parametrize("with_corrections", [True, False])
def test_corrections_of_scores_come_back(tmp_path: Path, with_corrections: bool) -> None:
    saved, loaded = run_distributed(lambda rank: saved_and_loaded(tmp_path, with_corrections=with_corrections), 1)[0]
    assert len(saved) == len(loaded) > 0
    for expected, found in zip(saved, loaded, strict=True):
        assert expected.any()
        assert torch.equal(found, expected) if with_corrections else not found.any()
