"""Run files of tiny models of several modalities, with conversations about drawn images and tones."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from PIL import Image
from tiny_composites import COMPOSITES, save_tiny_composite

from motet.config import RunConfig

HEARS = ("qwen2_audio", "voxtral")
BOTH = ("qwen2_5_omni_thinker",)


def encoders_of(name: str) -> list[str]:
    """The names of its encoders, in the order of the model's parts."""
    return ["vision", "audio"] if name in BOTH else ["audio"] if name in HEARS else ["vision"]


def write_conversations(folder: Path, name: str, num_samples: int = 8) -> Path:
    """Samples with one image (or clip) of different sizes, with two, and without any."""
    random = np.random.default_rng(0)
    records = []
    for i in range(num_samples):
        kinds = [["image"], ["image", "image"], [], ["image"]][i % 4]
        if name in HEARS:
            kinds = ["audio" for _ in kinds]
        if name in BOTH and i % 4 == 1:
            kinds = ["audio", "image"]
        files: dict[str, list[str]] = {"image": [], "audio": []}
        for k, kind in enumerate(kinds):
            if kind == "image":
                size = (56 + 28 * ((i + k) % 3), 56, 3)
                Image.fromarray(random.integers(0, 255, size, dtype=np.uint8)).save(folder / f"{i}_{k}.png")
                files["image"].append(f"{i}_{k}.png")
            else:
                wave = 0.1 * random.standard_normal(4000 + 1000 * ((i + k) % 4)).astype(np.float32)
                soundfile.write(folder / f"{i}_{k}.wav", wave, 16000)
                files["audio"].append(f"{i}_{k}.wav")
        asked = "".join(f"<{kind}>" for kind in kinds)
        turns = [
            {"from": "human", "value": f"{asked}What is the number {i}?"},
            {"from": "gpt", "value": f"It is {i * 37 % 10}."},
        ]
        records.append({"id": str(i), "conversations": turns, **{k: v for k, v in files.items() if v}})
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder / "data.jsonl"


def composite_run(
    folder: Path,
    name: str,
    *,
    pp: int = 1,
    tp: int = 1,
    parts: dict[str, Any] | None = None,
    num_samples: int = 8,
    num_microbatches: int = 2,
    **train: Any,
) -> dict[str, Any]:
    """The run file's content: each encoder on a rank of its own, the language model on `pp` x `tp` ranks."""
    assert name in COMPOSITES
    model = folder / "model"
    if not model.exists():
        save_tiny_composite(name, model)
    data = folder / "data.jsonl"
    if not data.exists():
        write_conversations(folder, name, num_samples)
    encoders = encoders_of(name)
    explicit: dict[str, Any] = {encoder: {} for encoder in sorted(encoders)}
    explicit["language_model"] = {"pp": pp, "tp": tp}
    return {
        "model": {"path": str(model), "parts": parts or {}},
        "data": {
            "kind": "conversations",
            "files": [str(data)],
            "image_folder": str(folder),
            "audio_folder": str(folder),
        },
        "cluster": {"num_devices": len(encoders) + pp * tp},
        "parallel": {"planner": "explicit", "num_microbatches": num_microbatches, "explicit": explicit},
        "train": {"global_batch_size": 8, "dtype": "float64", "steps": 2, **train},
    }


def composite_config(folder: Path, name: str, **options: Any) -> RunConfig:
    return RunConfig.model_validate_json(json.dumps(composite_run(folder, name, **options)))
