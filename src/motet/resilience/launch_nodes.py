"""Starts a training that survives the loss of nodes: a store, an agent for each node, and each node's processes.

On one machine, groups of processes stand for nodes. The store has a process of its own, so that no node's end takes it
along; everything dies with the process that calls this.

    this process -- store
                 -- agent of node 0 -- processes
                 -- agent of node 1 -- processes

On several machines, this process is on one of them, or on another that trains nothing: it has the store alone, waits
until all nodes have come (`join_training`, one process on each machine), and ends when the training does.
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
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from motet.cluster import available_cores
from motet.config import RunConfig
from motet.errors import UserError
from motet.plan import Plan
from motet.resilience.agent import SEEN_END, NodeAgent, WatchedProcess
from motet.resilience.control import Control
from motet.resilience.interfaces import interface_towards
from motet.resilience.membership import (
    FIRST_GENERATION,
    Beats,
    Membership,
    next_membership,
    propose,
    register,
    registered,
)
from motet.resilience.pipelines import Templates
from motet.resilience.recover import RESULT, StoppedError, TooFewNodesError, TrainingProcess
from motet.resilience.succession import Succession
from motet.runtime.launch import WorkerFailedError

STORE_TIMEOUT = timedelta(seconds=60)
LOOPBACK = "127.0.0.1"
POLL_S = 0.1
PR_SET_PDEATHSIG = 1


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
    Where too few nodes are left, or the store is lost, all of them are started anew, from the last checkpoint.
    Raises `UserError` or `WorkerFailedError` if the training could not go on."""
    assert config.train.failures is not None

    def run_once(config: RunConfig) -> dict[str, Any]:
        if listen is None:
            return _train_here(config, plan, templates, num_nodes, node_size)
        return _train_elsewhere(config, plan, num_nodes, listen)

    for _ in range(config.train.failures.restarts):
        try:
            return run_once(config)
        except NodesLostError as error:
            print(f"motet: {error}; starting anew", file=sys.stderr, flush=True)
            config = config.model_copy(update={"train": config.train.model_copy(update={"resume": "latest"})})
    return run_once(config)


class NodesLostError(WorkerFailedError):
    """Too few nodes are left, or they cannot reach each other."""


def join_training(
    config: RunConfig, templates: Templates | None, store_address: tuple[str, int], node_size: int
) -> None:
    """This process becomes the agent of one more node. Raises `UserError` if no store answers."""
    assert config.train.failures is not None
    host, port = store_address
    try:
        with socket.create_connection(store_address, timeout=10) as connection:
            interface = interface_towards(connection)
    except OSError:
        raise UserError(f"--join: nobody answers at {host}:{port}; is the training still running?") from None
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    succession = Succession(node_size, templates, stops_below_guarantee=config.train.failures.stop_below_guarantee)
    run_agent(config, store_address, None, node_size, succession)


def _train_here(
    config: RunConfig, plan: Plan, templates: Templates | None, num_nodes: int, node_size: int
) -> dict[str, Any]:
    assert config.train.failures is not None
    succession = Succession(node_size, templates, stops_below_guarantee=config.train.failures.stop_below_guarantee)
    context = multiprocessing.get_context("fork")
    # First of all, and alone with its threads: what is forked from a process with threads may inherit their locks.
    host, address = _start_store((LOOPBACK, 0), plan.to_json(), num_nodes)
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
        if not host.is_alive():
            raise NodesLostError("the process that had the store died")
        return _outcome(address)
    finally:
        for process in (*agents, host):
            process.kill()
            process.join()


def _train_elsewhere(config: RunConfig, plan: Plan, num_nodes: int, listen: tuple[str, int]) -> dict[str, Any]:
    assert config.train.failures is not None
    host, address = _start_store(listen, plan.to_json(), 0)
    try:
        print(
            f"motet: waiting for {num_nodes} nodes: motet train RUN.yaml --join {address[0]}:{address[1]}",
            file=sys.stderr,
            flush=True,
        )
        store = dist.TCPStore(*address, is_master=False, timeout=STORE_TIMEOUT)
        while registered(store) < num_nodes:
            time.sleep(POLL_S)
        nodes = tuple(range(num_nodes))
        membership = propose(
            store, Membership(generation=FIRST_GENERATION, nodes=nodes, num_known=num_nodes, plan=plan.to_json())
        )
        patience_s = max(5.0, 3 * config.train.failures.detect_s)
        membership = _wait_while_some_live(store, membership, patience_s)
        _wait_until_seen(store, len(membership.everyone), patience_s)
        return _outcome(address)
    except dist.DistError:
        if host.is_alive():
            raise
        raise NodesLostError("the process that had the store died") from None
    finally:
        host.kill()
        host.join()


def _wait_while_some_live(store: dist.Store, membership: Membership, timeout_s: float) -> Membership:
    """Until the training is over, or no node has given a sign of life for so long. Returns the last membership."""
    beats = Beats(store, timeout_s)
    while not store.check(["finished"]):
        membership = next_membership(store, membership.generation) or membership
        if len(beats.missing(membership.everyone, time.monotonic())) == len(membership.everyone):
            break
        time.sleep(POLL_S)
    return membership


def _wait_until_seen(store: dist.Store, num_nodes: int, timeout_s: float) -> None:
    """Else agents would find no store where they look for the end, and take that for a failure."""
    deadline = time.monotonic() + timeout_s
    while store.add(SEEN_END, 0) < num_nodes and time.monotonic() < deadline:
        time.sleep(POLL_S)


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


def _start_store(listen: tuple[str, int], plan: str, num_nodes: int) -> tuple[BaseProcess, tuple[str, int]]:
    """In a process of its own; its address. `num_nodes`: with which the training begins; 0: they are still to come.

    Raises `UserError` if it cannot listen there."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_host_store, args=(sender, listen, plan, num_nodes), daemon=True)
    process.start()
    answer = receiver.recv()
    if isinstance(answer, str):
        process.join()
        raise UserError(
            f"--listen: {listen[0]}:{listen[1]} cannot be listened at ({answer}); give an address of this "
            "machine and a free port"
        )
    return process, (listen[0], answer)


def _host_store(answer: Connection, listen: tuple[str, int], plan: str, num_nodes: int) -> None:
    end_with_parent()
    _ignore_signals()
    try:
        store = dist.TCPStore(*listen, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)
    except (RuntimeError, ValueError) as error:
        answer.send(str(error).splitlines()[0])
        return
    if num_nodes:
        nodes = tuple(register(store) for _ in range(num_nodes))
        propose(store, Membership(generation=FIRST_GENERATION, nodes=nodes, num_known=num_nodes, plan=plan))
    answer.send(store.port)
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
    try:
        agent.run()
    except RuntimeError as error:  # Its processes end with it.
        told = str(error).partition("\n")[0]
        print(f"motet: node {agent.node}: the store does not answer any more ({told})", file=sys.stderr, flush=True)
        os._exit(1)


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
