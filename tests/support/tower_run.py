"""A run file of three small towers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import CLIPConfig, CLIPModel

from motet.cli.main import main

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
RUN: dict[str, Any] = {
    "model": {
        "towers": {
            "image": {"config": "SiglipVisionConfig", "values": {**SMALL, "image_size": 48, "patch_size": 16}},
            "audio": {
                "config": "WhisperConfig",
                "values": {
                    "d_model": 16,
                    "encoder_layers": 1,
                    "encoder_attention_heads": 2,
                    "encoder_ffn_dim": 32,
                    "num_mel_bins": 16,
                    "max_source_positions": 50,
                },
                "projector": "mlp",
            },
            "text": {
                "config": "CLIPTextConfig",
                "values": {**SMALL, "vocab_size": 32, "max_position_embeddings": 12, "eos_token_id": 5},
                "projector": "linear",
            },
        },
        "contrastive": {"width": 8},
    },
    "data": {"kind": "same-digits", "num_train": 40, "num_held_out": 16, "workers": 0},
    "cluster": {"num_devices": 3},
    "parallel": {
        "planner": "explicit",
        "explicit": {"image": {}, "audio": {"num_microbatches": 1}, "text": {}},
        "num_microbatches": 2,
        "schedule": "distmm_pipe",
    },
    "train": {"steps": 2, "global_batch_size": 8, "contrastive_batch_size": 4, "checkpoint_every": 2},
}


def write_tower_run(folder: Path) -> Path:
    """The run file; its output goes beside it."""
    path = folder / "run.yaml"
    values = {**RUN, "train": {**RUN["train"], "output": str(folder / "run")}}
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """What the command prints as JSON."""
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def give_decoder(run_file: Path, family: str) -> None:
    """Changes the file: two towers, of images and of texts, and a decoder."""
    content = yaml.safe_load(run_file.read_text())
    del content["model"]["towers"]["audio"]
    size = {"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 32, "max_position_embeddings": 12}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if family == "GPT2Config" else {}
    values = {**size, "num_hidden_layers": 2, **still}
    content["model"]["decoder"] = {"config": family, "values": values, "reads": "image"}
    content["parallel"]["explicit"] = {"image": {}, "text": {}, "decoder": {"pp": 2}}
    content["cluster"]["num_devices"] = 4
    run_file.write_text(yaml.safe_dump(content, sort_keys=False))


def give_stored_clip(run_file: Path) -> tuple[CLIPModel, Path]:
    """Changes the file: both towers are those of one stored CLIPModel; it, and its folder."""
    torch.manual_seed(0)
    folder, content = run_file.with_name("clip"), yaml.safe_load(run_file.read_text())
    text = {**SMALL, "vocab_size": 32, "max_position_embeddings": 12, "bos_token_id": 2, "eos_token_id": 5}
    vision = {**SMALL, "image_size": 48, "patch_size": 16}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
    model.logit_scale.data.fill_(3.5)
    model.save_pretrained(folder)
    content["model"]["towers"] = {name: {"path": str(folder), "part": name} for name in ("image", "text")}
    content["parallel"]["explicit"] = {"image": {}, "text": {}}
    run_file.write_text(yaml.safe_dump(content, sort_keys=False))
    return model, folder
