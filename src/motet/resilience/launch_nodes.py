"""Starts a training that survives the loss of nodes: a store, an agent for each node, and each node's processes.

On one machine, groups of processes stand for nodes. The store has a process of its own, so that no node's end takes it
along; everything dies with the process that calls this, and nothing is waited for that may be stopped.

    this process -- store
                 -- agent of node 0 -- processes
                 -- agent of node 1 -- processes

On several machines, this process is on one of them, or on another that trains nothing: it has the store alone, waits
until all nodes have come (`join_training`, one process on each machine), and ends when the training does.
"""

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import torch

from motet.addresses import address_text, interface_towards
from motet.cluster import available_cores
from motet.config import RunConfig
from motet.errors import UserError
from motet.plan import Plan
from motet.planner.templates.pipelines import Templates
from motet.resilience.agent import NodeAgent
from motet.resilience.control import Control
from motet.resilience.failure_log import write_end
from motet.resilience.membership import Address, Change, Membership, StoreLostError, call_s
from motet.resilience.node_process import Children, WatchedProcess, how_it_ended
from motet.resilience.recover import StoppedError, TooFewNodesError, TrainingProcess
from motet.resilience.store.gathering import MOVES
from motet.resilience.store.keeper import End, Keeper, StoreDiesError
from motet.resilience.store.run_record import RunRecord, as_json, first_difference
from motet.resilience.store.standby import StandbyProcess
from motet.resilience.store.store import StoreClient, StoreNotStartedError, StoreProcess
from motet.resilience.succession import Succession
from motet.runtime.launch import WorkerFailedError

LOOPBACK = "127.0.0.1"


def train_on_nodes(
    config: RunConfig,
    plan: Plan,
    templates: Templates | None,
    *,
    num_nodes: int,
    node_size: int,
    listen: tuple[str, int] | None = None,
) -> dict[str, Any]:
    """Returns what `motet train --json` prints.

    `templates`: what pipelines may look like on other numbers of nodes; None: only as they are in the plan.
    `listen`: where this machine is reached by nodes on others, which train when all have come; None: the nodes are
    processes of this machine.
    Where too few nodes are left all of them are started anew, from the last checkpoint; where the store is lost, it is.
    Raises `UserError` or `WorkerFailedError` if the training could not go on."""
    assert config.train.failures is not None
    succession = Succession(node_size, templates, stops_below_guarantee=config.train.failures.stop_below_guarantee)
    with StoreProcess(listen or (LOOPBACK, 0)) as process:

        def train(run: RunRecord) -> dict[str, Any]:
            with _keeper(config, run, plan, num_nodes, process, moves=listen is not None) as keeper:
                if listen is None:
                    _begin_here(keeper, config, node_size, succession)
                else:
                    _begin_elsewhere(keeper)
                return _outcome(keeper.attend(), keeper.silence_s, keeper.agents, moves=keeper.moves)

        return _with_restarts(config, train)


def _with_restarts(config: RunConfig, train: Callable[[RunRecord], dict[str, Any]]) -> dict[str, Any]:
    assert config.train.failures is not None
    output, most = Path(config.train.output), config.train.failures.restarts
    run = RunRecord(config=as_json(config))
    while True:
        try:
            return train(run)
        except NodesLostError as error:
            if run.restarts == most:
                write_end(output, error.changes, f"{error}: not started anew, as train.failures.restarts is {most}")
                raise
            run = replace(run, restarts=run.restarts + 1)
            write_end(output, error.changes, f"{error}: all nodes are started anew (restart {run.restarts} of {most})")
            print(f"motet: {error}; starting anew", file=sys.stderr, flush=True)


class NodesLostError(WorkerFailedError):
    """Too few nodes are left, or they cannot reach each other. `changes`: those that the failure log does not tell of
    yet."""

    def __init__(self, why: str, changes: Sequence[Change] = ()) -> None:
        super().__init__(why)
        self.changes = changes


