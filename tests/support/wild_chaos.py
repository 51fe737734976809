"""Trainings of which more is lost than they tolerate, or something else than a node, and what they must come to.

Two nodes within one recovery, stopped agents, the store, members of etcd, the launcher's machine, nodes that join
meanwhile. Where some node that was not lost has held each layer since the beginning, and never waited while others
trained, training goes on without a restart. Else it goes on from the last checkpoint. In both cases losses and samples
are those of the undisturbed run, and nothing is left behind.
"""

import ctypes
import json
import multiprocessing
import os
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any, Literal
from unittest import mock

from chaos import (
    DETECT_S,
    STEPS,
    Layout,
    config_of,
    draw_kill,
    import_models,
    pipelines_of,
    plan_and_templates,
    undisturbed,
)
from etcd_servers import EtcdServers, etcd_servers
from ledger import Ids, recorded
from shared_segments import no_segment_left
from victims import OF_LAUNCHERS, Board, Kill, Victim, observed
from waiting import wait_until

from motet.config import RunConfig
from motet.data.service import workers
from motet.errors import UserError
from motet.plan import Plan
from motet.resilience.failure_log import FAILURES
from motet.resilience.launch_nodes import join_training, run_agent, train_on_nodes
from motet.resilience.store.embedded import StoreProcess
from motet.resilience.store.etcd import EtcdAddress
from motet.resilience.store.store import SECRET_VARIABLE
from motet.resilience.succession import Succession
from motet.runtime import launch
from motet.runtime.checkpoint.folder import find_checkpoints
from motet.runtime.launch import WorkerFailedError

Store = Literal["embedded", "etcd"]
OF_NODES = ("process", "process", "hang", "agent", "stopped agent")
OF_STORES = {
    "embedded": ("store", "stopped store"),
    "etcd": ("etcd member", "stopped etcd member", "launcher", "etcd member and launcher"),
}
PHASES = ("forward", "backward", "reduction", "optimizer step", "saving", "evaluation")
PR_SET_CHILD_SUBREAPER = 36
FORK = multiprocessing.get_context("fork")
LARGEST_ERROR = 1e-12
"""Relative. Sums are taken in other orders."""


@dataclass(frozen=True)
class WildTrial:
    seed: str
    layout: Layout
    store: Store
    kills: tuple[Kill, ...]
    joins: bool
    """Whether a node comes after the first loss."""
    waits: bool
    """Whether the last step waits until what is silent has been noticed; else the training may be over before."""
    has_workers: bool = False
    """Whether processes of each rank prepare the samples, and hand them over in shared memory."""

    @property
    def num_nodes(self) -> int:
        return sum(pipelines_of(self.layout, 1, False))

    @property
    def is_apart(self) -> bool:
        """Whether all nodes join a process that listens, as on several machines; that process may be lost."""
        return self.store == "etcd" and (self.joins or any(kill.how in OF_LAUNCHERS for kill in self.kills))


def draw_wild(seed: str, store: Store = "embedded", *, is_double: bool | None = None) -> WildTrial:
    """`is_double`: whether a node is lost within the recovery from the loss of another."""
    rng = Random(seed)
    layout: Layout = rng.choice(["alike", "unlike"])
    nodes = rng.sample(range(sum(pipelines_of(layout, 1, False))), k=2)
    is_double = rng.random() < 0.4 if is_double is None else is_double

    def kill(node: int, phase: str, ways: tuple[str, ...]) -> Kill:
        drawn = draw_kill(rng, node, "saving" if phase == "evaluation" else phase)
        return Kill(node, max(1, drawn.after_steps), phase, 0, drawn.delay_s, rng.choice(ways))

    kills = [kill(nodes[0], rng.choice(PHASES), OF_NODES)]
    if is_double:
        kills.append(kill(nodes[1], "recovery", OF_NODES))
    elif rng.random() < (0.6 if store == "embedded" else 0.9):
        kills.append(kill(nodes[1], rng.choice(PHASES), OF_STORES[store]))
    joins, waits = rng.random() < 0.3, rng.random() < 0.5
    has_workers = Random(f"workers/{seed}").random() < 0.25
    return WildTrial(seed, layout, store, tuple(kills), joins, waits, has_workers)


def config_for(trial: WildTrial, output: Path) -> RunConfig:
    config = config_of(output, 1, trial.layout)
    failures = {"tolerate": 1, "detect_s": DETECT_S, "restarts": 3}
    values = config.model_dump(exclude_unset=True)
    values["data"]["workers"] = int(trial.has_workers)
    values["train"] |= {"failures": failures, "eval_every": 2, "eval_samples": 4, "output": str(output)}
    return RunConfig.model_validate(values)


