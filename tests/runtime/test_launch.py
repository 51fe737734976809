"""A failure on any rank ends all of them, with the cause; interrupts and kills leave no process behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from sampling import in_campaigns

import motet.runtime.launch as launching
from motet.environment import SHARES_CORES, set_environment
from motet.errors import UserError
from motet.runtime.launch import WorkerFailedError, check_world_size, launch

HANGING = r"""
import os, time, torch
import torch.distributed as dist
from motet.runtime.launch import launch

def worker():
    dist.barrier()
    os.write(1, f"{os.getpid()}\n".encode())
    if dist.get_rank() == 0:
        time.sleep(100)
    dist.barrier()

torch.set_num_threads(1)
launch(worker, num_processes=3)
"""


def test_returns_what_rank_0_returns() -> None:
    def worker(offset: int) -> dict[str, float]:
        total = torch.tensor([float(dist.get_rank() + offset)])
        dist.all_reduce(total)
        return {"sum": total.item(), "rank": dist.get_rank()}

    assert launch(worker, 10, num_processes=3) == {"sum": 33.0, "rank": 0}


def test_no_port_is_open_to_other_machines() -> None:
    """Neither the launcher nor a rank listens anywhere but on loopback."""

    def listening(_: int) -> list[str]:
        dist.barrier()
        inodes = {os.readlink(f"/proc/{pid}/fd/{fd}") for pid in (os.getpid(), os.getppid()) for fd in _fds(pid)}
        rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
        rows += [line.split() for line in Path("/proc/self/net/tcp6").read_text().splitlines()[1:]]
        return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]

    found = launch(listening, 0, num_processes=2)
    assert all(address.startswith("0100007F:") for address in found), found


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({}, 4),
        ({"OMP_NUM_THREADS": "3"}, None),
        ({"OMP_NUM_THREADS": "1"}, None),
        ({"OMP_NUM_THREADS": "3", "TORCHELASTIC_RUN_ID": "run"}, None),
        # torchrun gives one thread itself.
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "run"}, 4),
        # From a process of motet.
        ({"OMP_NUM_THREADS": "1", SHARES_CORES: "1"}, 4),
        ({"OMP_NUM_THREADS": "3", SHARES_CORES: "1"}, None),
    ],
)
def test_a_process_has_its_share_of_the_cores_unless_the_user_gives_threads(
    variables: dict[str, str], threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = ("OMP", "TORCHELASTIC", SHARES_CORES)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(others)}
    monkeypatch.setattr(os, "environ", environment | variables)
    set_environment()
    monkeypatch.setattr(launching, "available_cores", lambda: 8)
    given: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    launching.share_cores(2)
    # Those that there are are set again: else two threads at once might make the pool that a fork has ended.
    assert given == [threads or 7]


def _fds(pid: int) -> list[str]:
    return [fd for fd in os.listdir(f"/proc/{pid}/fd") if os.path.islink(f"/proc/{pid}/fd/{fd}")]


def test_keeps_the_signal_handlers() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    launch(int, num_processes=1)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)] == before


def fail_on_rank_1(how: str) -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        if how == "user":
            raise UserError("data.files: nothing.jsonl is missing; give another")
        if how == "crash":
            raise RuntimeError("out of luck")
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("user", UserError, r"^data\.files: nothing\.jsonl is missing; give another$"),
        ("crash", WorkerFailedError, r"^rank 1: RuntimeError: out of luck\n(.|\n)*fail_on_rank_1"),
        ("exit", WorkerFailedError, "^rank 1 exited with code 7 and no message$"),
        ("kill", WorkerFailedError, "^rank 1 was ended by SIGKILL"),
    ],
)
def test_a_failure_ends_all_with_its_cause(how: str, error: type[Exception], message: str) -> None:
    started = time.monotonic()
    with pytest.raises(error, match=message):
        launch(fail_on_rank_1, how, num_processes=3)
    assert time.monotonic() - started < 60


def die_while_telling() -> None:
    def half_written(path: Path, text: str) -> None:
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    dist.barrier()
    if dist.get_rank() == 0:
        Path.write_text = half_written  # type: ignore[method-assign, assignment]
        raise RuntimeError("that nobody will hear of")
    dist.barrier()


def test_who_is_ended_while_it_tells_its_failure_is_named() -> None:
    with pytest.raises(WorkerFailedError, match=r"^rank 0 was ended by SIGKILL"):
        launch(die_while_telling, num_processes=2)


def end_child(folder: Path, rank: int, *, code: int | None = None) -> int:
    """A worker that exits, or that is ended by SIGTERM; it stays to be reaped."""
    pid = os.fork()
    if pid == 0:
        if code is None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        os._exit(code or 0)
    (folder / f"pid_{pid}").write_text(str(rank))
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid


def tell(folder: Path, rank: int) -> None:
    failure = launching._Failure(rank=rank, failed_at=0.0, is_user_error=True, message="told", trace="")
    (folder / f"failure_{rank}.json").write_text(json.dumps(vars(failure)))


@pytest.mark.parametrize("is_reaped", [False, True])
def test_whom_torchelastic_ended_is_not_blamed(tmp_path: Path, is_reaped: bool) -> None:
    """On a busy machine the first death is heard of after torchelastic has ended the others."""
    tell(tmp_path, 0)
    pids = [end_child(tmp_path, 0, code=2), end_child(tmp_path, 1)]
    if is_reaped:
        os.waitpid(pids.pop(0), 0)
    deaths = launching._FirstDeaths(tmp_path)
    deaths._note()
    assert str(launching._explain(tmp_path, deaths)) == "told"
    for pid in pids:
        os.waitpid(pid, 0)


def test_who_was_ended_before_others_failed_is_blamed(tmp_path: Path) -> None:
    pid = end_child(tmp_path, 1)
    deaths = launching._FirstDeaths(tmp_path)
    deaths._note()
    tell(tmp_path, 0)
    assert str(launching._explain(tmp_path, deaths)) == "rank 1 was ended by SIGTERM"
    os.waitpid(pid, 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, *in_campaigns([signal.SIGINT, signal.SIGTERM])])
def test_no_process_outlives_the_launcher(number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "hang.py"
    script.write_text(HANGING)
    launcher = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pids = [int(launcher.stdout.readline()) for _ in range(3)]
    launcher.send_signal(number)
    launcher.wait(timeout=300)
    started = time.monotonic()
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() - started < 60
        time.sleep(0.05)
    assert launcher.returncode != 0


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_refuses_a_world_that_is_too_small_for_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    check_world_size(3, num_devices=3)
    check_world_size(3, num_devices=4)
    with pytest.raises(UserError, match=r"cluster.num_devices: is 2, but the plan has 3 ranks"):
        check_world_size(3, num_devices=2)
    with pytest.raises(UserError, match="torchrun"):
        check_world_size(4, num_devices=4, num_nodes=2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="torchrun started 2 processes"):
        check_world_size(4, num_devices=4)
    with pytest.raises(UserError, match="torchrun started 2 processes; start 1 "):
        check_world_size(1, num_devices=2)
