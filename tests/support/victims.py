"""What every process of a trial is doing, and what is done to it.

What a process does stands in shared memory; when a victim enters the phase that was drawn for it, a timer of the kernel
is set that kills (or stops) it a random time later.
"""

import ctypes
import hashlib
import mmap
import os
import signal
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from waiting import wait_until

from motet.cluster.pipelines_on_nodes import nodes_of_pipelines
from motet.parallel.tensor.tensor_plans import local_ranges
from motet.resilience.membership import FIRST_GENERATION, MembershipNotice
from motet.resilience.recover import TrainingProcess
from motet.runtime.checkpoint.checkpoint import CheckpointWriter
from motet.runtime.communication.gradient_reduction import GradientReducer
from motet.runtime.executor import Executor
from motet.runtime.training.optimizer import Optimizer
from motet.runtime.training.trainer import Trainer

MOST_SHARDS = 2
"""Of tensor parallelism in these trials."""
PHASES = ("forward", "backward", "reduction", "optimizer step", "saving", "recovery", "other")
ALL_PHASES = (*PHASES, "evaluation")
OF_EVERY_STEP = PHASES[:4]
OF_AGENTS = {"agent": signal.SIGKILL, "stopped agent": signal.SIGSTOP, "warning": signal.SIGTERM}
SERVER_SIGNALS = {
    "store": signal.SIGKILL,
    "stopped store": signal.SIGSTOP,
    "etcd member": signal.SIGKILL,
    "stopped etcd member": signal.SIGSTOP,
    "etcd member and launcher": signal.SIGKILL,
}
"""What is done to the server whose number stands on the board."""
OF_LAUNCHERS = ("launcher", "etcd member and launcher")
SILENT = ("stopped agent", "stopped store")
"""Ways to be lost that no connection of a step notices: a short training would be over before anyone else does."""


@dataclass(frozen=True)
class Kill:
    node: int
    after_steps: int
    phase: str
    nth: int
    """Which entry of the phase, from then on."""
    delay_s: float
    how: str
    """process: SIGKILL; hang: SIGSTOP; agent: SIGKILL for the agent, which takes its processes along; stopped agent:
    SIGSTOP for it; warning: SIGTERM for the agent, so that the node leaves; cut: the cable of its host. The others hit
    no node, but a server (`SERVER_SIGNALS`)."""

    @property
    def hits_node(self) -> bool:
        return self.how not in SERVER_SIGNALS and self.how not in OF_LAUNCHERS


class Board:
    """Shared by all processes of a trial: each node's phase, and when each kill was carried out."""

    _PHASE = struct.Struct("=i")
    _TIME = struct.Struct("=d")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4096)

    def set_phase(self, node: int, phase: str) -> None:
        self._PHASE.pack_into(self._memory, 4 * node, ALL_PHASES.index(phase))
        self._memory[2600 + ALL_PHASES.index(phase)] = 1

    def check_phases(self) -> None:
        """Raises `AssertionError` unless what every step has was seen: else whoever was to be killed there lives."""
        entered = {phase for i, phase in enumerate(ALL_PHASES) if self._memory[2600 + i]}
        assert entered >= {*OF_EVERY_STEP}, f"nobody came into {sorted({*OF_EVERY_STEP} - entered)}"

    def phase(self, node: int) -> str:
        return ALL_PHASES[self._PHASE.unpack_from(self._memory, 4 * node)[0]]

    def set_saving(self, node: int, saving: bool) -> None:
        """A thread saves while others compute."""
        self._memory[2048 + node] = saving

    def phase_of(self, kill: Kill) -> str:
        """In which its victim was."""
        saved = kill.phase == "saving" and self._memory[2048 + kill.node]
        return "saving" if saved else self.phase(kill.node)

    def set_server(self, pid: int) -> None:
        """The process of the store, or of a member of etcd."""
        self._PHASE.pack_into(self._memory, 2560, pid)

    @property
    def server(self) -> int:
        return self._PHASE.unpack_from(self._memory, 2560)[0]

    def set_launcher(self, pid: int) -> None:
        self._PHASE.pack_into(self._memory, 2564, pid)

    @property
    def launcher(self) -> int:
        return self._PHASE.unpack_from(self._memory, 2564)[0]

    def note_membership(self, num_kills: int) -> None:
        """Whatever was done before has been noticed."""
        for kill in range(num_kills):
            self._memory[1536 + kill] = self.is_fired(kill)

    def is_noticed(self, kill: int) -> bool:
        return self._memory[1536 + kill] != 0

    def is_fired(self, kill: int) -> bool:
        return self._memory[1024 + kill] != 0

    def fire(self, kill: int) -> None:
        self._TIME.pack_into(self._memory, 3072 + 8 * kill, time.time())
        self._memory[1024 + kill] = 1

    def fired_at(self, kill: int) -> float:
        """Seconds since the epoch; its delay begins."""
        return self._TIME.unpack_from(self._memory, 3072 + 8 * kill)[0]


