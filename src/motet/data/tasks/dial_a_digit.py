"""Dial a digit: a small task of three modalities that needs no download. Imports no torch.

The image shows handwritten digits (scikit-learn's bundled 8x8 scans) in reading order, the sound is a noisy telephone
dialling digits by tone (DTMF, ITU-T Q.23), and the text asks what is seen, what is heard, or for the sum of all digits
seen and heard ("3 1 4" seen and "2" heard: 10). An example is a pure function of (task, split, index). No scan of the
held-out split is shown in training. The numbers of digits follow P(n) ~ 1/n up to `max_digits`: most examples are
short, a few are long.

A share of the examples (`drawings`) asks to draw one digit: that is told, the sum of two that are told (at most 9),
seen or heard. The answer names the digit, and a scan of it is what is to be drawn.

Limits: one digit per cell of a fixed grid and one tone per time slot, so a model must recognise and order digits, but
need not segment them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal, Protocol

import numpy as np
from PIL import Image

from motet.data.example import PLACEHOLDERS, TO_GENERATE, Example, Media, Message, Modality

Split = Literal["train", "held_out"]
SPLIT_SEEDS: Mapping[Split, int] = {"train": 0, "held_out": 1}
Question = Literal["see", "hear", "sum"]

QUESTIONS: Mapping[Question, str] = {
    "see": "What do you see?",
    "hear": "What do you hear?",
    "sum": "What is the sum of all digits?",
}
Request = Literal["told", "sum", "seen", "heard"]
"""How an example says which digit is to be drawn."""
REQUESTS: Mapping[Request, str] = {
    "told": "Draw {}.",
    "sum": "Draw {} + {}.",
    "seen": "Draw what you see.",
    "heard": "Draw what you hear.",
}

IMAGE_SIZE = 48
CELL_SIZE = 16
IMAGE_MEAN, IMAGE_STD = 0.1, 0.25
"""Mean and standard deviation of the pixels on a scale of 0 to 1, for image processors."""
SAMPLING_RATE = 16_000
SLOT_S = 0.120
"""Time between the earliest starts of consecutive tones."""
LOUDNESS = 0.015
"""Amplitude of the loudest tone of one frequency: that of a quiet line, whose noise is near 0 in Whisper's features."""
HELD_OUT_SHARE = 0.2
SCAN_SIZE = 8
"""Pixels on a side of what is drawn."""

LOW_HZ, HIGH_HZ = (697, 770, 852, 941), (1209, 1336, 1477)
KEYPAD = ("123", "456", "789", "*0#")
DTMF_HZ: Mapping[str, tuple[int, int]] = {
    key: (low, high) for low, row in zip(LOW_HZ, KEYPAD, strict=True) for high, key in zip(HIGH_HZ, row, strict=True)
}


@dataclass(frozen=True)
class Dialled:
    """The content of an example, before it is painted and played."""

    seen: tuple[tuple[int, ...], ...]
    """The digits of each image."""
    heard: tuple[tuple[int, ...], ...]
    """The digits of each clip."""
    question: Question

    @property
    def answer(self) -> str:
        if self.question == "sum":
            return str(sum(sum(digits) for digits in (*self.seen, *self.heard)))
        return " ".join(str(d) for digits in (self.seen if self.question == "see" else self.heard) for d in digits)


@dataclass(frozen=True)
class Drawing:
    """The content of an example that asks for a drawing."""

    digit: int
    request: Request
    terms: tuple[int, ...] = ()
    """The digits that the question names."""

    @property
    def question(self) -> str:
        return REQUESTS[self.request].format(*self.terms)


