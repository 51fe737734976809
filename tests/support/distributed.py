"""Runs a function on several forked processes with gloo between them.

Forking with torch already imported starts in a fraction of a second, where torchrun or spawn would need ten. The
functions may be closures, since nothing but their results is pickled. Limits: one machine, CPU tensors, and the parent
must run torch single-threaded (conftest.py sees to it).
"""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist


def run_distributed(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 300.0,
    last_words_s: float = 0.5,
    backend: str = "gloo",
    before: Callable[[], Any] = lambda: None,
    start_method: str = "fork",
) -> list[Any]:
    """Calls `fn(rank, *args)` in `world_size` processes of one group and returns their results in rank order.

    Results are pickled: return numbers, strings, numpy arrays or CPU tensors. Raises `AssertionError` with the
    traceback of the first rank that failed, `TimeoutError` after `timeout` seconds; no process outlives the call.
    `last_words_s`: for others to fail, too, once one has. `before`: called in each process before it joins the group.
    `start_method`: "spawn" where processes use accelerators, which may not survive a fork; all arguments are pickled.
    """
    context = multiprocessing.get_context(start_method)
    with tempfile.TemporaryDirectory() as folder:
        workers, receivers = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            worker = context.Process(
                target=_work,
                args=(fn, rank, world_size, args, folder, timeout, sender, backend, before),
                daemon=True,
            )
            worker.start()
            sender.close()
            workers.append(worker)
            receivers.append(receiver)
        try:
            results = _collect(receivers, timeout, last_words_s)
            for worker in workers:
                worker.join(timeout=5)
            return results
        finally:
            for worker in workers:
                worker.kill()
                worker.join()


def _collect(receivers: list[Connection], timeout: float, last_words_s: float) -> list[Any]:
    """The results in rank order; raises when a rank has failed, with the failure that came first."""
    results: dict[int, Any] = {}
    failures: list[tuple[float, int, str]] = []
    deadline = time.monotonic() + timeout
    while len(results) + len(failures) < len(receivers):
        done = {*results, *(rank for _, rank, _ in failures)}
        pending = {receiver: rank for rank, receiver in enumerate(receivers) if rank not in done}
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready and not failures:
            raise TimeoutError(f"ranks {list(pending.values())} did not finish within {timeout} s")
        if not ready:
            break
        for receiver in ready:
            rank = pending[receiver]  # type: ignore[index]
            try:
                failed_at, result = pickle.loads(receiver.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                failed_at, result = 0.0, "it died without a word"
            if failed_at is None:
                results[rank] = result
            else:
                failures.append((failed_at, rank, result))
        if failures:  # Others may have failed before, and their word be on its way.
            deadline = min(deadline, time.monotonic() + last_words_s)
    if failures:
        _, rank, message = min(failures)
        raise AssertionError(f"rank {rank} failed:\n{message}")
    return [results[rank] for rank in range(len(receivers))]


def _work(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    folder: str,
    timeout: float,
    sender: Connection,
    backend: str,
    before: Callable[[], Any],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        before()
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout + 60),  # It is the parent that gives up, and names who is silent.
        )
        result = fn(rank, *args)
        # A rank that leaves while others still talk to it makes gloo abort them.
        dist.barrier()
        dist.destroy_process_group()
        # Plain bytes: the connection's own pickler would pass tensors by shared memory that dies with this process.
        sender.send_bytes(pickle.dumps((None, result)))
    except BaseException:
        sender.send_bytes(pickle.dumps((time.monotonic(), traceback.format_exc())))
    sender.close()
