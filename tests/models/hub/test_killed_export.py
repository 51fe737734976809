"""A process that is killed while it exports: the earlier export or the new one is whole."""

import hashlib
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from training import run_config, train
from victims import signal_after

from motet.api import export_checkpoint
from motet.models.hub.export import write_folder

KILLED = 9
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def export(folder: Path, version: str) -> None:
    def write(partial: Path) -> None:
        (partial / "weights").mkdir()
        (partial / "weights/1").write_text(version)
        (partial / "manifest").write_text(version)

    write_folder(folder, write, marker="manifest")


def version_of(folder: Path) -> str:
    texts = {path.read_text() for path in (folder / "manifest", folder / "weights/1")}
    assert len(texts) == 1
    return texts.pop()


def export_until(change: int, folder: Path) -> bool:
    """In a process that is killed before that change of the file system. Returns whether it was."""
    child = os.fork()
    if child == 0:
        left = [change]

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            if event in CHANGES:
                left[0] -= 1
                if left[0] < 0:
                    os._exit(KILLED)

        sys.addaudithook(count)
        export(folder, "new")
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED


def test_at_every_change_of_the_file_system(tmp_path: Path) -> None:
    seen, change = [], 0
    while True:
        folder = tmp_path / str(change) / "export"
        export(folder, "old")
        was_killed = export_until(change, folder)
        seen.append(version_of(folder if folder.exists() else folder.with_name("export.replaced.tmp")))
        export(folder, "newer")
        assert version_of(folder) == "newer"
        assert [path.name for path in folder.parent.iterdir()] == ["export"]
        if not was_killed:
            break
        change += 1
    assert seen == sorted(seen, reverse=True), "the old one until the new one is whole"
    assert {*seen} == {"old", "new"}
    assert len(seen) > 8


NUM_RANDOM = int(os.environ.get("MOTET_CHAOS_EXPORT_TRIALS", "60"))


def digest_of(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(str(p.relative_to(folder)).encode() + p.read_bytes() for p in files)).hexdigest()


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_at_random_moments_of_a_training_s_export(tmp_path: Path) -> None:
    """SIGKILL while a trained model is exported: over nothing, and over the export of another checkpoint."""
    config = run_config(tmp_path / "run", train__steps=2, train__checkpoint_every=1)
    train(config)
    output = Path(config.train.output)
    checkpoints = sorted((output / "checkpoints").glob("step_*"))
    assert len(checkpoints) == 2

    def exported(checkpoint: Path, kill_after_s: float | None = None) -> bool:
        """In a process of its own. Returns whether it was killed."""
        child = os.fork()
        if child == 0:
            if kill_after_s is not None:
                signal_after(kill_after_s, signal.SIGKILL)
            export_checkpoint(config, checkpoint)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -signal.SIGKILL)
        return code != 0

    def seconds_of_export(checkpoint: Path) -> float:
        started = time.monotonic()
        assert not exported(checkpoint)
        return time.monotonic() - started

    whole, seconds = [], 0.0
    for checkpoint in checkpoints:
        seconds = seconds_of_export(checkpoint)
        whole.append(digest_of(output / "export"))
    assert len({*whole}) == 2
    beside = {path.name for path in output.iterdir()}
    rng, seen, num_killed = random.Random(os.environ.get("MOTET_CHAOS_SEED", "0")), set(), 0
    for _ in range(NUM_RANDOM):
        num_killed += exported(checkpoints[0], rng.random() * seconds)
        there = output / "export" if (output / "export").exists() else output / "export.replaced.tmp"
        seen.add(digest_of(there))
        assert seen <= {*whole}, "it is one export or the other, whole"
        seconds = seconds_of_export(checkpoints[1])  # The last one's: load changes, and kills would come too late.
        assert digest_of(output / "export") == whole[1]
        assert {path.name for path in output.iterdir()} == beside, "nothing is left"
    assert num_killed > NUM_RANDOM // 4, num_killed
    assert seen == {*whole}