@dataclass(frozen=True, kw_only=True)
class DialADigit:
    """The task's options."""

    seed: int = 0
    max_digits: int = 8
    """Most digits in one image, and in one clip; at most 8."""
    max_images: int = 1
    max_clips: int = 1
    no_image: float = 0.15
    """Share of examples without an image."""
    no_sound: float = 0.15
    """Share of examples without a sound; with `no_image` at most 1."""
    sum_questions: float = 0.2
    """Share of questions for the sum."""
    drawings: float = field(default=0.0, repr=False)
    """Share of examples that ask for a drawing."""

    def __post_init__(self) -> None:
        assert 1 <= self.max_digits <= 8
        assert self.max_images >= 1
        assert self.max_clips >= 1
        assert self.no_image + self.no_sound <= 1

    @lru_cache(maxsize=4096)  # noqa: B019 (a task is a small constant)
    def dialled(self, split: Split, index: int) -> Dialled:
        rng = np.random.default_rng((self.seed, SPLIT_SEEDS[split], index))
        lacks = rng.random()
        has_image = lacks >= self.no_image
        has_sound = not self.no_image <= lacks < self.no_image + self.no_sound
        seen = self._digits(rng, self.max_images) if has_image else ()
        heard = self._digits(rng, self.max_clips) if has_sound else ()
        asks_sum, asks_see = rng.random() < self.sum_questions, rng.random() < 0.5
        question: Question = "sum" if asks_sum else "see" if has_image and (asks_see or not has_sound) else "hear"
        return Dialled(seen, heard, question)

    def example(self, split: Split, index: int, *, denied: Sequence[Modality] = ()) -> Example:
        """`denied`: modalities of which only the noise remains.

        The question, its answer and the length of the sequence are the same, so the accuracy is then that of guessing:
        a control experiment for what a model learns from a modality.
        """
        drawing = self.drawing(split, index)
        if drawing is not None:
            return self._drawn(drawing, split, index)
        content, seed = self.dialled(split, index), (self.seed, SPLIT_SEEDS[split], index)
        images: list[Media] = [
            Strip(digits, split, (*seed, 0, item), "image" in denied) for item, digits in enumerate(content.seen)
        ]
        clips: list[Media] = [
            Dialling(digits, (*seed, 1, item), "audio" in denied) for item, digits in enumerate(content.heard)
        ]
        placeholders = "<audio>" * len(clips) + "<image>" * len(images)
        return Example(
            id=f"dial-a-digit/{self.seed}/{split}/{index}",
            messages=(
                Message("user", placeholders + QUESTIONS[content.question]),
                Message("assistant", content.answer),
            ),
            media={"image": tuple(images), "audio": tuple(clips)},
        )

    def drawing(self, split: Split, index: int) -> Drawing | None:
        """What the example asks to draw; None: it asks something else."""
        if not self.drawings:
            return None
        rng = np.random.default_rng((self.seed, SPLIT_SEEDS[split], index, 2))
        if rng.random() >= self.drawings:
            return None
        requests: list[Request] = ["told", "sum"]
        requests += ["seen"] if self.no_image < 1 else []
        requests += ["heard"] if self.no_sound < 1 else []
        request = requests[rng.integers(len(requests))]
        digit = int(rng.integers(10))
        if request == "sum":
            first = int(rng.integers(digit + 1))
            return Drawing(digit, request, (first, digit - first))
        return Drawing(digit, request, (digit,) if request == "told" else ())

    def _drawn(self, drawing: Drawing, split: Split, index: int) -> Example:
        seed = (self.seed, SPLIT_SEEDS[split], index, 2)
        media: dict[Modality, tuple[Media, ...]] = {TO_GENERATE: (Scan(drawing.digit, split, (*seed, 0)),)}
        question = drawing.question
        if drawing.request == "seen":
            media["image"], question = (Strip((drawing.digit,), split, (*seed, 1)),), PLACEHOLDERS["image"] + question
        elif drawing.request == "heard":
            media["audio"], question = (Dialling((drawing.digit,), (*seed, 1)),), PLACEHOLDERS["audio"] + question
        answer = f"{drawing.digit} {PLACEHOLDERS[TO_GENERATE]}"
        return Example(
            id=f"dial-a-digit/{self.seed}/{split}/{index}",
            messages=(Message("user", question), Message("assistant", answer)),
            media=media,
        )

    def _digits(self, rng: np.random.Generator, max_items: int) -> tuple[tuple[int, ...], ...]:
        num_items = int(rng.integers(1, max_items + 1))
        # What `rng.choice` with these probabilities draws, without its checks.
        lengths = np.searchsorted(self._shares_up_to, rng.random(num_items), side="right") + 1
        return tuple(tuple(rng.integers(0, 10, size=n).tolist()) for n in lengths.tolist())

    @cached_property
    def _shares_up_to(self) -> np.ndarray:
        """The shares of items of at most 1, 2, ... digits."""
        shares = 1 / np.arange(1, self.max_digits + 1)
        up_to = (shares / shares.sum()).cumsum()
        return up_to / up_to[-1]