def join_training(
    config: RunConfig, make_templates: Callable[[], Templates | None], store_address: tuple[str, int], node_size: int
) -> None:
    """This process becomes the agent of one more node. Templates are made if the training takes the node.

    Raises `UserError` if no store answers, or if the run has another run file; `WorkerFailedError` if the node was
    lost, or the training failed."""
    assert config.train.failures is not None
    host, port = store_address
    try:
        with socket.create_connection(store_address, timeout=10) as connection:
            here, interface = connection.getsockname()[0], interface_towards(connection)
    except (OSError, UnicodeError):  # The latter where no host can have this name.
        raise UserError(f"--join: nobody answers at {host}:{port}; is the training still running?") from None
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    moves = _check_run_file(config, store_address)
    succession = Succession(
        node_size, make_templates(), stops_below_guarantee=config.train.failures.stop_below_guarantee
    )
    with Children() as children:
        standby = StandbyProcess(children, here, config) if moves else None
        why = run_agent(config, store_address, None, node_size, succession, standby)
        if standby is not None:
            _keep_on(standby, config)
    if why:
        raise WorkerFailedError(why)


def _keep_on(standby: StandbyProcess, config: RunConfig) -> None:
    """If this machine has the store: until the training is over, whatever became of its own node.

    Raises `UserError` or `WorkerFailedError` if it could not go on."""
    end = standby.wait()
    if end is None:
        return
    if isinstance(end, str):
        raise WorkerFailedError(f"the store could not be kept: {end}; {ELSEWHERE}")
    assert config.train.failures is not None
    try:
        result = _outcome(end, config.train.failures.store_patience_s, moves=True)
    except NodesLostError as error:
        told = f"{error}: not started anew, as the machine is lost that would"
        write_end(Path(config.train.output), error.changes, told)
        raise
    saved = f"its last checkpoint is {result['checkpoint']}" if result["checkpoint"] else "it wrote no checkpoint"
    print(f"motet: the training is over, after {len(result['losses'])} steps; {saved}", file=sys.stderr, flush=True)


def _check_run_file(config: RunConfig, store_address: Address) -> bool:
    """Whether its store may move to another machine. Raises `UserError` unless it is that of the run which has the
    store."""
    assert config.train.failures is not None
    address = address_text(store_address)
    patience_s = 2 * call_s(config.train.failures.detect_s)
    mistake = f"--join: what answers at {address} is no training that a node can join"

    def end() -> NoReturn:
        print(f"motet: error: {mistake}: it is silent for {patience_s:g} s", file=sys.stderr, flush=True)
        os._exit(2)  # As for a `UserError`, which nobody would see: the store's client tries again and again.

    with StoreClient(store_address, patience_s, on_late=end) as store:
        try:
            store.connect()
            run, moves = RunRecord.read(store), store.check([MOVES])
        except (StoreLostError, ValueError, TypeError):
            raise UserError(mistake) from None
    if difference := first_difference(config, run):
        raise UserError(f"{difference}, in the training at {address}; give the run file of that training")
    return moves


def _begin_here(keeper: Keeper, config: RunConfig, node_size: int, succession: Succession) -> None:
    # First of all, and alone with its threads: what is forked from a process with threads may inherit their locks.
    keeper.begin(awaits_nodes=False)
    host, port = address = keeper.process.address
    print(f"motet: nodes may join: motet train RUN.yaml --join {host}:{port}", file=sys.stderr, flush=True)
    start, nodes = keeper.children.start, range(keeper.num_nodes)
    keeper.agents = [start(run_agent, config, address, node, node_size, succession) for node in nodes]


def _begin_elsewhere(keeper: Keeper) -> None:
    keeper.begin(awaits_nodes=True)
    host, port = keeper.process.address
    told = f"motet: waiting for {keeper.num_nodes} nodes: motet train RUN.yaml --join {host}:{port}"
    print(told, file=sys.stderr, flush=True)


