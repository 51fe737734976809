"""Starts a training that survives the loss of nodes: a store, an agent for each node, and each node's processes.

On one machine, groups of processes stand for nodes. The store has a process of its own, so that no node's end takes it
along; everything dies with the process that calls this.

    this process -- store
                 -- agent of node 0 -- processes
                 -- agent of node 1 -- processes

On several machines, this process may be on one of them, or on a machine that trains nothing: it runs only the store,
waits until all nodes have joined (`join_training`, one process per machine), and ends when the training does.
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
from motet.resilience.failure_log import write_end
from motet.resilience.membership import (
    Address,
    Change,
    RunRecord,
    StoreLostError,
    as_json,
    first_difference,
    store_timeout_s,
)
from motet.resilience.process_control import AgentLink, Children, WatchedProcess, describe_exit
from motet.resilience.recover import StoppedError, TooFewNodesError, TrainingProcess
from motet.resilience.store.keeper import StandbyProcess, StoreDiesError, StoreKeeper, TrainingEnd
from motet.resilience.store.store import StoreClient, StoreNotStartedError, StoreProcess
from motet.resilience.store.store_failover import MOVES
from motet.resilience.succession import Succession
from motet.runtime.launch import WorkerFailedError

LOOPBACK = "127.0.0.1"
ERROR_KINDS = {"mistake": UserError, "too few nodes": TooFewNodesError, "stopped": StoppedError}
"""Errors of training processes that are told apart; all others are of kind `failure`."""
FINAL_ERRORS = {"mistake": UserError, "stopped": WorkerFailedError, "failure": WorkerFailedError}
"""What is raised for kinds after which the nodes are not restarted."""
ELSEWHERE = "if enough nodes are left, they go on with a store on another machine"


class NodesLostError(WorkerFailedError):
    """Too few nodes are left, or they cannot reach each other. `changes`: those that are not in the failure log yet."""

    def __init__(self, why: str, changes: Sequence[Change] = ()) -> None:
        super().__init__(why)
        self.changes = changes


def train_on_nodes(
    config: RunConfig,
    plan: Plan,
    templates: Templates | None,
    *,
    num_nodes: int,
    node_size: int,
    listen: tuple[str, int] | None = None,
) -> dict[str, Any]:
    """Trains, and returns the JSON of `motet train`.

    `templates`: pipelines on other numbers of nodes; None: only as they are in the plan. `listen`: the address at which
    nodes on other machines join; None: the nodes are processes of this machine.
    Where too few nodes are left, all are restarted from the last checkpoint (`train.failures.restarts` times).
    Raises `UserError` or `WorkerFailedError` if the training could not continue."""
    failures, output = config.train.failures, Path(config.train.output)
    assert failures is not None
    run = RunRecord(config=as_json(config))
    with StoreProcess(listen or (LOOPBACK, 0)) as process:
        while True:
            try:
                with _store_keeper(config, run, plan, num_nodes, process, moves=listen is not None) as keeper:
                    # Before anything else, while it has no threads: forked processes may inherit their locks.
                    keeper.begin(awaits_nodes=listen is not None)
                    host, port = keeper.process.address
                    told = "nodes may join" if listen is None else f"waiting for {num_nodes} nodes"
                    print(f"motet: {told}: motet train RUN.yaml --join {host}:{port}", file=sys.stderr, flush=True)
                    if listen is None:
                        succession = Succession(node_size, templates, failures.stop_below_guarantee)
                        keeper.agents = [
                            keeper.children.start(run_agent, config, (host, port), node, node_size, succession)
                            for node in range(num_nodes)
                        ]
                    return _outcome(keeper.run(), keeper.silence_s, keeper.agents, moves=keeper.moves)
            except NodesLostError as error:
                most = failures.restarts
                if run.restarts == most:
                    done = f"{error}: not started anew, as train.failures.restarts is {most}"
                    write_end(output, error.changes, done)
                    raise
                run = replace(run, restarts=run.restarts + 1)
                done = f"{error}: all nodes are started anew (restart {run.restarts} of {most})"
                write_end(output, error.changes, done)
                print(f"motet: {error}; starting anew", file=sys.stderr, flush=True)


def join_training(
    config: RunConfig, make_templates: Callable[[], Templates | None], store_address: tuple[str, int], node_size: int
) -> None:
    """Turns this process into the agent of one more node. Templates are made if the training accepts the run file.

    Raises `UserError` if no store answers, or if the run has another run file; `WorkerFailedError` if the node was
    lost, or the training failed."""
    failures, output = config.train.failures, Path(config.train.output)
    assert failures is not None
    host, port = store_address
    try:
        with socket.create_connection(store_address, timeout=10) as connection:
            here, interface = connection.getsockname()[0], interface_towards(connection)
    except (OSError, UnicodeError):  # The latter where no host can have this name.
        raise UserError(f"--join: nobody answers at {host}:{port}; is the training still running?") from None
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    moves = _check_run_file(config, store_address)
    succession = Succession(node_size, make_templates(), failures.stop_below_guarantee)
    with Children() as children:
        standby = StandbyProcess(children, here, config) if moves else None
        why = run_agent(config, store_address, None, node_size, succession, standby)
        # If this machine has the store, it keeps it until the training is over, whatever became of its own node.
        end = standby.wait() if standby is not None else None
        if isinstance(end, str):
            raise WorkerFailedError(f"the store could not be kept: {end}; {ELSEWHERE}")
        if end is not None:
            try:
                result = _outcome(end, failures.store_patience_s, moves=True)
            except NodesLostError as error:
                told = f"{error}: not started anew, as the machine is lost that would"
                write_end(output, error.changes, told)
                raise
            saved = "it wrote no checkpoint"
            if result["checkpoint"]:
                saved = f"its last checkpoint is {result['checkpoint']}"
            told = f"the training is over, after {len(result['losses'])} steps; {saved}"
            print(f"motet: {told}", file=sys.stderr, flush=True)
    if why:
        raise WorkerFailedError(why)


def _check_run_file(config: RunConfig, store_address: Address) -> bool:
    """Returns whether the training's store may move to another machine. Raises `UserError` unless the run file is that
    of the training."""
    assert config.train.failures is not None
    address = address_text(store_address)
    patience_s = 2 * store_timeout_s(config.train.failures.detect_s)
    mistake = f"--join: what answers at {address} is no training that a node can join"

    def end() -> NoReturn:
        print(f"motet: error: {mistake}: it is silent for {patience_s:g} s", file=sys.stderr, flush=True)
        os._exit(2)  # As for a `UserError`, which nobody would see: the store's client retries again and again.

    with StoreClient(store_address, patience_s, on_late=end) as store:
        try:
            store.connect()
            run, moves = RunRecord.read(store), store.check([MOVES])
        except (StoreLostError, ValueError, TypeError):
            raise UserError(mistake) from None
    if difference := first_difference(config, run):
        raise UserError(f"{difference}, in the training at {address}; give the run file of that training")
    return moves


@contextmanager
def _store_keeper(
    config: RunConfig, run: RunRecord, plan: Plan, num_nodes: int, process: StoreProcess, *, moves: bool
) -> Iterator[StoreKeeper]:
    """`moves`: nodes are on other machines, and continue if this one is lost."""
    failures = config.train.failures
    assert failures is not None
    with Children() as children:
        keeper = StoreKeeper(
            process=process,
            children=children,
            run_record=run,
            plan=plan.to_json(),
            num_nodes=num_nodes,
            detect_s=failures.detect_s,
            # An agent may have just begun to wait for an answer when it is out of patience.
            silence_s=failures.store_patience_s + 4 * store_timeout_s(failures.detect_s),
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


def _outcome(end: TrainingEnd, silence_s: float, agents: Sequence[BaseProcess] = (), *, moves: bool) -> dict[str, Any]:
    """Returns the training's result, or raises the error with which it ended."""
    if end.failure is not None:
        failure = json.loads(end.failure)
        if failure["kind"] in FINAL_ERRORS:
            raise FINAL_ERRORS[failure["kind"]](failure["message"])
        raise NodesLostError(failure["message"], end.unlogged)
    if end.result is not None:
        result: dict[str, Any] = json.loads(end.result)
        return result
    if moves and not (end.is_settled and end.last.stop):
        # A restart might train a second time beside nodes that continue elsewhere.
        raise WorkerFailedError(f"no node has given a sign of life for {silence_s:g} s; {ELSEWHERE}")
    # No agent was left to report these nodes as lost.
    how = {
        node: f"its agent {describe_exit(agent.exitcode)}"
        for node, agent in enumerate(agents)
        if agent.exitcode is not None
    }
    silent = f"its agent was silent for {silence_s:g} s"
    lost = [Change("lost", node, how.get(node, silent), time.time()) for node in end.last.all_nodes]
    raise NodesLostError(end.last.stop or "all nodes were lost", (*end.unlogged, *lost))


