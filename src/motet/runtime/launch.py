"""Runs a worker on every rank: joins the processes that torchrun started, or starts its own by torchelastic.

Processes of one machine are forked with everything imported (spawned where they have accelerators, which do not
survive a fork), never restarted, and end together: when one fails or the user interrupts, torchelastic ends the others.
The cause is the failure that came first, as far as processes could still write it down; of a process that was killed,
the signal.

Limits: without torchrun, one machine.
"""

import json
import logging
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, SignalException, start_processes

from motet.cluster import available_cores
from motet.devices import barrier
from motet.environment import gives_threads, is_first_process
from motet.errors import UserError
from motet.runtime.checkpoint.folder import write_atomically

Device = Literal["cpu", "cuda"]
Worker = Callable[..., Any]
"""A function that runs on every rank, inside the process group. Its return value on rank 0 is the result."""

POLL_S = 0.05
"""Interval between two looks whether processes have ended."""
SHUTDOWN_TIMEOUT_S = 5
"""Seconds after which a process that does not end is killed."""


class WorkerFailedError(RuntimeError):
    """A rank failed through no fault of the user's input."""


@dataclass(frozen=True)
class _Failure:
    """The report that a failing rank writes into the launcher's folder."""

    rank: int
    failed_at: float
    """`time.monotonic()`, which the processes of a machine share."""
    is_user_error: bool
    message: str
    trace: str


def started_by_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_world_size(num_ranks: int, num_devices: int, num_nodes: int = 1) -> None:
    """Raises `UserError` if the plan has more ranks than there are devices; under torchrun, which has started processes
    already, if it has not as many as these."""
    if started_by_torchrun():
        world_size = int(os.environ["WORLD_SIZE"])
        if world_size != num_ranks:
            raise UserError(
                f"the plan has {num_ranks} ranks, but torchrun started {world_size} processes; "
                f"start {num_ranks} (nnodes x nproc-per-node), or give a plan for {world_size}"
            )
        return
    if num_ranks > num_devices:
        raise UserError(
            f"cluster.num_devices: is {num_devices}, but the plan has {num_ranks} ranks; "
            f"give cluster.num_devices={num_ranks}, or a layout for {num_devices}"
        )
    if num_nodes > 1:
        raise UserError(
            f"cluster.num_nodes: is {num_nodes}; processes on several machines are started by torchrun, see "
            "docs/launching.md"
        )


def launch(worker: Worker, *args: Any, num_processes: int, device: Device = "cpu", timeout_s: float = 300.0) -> Any:
    """`worker(*args)` on every rank of one process group. Returns what it returns on rank 0 (elsewhere: None).

    Args:
        worker, args: picklable, except on CPUs, where processes are forked.
        num_processes: number of processes to start; not read under torchrun, which has started them.
        timeout_s: timeout of the process group.

    Raises `UserError` if the worker did on some rank, `WorkerFailedError` for another failure, with the rank and its
    traceback, and `KeyboardInterrupt` if the user interrupted.
    """
    if started_by_torchrun():
        with _process_group(device, timeout_s):
            result = worker(*args)
        return result if is_first_process() else None
    ranks, size = range(num_processes), str(num_processes)
    with tempfile.TemporaryDirectory(prefix="motet-") as name, _signal_handlers_restored():
        folder = Path(name)
        (folder / "logs").mkdir()
        _silence_torchelastic()
        _meet_on_loopback()
        try:
            with _FirstDeaths(folder) as deaths:
                processes = start_processes(
                    name="motet",
                    entrypoint=_work,
                    args=dict.fromkeys(ranks, (folder, worker, args, device, timeout_s)),
                    envs={
                        rank: {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
                        for rank in ranks
                    },
                    logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
                    start_method="fork" if device == "cpu" else "spawn",
                )
                have_succeeded = _wait_for(processes)
            if not have_succeeded:
                raise _explain(folder, deaths)
        except SignalException as interruption:
            _show_cursor()
            if interruption.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + interruption.sigval) from None
        return pickle.loads((folder / "result").read_bytes())


