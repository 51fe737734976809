"""The same digits seen, heard and named: a small task for contrastive models that needs no download. Imports no torch.

The image shows a few handwritten digits, the sound is a telephone dialling the same digits by tone, and the text names
them ("three one four"). Images and sounds are made as in *dial a digit*; no scan of the held-out split is shown in
training. An example is a pure function of (task, split, index).

Limits: digits and numbers of digits are drawn uniformly, so a batch may hold the same digits twice, which a contrastive
loss treats as different; with five digits that is rare.
"""

from dataclasses import dataclass

import numpy as np

from motet.data.example import Example, Message
from motet.data.tasks.dial_a_digit import SPLIT_SEEDS, Dialling, Split, Strip, TaskExamples

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True, kw_only=True)
class SameDigits:
    """The task's options."""

    seed: int = 0
    min_digits: int = 3
    max_digits: int = 5
    """At most 8."""

    def digits(self, split: Split, index: int) -> tuple[int, ...]:
        rng = np.random.default_rng((self.seed, SPLIT_SEEDS[split], index))
        number = rng.integers(self.min_digits, self.max_digits + 1)
        return tuple(rng.integers(0, 10, size=number).tolist())

    def example(self, split: Split, index: int) -> Example:
        digits, seed = self.digits(split, index), (self.seed, SPLIT_SEEDS[split], index)
        return Example(
            id=f"same-digits/{self.seed}/{split}/{index}",
            messages=(Message("user", " ".join(NAMES[digit] for digit in digits)),),
            media={"image": (Strip(digits, split, (*seed, 0)),), "audio": (Dialling(digits, (*seed, 1)),)},
        )


class SameDigitsExamples(TaskExamples):
    task: SameDigits
