"""Starts a training that survives the loss of nodes: a store, an agent for each node, and each node's processes.

On one machine, groups of processes stand for nodes. The store has a process of its own, so that no node's end takes it
along; everything dies with the process that calls this.

    this process -- store
                 -- agent of node 0 -- processes
                 -- agent of node 1 -- processes
"""

import ctypes
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from motet.cluster import available_cores
from motet.config import RunConfig
from motet.errors import UserError
from motet.plan import Plan
from motet.resilience.agent import NodeAgent, WatchedProcess
from motet.resilience.control import Control
from motet.resilience.membership import FIRST_GENERATION, Membership, propose, register
from motet.resilience.pipelines import Templates
from motet.resilience.recover import RESULT, StoppedError, TooFewNodesError, TrainingProcess
from motet.resilience.succession import Succession
from motet.runtime.launch import WorkerFailedError

STORE_TIMEOUT = timedelta(seconds=60)
PR_SET_PDEATHSIG = 1


def train_on_nodes(
    config: RunConfig, plan: Plan, templates: Templates | None, *, num_nodes: int, node_size: int
) -> dict[str, Any]:
    """Trains on processes of this machine; returns what `motet train --json` prints.

    `templates`: what pipelines may look like on other numbers of nodes; None: only as they are in the plan.
    Where too few nodes are left, all of them are started anew, from the last checkpoint.
    Raises `UserError` or `WorkerFailedError` if the training could not go on."""
    assert config.train.failures is not None
    for _ in range(config.train.failures.restarts):
        try:
            return _train_once(config, plan, templates, num_nodes, node_size)
        except NodesLostError as error:
            print(f"motet: {error}; starting anew", file=sys.stderr, flush=True)
            config = config.model_copy(update={"train": config.train.model_copy(update={"resume": "latest"})})
    return _train_once(config, plan, templates, num_nodes, node_size)


class NodesLostError(WorkerFailedError):
    """Too few nodes are left."""


def join_training(
    config: RunConfig, templates: Templates | None, store_address: tuple[str, int], node_size: int
) -> None:
    """This process becomes the agent of one more node. Raises `UserError` if no store answers."""
    assert config.train.failures is not None
    host, port = store_address
    try:
        with socket.create_connection(store_address, timeout=10):
            pass
    except OSError:
        raise UserError(f"--join: nobody answers at {host}:{port}; is the training still running?") from None
    succession = Succession(node_size, templates, stops_below_guarantee=config.train.failures.stop_below_guarantee)
    run_agent(config, store_address, None, node_size, succession)


def _train_once(
    config: RunConfig, plan: Plan, templates: Templates | None, num_nodes: int, node_size: int
) -> dict[str, Any]:
    assert config.train.failures is not None
    succession = Succession(node_size, templates, stops_below_guarantee=config.train.failures.stop_below_guarantee)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    # First of all, and alone with its threads: what is forked from a process with threads may inherit their locks.
    host = context.Process(target=_host_store, args=(sender, plan.to_json(), num_nodes), daemon=True)
    host.start()
    address = ("127.0.0.1", receiver.recv())
    print(f"motet: nodes may join: motet train RUN.yaml --join {address[0]}:{address[1]}", file=sys.stderr, flush=True)
    agents = [
        context.Process(target=run_agent, args=(config, address, node, node_size, succession))
        for node in range(num_nodes)
    ]
    for agent in agents:
        agent.start()
    try:
        for agent in agents:
            agent.join()
        return _outcome(address)
    finally:
        for process in (*agents, host):
            process.kill()
            process.join()


KINDS = {"mistake": UserError, "too few nodes": TooFewNodesError, "stopped": StoppedError}
FAILURES = {
    "mistake": UserError,
    "too few nodes": NodesLostError,
    "stopped": WorkerFailedError,
    "failure": WorkerFailedError,
}


def _outcome(address: tuple[str, int]) -> dict[str, Any]:
    store = dist.TCPStore(*address, is_master=False, timeout=STORE_TIMEOUT)
    if store.check(["failure"]):
        failure = json.loads(store.get("failure"))
        raise FAILURES[failure["kind"]](failure["message"])
    if store.check([RESULT]):
        return json.loads(store.get(RESULT))
    raise NodesLostError("all nodes were lost")


def _host_store(address: Connection, plan: str, num_nodes: int) -> None:
    end_with_parent()
    _ignore_signals()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)
    nodes = tuple(register(store) for _ in range(num_nodes))
    propose(store, Membership(generation=FIRST_GENERATION, nodes=nodes, num_known=num_nodes, plan=plan))
    address.send(store.port)
    signal.pause()


def run_agent(
    config: RunConfig, store_address: tuple[str, int], node: int | None, node_size: int, succession: Succession
) -> None:
    """The process of a node's agent. `node`: its number; None: it joins a training that is under way."""
    end_with_parent()
    _ignore_signals()
    assert config.train.failures is not None
    context = multiprocessing.get_context("fork")
    processes = []
    pipes: list[Connection] = []
    for place in range(node_size):
        mine, theirs = context.Pipe()
        process = context.Process(
            target=_run_process, args=(config, store_address, place, node_size, theirs, (*pipes, mine))
        )
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(WatchedProcess(process, mine))
    agent = NodeAgent(
        node,
        dist.TCPStore(*store_address, is_master=False, timeout=STORE_TIMEOUT),
        processes,
        succession,
        config.train.failures.detect_s,
    )

    def warn(*_: object) -> None:
        agent.is_warned = True

    signal.signal(signal.SIGTERM, warn)
    agent.run()


def _run_process(
    config: RunConfig,
    store_address: tuple[str, int],
    place: int,
    node_size: int,
    pipe: Connection,
    others: Sequence[Connection],
) -> None:
    """A training process."""
    end_with_parent()
    _ignore_signals()
    for other in others:  # The agent's ends: if they stayed open here, its end would go unnoticed.
        other.close()
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(place), str(node_size)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(max(1, available_cores() // node_size))
    control = Control(pipe)
    try:
        TrainingProcess(config, control, store_address, node_size).run()
    except BaseException as error:
        kind = next((name for name, known in KINDS.items() if isinstance(error, known)), "failure")
        message = str(error) if kind != "failure" else f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        control.tell("failed", json.dumps({"kind": kind, "message": message}))
        time.sleep(5)
        os._exit(1)
    os._exit(0)


def _ignore_signals() -> None:
    """The terminal's interrupt reaches all processes; the first one ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def end_with_parent() -> None:
    """Linux: this process is killed when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
