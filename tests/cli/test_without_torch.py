"""`motet plan` and `motet simulate` where torch and transformers cannot be imported, for every supported family.

The shape cards are there: they are made once where torch is."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkout import ROOT
from composite_run import composite_run
from PIL import Image
from tiny_configs import AUDIO, DINO, TEXT, VISION
from tiny_language_models import MIXTURES
from transformers import WhisperFeatureExtractor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from motet.config import RunConfig, load_run_config
from motet.data.chat import word_level_tokenizer
from motet.data.run_file import open_samples
from motet.families.capabilities import SHOWN_EQUAL, WITH_OTHER_MASKS
from motet.families.classes import MODEL_CLASSES, model_class_of
from motet.families.configured_graph import read_graph

SCRIPT = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
from motet.cli.main import main
command, *run_files = sys.argv[1:]
for run_file in run_files:
    print(run_file, file=sys.stderr)
    if main([command, run_file, "--json"]) or command == "plan" and main(["simulate", run_file, "--json"]):
        sys.exit(1)
"""
"""Runs a command for each run file; what is planned is simulated, too."""

QWEN = {"depth": 2, "hidden_size": 64, "num_heads": 4, "patch_size": 4, "out_hidden_size": 48}
ENCODERS = {
    "SiglipVisionConfig": VISION,
    "CLIPVisionConfig": VISION,
    "Dinov2Config": DINO,
    "PixtralVisionConfig": VISION,
    "Qwen2_5_VLVisionConfig": QWEN,
    "WhisperConfig": AUDIO,
    "Qwen2AudioEncoderConfig": AUDIO,
}
LANGUAGE_MODELS = {
    "LlamaConfig": TEXT,
    "MistralConfig": TEXT,
    "Qwen3Config": TEXT,
    "Gemma3TextConfig": TEXT,
    "Phi3Config": TEXT,
    "MllamaTextConfig": {**TEXT, "cross_attention_layers": [1]},
}
EVERY_HEAD = {key: TEXT[key] for key in TEXT if key != "num_key_value_heads"}
TEXTS = {
    "CLIPTextConfig": {**EVERY_HEAD, "max_position_embeddings": 12, "eos_token_id": 5},
    "SiglipTextConfig": {**EVERY_HEAD, "max_position_embeddings": 12, "projection_size": 32},
    "BertConfig": {**EVERY_HEAD, "max_position_embeddings": 12},
}
"""Text towers."""
DECODERS = {
    "GPT2Config": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32},
    "BertConfig": {**EVERY_HEAD, "hidden_size": 32},
}
"""That caption what a tower sees."""
PAIRS = [(encoder, list(LANGUAGE_MODELS)[i % len(LANGUAGE_MODELS)]) for i, encoder in enumerate(ENCODERS)]