def survives(lost: set[int], plan: Plan) -> bool:
    """Whether nodes that were not `lost` have held each layer since the beginning; or fewer were lost than are
    tolerated."""
    if len(lost) <= 1:
        return True
    held = {
        (name, layer)
        for name, module in plan.modules.items()
        for replica in module.replicas
        for stage in replica.stages
        if not lost & {*stage.ranks}
        for layer in range(*stage.layers)
    }
    return held == {(name, layer) for name, module in plan.modules.items() for layer in range(module.num_layers)}


def left_behind(log: list[dict[str, Any]]) -> set[int]:
    """Nodes that waited without a place while others trained, so that they hold the state of an earlier step."""
    nodes: set[int] = set()
    known: set[int] = set()
    before: dict[str, Any] | None = None
    for line in log:
        if "nodes" not in line:
            if line["done"] != "nothing":  # All nodes ended, and began anew from a checkpoint, if at all.
                before = None
            continue
        known |= {*line["nodes"]}
        if before is not None:
            went_back = re.search("went back from step ([0-9]+)", line["done"])
            steps_before = int(went_back[1]) if went_back else line["step"] - 1
            if steps_before >= before["step"]:
                nodes |= known - {*before["nodes"]}
        before = line
    return nodes


@dataclass(frozen=True)
class WildOutcome:
    trial: WildTrial
    killed: tuple[str, ...]
    """How and in which phase."""
    survives: bool
    went_on: bool
    """Without a checkpoint."""
    joined: bool
    """Whether a node that came later was counted in."""
    num_starved: int
    """Nodes that were lost although nobody hit them: the machine was too busy for `DETECT_S`."""
    max_loss_error: float
    seconds: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def run_wild(trial: WildTrial) -> WildOutcome:
    """Raises `AssertionError` if something is not as it must be."""
    import_models()
    losses, ids = undisturbed(1, trial.layout)
    plan, templates = plan_and_templates(trial.layout, 1, pipelines_of(trial.layout, 1, False))
    board = Board()
    # What loses its parent becomes a child of this process, which sees it.
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1) == 0
    before, descriptors = children(), open_descriptors()
    with no_segment_left(), tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        output, temporary = Path(folder) / "run", Path(folder) / "temporary"
        temporary.mkdir()
        output.mkdir()
        config = config_for(trial, output)
        etcd = None
        if trial.store == "etcd":
            (Path(folder) / "etcd").mkdir()
            servers = stack.enter_context(etcd_servers(Path(folder) / "etcd"))
            board.set_server(_pid_of_member(servers, Random(trial.seed).randrange(3)))
            etcd = servers.address("trial")
        apart = children()
        stack.enter_context(mock.patch.object(tempfile, "tempdir", str(temporary)))
        stack.enter_context(recorded(output))
        stack.enter_context(mock.patch.object(workers, "LARGE_BYTES", 1))
        # More threads would wait for each other in a busy loop: a joining node does not know who else is here.
        stack.enter_context(mock.patch.object(launch, "available_cores", return_value=1))
        stack.enter_context(observed(Victim(trial.kills, board, STEPS - 1 if trial.waits else None)))
        started = time.monotonic()
        if trial.is_apart:
            assert etcd is not None
            result = train_apart(trial, config, plan, templates, board, etcd)
        else:
            with joining(config, plan, templates, board) if trial.joins else noted_store(board):
                result = train_on_nodes(config, plan, templates, num_nodes=trial.num_nodes, node_size=1, store=etcd)
        seconds = time.monotonic() - started
        path = output / FAILURES
        log = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        fired = tuple(kill for i, kill in enumerate(trial.kills) if board.is_fired(i))
        wait_until(lambda: children() <= apart, f"processes are left: {children() - apart}")
        assert [*temporary.iterdir()] == [], "temporary files are left"
        seen = ids_by_step(output)
        metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        saved = find_checkpoints(output / "checkpoints")[-1].name
    board.check_phases()
    wait_until(lambda: children() <= before, "processes are left")
    try:
        wait_until(lambda: len(open_descriptors()) <= len(descriptors) + 2)
    except AssertionError:
        left = {name: what for name, what in open_descriptors().items() if descriptors.get(name) != what}
        raise AssertionError(f"descriptors are left: {left}") from None
    assert saved == f"step_{STEPS:08d}", (trial, saved, log)
    # Where no process has survived, the result holds the steps since the checkpoint; the metrics hold all of them.
    written = {line["step"]: line["loss"] for line in metrics if "loss" in line}
    assert sorted(written) == list(range(1, STEPS + 1)), (trial, metrics, log)
    pairs = [(loss, losses[step - 1]) for step, loss in written.items()]
    if result is not None:
        pairs += zip(result["losses"], losses[STEPS - len(result["losses"]) :], strict=True)
    error = max(abs(a - b) / abs(b) for a, b in pairs)
    assert error <= LARGEST_ERROR, (trial, error, log)
    assert seen == ids, (trial, log)
    changes = {(change["kind"], change["how"]) for line in log for change in line["changes"]}
    assert not {kind for kind, _ in changes} & {"refused", "clock"}, (trial, log)
    joined = any(kind == "joined" for kind, _ in changes)
    went_on = all(line["done"].startswith(("went on", "nothing had been trained")) for line in log if "done" in line)
    hit = {kill.node for kill in fired if kill.hits_node}
    lost = {change["node"] for line in log for change in line["changes"] if change["kind"] == "lost"}
    lives = survives(hit | lost | left_behind(log), plan)
    store_was_lost = trial.store == "embedded" and any(not kill.hits_node for kill in fired)
    if lives and not store_was_lost:
        assert went_on, (trial, fired, log)
    assert (result is None) == any(kill.how in OF_LAUNCHERS for kill in fired), (trial, log)
    killed = tuple(f"{kill.how} in {kill.phase}" for kill in fired)
    return WildOutcome(trial, killed, lives, went_on, joined, len(lost - hit), error, seconds)


