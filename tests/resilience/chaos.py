"""Trainings whose processes are killed at random moments, and what they must come to.

A trial is drawn from its seed alone. What every process is doing stands in shared memory; when a victim enters the
phase that was drawn for it, a timer of the kernel is set that kills (or stops) it a random time later.
"""

import ctypes
import hashlib
import json
import mmap
import os
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch.distributed as dist
from training import plan_of, run_config, train

from motet.config import RunConfig
from motet.resilience.failure_log import FAILURES
from motet.resilience.launch_nodes import train_on_nodes
from motet.resilience.membership import FIRST_GENERATION
from motet.resilience.recover import TrainingProcess
from motet.runtime.checkpoint_writer import CheckpointWriter
from motet.runtime.executor import Executor
from motet.runtime.gradients import GradientReducer
from motet.runtime.optimizer import Optimizer
from motet.runtime.trainer import Trainer
from motet.schedule.action import Compute, Kind, Reduce

PHASES = ("forward", "backward", "reduction", "optimizer step", "saving", "recovery", "other")
HOW = ("process", "process", "process", "process", "hang", "agent")
STEPS = 5
DETECT_S = 4.0
"""More than the usual: machines that run tests may be busy, and a node that is not killed must not be lost."""
MAX_NODES = 8
LONGEST_DELAY_S = {"forward": 4e-3, "backward": 6e-3, "reduction": 3e-3, "optimizer step": 2e-3, "saving": 2e-2,
                   "recovery": 0.15}  # fmt: skip
"""About as long as the phase lasts."""


@dataclass(frozen=True)
class Kill:
    node: int
    after_steps: int
    phase: str
    nth: int
    """Which entry of the phase, from then on."""
    delay_s: float
    how: str
    """process: SIGKILL; hang: SIGSTOP; agent: SIGKILL for the agent, which takes its processes along."""


@dataclass(frozen=True)
class Trial:
    seed: str
    tolerate: int
    """So many pipelines may lose a node; there is one more. Each has two nodes of one process."""
    kills: tuple[Kill, ...]

    @property
    def num_nodes(self) -> int:
        return 2 * (self.tolerate + 1)


def draw_trial(seed: str, phase: str | None = None) -> Trial:
    """`phase`: of the first kill, or of the second if it is the recovery from another one."""
    rng = Random(seed)
    phase = phase or rng.choice(PHASES[:-1])
    # Who is killed during a recovery must have a part in it, so its own pipeline is whole.
    tolerate = 2 if phase == "recovery" else rng.choice([1, 2])
    pipelines = rng.sample(range(tolerate + 1), k=tolerate)
    nodes = [2 * p + rng.randrange(2) for p in pipelines]
    if phase == "recovery":
        kills = [_draw_kill(rng, nodes[0], rng.choice(PHASES[:5])), _draw_kill(rng, nodes[1], "recovery")]
    else:
        kills = [_draw_kill(rng, nodes[0], phase)]
        if tolerate > 1 and rng.random() < 0.6:  # At the same moment, or in another step.
            same = rng.random() < 0.5
            kills.append(_draw_kill(rng, nodes[1], phase, kills[0].after_steps if same else None))
    return Trial(seed, tolerate, tuple(kills))


def _draw_kill(rng: Random, node: int, phase: str, after_steps: int | None = None) -> Kill:
    steps = rng.randrange(STEPS - 1) if after_steps is None else after_steps
    if phase == "saving":
        steps = max(1, steps)
    if phase == "recovery":
        steps = 0
    delay_s = rng.random() * LONGEST_DELAY_S[phase]
    return Kill(node, steps, phase, rng.randrange(3) if phase in PHASES[:3] else 0, delay_s, rng.choice(HOW))


def config_of(output: Path, tolerate: int) -> RunConfig:
    layout = {name: {"dp": tolerate + 1} for name in ("vision", "audio", "language_model")}
    return run_config(
        output,
        layout,
        train__steps=STEPS,
        train__global_batch_size=6,
        train__dtype="float64",
        train__checkpoint_every=1,
        train__failures={"tolerate": tolerate, "detect_s": DETECT_S},
        data__num_train=24,
    )


class Board:
    """Shared by all processes of a trial: each node's phase, and when each kill was carried out."""

    _PHASE = struct.Struct("=i")

    def __init__(self, num_kills: int) -> None:
        self._memory = mmap.mmap(-1, 4096)
        self._num_kills = num_kills

    def set_phase(self, node: int, phase: str) -> None:
        self._PHASE.pack_into(self._memory, 4 * node, PHASES.index(phase))

    def phase(self, node: int) -> str:
        return PHASES[self._PHASE.unpack_from(self._memory, 4 * node)[0]]

    def set_saving(self, node: int, saving: bool) -> None:
        """A thread saves while others compute."""
        self._memory[2048 + node] = saving

    def phase_of(self, kill: Kill) -> str:
        """In which its victim was."""
        saved = kill.phase == "saving" and self._memory[2048 + kill.node]
        return "saving" if saved else self.phase(kill.node)

    def is_fired(self, kill: int) -> bool:
        return self._memory[1024 + kill] != 0

    def fire(self, kill: int) -> None:
        self._memory[1024 + kill] = 1


