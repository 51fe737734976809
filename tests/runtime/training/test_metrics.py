"""Where numbers go: valid JSON whatever they are, and what is missing is told."""

import json
import math
import sys
from pathlib import Path

import pytest

from motet.errors import UserError
from motet.runtime.training.metrics import Progress, open_sinks


def test_a_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    (sink,) = open_sinks(["jsonl"], tmp_path, keep_until_step=0)
    sink.write(1, {"loss": math.nan, "gradient_norm": math.inf, "step_s": 0.5})
    sink.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line) == {"step": 1, "loss": None, "gradient_norm": None, "step_s": 0.5}
    assert "NaN" not in line


def test_lines_are_there_at_once_and_go_on_after_the_step_that_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"no step": 2}\n\n{"step": 3}\n{"ste')
    (sink,) = open_sinks(["jsonl"], tmp_path, keep_until_step=2)
    sink.write(3, {"loss": 1.0})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    sink.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"train\.metrics: {name} is not installed; pip install 'motet\[{name}\]'"):
        open_sinks([name], tmp_path, keep_until_step=0)


def test_progress_in_a_log_is_its_first_and_its_last_step(capsys: pytest.CaptureFixture[str]) -> None:
    """No terminal: a line every ten seconds at most."""
    values = {"loss": 1.5, "samples_per_s": 20.0, "tokens_per_s": 1234.5, "mfu": 0.4, "peak_memory_bytes": [1, 2**29]}
    for visible in (True, False):
        progress = Progress(50, 0, visible=visible)
        for step in range(1, 51):
            progress.advance(step, values)
        progress.note("done")
        progress.close()
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        "step 1/50  loss 1.5000  20.0 samples/s  1234 tokens/s  MFU 40.0%  0.50 GiB",
        "step 50/50  loss 1.5000  20.0 samples/s  1234 tokens/s  MFU 40.0%  0.50 GiB",
        "done",
    ]
    assert said.out == ""
