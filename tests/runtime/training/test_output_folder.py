"""The output folder: one run at a time, whose checkpoints are its own, and errors of writing in one line."""

import errno
import multiprocessing
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from training import run_config, train

from motet.config import TrainConfig
from motet.errors import UserError
from motet.runtime.training.output_folder import LOCK, claimed_output
from motet.runtime.training.trainer import Trainer

FORK = multiprocessing.get_context("fork")


def checkpoint(output: Path, step: int) -> Path:
    folder = output / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    (folder / "shard").write_text("content")
    return folder


def refusal(**settings: Any) -> str:
    with pytest.raises(UserError) as refused, claimed_output(TrainConfig(**settings)):
        pass
    return str(refused.value)


def claim_until_killed(output: str, claimed: Any) -> None:
    with claimed_output(TrainConfig(output=output)):
        claimed.set()
        signal.pause()


def test_one_run_at_a_time_and_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    claimed = FORK.Event()
    process = FORK.Process(target=claim_until_killed, args=(str(tmp_path), claimed), daemon=True)
    process.start()
    assert claimed.wait(30)
    said = refusal(output=str(tmp_path))
    assert said.startswith(f"train.output: {tmp_path} is in use by another run (process {process.pid} on ")
    process.kill()
    process.join()
    with claimed_output(TrainConfig(output=str(tmp_path))):
        assert str(os.getpid()) in (tmp_path / LOCK).read_text()


def test_a_run_that_begins_anew_asks_before_it_deletes(tmp_path: Path) -> None:
    for step in (2, 10):
        checkpoint(tmp_path, step)
    expected = (
        f"train.output: {tmp_path}/checkpoints has checkpoints up to step_00000010; continue from them with "
        "train.resume: latest, give another folder, or delete them with --overwrite"
    )
    assert refusal(output=str(tmp_path)) == expected
    assert refusal(output=str(tmp_path), resume="/elsewhere/step_00000004") == expected
    with claimed_output(TrainConfig(output=str(tmp_path), resume="latest", overwrite=True)):
        assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    with claimed_output(TrainConfig(output=str(tmp_path), overwrite=True)):
        assert list((tmp_path / "checkpoints").iterdir()) == []


def test_steps_beyond_the_one_that_is_resumed_are_asked_for(tmp_path: Path) -> None:
    older, newer = checkpoint(tmp_path, 2), checkpoint(tmp_path, 10)
    assert "up to step_00000010" in refusal(output=str(tmp_path), resume=str(older))
    with claimed_output(TrainConfig(output=str(tmp_path), resume=str(newer))):
        pass
    with claimed_output(TrainConfig(output=str(tmp_path), resume=str(older), overwrite=True)):
        assert list((tmp_path / "checkpoints").iterdir()) == [older]


def test_processes_that_torchrun_starts_again_do_not_delete_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(tmp_path, 2)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert "train.resume: latest" in refusal(output=str(tmp_path), overwrite=True)


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", read_only)
    expected = f"train.output: {tmp_path} cannot be used (Read-only file system); give another folder"
    assert refusal(output=str(tmp_path)) == expected


def test_a_full_disk_says_what_is_saved(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    config = run_config(tmp_path, train__checkpoint_every=2)
    with pytest.raises(AssertionError) as failed:
        train(config)
    said = f"train.output: {tmp_path}/metrics.jsonl cannot be written (No space left on device) after step 1"
    assert f"{said}; no checkpoint was saved; free space or choose another folder" in str(failed.value)


def test_a_deleted_folder_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Trainer._finish

    def finish_and_delete(trainer: Trainer, step: Any) -> Any:
        result = finish(trainer, step)
        if trainer.is_first and trainer.finished_steps == 2:
            shutil.rmtree(tmp_path / "run")
        return result

    monkeypatch.setattr(Trainer, "_finish", finish_and_delete)
    with pytest.raises(AssertionError) as failed:
        train(run_config(tmp_path / "run", train__checkpoint_every=0))
    assert f"{tmp_path}/run/metrics.jsonl was deleted by another process after step 2" in str(failed.value)
