"""A run file with adapters (LoRA): trained over stages and tensor-parallel ranks, resumed, exported for peft."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tiny_run import TINY_RUN
from transformers import LlamaForCausalLM, SiglipVisionModel

from motet.api import export_checkpoint, train, verify
from motet.config import RunConfig

LAYOUT = {"vision": {}, "audio": {}, "language_model": {"pp": 2, "tp": 2}}


def run_file(folder: Path, *, merged_export: bool = False, **options: Any) -> RunConfig:
    values = copy.deepcopy(TINY_RUN)
    lora = {"lora": {"rank": 2, "merged_export": merged_export}}
    values["model"]["language_model"]["train"] = lora
    values["model"]["encoders"]["vision"]["train"] = lora
    values["model"]["encoders"]["audio"]["train"] = {"module": False}
    values["cluster"] = {"num_devices": 6}
    values["parallel"] = {"planner": "explicit", "num_microbatches": 2, "explicit": LAYOUT}
    values["train"] |= {"steps": 4, "checkpoint_every": 2, "output": str(folder), **options}
    return RunConfig.model_validate(values)


@pytest.mark.campaign
def test_is_verified(tmp_path: Path) -> None:
    found = verify(run_file(tmp_path / "output", dtype="float64"))
    assert found["max_grad_rel_err"] < 1e-9
    # Two matrices for each of 7 linears of 3 blocks, of 6 linears of 2 blocks, and two projectors.
    assert found["num_parameters_compared"] == 2 * 7 * 3 + 2 * 6 * 2 + 8


@pytest.mark.campaign
@torch.no_grad()
def test_is_trained_resumed_and_exported(tmp_path: Path) -> None:
    whole = train(run_file(tmp_path / "whole"))
    train(run_file(tmp_path / "parts", steps=2, lr_schedule="constant"))
    resumed = train(run_file(tmp_path / "parts", resume="latest", lr_schedule="constant"))
    assert len(whole["losses"]) == 4
    assert len(resumed["losses"]) == 2

    export = Path(whole["export"])
    ids = torch.arange(12)[None]
    plain = LlamaForCausalLM.from_pretrained(export / "language_model").eval()
    base = plain(input_ids=ids).logits
    adapted = PeftModel.from_pretrained(plain, export / "language_model_adapter").eval()(input_ids=ids).logits
    assert not torch.allclose(adapted, base)
    PeftModel.from_pretrained(SiglipVisionModel.from_pretrained(export / "vision"), export / "vision_adapter")

    merged = export_checkpoint(run_file(tmp_path / "whole", merged_export=True), whole["checkpoint"])
    assert not (merged / "language_model_adapter").exists()
    added = LlamaForCausalLM.from_pretrained(merged / "language_model").eval()(input_ids=ids).logits
    assert torch.allclose(added, adapted, atol=1e-5)
