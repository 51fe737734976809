"""What tells one run from another: its run file, and the checkpoints that were there before it."""

import os
from pathlib import Path

import pytest
from interrupted_training import config_of

from motet.resilience.membership import RunRecord, as_json, first_difference
from motet.resilience.recover import EARLIER, earlier_checkpoints
from motet.runtime.checkpoint.folder import MANIFEST, complete_checkpoints, stamps


class Memory:
    """What is used of a store."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]


def test_comes_back_from_a_store(tmp_path: Path) -> None:
    run = RunRecord(config=as_json(config_of(tmp_path)), restarts=2)
    store = Memory()
    run.write(store)  # type: ignore[arg-type]
    assert RunRecord.read(store) == run  # type: ignore[arg-type]
    assert first_difference(config_of(tmp_path), RunRecord.read(store)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"train__steps": 7}, "train.steps: is 7 here and is 6 there"),
        ({"train__dtype": "float32"}, 'train.dtype: is "float32" here and is "float64" there'),
        ({"train__failures": {"tolerate": 2, "detect_s": 10}}, "train.failures.tolerate: is 2 here and is 1 there"),
        ({"train__resume": "latest"}, None),
        ({"data__workers": 2}, None),
        ({"data__servers": ["grpc://here:1"]}, None),
    ],
)
def test_names_the_key_that_differs(tmp_path: Path, overrides: dict[str, object], told: str | None) -> None:
    run = RunRecord(config=as_json(config_of(tmp_path)))
    assert first_difference(config_of(tmp_path, **overrides), run) == told


def test_names_what_only_one_has(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    there = as_json(config)
    there["train"]["future"] = 1
    del there["train"]["eps"]
    assert first_difference(config, RunRecord(config=there)) == "train.eps: is 1e-08 here and is not given there"
    there["train"]["eps"] = 1e-8
    assert first_difference(config, RunRecord(config=there)) == "train.future: is not given here and is 1 there"


def write(folder: Path, name: str, written_s: int) -> Path:
    path = folder / name
    path.mkdir()
    (path / MANIFEST).write_text("{}")
    os.utime(path / MANIFEST, (written_s, written_s))
    return path


def test_checkpoints_of_other_runs_are_known_when_they_are_moved_aside(tmp_path: Path) -> None:
    for step in (2, 4):
        write(tmp_path, f"step_0000000{step}", step)
    earlier = stamps(tmp_path)
    assert complete_checkpoints(tmp_path, besides=earlier) == []
    (tmp_path / "step_00000002").rename(tmp_path / "step_00000002.old")
    assert complete_checkpoints(tmp_path, besides=earlier) == []
    own = write(tmp_path, "step_00000002", 5)
    assert complete_checkpoints(tmp_path, besides=earlier) == [own]
    assert len(complete_checkpoints(tmp_path)) == 3


def test_a_run_has_no_checkpoints_before_it_begins(tmp_path: Path) -> None:
    """The folder may hold those of runs before."""
    output = tmp_path / "output"
    (output / "checkpoints").mkdir(parents=True)
    for run, step in (("first", 2), ("second", 4)):
        assert earlier_checkpoints(output, run) is None
        own = write(output / "checkpoints", f"step_0000000{step}", step)
        for _ in range(2):
            earlier = earlier_checkpoints(output, run)
            assert earlier is not None
            assert complete_checkpoints(output / "checkpoints", besides=earlier) == [own]
    (output / EARLIER).write_text("")
    assert earlier_checkpoints(output, "second") is None
