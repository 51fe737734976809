"""The examples that draw and dial digits: data, training, export, and drawing by plain transformers and diffusers."""

import sys
from pathlib import Path

import pytest
from checkout import ROOT

import motet


@pytest.mark.campaign
def test_it_trains_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    import draw_digits

    draw_digits.write(tmp_path, num_samples=64)
    small = ["train.steps=6", "train.global_batch_size=8", "train.warmup_steps=0", "data.workers=0"]
    result = motet.train(tmp_path / "run.yaml", small)
    assert result["losses"][-1] < result["losses"][0]
    draw_digits.read(tmp_path, num_images=20)
    assert (tmp_path / "drawings.png").is_file()
    del sys.modules["draw_digits"]


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_what_it_dials_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    import dial_digits

    dial_digits.write(tmp_path)
    motet.train(tmp_path / "run.yaml")
    made, recorded = dial_digits.read(tmp_path)
    assert recorded >= 0.98
    assert made >= 0.8
    assert (tmp_path / "spectrograms.png").is_file()
    for name in ("dial_digits", "draw_digits"):
        del sys.modules[name]