class Task(Protocol):
    def example(self, split: Split, index: int) -> Example: ...


@dataclass(frozen=True)
class TaskExamples:
    """The first examples of a split of a task."""

    task: Task
    split: Split
    num_examples: int

    @property
    def fingerprint(self) -> str:
        return repr(self)

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, index: int) -> Example:
        return self.task.example(self.split, index)


class DialADigitExamples(TaskExamples):
    task: DialADigit

    @property
    def fingerprint(self) -> str:
        # Checkpoints of trainings without drawings have none in it.
        return repr(self) + (f" with drawings {self.task.drawings}" if self.task.drawings else "")


@dataclass(frozen=True)
class Strip:
    """An image of digits, painted when it is loaded."""

    digits: tuple[int, ...]
    split: Split
    seed: tuple[int, ...]
    is_blank: bool = False

    def size(self) -> tuple[int, int]:
        return IMAGE_SIZE, IMAGE_SIZE

    def load(self) -> Image.Image:
        return paint(self.digits, self.split, np.random.default_rng(self.seed), is_blank=self.is_blank)


@dataclass(frozen=True)
class Scan:
    """An image of one digit as it was scanned: what is to be drawn."""

    digit: int
    split: Split
    seed: tuple[int, ...]

    def size(self) -> tuple[int, int]:
        return SCAN_SIZE, SCAN_SIZE

    def load(self) -> Image.Image:
        scans = handwriting()[self.split][self.digit]
        pixels = scans[np.random.default_rng(self.seed).integers(len(scans))] * 255
        return Image.fromarray(pixels.astype(np.uint8)).convert("RGB")


@dataclass(frozen=True)
class Dialling:
    """A clip of dialled digits, played when it is loaded."""

    digits: tuple[int, ...]
    seed: tuple[int, ...]
    is_silent: bool = False

    def size(self) -> tuple[int, int]:
        return len(self.digits) * round(SLOT_S * SAMPLING_RATE), SAMPLING_RATE

    def load(self) -> np.ndarray:
        return dial(self.digits, np.random.default_rng(self.seed), is_silent=self.is_silent)


@lru_cache(maxsize=1)
def handwriting() -> Mapping[Split, tuple[np.ndarray, ...]]:
    """For each split, the scans of each digit: float32 [number of scans, 8, 8] in [0, 1]. The splits share no scan."""
    from sklearn.datasets import load_digits

    scans, labels = load_digits(return_X_y=True)
    scans = (scans / 16).reshape(-1, 8, 8).astype(np.float32)
    rng = np.random.default_rng(0)
    shuffled = [rng.permutation(scans[labels == digit]) for digit in range(10)]
    bounds = [round(HELD_OUT_SHARE * len(own)) for own in shuffled]
    return {
        "held_out": tuple(own[:bound] for own, bound in zip(shuffled, bounds, strict=True)),
        "train": tuple(own[bound:] for own, bound in zip(shuffled, bounds, strict=True)),
    }


