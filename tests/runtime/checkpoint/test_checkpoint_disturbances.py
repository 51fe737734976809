"""Random histories of a checkpoint folder: dates, damage, crashes, a full disk and a second run in any order.

After each disturbance the newest whole checkpoint is found, whatever its files' times say. What is deleted is older
than the checkpoints that are kept. The history is a model's: which checkpoints were written, and which are damaged.
"""

import errno
import os
import random
from pathlib import Path

import pytest
from distributed import run_distributed

from motet.config import TrainConfig
from motet.errors import UserError
from motet.runtime.checkpoint import folder as checkpoint_folder
from motet.runtime.checkpoint.checkpoint import read_latest
from motet.runtime.checkpoint.folder import (
    MANIFEST,
    Manifest,
    TrainingState,
    abandon,
    begin,
    complete,
    describe_files,
    find_checkpoints,
    read_manifest,
    step_of,
)
from motet.runtime.training.output_folder import claimed_output

FILES = ("a.safetensors", "b.safetensors")
NUM_BYTES = 40


class Crash(Exception):
    """The process ends here: nothing that follows is done."""


class History:
    """One folder of checkpoints, and what is known of it."""

    def __init__(self, output: Path, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.output, self.folder = output, output / "checkpoints"
        self.random, self.patch = random.Random(seed), patch
        self.keep = 1 + seed % 2
        self.step = 0
        """Finished steps of the run that trains."""
        self.intact: dict[int, int] = {}
        """Steps of the undamaged checkpoints, by their numbers."""
        self.num_written = 0

    def write(self) -> None:
        self.num_written += 1
        self.step += self.random.randint(1, 3)
        final = self.folder / f"step_{self.step:08d}"
        partial = begin(final)
        for name in FILES:
            (partial / name).write_bytes(self.random.randbytes(NUM_BYTES))
        state = TrainingState(self.step, {"number": self.num_written}, "")
        complete(partial, final, Manifest(state, describe_files(partial, FILES)), is_best=False, keep=self.keep)
        self.intact[self.num_written] = self.step

    def crash(self) -> None:
        """At one of the moments of completing a checkpoint, and then the run starts again."""
        where = self.random.choice(["_write_to_disk", "_flush", "_link", "delete_checkpoints", "rename"])
        target: object = Path if where == "rename" else checkpoint_folder
        num_calls, last = 0, self.random.randint(1, 2)
        original = getattr(target, where)

        def die(*args: object) -> object:
            nonlocal num_calls
            num_calls += 1
            if num_calls >= last:
                raise Crash
            return original(*args)

        with self.patch.context() as patch:
            patch.setattr(target, where, die)
            try:
                self.write()
            except Crash:
                if self.num_written in map(number_in, find_checkpoints(self.folder)):
                    self.intact[self.num_written] = self.step
        self.go_on()

    def full_disk(self) -> None:
        def no_space(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with self.patch.context() as patch:
            patch.setattr(checkpoint_folder, "_write_to_disk", no_space)
            with pytest.raises(OSError, match="No space"):
                self.write()
        abandon(self.folder / f"step_{self.step:08d}.tmp")
        self.go_on()

    def damage(self) -> None:
        there = find_checkpoints(self.folder)
        if not there:
            return
        checkpoint = self.random.choice([there[-1], self.random.choice(there)])
        number, files = number_in(checkpoint), sorted(checkpoint.iterdir())
        if not files:
            return
        path, how = self.random.choice(files), self.random.choice(["cut", "flip", "delete"])
        content = bytearray(path.read_bytes())
        place = self.random.randrange(len(content)) if content else 0
        if how == "delete" or not content:
            path.unlink()
        elif how == "cut":
            path.write_bytes(content[:place])
        else:
            content[place] ^= 1 << self.random.randrange(8)
            path.write_bytes(content)
        if path.name != MANIFEST or number_in(checkpoint) != number:
            self.intact.pop(number, None)

    def dates(self) -> None:
        for path in self.folder.glob("step_*/*"):
            at = self.random.uniform(0, 4e9)
            os.utime(path, (at, at))
            os.utime(path.parent, (at, at))

    def second_run(self) -> None:
        settings = TrainConfig(output=str(self.output))
        with pytest.raises(UserError, match="in use by another run"), claimed_output(settings):
            pass

    def go_on(self) -> None:
        """The run starts again from the newest checkpoint that is whole."""
        self.step = max(self.intact.values(), default=0)

    def check(self, what: str) -> None:
        there = find_checkpoints(self.folder)
        numbers = [number_in(path) for path in there]
        kept = [step_of(path) for path in there if looks_whole(path)]
        for number, step in list(self.intact.items()):
            if number not in numbers:
                assert step in kept or sum(other > step for other in kept) >= self.keep, (
                    f"{what}: step {step} was deleted"
                )
                del self.intact[number]
        try:
            found = read_latest(self.folder)
        except UserError:
            found = None
        if not self.intact:
            assert found is None, what
            return
        assert found is not None, f"{what}: {sorted(self.intact.values())} are whole"
        checkpoint, state = found
        assert state.step == step_of(checkpoint) == max(self.intact.values()), what
        assert state.data["number"] in self.intact, what


def number_in(checkpoint: Path) -> int:
    """-1 if the manifest is missing or damaged."""
    try:
        return int(read_manifest(checkpoint).state.data["number"])
    except UserError:
        return -1


def looks_whole(checkpoint: Path) -> bool:
    sizes = [(checkpoint / name).stat().st_size for name in FILES if (checkpoint / name).exists()]
    return number_in(checkpoint) >= 0 and sizes == [NUM_BYTES] * len(FILES)


ACTIONS = ("write", "write", "crash", "full_disk", "damage", "dates", "second_run", "go_on")


@pytest.mark.parametrize("num_histories", [10, pytest.param(300, marks=pytest.mark.campaign)])
def test_the_newest_whole_checkpoint_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_histories: int
) -> None:
    """20 disturbances a history."""

    def work(rank: int) -> None:
        for seed in range(num_histories):
            output = tmp_path / str(seed)
            with claimed_output(TrainConfig(output=str(output))):
                history = History(output, seed, monkeypatch)
                done = []
                for _ in range(20):
                    action = history.random.choice(ACTIONS)
                    done.append(action)
                    getattr(history, action)()
                    history.check(f"seed {seed}: {done}")

    run_distributed(work, 1, timeout=300)
