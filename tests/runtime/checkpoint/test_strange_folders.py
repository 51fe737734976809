"""What others leave among the checkpoints neither ends a training nor is deleted."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from motet.errors import UserError
from motet.runtime.checkpoint.folder import (
    Manifest,
    TrainingState,
    begin,
    complete,
    describe_files,
    find_checkpoints,
    read_manifest,
)


def save(folder: Path, step: int) -> None:
    final = folder / f"step_{step:08d}"
    partial = begin(final)
    (partial / "shard").write_text("weights")
    manifest = Manifest(TrainingState(step, {}, ""), describe_files(partial, ["shard"]))
    complete(partial, final, manifest, is_best=False, keep=2)


def names(folder: Path) -> list[str]:
    return [path.name for path in find_checkpoints(folder)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (1, 2):
        save(tmp_path, step)
    return tmp_path


def nested(manifest: Path) -> None:
    manifest.write_text("[" * 100_000)


def a_pipe(manifest: Path) -> None:
    manifest.unlink()
    os.mkfifo(manifest)


@pytest.mark.parametrize("damage", [nested, a_pipe])
def test_a_manifest_that_cannot_be_read(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(folder / "step_00000002" / "checkpoint.json")
    with pytest.raises(UserError, match=r"step_00000002.* (is damaged|is missing)"):
        read_manifest(folder / "step_00000002")
    for step in (3, 4):
        save(folder, step)
    assert names(folder) == ["step_00000002", "step_00000003", "step_00000004"]


def test_a_checkpoint_elsewhere_is_not_deleted_with_its_link(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "kept"
    (folder / "step_00000001").rename(elsewhere)
    (folder / "step_00000001").symlink_to(elsewhere)
    for step in (3, 4):
        save(folder, step)
    assert names(folder) == ["step_00000003", "step_00000004"]
    assert {path.name for path in folder.iterdir()} == {"step_00000003", "step_00000004", "latest"}
    assert (elsewhere / "shard").read_text() == "weights"


def test_files_of_others_stay(folder: Path) -> None:
    (folder / "step_notes.tmp").write_text("mine")
    save(folder, 3)
    assert (folder / "step_notes.tmp").read_text() == "mine"
    assert names(folder) == ["step_00000002", "step_00000003"]


def test_what_cannot_be_deleted_is_told_and_ends_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "step_00000009.tmp").write_text("no folder, which a checkpoint that is being written is")
    save(folder, 3)
    assert names(folder) == ["step_00000002", "step_00000003"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"train.output: {folder / 'step_00000009.tmp'} cannot be deleted (Not a directory); training goes on"


def test_a_folder_in_the_place_of_a_link_stays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "latest").unlink()
    (folder / "latest" / "mine").mkdir(parents=True)
    save(folder, 3)
    assert (folder / "latest" / "mine").is_dir()
    assert "step_00000003" in names(folder)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"train.output: {folder / 'latest'} cannot be deleted (")