def paint(digits: Sequence[int], split: Split, rng: np.random.Generator, *, is_blank: bool = False) -> Image.Image:
    """Paints digits in reading order on a page of 3x3 cells of 16 pixels, at random sizes and positions in the cells.

    `is_blank`: paints only the noise.
    """
    page = np.zeros((IMAGE_SIZE, IMAGE_SIZE), np.float32)
    for cell, digit in enumerate(digits):
        scans = handwriting()[split][digit]
        scan = Image.fromarray(scans[rng.integers(len(scans))])
        width, height = (int(size) for size in rng.integers(CELL_SIZE - 1, CELL_SIZE + 1, size=2))
        ink = rng.uniform(0.7, 1.0) * np.asarray(scan.resize((width, height), Image.Resampling.BILINEAR))
        row, column = divmod(cell, IMAGE_SIZE // CELL_SIZE)
        top = row * CELL_SIZE + rng.integers(0, CELL_SIZE - height + 1)
        left = column * CELL_SIZE + rng.integers(0, CELL_SIZE - width + 1)
        page[top : top + height, left : left + width] = ink
    noise = rng.normal(0, 0.05, page.shape)
    pixels = (noise if is_blank else page + noise).clip(0, 1) * 255
    return Image.fromarray(pixels.astype(np.uint8)).convert("RGB")


def dial(digits: Sequence[int], rng: np.random.Generator, *, is_silent: bool = False) -> np.ndarray:
    """The sound of dialling: float32 [samples] at 16 kHz, with a slot of 120 ms for each digit.

    Tones begin up to 20 ms late, last 60 to 90 ms, and are 5 to 20 dB above white noise. `is_silent`: only the noise.
    """
    slot = round(SLOT_S * SAMPLING_RATE)
    wave = np.zeros(slot * len(digits))
    for i, digit in enumerate(digits):
        start = i * slot + int(rng.uniform(0, 0.020) * SAMPLING_RATE)
        time_s = np.arange(int(rng.uniform(0.060, 0.090) * SAMPLING_RATE)) / SAMPLING_RATE
        tones = [np.sin(2 * np.pi * (hz * time_s + rng.random())) for hz in DTMF_HZ[str(digit)]]
        wave[start : start + len(time_s)] = LOUDNESS * rng.uniform(0.5, 1.0) * (tones[0] + tones[1])
    noise = rng.normal(0, 0.75 * LOUDNESS / 10 ** (rng.uniform(5, 20) / 20), wave.shape)
    return (noise if is_silent else wave + noise).clip(-1, 1).astype(np.float32)


@dataclass(frozen=True)
class Accuracy:
    """The accuracy of answers, in shares from 0 to 1; None where nothing was asked."""

    seen_digits: float | None
    """Share of digits in answers to "see" that are right at their position."""
    heard_digits: float | None
    answers: dict[Question, float | None]
    """Share of answers that are entirely right, by question."""
    num_answers: dict[Question, int]


def digits_of(text: str) -> str:
    """The digits of an answer, without other characters."""
    return "".join(character for character in text if character.isdigit())


def count_right_digits(right: str, given: str) -> tuple[int, int]:
    """Returns (digits that are right at their position, the larger of the numbers of digits asked and given)."""
    right, given = digits_of(right), digits_of(given)
    return sum(a == b for a, b in zip(right, given, strict=False)), max(len(right), len(given))


def accuracy(answers: Iterable[tuple[Dialled, str]]) -> Accuracy:
    """The accuracy of answer texts."""
    digits = {question: [0, 0] for question in QUESTIONS}
    whole = {question: [0, 0] for question in QUESTIONS}
    for content, given in answers:
        num_right, num_digits = count_right_digits(content.answer, given)
        digits[content.question][0] += num_right
        digits[content.question][1] += num_digits
        whole[content.question][0] += digits_of(content.answer) == digits_of(given)
        whole[content.question][1] += 1
    return Accuracy(
        seen_digits=_share(digits["see"]),
        heard_digits=_share(digits["hear"]),
        answers={question: _share(counts) for question, counts in whole.items()},
        num_answers={question: counts[1] for question, counts in whole.items()},
    )


def _share(counts: list[int]) -> float | None:
    right, asked = counts
    return right / asked if asked else None