@contextmanager
def _keeper(
    config: RunConfig, run: RunRecord, plan: Plan, num_nodes: int, process: StoreProcess, *, moves: bool
) -> Iterator[Keeper]:
    """`moves`: nodes are on other machines, and go on if this one is lost."""
    failures = config.train.failures
    assert failures is not None
    with Children() as children:
        keeper = Keeper(
            process=process,
            children=children,
            run=run,
            plan=plan.to_json(),
            num_nodes=num_nodes,
            detect_s=failures.detect_s,
            # An agent may have begun to wait for an answer when it is out of patience.
            silence_s=failures.store_patience_s + 4 * call_s(failures.detect_s),
            output=Path(config.train.output),
            tolerate=failures.tolerate,
            moves=moves,
        )
        try:
            yield keeper
        except (StoreNotStartedError, StoreDiesError) as error:
            if moves and keeper.has_begun:
                raise WorkerFailedError(f"{error}; {ELSEWHERE}") from None
            raise NodesLostError(str(error)) from None


KINDS = {"mistake": UserError, "too few nodes": TooFewNodesError, "stopped": StoppedError}
FAILURES = {"mistake": UserError, "stopped": WorkerFailedError, "failure": WorkerFailedError}


ELSEWHERE = "if enough nodes are left, they go on with a store on another machine"


def _outcome(end: End, silence_s: float, agents: Sequence[BaseProcess] = (), *, moves: bool) -> dict[str, Any]:
    if end.failure is not None:
        failure = json.loads(end.failure)
        if failure["kind"] in FAILURES:
            raise FAILURES[failure["kind"]](failure["message"])
        raise NodesLostError(failure["message"], end.unlogged)
    if end.result is not None:
        result: dict[str, Any] = json.loads(end.result)
        return result
    if moves and not (end.is_settled and end.last.stop):
        # To start anew might be to train twice.
        raise WorkerFailedError(f"no node has given a sign of life for {silence_s:g} s; {ELSEWHERE}")
    lost = _lost_unseen(end.last, agents, f"its agent was silent for {silence_s:g} s")
    raise NodesLostError(end.last.stop or "all nodes were lost", (*end.unlogged, *lost))


def _lost_unseen(last: Membership, agents: Sequence[BaseProcess], silent: str) -> list[Change]:
    """Nobody was left to take these nodes for lost."""
    codes = dict(enumerate(agent.exitcode for agent in agents))
    ends = {node: f"its agent {how_it_ended(code)}" for node, code in codes.items() if code is not None}
    return [Change("lost", node, ends.get(node, silent), time.time()) for node in last.everyone]


def run_agent(
    config: RunConfig,
    store_address: Address,
    node: int | None,
    node_size: int,
    succession: Succession,
    standby: StandbyProcess | None = None,
) -> str | None:
    """The process of a node's agent. `node`: its number; None: it joins a training that is under way. `standby`: where
    the store may move to this machine.

    Returns why its part is over, if the node was lost or the training failed."""
    failures = config.train.failures
    assert failures is not None
    with Children() as children:
        processes = _start_processes(children, config, node_size)
        with StoreClient(store_address, 2 * call_s(failures.detect_s)) as store:
            agent = NodeAgent(
                node,
                store,
                processes,
                succession,
                failures.detect_s,
                failures.store_patience_s,
                tolerate=failures.tolerate,
                standby=standby,
            )
            signal.signal(signal.SIGTERM, agent.warn)
            return agent.run()


def _start_processes(children: Children, config: RunConfig, node_size: int) -> list[WatchedProcess]:
    """Those that train on this node."""
    processes: list[WatchedProcess] = []
    for place in range(node_size):
        mine, theirs = multiprocessing.Pipe()
        ends = [*(other.pipe for other in processes), mine]
        process = children.start(_run_process, config, place, node_size, theirs, ends)
        theirs.close()
        processes.append(WatchedProcess(process, mine))
    return processes


def _run_process(
    config: RunConfig,
    place: int,
    node_size: int,
    pipe: Connection,
    others: Sequence[Connection],
) -> None:
    """A training process."""
    for other in others:  # The agent's ends: if they stayed open here, its end would go unnoticed.
        other.close()
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(place), str(node_size)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(max(1, available_cores() // node_size))
    control = Control(pipe)
    try:
        TrainingProcess(config, control, node_size).run()
    except BaseException as error:
        kind = next((name for name, known in KINDS.items() if isinstance(error, known)), "failure")
        message = str(error) if kind != "failure" else f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        control.tell("failed", json.dumps({"kind": kind, "message": message}))
        time.sleep(5)
        os._exit(1)
    os._exit(0)
