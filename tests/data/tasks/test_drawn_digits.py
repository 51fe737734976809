"""Reading drawings, and comparing them with handwriting."""

import numpy as np
import pytest

from motet.data.tasks.dial_a_digit import handwriting
from motet.data.tasks.drawn_digits import (
    contact_sheet,
    read_digits,
    relative_novelty,
    relative_spread,
    share_read_in_training_scans,
)


def scans(split: str) -> tuple[np.ndarray, np.ndarray]:
    of_digits = handwriting()[split]  # type: ignore[index]
    return np.concatenate(of_digits), np.repeat(np.arange(10), [len(own) for own in of_digits])


def test_handwriting_that_it_never_saw_is_read() -> None:
    images, digits = scans("train")
    assert share_read_in_training_scans() == pytest.approx((read_digits(images) == digits).mean())
    assert share_read_in_training_scans() > 0.98
    noise = np.random.default_rng(0).random((500, 8, 8))
    assert (read_digits(noise) == np.arange(500) % 10).mean() < 0.2
    assert len(read_digits(np.zeros((0, 8, 8)))) == 0


def test_templates_have_no_spread_and_copies_no_novelty() -> None:
    images, digits = scans("train")
    templates = np.stack([images[digits == digit].mean(0) for digit in range(10)]).repeat(5, 0)
    assert relative_spread(templates, np.arange(10).repeat(5)) == pytest.approx(0, abs=1e-6)
    assert relative_novelty(images[:100]) == pytest.approx(0, abs=1e-3)
    held_out, of_held_out = scans("held_out")
    assert relative_novelty(held_out) == pytest.approx(1)
    assert relative_spread(held_out, of_held_out) == pytest.approx(1, abs=0.1)


def test_a_sheet_shows_every_drawing_and_frames_wrong_ones() -> None:
    images, _ = scans("train")
    sheet = np.asarray(contact_sheet([("Draw 1.", images[:3], [True, False, True]), ("Draw 2.", images[:1], [True])]))
    rows = sheet.shape[0] // 2
    is_red = (sheet == (255, 0, 0)).all(-1)
    assert is_red[:rows].any()
    assert not is_red[rows:].any()
    assert sheet.shape[1] > 3 * 48
