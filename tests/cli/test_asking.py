"""Judging what an exported model draws."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from motet.cli import asking, demo
from motet.cli.asking import AskedToDraw
from motet.data.tasks.dial_a_digit import Drawing, handwriting
from motet.data.tasks.drawn_digits import read_digits


def test_a_request_that_is_answered_without_a_drawing_is_not_right_and_counts_for_no_likeness() -> None:
    scans = [handwriting()["held_out"][digit][place] for digit in range(10) for place in range(3)]
    digits = np.arange(10).repeat(3)
    of_blank = int(read_digits(np.zeros((1, 8, 8)))[0])
    asked = AskedToDraw.__new__(AskedToDraw)
    asked.contents = tuple(Drawing(int(digit), "told", (int(digit),)) for digit in (*digits, of_blank))
    asked.wants_to_draw = np.array([True] * 30 + [False])
    drawn = np.stack([*scans, np.zeros((8, 8))])
    assert asked.is_right(drawn).tolist() == [True] * 30 + [False]
    assert asked.shares(drawn) == {"told": pytest.approx(30 / 31), "sum": None, "seen": None, "heard": None}
    whole = asked.likeness(drawn)
    asked.contents, asked.wants_to_draw = asked.contents[:30], asked.wants_to_draw[:30]
    assert whole == asked.likeness(drawn[:30])
    asked.wants_to_draw = np.zeros(30, dtype=bool)
    assert asked.likeness(drawn[:30]) == {"spread": 0.0, "novelty": 0.0}


def test_held_out_examples_that_ask_for_no_drawing_leave_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few that none of them does, though those of the training do."""
    from motet.models.hub import drawing, export

    task = SimpleNamespace(drawing=lambda split, index: None)
    held_out: Any = SimpleNamespace(num_examples=3, task=task, tokenizer=SimpleNamespace(eos_token_id=1))
    held_out.tokenizer.batch_decode = lambda texts, skip_special_tokens: []
    monkeypatch.setattr(asking, "_HeldOut", lambda config: held_out)
    whole: Any = SimpleNamespace(preprocess_callback=None, media_attention="causal", parts=dict)
    monkeypatch.setattr(export, "load_export", lambda folder: whole)
    monkeypatch.setattr(drawing, "load_generator", lambda folder, name: SimpleNamespace(placeholder_token_id=2))
    monkeypatch.setattr("motet.models.hub.generation.generate_answers", lambda model, prompts, **options: [])
    generators = {"image": SimpleNamespace(makes_sounds=False)}
    config: Any = SimpleNamespace(model=SimpleNamespace(generators=generators))
    assert demo._draw(config, Path("export"), Path("sheet.png")) is None
