"""Which samples each process trains on in which step, and what must be true of that however many processes die."""

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from motet.data.loader import LoadedBatch
from motet.runtime.training.trainer import Trainer

Ids = tuple[str, ...]


@contextmanager
def recorded(folder: Path) -> Iterator[None]:
    """Every process that is forked meanwhile writes down, in a file of its own, which steps it begins and which updates
    it has applied, with the ids of their samples."""
    report, update = Trainer._report_skipped, Trainer.update

    def begin(self: Trainer, number: int, batch: LoadedBatch) -> None:
        """Called for each batch, before its step."""
        self.chaos_ids = [sample.id for sample in batch.samples]  # type: ignore[attr-defined]
        _write(folder, "began", self)
        report(self, number, batch)

    def apply(self: Trainer, *args: Any) -> None:
        update(self, *args)
        _write(folder, "applied", self)

    with mock.patch.object(Trainer, "_report_skipped", begin), mock.patch.object(Trainer, "update", apply):
        yield


def _write(folder: Path, what: str, trainer: Trainer) -> None:
    number = trainer.finished_steps + (what == "began")
    with (folder / f"{os.getpid()}.ledger").open("a") as file:
        file.write(" ".join((what, str(number), *trainer.chaos_ids)) + "\n")  # type: ignore[attr-defined]


def applied_ids(folder: Path) -> dict[int, Ids]:
    """By step (the first is 1). Raises `AssertionError` if two processes differ, if one applies a step twice or
    leaves one out in which it had a part, or if one does more again than the step that a failure interrupted."""
    ids: dict[int, Ids] = {}
    for path in folder.glob("*.ledger"):
        steps: dict[str, list[int]] = defaultdict(list)
        for line in path.read_text().splitlines():
            what, number, *samples = line.split(" ")
            steps[what].append(int(number))
            if what == "applied":
                assert ids.setdefault(int(number), tuple(samples)) == tuple(samples), (path, line, ids)
        for before, after in pairwise(steps["applied"]):
            # A spare has no part in the steps between; it may have begun the one that a loss interrupted.
            is_spare = after > before and not {*range(before + 2, after)} & {*steps["began"]}
            assert after == before + 1 or is_spare, (path, steps)
        for before, after in pairwise(steps["began"]):
            assert after >= before, (path, steps)
    return ids
