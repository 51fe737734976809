"""The same digits seen, heard and named: a small task for contrastive towers that needs no download. Pure: no torch.

The image shows a few handwritten digits, the sound is a telephone dialling the same ones by tone, the text names them
("three one four"). Painting, handwriting and dialling are those of *dial a digit*; no scan of the held-out split is
ever shown in training. An example is a pure function of (task, split, index).

Limits: numbers of digits and digits are drawn evenly, so a batch may hold the same digits twice, which a contrastive
loss then takes for different; with five digits that is rare.
"""

from dataclasses import dataclass

import numpy as np
from PIL import Image

from motet.data.example import Example, Message
from motet.data.tasks.dial_a_digit import IMAGE_SIZE, SAMPLING_RATE, SLOT_S, Split, dial, paint

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True, kw_only=True)
class SameDigits:
    """The task's options."""

    seed: int = 0
    min_digits: int = 3
    max_digits: int = 5
    """At most 8."""

    def digits(self, split: Split, index: int) -> tuple[int, ...]:
        rng = self.rng(split, index)
        number = rng.integers(self.min_digits, self.max_digits + 1)
        return tuple(rng.integers(0, 10, size=number).tolist())

    def rng(self, split: Split, index: int, *item: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, 0 if split == "train" else 1, index, *item])


@dataclass(frozen=True)
class SameDigitsExamples:
    """The first examples of a split."""

    task: SameDigits
    split: Split
    num_examples: int

    @property
    def fingerprint(self) -> str:
        return repr(self)

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, index: int) -> Example:
        digits = self.task.digits(self.split, index)
        return Example(
            id=f"same-digits/{self.task.seed}/{self.split}/{index}",
            messages=(Message("user", " ".join(NAMES[digit] for digit in digits)),),
            media={
                "image": (Strip(self.task, self.split, index),),
                "audio": (Dialling(self.task, self.split, index),),
            },
        )


@dataclass(frozen=True)
class Strip:
    """The image, painted when it is loaded."""

    task: SameDigits
    split: Split
    index: int

    def size(self) -> tuple[int, int]:
        return IMAGE_SIZE, IMAGE_SIZE

    def load(self) -> Image.Image:
        return paint(self.task.digits(self.split, self.index), self.split, self.task.rng(self.split, self.index, 0))


@dataclass(frozen=True)
class Dialling:
    """The sound, played when it is loaded."""

    task: SameDigits
    split: Split
    index: int

    def size(self) -> tuple[int, int]:
        return len(self.task.digits(self.split, self.index)) * round(SLOT_S * SAMPLING_RATE), SAMPLING_RATE

    def load(self) -> np.ndarray:
        return dial(self.task.digits(self.split, self.index), self.task.rng(self.split, self.index, 1))