def train_apart(
    trial: WildTrial, config: RunConfig, plan: Plan, templates: Any, board: Board, etcd: EtcdAddress
) -> dict[str, Any] | None:
    """All nodes join a process that listens. Its result; None if it was lost."""
    printed = Path(config.train.output) / "result.json"

    def listen() -> None:
        result = train_on_nodes(config, plan, templates, num_nodes=trial.num_nodes, node_size=1, listen=etcd)
        printed.write_text(json.dumps(result))

    def join(is_late: bool) -> None:
        if is_late:
            wait_until(lambda: board.is_fired(0))
        while True:
            try:
                return join_training(config, lambda: templates, etcd, 1)
            except UserError:  # The run has not begun.
                time.sleep(0.2)
            except WorkerFailedError as error:
                return print(f"a node ended: {error}", flush=True)

    with mock.patch.dict(os.environ, {SECRET_VARIABLE: "a secret of all machines"}):
        processes = [FORK.Process(target=listen)]
        processes += [FORK.Process(target=join, args=(is_late,)) for is_late in (*[False] * trial.num_nodes, True)]
        for process in processes if trial.joins else processes[:-1]:
            process.start()
    board.set_launcher(processes[0].pid or 0)
    try:
        while not all(map(has_ended, processes[:-1])):
            time.sleep(0.05)
        return json.loads(printed.read_text()) if printed.exists() else None
    finally:
        for process in processes if trial.joins else processes[:-1]:
            process.kill()
            process.join()
            process.close()


def has_ended(process: BaseProcess) -> bool:
    """Or was stopped, and does not end by itself."""
    if process.exitcode is not None:
        return True
    state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0]
    return state == "T"


def ids_by_step(folder: Path) -> dict[int, Ids]:
    """The samples of each step; a step that is done again has the same ones."""
    seen: dict[int, set[Ids]] = defaultdict(set)
    for path in folder.glob("*.ledger"):
        for line in path.read_text().splitlines():
            what, number, *samples = line.split(" ")
            if what == "applied":
                seen[int(number)].add(tuple(samples))
    assert all(len(of_step) == 1 for of_step in seen.values()), seen
    assert seen.keys() == set(range(1, STEPS + 1)), seen
    return {step: next(iter(of_step)) for step, of_step in seen.items()}


def children() -> set[int]:
    """Processes whose parent is this one, and that have not ended."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(") ")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.add(int(folder.name))
    return found


def open_descriptors() -> dict[str, str]:
    """What each of this process is of."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _pid_of_member(servers: EtcdServers, number: int) -> int:
    return servers._processes[number].pid


@contextmanager
def noted_store(board: Board, told: Any = None) -> Iterator[None]:
    """Writes the embedded store's process on the board whenever one is started. `told`: gets address and secret."""
    start = StoreProcess.start

    def started(self: StoreProcess, *args: Any) -> None:
        start(self, *args)
        assert self._process is not None
        board.set_server(self._process.pid or 0)
        if told is not None:
            told.put((self.address, self._secret))

    with mock.patch.object(StoreProcess, "start", started):
        yield


@contextmanager
def joining(config: RunConfig, plan: Plan, templates: Any, board: Board) -> Iterator[None]:
    """A node of a process of its own that joins after the first loss."""
    addresses = FORK.SimpleQueue()

    def join() -> None:
        address, secret = addresses.get()
        wait_until(lambda: board.is_fired(0))
        succession = Succession(1, templates, first_plan=plan.to_json())
        run_agent(config, address, secret, None, 1, succession)

    helper = FORK.Process(target=join, daemon=False)
    with noted_store(board, addresses):
        helper.start()
        try:
            yield
        finally:
            helper.kill()
            helper.join()