class Victim:
    """In each training process: follows what it does, and carries out what was drawn for its node.

    `last_step`: finished steps at which it waits until what is silent has been noticed; None: it never waits."""

    def __init__(self, kills: Sequence[Kill], board: Board, last_step: int | None = None) -> None:
        self._kills, self.board, self.last_step = kills, board, last_step
        self.node = -1
        self.finished_steps = 0
        self._entries = [0] * len(kills)

    def enter(self, phase: str) -> None:
        if self.node < 0:
            return
        if phase != "saving":
            self.board.set_phase(self.node, phase)
        for i, kill in enumerate(self._kills):
            if kill.node != self.node or kill.phase != phase or self.board.is_fired(i):
                continue
            if self.finished_steps < kill.after_steps:
                continue
            self._entries[i] += 1
            if self._entries[i] > kill.nth:
                self.board.fire(i)
                if kill.how in OF_LAUNCHERS:
                    os.kill(self.board.launcher, signal.SIGKILL)
                if kill.how in OF_AGENTS:
                    os.kill(os.getppid(), OF_AGENTS[kill.how])
                elif kill.how in SERVER_SIGNALS:
                    os.kill(self.board.server, SERVER_SIGNALS[kill.how])
                elif kill.how not in ("cut", "launcher"):  # The board is watched by who cuts.
                    signal_after(kill.delay_s, signal.SIGSTOP if kill.how == "hang" else signal.SIGKILL)

    def wait_for_notice(self, trainer: Trainer) -> None:
        for i, kill in enumerate(self._kills):
            if kill.how in SILENT and self.board.is_fired(i) and not self.board.is_noticed(i):
                # What ends the wait under another membership is this process's end.
                wait_until(trainer.engine.wants_pause, f"{kill} is not noticed")

    def joins(self, call: MembershipNotice) -> str:
        is_first = call.membership.generation == FIRST_GENERATION
        if not is_first or call.run.restarts:
            self.board.note_membership(len(self._kills))
        return "other" if is_first else "recovery"

    def save(self, begins: bool) -> None:
        self.board.set_saving(self.node, begins)
        if begins:
            self.enter("saving")


