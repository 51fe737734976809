"""A language model that draws: it is told a digit, or two that add up to one, and answers with an image.

    python examples/draw_digits.py write runs/draw     # handwriting, conversations, a tokenizer and a run file
    motet train runs/draw/run.yaml                     # two processes; docs/generators.md
    python examples/draw_digits.py read runs/draw      # draws with plain transformers and diffusers, and reads it

What is drawn is read by a classifier that has never seen the handwriting of the training.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np
import torch
import yaml
from motet.data.chat import word_level_tokenizer
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.svm import SVC

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
NUM_TRAINING_SCANS = 1000


def scans() -> tuple[np.ndarray, np.ndarray]:
    """Handwriting in an order of its own: float [scans, 8, 8] in [0, 1], and what it says."""
    images, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    return images[order].reshape(-1, 8, 8) / 16, digits[order]


def question(digit: int, random: np.random.Generator) -> str:
    if random.random() < 0.5:
        return f"draw {WORDS[digit]}"
    first = int(random.integers(0, digit + 1))
    return f"draw {WORDS[first]} plus {WORDS[digit - first]}"


def write(folder: Path, num_samples: int = 4000) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    images, digits = scans()
    random = np.random.default_rng(1)
    for i, image in enumerate(images[:NUM_TRAINING_SCANS]):
        Image.fromarray((255 * image).astype(np.uint8)).save(folder / f"{i}.png")
    records = []
    for i in range(num_samples):
        scan = i % NUM_TRAINING_SCANS
        turns = [question(int(digits[scan]), random), "<generate>"]
        spoken = [{"from": who, "value": text} for who, text in zip(("human", "gpt"), turns, strict=True)]
        records.append({"id": str(i), "generate": f"{scan}.png", "conversations": spoken})
    (folder / "drawings.jsonl").write_text("\n".join(map(json.dumps, records)))
    tokenizer = word_level_tokenizer(["draw plus", " ".join(WORDS)])
    tokenizer.add_tokens(["<generate>"], special_tokens=True)
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "run.yaml").write_text(yaml.safe_dump(run_file(folder), sort_keys=False))


def run_file(folder: Path) -> dict:
    language_model = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "max_position_embeddings": 64,
    }
    generator = {
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 1,
        "out_channels": 1,
        "num_layers": 4,
        "attention_head_dim": 16,
        "num_attention_heads": 6,
        "joint_attention_dim": 64,
        "caption_projection_dim": 96,
        "pooled_projection_dim": 64,
        "pos_embed_max_size": 4,
    }
    return {
        "model": {
            "language_model": {"config": "LlamaConfig", "values": language_model},
            "generators": {"image": {"config": "SD3Transformer2DModel", "values": generator, "queries": 8}},
        },
        "data": {
            "kind": "conversations",
            "files": [str(folder / "drawings.jsonl")],
            "image_folder": str(folder),
            "tokenizer": str(folder / "tokenizer"),
        },
        "cluster": {"num_devices": 2},
        "parallel": {"planner": "explicit", "explicit": {"language_model": {}, "image": {}}, "num_microbatches": 1},
        "train": {
            "steps": 2000,
            "global_batch_size": 64,
            "learning_rate": 0.001,
            "weight_decay": 0.0,
            "warmup_steps": 100,
            "checkpoint_every": 1000,
            "output": str(folder / "output"),
        },
    }


def read(folder: Path, num_images: int = 100, guidance: float = 2.0) -> float:
    """The share of drawings that say what they should."""
    draw = drawer(folder / "output" / "export")
    images, digits = scans()
    unseen = slice(NUM_TRAINING_SCANS, None)
    judge = SVC(gamma=0.5, C=10).fit(images[unseen].reshape(-1, 64), digits[unseen])
    random = np.random.default_rng(2)
    wanted = random.integers(0, 10, num_images)
    torch.manual_seed(0)
    drawn = [draw(f"<|user|>{question(int(d), random)}<|end|><|assistant|>", guidance=guidance) for d in wanted]
    sheet = ((torch.cat(drawn)[:, 0].float().numpy() + 1) / 2).clip(0, 1)
    rows = sheet[: num_images // 10 * 10].reshape(-1, 10, 8, 8).transpose(0, 2, 1, 3).reshape(-1, 80)
    Image.fromarray((255 * rows).astype(np.uint8)).resize((640, 8 * len(rows))).save(folder / "drawings.png")
    return float((judge.predict(sheet.reshape(-1, 64)) == wanted).mean())


def drawer(export: Path, generator: str = "image"):
    """The function `draw_<generator>` of the exported README: plain transformers, diffusers and torch."""
    text = (export / "README.md").read_text()
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(re.sub(r'(from_pretrained|load_file)\("', rf'\1("{export}/', code), names)
    return names[f"draw_{generator}"]


if __name__ == "__main__":
    command, path = sys.argv[1], Path(sys.argv[2])
    if command == "write":
        write(path.resolve())
    else:
        print(f"{100 * read(path.resolve()):.0f}% of the drawings are read as what was asked for; {path}/drawings.png")