class Victim:
    """In each training process: follows what it does, and carries out what was drawn for its node."""

    def __init__(self, trial: Trial, board: Board) -> None:
        self._trial, self._board = trial, board
        self.node = -1
        self.finished_steps = 0
        self._entries = [0] * len(trial.kills)

    def enter(self, phase: str) -> None:
        if self.node < 0:
            return
        if phase != "saving":
            self._board.set_phase(self.node, phase)
        for i, kill in enumerate(self._trial.kills):
            if kill.node != self.node or kill.phase != phase or self._board.is_fired(i):
                continue
            if self.finished_steps < kill.after_steps:
                continue
            self._entries[i] += 1
            if self._entries[i] > kill.nth:
                self._board.fire(i)
                if kill.how == "agent":
                    os.kill(os.getppid(), signal.SIGKILL)
                else:
                    signal_after(kill.delay_s, signal.SIGSTOP if kill.how == "hang" else signal.SIGKILL)

    def save(self, begins: bool) -> None:
        self._board.set_saving(self.node, begins)
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

    def of_step(_: Executor, step: object) -> str | None:
        if isinstance(step, Compute):
            return "forward" if step.kind is Kind.FORWARD else "backward"
        return "reduction" if isinstance(step, Reduce) else None

    def of_trainer(trainer: Trainer, *_: object) -> str:
        victim.finished_steps = trainer.finished_steps
        return "other"

    def join(process: TrainingProcess, call: Any) -> str:
        victim.node = call.membership.everyone[call.rank // process._node_size]
        return "other" if call.membership.generation == FIRST_GENERATION else "recovery"

    written = CheckpointWriter._write

    def write(self: CheckpointWriter, *args: Any) -> None:
        victim.save(True)
        written(self, *args)
        victim.save(False)

    recovered = TrainingProcess._recovered

    def checked(self: TrainingProcess, *args: Any) -> Trainer:
        trainer = recovered(self, *args)
        check_replicas(trainer)
        return trainer

    with (
        before(Executor, "_run_step", of_step),
        before(GradientReducer, "finish", lambda *_: "reduction"),
        before(Optimizer, "step", lambda *_: "optimizer step"),
        mock.patch.object(CheckpointWriter, "_write", write),
        before(Trainer, "_step", of_trainer),
        before(TrainingProcess, "_join_world", join),
        mock.patch.object(TrainingProcess, "_recovered", checked),
    ):
        yield


def check_replicas(trainer: Trainer) -> None:
    """Collective: all that hold a parameter hold the same bits of it, and of its optimizer's state."""
    states = trainer.optimizer.states()
    mine = {}
    for p in trainer.engine.model.parameters:
        tensors = [p.parameter.detach(), *states.get(p.parameter, {}).values()]
        key = (p.name, p.tp.rank, p.tp.size) if p.shard else (p.name, 0, 1)
        mine[key] = hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()
    everyone: list[dict[Any, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    seen: dict[Any, str] = {}
    for held in everyone:
        assert held is not None
        for key, digest in held.items():
            assert seen.setdefault(key, digest) == digest, f"replicas differ in {key}"


@cache
def undisturbed(tolerate: int) -> tuple[float, ...]:
    """The losses."""
    with tempfile.TemporaryDirectory() as folder:
        return tuple(train(config_of(Path(folder), tolerate), timeout=120)[0]["losses"])


@dataclass(frozen=True)
class Outcome:
    killed_in: tuple[str, ...]
    """The phase in which each victim was, of those that were killed."""
    max_loss_error: float
    log: tuple[dict[str, Any], ...]


def run_trial(trial: Trial) -> Outcome:
    """Raises `AssertionError` if something is not as it must be."""
    board = Board(len(trial.kills))
    victim = Victim(trial, board)
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(Path(folder), trial.tolerate)
        with observed(victim):
            result = train_on_nodes(config, plan_of(config), None, num_nodes=trial.num_nodes, node_size=1)
        path = Path(folder) / FAILURES
        log = tuple(json.loads(line) for line in path.read_text().splitlines()) if path.exists() else ()
    fired = [kill for i, kill in enumerate(trial.kills) if board.is_fired(i)]
    expected = undisturbed(trial.tolerate)
    assert len(result["losses"]) == len(expected), (trial, result["losses"], log)
    assert result["checkpoint"].endswith(f"step_{STEPS:08d}"), (trial, result["checkpoint"], log)
    error = max(abs(a - b) / abs(b) for a, b in zip(result["losses"], expected, strict=True))
    assert error <= 1e-6, (trial, error, log)
    lost = {change["node"] for line in log for change in line["changes"] if change["kind"] == "lost"}
    assert lost <= {kill.node for kill in fired}, (trial, log)
    for line in log:
        assert line["done"].startswith(("went on", "nothing had been trained")), (trial, log)
    return Outcome(tuple(map(board.phase_of, fired)), error, log)
