"""A tiny data set of conversations with image and audio files, written into a test's folder."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from PIL import Image

CONVERSATIONS: tuple[dict[str, Any], ...] = (
    {
        "id": "one-image",
        "image": "wide.png",
        "conversations": [
            {"from": "human", "value": "<image>\nWhat is this?"},
            {"from": "gpt", "value": "A cat."},
            {"from": "human", "value": "Is it old?"},
            {"from": "gpt", "value": "No it is young."},
        ],
    },
    {
        "id": "both",
        "image": ["tall.jpg", "wide.png"],
        "audio": ["long.wav", "short.flac"],
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "Is <image> like <audio> or <image> like <audio>?"},
            {"from": "gpt", "value": "The cat is."},
        ],
    },
    {
        "id": "text",
        "conversations": [{"from": "human", "value": "What is old?"}, {"from": "gpt", "value": "Time."}],
    },
    {
        "id": "one-clip",
        "audio": "stereo.wav",
        "conversations": [{"from": "human", "value": "What is this? <audio>"}, {"from": "gpt", "value": "A cat"}],
    },
)


def write_media(folder: Path) -> None:
    rng = np.random.default_rng(0)

    def picture(height: int, width: int) -> Image.Image:
        return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))

    picture(40, 90).save(folder / "wide.png")
    picture(70, 30).save(folder / "tall.jpg")
    soundfile.write(folder / "long.wav", rng.uniform(-0.5, 0.5, 15_000), 16_000)
    soundfile.write(folder / "short.flac", rng.uniform(-0.5, 0.5, 3_001), 8_000)
    soundfile.write(folder / "stereo.wav", rng.uniform(-0.5, 0.5, (30_000, 2)), 44_100)


def write_conversations(file: Path, records: Iterable[Any] = CONVERSATIONS) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def words() -> list[str]:
    """Everything that the conversations say, for a tokenizer."""
    return [turn["value"] for record in CONVERSATIONS for turn in record["conversations"]]
