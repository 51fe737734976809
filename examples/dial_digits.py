"""A language model that dials: it is told a digit, or two that add up to one, and answers with the telephone's tones.

    python examples/dial_digits.py write runs/dial     # tones, conversations, a tokenizer and a run file
    motet train runs/dial/run.yaml                     # two processes; docs/generators.md
    python examples/dial_digits.py read runs/dial      # dials with plain transformers and diffusers, and listens

The generator makes spectrograms. Their two loudest tones say which key was pressed (DTMF, ITU-T Q.23).
"""

import json
import sys
from pathlib import Path

import numpy as np
import soundfile
import torch
import yaml
from motet.config import SpectrogramConfig
from motet.data.chat import word_level_tokenizer
from motet.data.generated import log_mel, mel_bands
from PIL import Image

from draw_digits import WORDS, drawer, question, run_file

LOW_HZ, HIGH_HZ = (697, 770, 852, 941), (1209, 1336, 1477)
KEYS = {1: (0, 0), 2: (0, 1), 3: (0, 2), 4: (1, 0), 5: (1, 1), 6: (1, 2), 7: (2, 0), 8: (2, 1), 9: (2, 2), 0: (3, 1)}
RATE, NUM_SAMPLES = 8000, 1600
SPECTROGRAM = {"sampling_rate": RATE, "window": 400, "hop": 200, "num_mels": 48}


def tones(digit: int, random: np.random.Generator) -> np.ndarray:
    """A key's two tones: of any loudness and phase, somewhere in 0.2 s, on a noisy line."""
    low, high = KEYS[digit]
    seconds = np.arange(NUM_SAMPLES) / RATE
    wave = sum(np.sin(2 * np.pi * (hz * seconds + random.random())) for hz in (LOW_HZ[low], HIGH_HZ[high]))
    first = random.integers(0, NUM_SAMPLES // 4)
    sounds = (np.arange(NUM_SAMPLES) >= first) & (np.arange(NUM_SAMPLES) < first + NUM_SAMPLES * 3 // 4)
    return random.uniform(0.05, 0.4) * wave * sounds + 0.001 * random.standard_normal(NUM_SAMPLES)


def heard(spectrogram: np.ndarray) -> int | None:
    """The digit that a spectrogram [bands, frames] sounds like; None: no key has these two tones."""
    bands = mel_bands(RATE, SPECTROGRAM["window"], SPECTROGRAM["num_mels"])
    power = 10 ** (4 * (spectrogram.mean(1) - 1))

    def loudest(frequencies: tuple[int, ...]) -> int:
        nearest = [bands[round(hz * SPECTROGRAM["window"] / RATE)] for hz in frequencies]
        return int(np.argmax([(weights * power).sum() / weights.sum() for weights in nearest]))

    pressed = loudest(LOW_HZ), loudest(HIGH_HZ)
    return next((digit for digit, key in KEYS.items() if key == pressed), None)


def write(folder: Path, num_samples: int = 4000) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(1)
    records = []
    for i in range(num_samples):
        digit = i % 10
        soundfile.write(folder / f"{i}.wav", tones(digit, random), RATE)
        asked = question(digit, random).replace("draw", "dial")
        spoken = [{"from": "human", "value": asked}, {"from": "gpt", "value": "<generate_audio>"}]
        records.append({"id": str(i), "generate_audio": f"{i}.wav", "conversations": spoken})
    (folder / "calls.jsonl").write_text("\n".join(map(json.dumps, records)))
    tokenizer = word_level_tokenizer(["dial plus", " ".join(WORDS)])
    tokenizer.add_tokens(["<generate_audio>"], special_tokens=True)
    tokenizer.save_pretrained(folder / "tokenizer")
    run = run_file(folder)
    voice = run["model"]["generators"].pop("image")
    voice["values"] |= {"patch_size": 4, "pos_embed_max_size": 12}
    run["model"]["generators"]["voice"] = {**voice, "spectrogram": SPECTROGRAM}
    run["data"] = {
        "kind": "conversations",
        "files": [str(folder / "calls.jsonl")],
        "audio_folder": str(folder),
        "tokenizer": str(folder / "tokenizer"),
    }
    run["parallel"]["explicit"] = {"language_model": {}, "voice": {}}
    run["train"]["steps"] = 1000
    (folder / "run.yaml").write_text(yaml.safe_dump(run, sort_keys=False))


def read(folder: Path, num_calls: int = 100, guidance: float = 2.0) -> tuple[float, float]:
    """The shares of dialled digits, and of recorded tones, that are heard as what they should be."""
    draw = drawer(folder / "output" / "export", "voice")
    random = np.random.default_rng(2)
    options = SpectrogramConfig(**SPECTROGRAM)
    recorded = [
        heard(log_mel(tones(i % 10, random), options, NUM_SAMPLES // options.hop)) == i % 10 for i in range(200)
    ]
    wanted = random.integers(0, 10, num_calls)
    torch.manual_seed(0)
    prompts = [f"<|user|>{question(int(d), random).replace('draw', 'dial')}<|end|><|assistant|>" for d in wanted]
    made = [draw(prompt, guidance=guidance)[0, 0].float().numpy() for prompt in prompts]
    rows = [np.hstack(made[i : i + 10]) for i in range(0, num_calls // 10 * 10, 10)]
    sheet = (127.5 * (np.vstack(rows)[::-1] + 1)).astype(np.uint8)
    Image.fromarray(sheet).resize((8 * sheet.shape[1], sheet.shape[0])).save(folder / "spectrograms.png")
    return float(np.mean([heard(own) == d for own, d in zip(made, wanted, strict=True)])), float(np.mean(recorded))


if __name__ == "__main__":
    command, path = sys.argv[1], Path(sys.argv[2])
    if command == "write":
        write(path.resolve())
    else:
        made, recorded = read(path.resolve())
        print(
            f"{100 * made:.0f}% of what it dials is heard as what was asked for ({100 * recorded:.0f}% of recordings)"
        )
