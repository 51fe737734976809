"""The output folder of a run: one run at a time, no mixture of two runs' checkpoints, and errors in one line.

The lock is the system's (flock), so it ends with the last process of the run, however that ends; the file stays.
Checkpoints that are in the folder belong to the run that resumes from the newest of them. Any other run would later be
resumed from theirs, so it is refused unless `train.overwrite` deletes them.

Limits: where the file system has no locks (some NFS mounts), a line says that nothing keeps a second run out.
"""

import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from motet.config import TrainConfig
from motet.errors import UserError
from motet.runtime.checkpoint.folder import delete_checkpoints, find_checkpoints, step_of

LOCK = "run.lock"
"""File in the output folder, held locked by the run; says which one it is."""


@contextmanager
def claimed_output(settings: TrainConfig) -> Iterator[Path]:
    """Makes the output folder, keeps other runs out of it, and deletes the checkpoints that this run replaces.

    Raises `UserError` if another run uses it, if it has checkpoints beyond the step with which this run begins, or if
    nothing can be written there."""
    output = Path(settings.output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = os.open(output / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"train.output: {output} cannot be used ({error.strerror}); give another folder") from None
    try:
        _lock(lock, output)
        _check_checkpoints(settings, output / "checkpoints")
        yield output
    finally:
        os.close(lock)


def _lock(lock: int, output: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        try:
            holder = "process {pid} on {host}".format(**json.loads(os.pread(lock, 1000, 0)))
        except (ValueError, KeyError, TypeError):
            holder = "another process"
        raise UserError(
            f"train.output: {output} is in use by another run ({holder}); give another folder or wait for its end"
        ) from None
    except OSError as error:
        print(f"{output} cannot be locked ({error.strerror}): start no second run in it", file=sys.stderr, flush=True)
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
    except OSError as error:
        raise UserError(f"train.output: {output / LOCK} cannot be written ({error.strerror}); make room") from None


def _check_checkpoints(settings: TrainConfig, folder: Path) -> None:
    there = find_checkpoints(folder)
    if settings.resume == "latest" or not there:
        return
    first_step = 0
    if settings.resume is not None and Path(settings.resume).resolve() in [path.resolve() for path in there]:
        first_step = step_of(Path(settings.resume).resolve())
    later = [path for path in there if step_of(path) > first_step]
    if not later:
        return
    if not settings.overwrite or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        raise UserError(
            f"train.output: {folder} has checkpoints up to {later[-1].name}; continue from them with train.resume: "
            "latest, give another folder, or delete them with --overwrite"
        )
    print(f"deleting {', '.join(path.name for path in later)} in {folder} (--overwrite)", file=sys.stderr, flush=True)
    delete_checkpoints(later)