def _meet_on_loopback() -> None:
    """Makes processes of one machine talk over loopback; they meet through a file, for which no port is opened."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)


def _wait_for(processes: PContext) -> bool:
    """Waits until all processes have ended; whether all have succeeded. Ends the others when one fails."""
    end_signal = signal.SIGTERM
    try:
        ended = processes.wait(period=POLL_S)
        return ended is not None and not ended.is_failed()
    except SignalException as interruption:
        end_signal = interruption.sigval
        raise
    finally:
        processes.close(end_signal, SHUTDOWN_TIMEOUT_S)


def _silence_torchelastic() -> None:
    """Silences torchelastic's reports about ended processes; its loggers have levels of their own."""
    for name in logging.root.manager.loggerDict:
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _work(folder: Path, worker: Worker, args: tuple[Any, ...], device: Device, timeout_s: float) -> None:
    """Runs the worker in a started process; its result or failure goes to a file."""
    # Inherited handlers would only run when a blocking call returns; the default action ends the process at once.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    rank = int(os.environ["RANK"])
    write_atomically(folder / f"pid_{os.getpid()}", str(rank))
    try:
        with _process_group(device, timeout_s, folder / "rendezvous"):
            result = worker(*args)
        if rank == 0:
            (folder / "result").write_bytes(pickle.dumps(result))
    except BaseException as error:
        failure = _Failure(
            rank=rank,
            failed_at=time.monotonic(),
            is_user_error=isinstance(error, UserError),
            message=str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}",
            trace=traceback.format_exc(),
        )
        write_atomically(folder / f"failure_{rank}.json", json.dumps(vars(failure)))
        raise SystemExit(2 if failure.is_user_error else 1) from None


def share_cores(num_processes: int) -> None:
    """Gives torch, in one of so many processes of this machine, as many threads as its share of the cores, unless the
    user has said how many it takes."""
    number = torch.get_num_threads() if gives_threads() else max(1, available_cores() // num_processes)
    # The pool of threads does not survive a fork. This mends it, which two threads must not do at once.
    torch.set_num_threads(number)


@contextmanager
def _process_group(device: Device, timeout_s: float, rendezvous: Path | None = None) -> Iterator[None]:
    """The process group that the environment describes. `rendezvous`: the file through which ranks meet; None: where
    torchrun says."""
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if device != "cpu":
        torch.accelerator.set_device_index(local_rank)
    share_cores(local_size)
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        init_method=None if rendezvous is None else f"file://{rendezvous}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout_s),
    )
    yield
    # A rank that leaves while others still talk to it makes gloo abort them. What a thread of gloo's still holds of a
    # plain barrier when the interpreter ends would abort this one; a monitored barrier runs in this thread alone.
    if dist.get_backend() == "gloo":
        dist.monitored_barrier(timeout=timedelta(seconds=timeout_s))
    else:
        barrier()
    dist.destroy_process_group()


def _explain(folder: Path, deaths: "_FirstDeaths") -> Exception:
    """The failure that came first, as an exception for the user."""
    written = [_Failure(**json.loads(path.read_text())) for path in folder.glob("failure_*.json")]
    failures = {failure.rank: failure for failure in sorted(written, key=lambda f: f.failed_at)}
    # Who died without a word is the cause of what the others say, unless torchelastic ended it after them.
    was_told = any(rank in failures for rank in (*deaths.of_rank, *deaths.reaped))
    for rank, death in deaths.of_rank.items():
        if rank not in failures and not (was_told and death.si_status == signal.SIGTERM):
            return WorkerFailedError(f"rank {rank} {_how_it_died(death)}")
    if not failures:
        return WorkerFailedError("a process ended before it could do anything")
    cause = next(iter(failures.values()))
    if cause.is_user_error:
        return UserError(cause.message)
    return WorkerFailedError(f"rank {cause.rank}: {cause.message}\n{cause.trace}".rstrip())


class _FirstDeaths:
    """Records which ranks have failed, and how, at the first failure; torchelastic then ends the others, and on a busy
    machine it may have done so already."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.of_rank: dict[int, os.waitid_result] = {}
        self.reaped: list[int] = []
        """Ranks whose end torchelastic knew already."""

    def __enter__(self) -> "_FirstDeaths":
        signal.signal(signal.SIGCHLD, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def _note(self, *_: object) -> None:
        if self.of_rank:
            return
        reaped = []
        for path in self._folder.glob("pid_*"):
            rank = int(path.read_text())
            try:
                # WNOWAIT: torchelastic still has to learn of it.
                info = os.waitid(os.P_PID, int(path.name.removeprefix("pid_")), os.WEXITED | os.WNOWAIT | os.WNOHANG)
            except ChildProcessError:
                reaped.append(rank)
                continue
            if info is not None and info.si_status != 0:
                self.of_rank[rank] = info
        self.reaped = reaped


def _how_it_died(info: os.waitid_result) -> str:
    if info.si_code == os.CLD_EXITED:
        return f"exited with code {info.si_status} and no message"
    hint = "; was the machine out of memory?" if info.si_status == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(info.si_status).name}{hint}"


@contextmanager
def _signal_handlers_restored() -> Iterator[None]:
    """Torchelastic replaces handlers and leaves its own behind."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _show_cursor() -> None:
    """A progress display that was ended had hidden it."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h\n")