def run_blocked(command: str, *run_files: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", SCRIPT, command, *map(str, run_files)], capture_output=True, text=True)


def planned_modules(folder: Path, runs: Sequence[Mapping[str, Any]]) -> list[set[str]]:
    """Of runs that are planned, and simulated alike, all in one process."""
    run_files = [folder / f"run{i}.yaml" for i in range(len(runs))]
    for run_file, run in zip(run_files, runs, strict=True):
        run_file.write_text(yaml.safe_dump(run))
        read_graph(load_run_config(run_file, []))
    result = run_blocked("plan", *run_files)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    for planned, simulated in zip(lines[::2], lines[1::2], strict=True):
        assert planned["iteration_time_s"] == simulated["iteration_time_s"] > 0
    return [{stage["module"] for stage in planned["stages"]} for planned in lines[::2]]


def test_every_family_is_among_the_pairs() -> None:
    """Of language models, dense ones that the project's tests show equal; others are read in the same way."""
    known = [
        (family, kind)
        for kind, families in MODEL_CLASSES.items()
        for family in (set(SHOWN_EQUAL) - MIXTURES.keys() - WITH_OTHER_MASKS if kind == "language_model" else families)
    ]
    configs = {model_class_of(family, kind).config_class.__name__ for family, kind in known}
    assert {*ENCODERS, *LANGUAGE_MODELS, *TEXTS, *DECODERS} == configs
    assert {name for pair in PAIRS for name in pair} == {*ENCODERS, *LANGUAGE_MODELS}


def mllm(encoder: str, language_model: str) -> dict[str, Any]:
    hears = encoder in ("WhisperConfig", "Qwen2AudioEncoderConfig")
    return {
        "model": {
            "encoders": {"encoder": {"config": encoder, "values": ENCODERS[encoder]}},
            "language_model": {"config": language_model, "values": LANGUAGE_MODELS[language_model]},
        },
        "data": {"kind": "dial-a-digit", "num_train": 16, "no_image": float(hears), "no_sound": float(not hears)},
        "cluster": {"num_devices": 2},
        "parallel": {"num_microbatches": 2},
        "train": {"global_batch_size": 4},
    }


def towers(text: str, decoder: str | None = None) -> dict[str, Any]:
    model: dict[str, Any] = {
        "towers": {
            "image": {"config": "SiglipVisionConfig", "values": VISION, "projector": "linear"},
            "text": {"config": text, "values": TEXTS[text], "projector": "linear"},
        },
        "contrastive": {"width": 32},
    }
    run = {
        "model": model,
        "data": {"kind": "same-digits", "num_train": 16},
        "cluster": {"num_devices": 2},
        "train": {"global_batch_size": 4},
    }
    if decoder is not None:
        model["decoder"] = {"config": decoder, "values": DECODERS[decoder], "reads": "image"}
        layout = {"image": {}, "text": {}, "decoder": {"pp": 2}}
        run |= {"cluster": {"num_devices": 4}, "parallel": {"planner": "explicit", "explicit": layout}}
    return run


def test_no_family_needs_torch(tmp_path: Path) -> None:
    expected = [
        *((mllm(*pair), {"encoder", "language_model"}) for pair in PAIRS),
        *((towers(text), {"image", "text", "contrastive"}) for text in TEXTS),
        *((towers("BertConfig", decoder), {"image", "text", "contrastive", "decoder"}) for decoder in DECODERS),
    ]
    assert planned_modules(tmp_path, [run for run, _ in expected]) == [modules for _, modules in expected]


def test_a_whole_model_that_was_planned_before_needs_no_torch(tmp_path: Path) -> None:
    run = composite_run(tmp_path, "qwen3_vl", pp=2)
    samples = open_samples(RunConfig.model_validate_json(json.dumps(run)))
    for index in range(len(samples)):
        samples.sample(index)

    assert planned_modules(tmp_path, [run]) == [{"vision", "language_model"}]


@pytest.mark.campaign
def test_conversations_and_folders_need_no_torch(tmp_path: Path) -> None:
    """A stored model whose parts' configurations are nested, its tokenizer and its processors."""
    Image.new("RGB", (60, 40)).save(tmp_path / "cat.png")
    turns = [{"from": "human", "value": "<image> What is it?"}, {"from": "gpt", "value": "A cat."}]
    record = json.dumps({"image": "cat.png", "conversations": turns})
    (tmp_path / "data.jsonl").write_text(f"{record}\n" * 4)
    model = tmp_path / "model"
    word_level_tokenizer(["What is it? A cat."]).save_pretrained(model)
    CLIPImageProcessorPil(size={"shortest_edge": 110}, crop_size={"height": 96, "width": 96}).save_pretrained(model)
    stored = {
        "model_type": "llava",
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", **VISION},
    }
    (model / "config.json").write_text(json.dumps(stored))
    WhisperFeatureExtractor(feature_size=16, chunk_length=1).save_pretrained(tmp_path / "audio")
    run = {
        "model": {
            "encoders": {
                "vision": {"path": str(model)},
                "audio": {"config": "WhisperConfig", "values": AUDIO},
            },
            "language_model": {"path": str(model)},
        },
        "data": {
            "kind": "conversations",
            "files": str(tmp_path / "data.jsonl"),
            "image_folder": str(tmp_path),
            "processors": {"audio": str(tmp_path / "audio")},
        },
        "cluster": {"num_devices": 3},
        "parallel": {"num_microbatches": 2},
        "train": {"global_batch_size": 4},
    }
    assert planned_modules(tmp_path, [run]) == [{"vision", "audio", "language_model"}]


def test_the_blocker_blocks() -> None:
    result = run_blocked("profile", ROOT / "examples" / "tiny.yaml")
    assert result.returncode == 1
    assert "is blocked" in result.stderr


def test_a_reader_that_has_seen_enough_is_no_failure() -> None:
    """As in `motet plan RUN.yaml | head -1`."""
    tiny = ROOT / "examples" / "tiny.yaml"
    command = [sys.executable, "-m", "motet.cli.main", "plan", str(tiny)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1
