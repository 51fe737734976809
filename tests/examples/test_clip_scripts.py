"""A single-device CLIP script becomes a distributed one by changing at most five lines, and learns the same."""

import contextlib
import difflib
import io
import multiprocessing
import os
import re
import runpy
import tempfile
from multiprocessing.connection import Connection

import pytest
from checkout import ROOT

EXAMPLES = ROOT / "examples"


def losses(script: str, num_processes: int) -> list[list[float]]:
    """What each process prints. They are forked, and find each other as torchrun's do."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        workers, receivers = [], []
        for rank in range(num_processes):
            receiver, sender = context.Pipe(duplex=False)
            worker = context.Process(target=_run, args=(script, rank, num_processes, folder, sender), daemon=True)
            worker.start()
            sender.close()
            workers.append(worker)
            receivers.append(receiver)
        try:
            return [receiver.recv() for receiver in receivers]
        finally:
            for worker in workers:
                worker.kill()
                worker.join()


def _run(script: str, rank: int, num_processes: int, folder: str, sender: Connection) -> None:
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    join = dist.init_process_group

    def by_file(backend: str) -> None:  # As with torchrun, but without a port.
        join(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_processes)

    dist.init_process_group = by_file  # type: ignore[assignment]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    if dist.is_initialized():
        dist.barrier()
    sender.send([float(loss) for loss in re.findall(r"^loss (\S+)$", printed.getvalue(), flags=re.MULTILINE)])


def test_few_lines_differ() -> None:
    alone, distributed = (
        [line for line in (EXAMPLES / f"clip_{name}.py").read_text().splitlines()[1:] if line.strip()]
        for name in ("single_device", "distributed")
    )
    changes = difflib.SequenceMatcher(None, alone, distributed, autojunk=False).get_opcodes()
    changed = sum(max(b - a, d - c) for kind, a, b, c, d in changes if kind != "equal")
    assert 0 < changed <= 5


def test_both_learn_the_same() -> None:
    (alone,) = losses("clip_single_device.py", 1)
    everyone = losses("clip_distributed.py", 4)
    assert len(alone) == 12
    assert alone[-1] < alone[0]
    for printed in everyone:
        assert printed == pytest.approx(alone, rel=1e-3)
