"""Reads drawings of digits, and compares them with handwriting: do they say what they should, and are they copies?

The classifier is trained on the scans of the held-out split, which no generator is trained on; of the other split's
scans it reads 98%. Drawings are float [drawings, 8, 8] between 0 and 1, as scans are. Imports no torch.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from motet.data.tasks.dial_a_digit import SCAN_SIZE, Split, handwriting

SCALE = 6
"""Pixels on a contact sheet for each of a drawing's."""
MARGIN = 6
LINE = 14
"""Height of a line of text."""


@lru_cache(maxsize=1)
def _classifier() -> Any:
    from sklearn.svm import SVC

    scans, digits = _scans("held_out")
    return SVC(gamma=0.3, C=10).fit(scans, digits)


def _scans(split: Split) -> tuple[np.ndarray, np.ndarray]:
    """All scans of a split, [scans, 64], and their digits."""
    of_digits = handwriting()[split]
    digits = np.repeat(np.arange(10), [len(own) for own in of_digits])
    return np.concatenate(of_digits).reshape(len(digits), -1), digits


def read_digits(drawings: np.ndarray) -> np.ndarray:
    """What each drawing says: int [drawings]."""
    if not len(drawings):
        return np.zeros(0, dtype=np.int64)
    read: np.ndarray = _classifier().predict(drawings.reshape(len(drawings), -1))
    return read


def share_read_in_training_scans() -> float:
    """The share of the training split's scans that the classifier reads rightly: what drawings can reach."""
    scans, digits = _scans("train")
    return float((read_digits(scans) == digits).mean())


def relative_spread(drawings: np.ndarray, digits: np.ndarray) -> float:
    """The standard deviation of pixels among drawings of one digit, as a share of that among scans of it: 0 for a
    generator that draws one template for each. Mean over the digits that are drawn at least twice; 0 if none is."""
    of_scans, flat = handwriting()["train"], drawings.reshape(len(drawings), SCAN_SIZE**2)
    drawn = [flat[digits == digit].std(0).mean() for digit in range(10) if (digits == digit).sum() > 1]
    real = [of_scans[digit].reshape(len(of_scans[digit]), -1).std(0).mean() for digit in range(10)]
    return float(np.mean(drawn) / np.mean(real)) if drawn else 0.0


def relative_novelty(drawings: np.ndarray) -> float:
    """The mean distance of drawings to the nearest training scan, as a share of that of held-out scans: 0 for a
    generator that copies what it was trained on, or draws nothing."""
    if not len(drawings):
        return 0.0
    training = _scans("train")[0]
    own, real = (_nearest(flat, training) for flat in (drawings.reshape(len(drawings), -1), _scans("held_out")[0]))
    return float(own.mean() / real.mean())


def _nearest(flat: np.ndarray, training: np.ndarray) -> np.ndarray:
    squares = (flat**2).sum(1)[:, None] + (training**2).sum(1)[None] - 2 * flat @ training.T
    nearest: np.ndarray = np.sqrt(np.maximum(squares, 0).min(1))
    return nearest


def contact_sheet(rows: Sequence[tuple[str, np.ndarray, Sequence[bool]]]) -> Image.Image:
    """A picture of drawings. `rows`: a line of text above them, the drawings of a row, and for each whether it is
    read as what it should be; the others have a red frame."""
    side, width = SCALE * SCAN_SIZE, max(len(drawings) for _, drawings, _ in rows)
    height = LINE + side + 2 * MARGIN
    sheet = Image.new("RGB", (MARGIN + width * (side + MARGIN), height * len(rows)), "white")
    pen = ImageDraw.Draw(sheet)
    for number, (text, drawings, are_right) in enumerate(rows):
        pen.text((MARGIN, number * height + 2), text, fill="black")
        for column, (drawing, is_right) in enumerate(zip(drawings, are_right, strict=True)):
            left, top = MARGIN + column * (side + MARGIN), number * height + LINE + MARGIN // 2
            pixels = Image.fromarray((255 * (1 - drawing.clip(0, 1))).astype(np.uint8))
            sheet.paste(pixels.resize((side, side), Image.Resampling.NEAREST), (left, top))
            frame = "lightgrey" if is_right else "red"
            pen.rectangle((left - 1, top - 1, left + side, top + side), outline=frame)
    return sheet