def run_agent(
    config: RunConfig,
    store_address: Address,
    node: int | None,
    node_size: int,
    succession: Succession,
    standby: StandbyProcess | None = None,
) -> str | None:
    """Runs a node's agent in this process. `node`: its number; None: it joins a training that is under way. `standby`:
    given where the store may move to this machine.

    Returns why the node's part is over, if the node was lost or the training failed."""
    failures = config.train.failures
    assert failures is not None
    with Children() as children:
        processes: list[WatchedProcess] = []
        for place in range(node_size):
            mine, theirs = multiprocessing.Pipe()
            agent_ends = [*(other.pipe for other in processes), mine]
            process = children.start(_run_process, config, place, node_size, theirs, agent_ends)
            theirs.close()
            processes.append(WatchedProcess(process, mine))
        with StoreClient(store_address, 2 * store_timeout_s(failures.detect_s)) as store:
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


def _run_process(
    config: RunConfig, place: int, node_size: int, pipe: Connection, agent_ends: Sequence[Connection]
) -> None:
    """Runs a training process."""
    for other in agent_ends:  # If these stayed open here, the agent's end would go unnoticed.
        other.close()
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(place), str(node_size)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(max(1, available_cores() // node_size))
    link = AgentLink(pipe)
    try:
        TrainingProcess(config, link, node_size).run()
    except BaseException as error:
        kind = next((name for name, known in ERROR_KINDS.items() if isinstance(error, known)), "failure")
        message = str(error) if kind != "failure" else f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        link.send("failed", json.dumps({"kind": kind, "message": message}))
        time.sleep(5)
        os._exit(1)
    os._exit(0)
