"""Random disturbances of a training's checkpoints: the newest whole one is always found, and no good one is deleted.

Whether a checkpoint is whole is decided by its weights, which are known for each step, and not by its own checksums.
"""

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from test_checkpoint_chaos import assert_is_of_its_step, damage_at_random, weights_after
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from toy_training import Toy, toy_plan

from motet.config import TrainConfig
from motet.errors import UserError
from motet.runtime.checkpoint.checkpoint import CheckpointWriter, load_checkpoint, read_latest
from motet.runtime.checkpoint.folder import TrainingState, _looks_whole, find_checkpoints, step_of
from motet.runtime.training.output_folder import claimed_output

KEEP = 2
YEAR_S = 365 * 86400


def whole(folder: Path) -> dict[int, Path]:
    """The whole checkpoints of a folder, by step."""
    found = {}
    for checkpoint in find_checkpoints(folder):
        try:
            found[assert_is_of_its_step(checkpoint)] = checkpoint
        except (AssertionError, UserError, OSError, ValueError, KeyError):
            continue
    return found


def with_content(folder: Path) -> list[Path]:
    """Checkpoints of which every file holds something that can be damaged."""
    sizes = {path: [f.stat().st_size for f in path.iterdir() if f.is_file()] for path in find_checkpoints(folder)}
    return [path for path, own in sizes.items() if own and all(own)]


def change_dates(folder: Path, random: Random) -> None:
    """Some lie in the future, others far in the past."""
    for path in folder.rglob("*"):
        if random.random() < 0.5:
            at = time.time() + random.uniform(-20, 20) * YEAR_S
            os.utime(path, (at, at))


def damage(folder: Path, random: Random) -> None:
    if there := with_content(folder):
        damage_at_random(random.choice(there), random)


def damage_newest(folder: Path, random: Random) -> None:
    if there := with_content(folder):
        damage_at_random(there[-1], random)


def delete_manifest(folder: Path, random: Random) -> None:
    if there := find_checkpoints(folder):
        (random.choice(there) / "checkpoint.json").unlink(missing_ok=True)


def leave_half(folder: Path, random: Random) -> None:
    """What a process leaves that dies while it writes or deletes."""
    partial = folder / f"step_{random.randrange(1, 300):08d}{random.choice(['.tmp', '.old.tmp'])}"
    partial.mkdir(exist_ok=True)
    (partial / "shard").write_text("half")


def leave_strange_files(folder: Path, random: Random) -> None:
    (folder / random.choice(["step_x", "step_00000009.bak", "notes"])).mkdir(exist_ok=True)
    (folder / "step_00000008.txt").write_text("mine")


def break_latest(folder: Path, random: Random) -> None:
    (folder / "latest").unlink(missing_ok=True)
    if random.random() < 0.5:
        (folder / "latest").symlink_to("step_99999999")


def rename(folder: Path, random: Random) -> None:
    """A checkpoint under the name of another step is of neither."""
    if there := find_checkpoints(folder):
        other = folder / f"step_{random.randrange(300, 400):08d}"
        if not other.exists():
            random.choice(there).rename(other)


def start_second_run(folder: Path, random: Random) -> None:
    """It would delete everything, if it got the folder."""

    settings = TrainConfig(output=str(folder.parent), overwrite=True)
    with pytest.raises(UserError, match="in use by another run"), claimed_output(settings):
        pass


def nothing(folder: Path, random: Random) -> None:
    """The next save fails, or the training is resumed."""


DISTURBANCES: tuple[Callable[[Path, Random], None], ...] = (
    change_dates,
    damage,
    damage_newest,
    delete_manifest,
    leave_half,
    leave_strange_files,
    break_latest,
    rename,
    start_second_run,
    nothing,
)


@pytest.mark.campaign
@pytest.mark.parametrize("number", [12, 200])
def test_the_newest_whole_one_is_always_found(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkpoints"
    original = HuggingFaceStorageWriter.write_data

    def full_disk(*args: object) -> object:
        raise OSError(28, "No space left on device")

    def work(rank: int) -> Counter[str]:
        counts: Counter[str] = Counter()
        random, toy = Random(0), Toy(toy_plan())  # The same draws on both ranks.
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
        writer = CheckpointWriter(folder, keep=KEEP)
        for trial in range(number):
            disturb = random.choice(DISTURBANCES)
            fails, resumes, own = random.random() < 0.15, random.random() < 0.2, Random(f"{trial}")
            if rank == 0:
                disturb(folder, own)
            dist.barrier()
            before = whole(folder)
            try:
                found = read_latest(folder)
            except UserError:
                found = None
            assert (None if found is None else found[1].step) == max(before, default=None), (trial, disturb)
            if resumes and found is not None:
                load_checkpoint(found[0], toy.model, toy.optimizer)
                toy.finished_steps = found[1].step
                for name, weight in toy.weights().items():
                    assert torch.allclose(weight, weights_after(found[1].step)[name], rtol=0, atol=1e-12)
            dist.barrier()
            toy.step()
            state = TrainingState(toy.finished_steps, {"samples_seen": 4 * toy.finished_steps}, "")
            monkeypatch.setattr(HuggingFaceStorageWriter, "write_data", full_disk if fails and rank == 1 else original)
            writer.save(toy.model, toy.optimizer, state)
            with pytest.raises(UserError, match="No space left") if fails else nullcontext():
                writer.finish()
            dist.barrier()
            after = whole(folder)
            if fails:
                assert after == before, (trial, disturb)
            else:
                assert toy.finished_steps in after, (trial, disturb)
                # Deleted were none but those before the last two that look whole.
                for step in before.keys() - after.keys():
                    newer = {step_of(path) for path in find_checkpoints(folder) if _looks_whole(path)}
                    assert len([each for each in newer if step < each <= toy.finished_steps]) >= KEEP, (trial, step)
            counts.update([disturb.__name__, *(["full disk"] if fails else []), *(["resumed"] if resumes else [])])
            dist.barrier()
        return counts

    with claimed_output(TrainConfig(output=str(tmp_path))):
        counts, _ = run_distributed(work, 2, timeout=600)
    print(f"{number} disturbances: {dict(counts)}")
    assert len(counts) >= 6
    shutil.rmtree(folder)