def signal_after(seconds: float, number: int) -> None:
    """The kernel sends this process the signal then: no thread of it has to run."""
    libc = ctypes.CDLL(None, use_errno=True)
    event = (ctypes.c_char * 64)()
    struct.pack_into("=qii", event, 0, 0, number, 0)  # sigev_value, sigev_signo, SIGEV_SIGNAL
    timer = ctypes.c_void_p()
    assert libc.timer_create(1, event, ctypes.byref(timer)) == 0, ctypes.get_errno()
    first = max(1000, int(seconds * 1e9))
    setting = struct.pack("=qqqq", 0, 0, first // 10**9, first % 10**9)
    assert libc.timer_settime(timer, 0, setting, None) == 0, ctypes.get_errno()


@contextmanager
def observed(victim: Victim) -> Iterator[None]:
    """Every process that is forked meanwhile tells the victim what it does."""

    def before(owner: type, name: str, phase_of: Callable[..., str | None]) -> Any:
        original = getattr(owner, name)

        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            phase = phase_of(self, *args)
            if phase is not None:
                victim.enter(phase)
            return original(self, *args, **kwargs)

        return mock.patch.object(owner, name, wrapped)

    def of_trainer(trainer: Trainer, *_: object) -> str:
        victim.finished_steps = trainer.finished_steps
        if trainer.finished_steps == victim.last_step:
            victim.wait_for_notice(trainer)
        return "other"

    def join(process: TrainingProcess, call: MembershipNotice) -> str:
        assert call.rank is not None
        victim.node = call.membership.all_nodes[call.rank // process._node_size]
        return victim.joins(call)

    written = CheckpointWriter._write

    def write(self: CheckpointWriter, *args: Any) -> None:
        victim.save(True)
        written(self, *args)
        victim.save(False)

    recovered = TrainingProcess._recovered

    def checked(self: TrainingProcess, *args: Any) -> Trainer:
        trainer = recovered(self, *args)
        check_replicas(trainer, num_keepers(self, trainer))
        return trainer

    with (
        before(Executor, "_forward", lambda *_: "forward"),
        before(Executor, "_backward", lambda *_: "backward"),
        before(Executor, "_weight_half", lambda *_: "backward"),
        before(GradientReducer, "start", lambda *_: "reduction"),
        before(GradientReducer, "finish", lambda *_: "reduction"),
        before(Optimizer, "step", lambda *_: "optimizer step"),
        before(Optimizer, "exchange", lambda *_: "optimizer step"),
        mock.patch.object(CheckpointWriter, "_write", write),
        before(Trainer, "_launch", of_trainer),
        before(Trainer, "evaluate", lambda *_: "evaluation"),
        before(TrainingProcess, "_join_world", join),
        mock.patch.object(TrainingProcess, "_recovered", checked),
    ):
        yield


def num_keepers(process: TrainingProcess, trainer: Trainer) -> int | None:
    """Of each part of each parameter's state, so many ranks have to keep it; None without ZeRO-1."""
    if not process._config.parallel.zero1:
        return None
    failures = process._config.train.failures
    assert failures is not None
    return min(failures.tolerate + 1, len(nodes_of_pipelines(trainer.engine.plan, process._node_size)))


Place = int | tuple[int, ...]
"""Where a part begins; or which share of rows it is."""


def check_replicas(trainer: Trainer, num_keepers: int | None = None) -> None:
    """Collective: all that hold a part of a parameter hold the same bits of it, all that keep its optimizer's state the
    same bits of that, however their stages are cut; and so many keep it, if it is given."""
    parameters = [p for p in trainer.engine.model.parameters if p.is_kept]
    states = trainer.optimizer.states()
    told = _gathered({p.name: p.shard for p in parameters if p.shard})
    shards = {name: shard for each in told for name, shard in each.items()}
    mine: dict[tuple[str, Place, str], str] = {}
    for p in parameters:
        tensors = {"values": [p.parameter.detach()], "state": list(states.get(p.parameter, {}).values())}
        if not tensors["state"]:
            del tensors["state"]
        if p.rows is not None:
            members, cut = p.rows.members, (p.tp.rank, p.tp.size) if p.shard else (0, 1)
            place = (members.rank, members.size, *cut)
            mine |= {(p.name, place, what): _digest(of) for what, of in tensors.items()}
            continue
        if (shard := shards.get(p.name)) is None:
            mine |= {(p.name, 0, what): _digest(of) for what, of in tensors.items()}
            continue
        length, first_here = p.full_shape[shard.dim], 0
        pieces = [piece for t in range(MOST_SHARDS) for piece in local_ranges(length, shard, t, MOST_SHARDS)]
        for a, b in local_ranges(length, shard, p.tp.rank, p.tp.size) if p.shard else [(0, length)]:
            for first, last in pieces:
                if a <= first < b:
                    here = first_here + first - a, last - first
                    for what, of in tensors.items():
                        digest = _digest([t.narrow(shard.dim, *here) if t.dim() else t for t in of])
                        mine[p.name, first, what] = digest
            first_here += b - a
    seen: dict[tuple[str, Place, str], str] = {}
    kept: Counter[tuple[str, Place, str]] = Counter()
    for held in _gathered(mine):
        for key, digest in held.items():
            assert seen.setdefault(key, digest) == digest, f"replicas differ in {key}"
        kept.update(key for key in held if key[2] == "state")
    wrong = {key: number for key, number in kept.items() if number != num_keepers}
    assert num_keepers is None or not wrong, f"each is to be kept by {num_keepers}, but {wrong}"


def _digest(tensors: Sequence[Tensor]) -> str:
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()


def _gathered(mine: dict[Any, Any]) -> list[dict[Any, Any]]:
    everyone: list[dict[Any, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
