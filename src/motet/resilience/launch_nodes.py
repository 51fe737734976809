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
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from motet.cluster import available_cores
from motet.config import RunConfig
from motet.errors import UserError
from motet.plan import Plan
from motet.resilience.agent import FINISH_S, SEEN_END, NodeAgent, WatchedProcess, how_it_ended, store_patience_s
from motet.resilience.children import Children
from motet.resilience.control import Control
from motet.resilience.failure_log import write_end
from motet.resilience.interfaces import interface_towards
from motet.resilience.membership import (
    FIRST_GENERATION,
    Beats,
    Change,
    Membership,
    key_of,
    next_membership,
    propose,
    register,
    registered,
    unlogged_changes,
)
from motet.resilience.pipelines import Templates
from motet.resilience.recover import RESULT, StoppedError, TooFewNodesError, TrainingProcess
from motet.resilience.run_record import RunRecord, as_json, first_difference
from motet.resilience.succession import Succession
from motet.resilience.watchdog import Watchdog
from motet.runtime.launch import WorkerFailedError

STORE_TIMEOUT = timedelta(seconds=10)
LOOPBACK = "127.0.0.1"
POLL_S = 0.1


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
    if listen is not None:
        listen = _free_address(listen)
    output, most = Path(config.train.output), config.train.failures.restarts
    run = RunRecord(config=as_json(config))
    while True:
        try:
            if listen is None:
                return _train_here(config, run, plan, templates, num_nodes, node_size)
            return _train_elsewhere(config, run, plan, num_nodes, listen)
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
            interface = interface_towards(connection)
    except (OSError, UnicodeError):  # The latter where no host can have this name.
        raise UserError(f"--join: nobody answers at {host}:{port}; is the training still running?") from None
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    _check_run_file(config, store_address)
    succession = Succession(
        node_size, make_templates(), stops_below_guarantee=config.train.failures.stop_below_guarantee
    )
    if why := run_agent(config, store_address, None, node_size, succession):
        raise WorkerFailedError(why)


def _check_run_file(config: RunConfig, store_address: tuple[str, int]) -> None:
    """Raises `UserError` unless it is that of the run which has the store."""
    assert config.train.failures is not None
    address = ":".join(map(str, store_address))
    patience_s = store_patience_s(config.train.failures.detect_s)
    mistake = f"--join: what answers at {address} is no training that a node can join"

    def end() -> NoReturn:
        print(f"motet: error: {mistake}: it is silent for {patience_s:g} s", file=sys.stderr, flush=True)
        os._exit(2)  # As for a `UserError`, which nobody would see: the store's client waits without limit.

    with Watchdog(patience_s, end):
        try:
            store = dist.TCPStore(*store_address, is_master=False, timeout=timedelta(seconds=patience_s / 2))
            run = RunRecord.read(store)
        except (dist.DistError, ValueError, TypeError):
            raise UserError(mistake) from None
    if difference := first_difference(config, run):
        raise UserError(f"{difference}, in the training at {address}; give the run file of that training")


def _train_here(
    config: RunConfig, run: RunRecord, plan: Plan, templates: Templates | None, num_nodes: int, node_size: int
) -> dict[str, Any]:
    assert config.train.failures is not None
    succession = Succession(node_size, templates, stops_below_guarantee=config.train.failures.stop_below_guarantee)
    with Children() as children:
        # First of all, and alone with its threads: what is forked from a process with threads may inherit their locks.
        host, address = _start_store(children, (LOOPBACK, 0), run, plan.to_json(), num_nodes)
        told = f"motet: nodes may join: motet train RUN.yaml --join {address[0]}:{address[1]}"
        print(told, file=sys.stderr, flush=True)
        agents = [children.start(run_agent, config, address, node, node_size, succession) for node in range(num_nodes)]
        with _watched_store(host, address, config) as (store, watchdog):
            return _outcome(store, _wait_for_end(store, watchdog, config, agents), config, agents)


def _train_elsewhere(
    config: RunConfig, run: RunRecord, plan: Plan, num_nodes: int, listen: tuple[str, int]
) -> dict[str, Any]:
    assert config.train.failures is not None
    with Children() as children:
        host, address = _start_store(children, listen, run, plan.to_json(), 0)
        told = f"motet: waiting for {num_nodes} nodes: motet train RUN.yaml --join {address[0]}:{address[1]}"
        print(told, file=sys.stderr, flush=True)
        with _watched_store(host, address, config) as (store, watchdog):
            while registered(store) < num_nodes:
                watchdog.come_round()
                time.sleep(POLL_S)
            nodes = tuple(range(num_nodes))
            propose(
                store, Membership(generation=FIRST_GENERATION, nodes=nodes, num_known=num_nodes, plan=plan.to_json())
            )
            return _outcome(store, _wait_for_end(store, watchdog, config), config)


def _patience_s(config: RunConfig) -> float:
    """More than that of the agents, which end by themselves if the store does not answer."""
    assert config.train.failures is not None
    return 2 * store_patience_s(config.train.failures.detect_s)


@contextmanager
def _watched_store(
    host: BaseProcess, address: tuple[str, int], config: RunConfig
) -> Iterator[tuple[dist.Store, Watchdog]]:
    """A client, for whoever comes round to the watchdog between the calls. Raises `NodesLostError` if the process that
    has the store dies, or does not answer any more (it may be stopped); then it is killed."""
    with Watchdog(_patience_s(config), host.kill) as watchdog:
        try:
            yield dist.TCPStore(*address, is_master=False, timeout=STORE_TIMEOUT), watchdog
        except dist.DistError:
            host.join(1.0)  # Its connections end a moment before it does.
            if host.is_alive():
                raise
            raise NodesLostError("the process that had the store died") from None


def _wait_for_end(
    store: dist.Store, watchdog: Watchdog, config: RunConfig, agents: Sequence[BaseProcess] = ()
) -> Membership:
    """Until the training is over and all agents know it, or no node has given a sign of life for too long: the last
    membership.

    `agents`: of the first nodes, if they are children of this process. Those that are stopped are not waited for."""
    beats = Beats(store, _patience_s(config))
    membership = Membership.from_json(store.get(key_of(FIRST_GENERATION)))
    while not store.check(["finished"]):
        watchdog.come_round()
        membership = next_membership(store, membership.generation) or membership
        left = [node for node in membership.everyone if node >= len(agents) or agents[node].is_alive()]
        if len(beats.missing(left, time.monotonic())) == len(left):
            return membership
        time.sleep(POLL_S)

    def all_know() -> bool:
        nodes = (*membership.everyone, *membership.waiting)
        return store.check([f"{SEEN_END}/{node}" for node in nodes]) and not any(agent.is_alive() for agent in agents)

    # If an agent found no store where it looks for the end, it would take that for a failure.
    deadline = time.monotonic() + FINISH_S + 1.0
    while not all_know() and time.monotonic() < deadline:
        watchdog.come_round()
        time.sleep(POLL_S)
    return membership


KINDS = {"mistake": UserError, "too few nodes": TooFewNodesError, "stopped": StoppedError}
FAILURES = {"mistake": UserError, "stopped": WorkerFailedError, "failure": WorkerFailedError}


def _outcome(
    store: dist.Store, last: Membership, config: RunConfig, agents: Sequence[BaseProcess] = ()
) -> dict[str, Any]:
    while newer := next_membership(store, last.generation):
        last = newer
    if store.check(["failure"]):
        failure = json.loads(store.get("failure"))
        if failure["kind"] in FAILURES:
            raise FAILURES[failure["kind"]](failure["message"])
        raise NodesLostError(failure["message"], unlogged_changes(store, last.generation))
    if store.check([RESULT]):
        return json.loads(store.get(RESULT))
    lost = _lost_unseen(last, agents, f"its agent was silent for {_patience_s(config):g} s")
    raise NodesLostError(last.stop or "all nodes were lost", (*unlogged_changes(store, last.generation), *lost))


def _lost_unseen(last: Membership, agents: Sequence[BaseProcess], silent: str) -> list[Change]:
    """Nobody was left to take these nodes for lost."""
    codes = dict(enumerate(agent.exitcode for agent in agents))
    ends = {node: f"its agent {how_it_ended(code)}" for node, code in codes.items() if code is not None}
    return [Change("lost", node, ends.get(node, silent), time.time()) for node in last.everyone]


def _free_address(listen: tuple[str, int]) -> tuple[str, int]:
    """With a free port for port 0: nodes come back to where they joined, so a restart must not choose another.

    Raises `UserError` unless it is one of this machine's and free. A store would listen at all of them."""
    host, _ = listen
    try:
        families = [family for family, *_ in socket.getaddrinfo(*listen, type=socket.SOCK_STREAM)]
    except UnicodeError:
        raise _no_address(listen, "no host can have this name") from None
    except OSError as error:
        raise _no_address(listen, str(error.strerror)) from None
    failed = 0
    for family in families:
        try:
            with socket.create_server(listen, family=family) as server:
                return host, server.getsockname()[1]
        except OSError as error:
            failed = error.errno or 0
    raise _no_address(listen, os.strerror(failed))


def _no_address(listen: tuple[str, int], why: str) -> UserError:
    host, port = listen
    return UserError(
        f"--listen: {host}:{port} cannot be listened at ({why}); give an address of this machine and a free port"
    )


def _start_store(
    children: Children, listen: tuple[str, int], run: RunRecord, plan: str, num_nodes: int
) -> tuple[BaseProcess, tuple[str, int]]:
    """In a process of its own; its address. `num_nodes`: with which the training begins; 0: they are still to come.

    Raises `UserError` if it cannot listen there, `NodesLostError` if it does not answer."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = children.start(_host_store, sender, listen, run, plan, num_nodes)
    sender.close()  # Else its end would go unnoticed.
    try:
        answer = receiver.recv() if receiver.poll(STORE_TIMEOUT.total_seconds()) else None
    except EOFError:
        answer = None
    if answer is None:
        raise NodesLostError("the process that is to have the store does not answer")
    if isinstance(answer, str):
        raise _no_address(listen, answer)
    return process, (listen[0], answer)


def _host_store(answer: Connection, listen: tuple[str, int], run: RunRecord, plan: str, num_nodes: int) -> None:
    try:
        store = dist.TCPStore(*listen, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)
    except (RuntimeError, ValueError) as error:
        answer.send(str(error).splitlines()[0])
        return
    run.write(store)
    if num_nodes:
        nodes = tuple(register(store) for _ in range(num_nodes))
        propose(store, Membership(generation=FIRST_GENERATION, nodes=nodes, num_known=num_nodes, plan=plan))
    answer.send(store.port)
    signal.pause()


def run_agent(
    config: RunConfig, store_address: tuple[str, int], node: int | None, node_size: int, succession: Succession
) -> str | None:
    """The process of a node's agent. `node`: its number; None: it joins a training that is under way.

    Returns why its part is over, if the node was lost or the training failed."""
    assert config.train.failures is not None
    detect_s = config.train.failures.detect_s
    patience_s = store_patience_s(detect_s)
    with Children() as children:
        processes = _start_processes(children, config, store_address, node_size)
        with Watchdog(patience_s, lambda: _end_cut_off(store_address, f"for {patience_s:g} s")) as watchdog:
            try:
                store = dist.TCPStore(*store_address, is_master=False, timeout=STORE_TIMEOUT)
                agent = NodeAgent(node, store, processes, succession, detect_s, watchdog)
                signal.signal(signal.SIGTERM, agent.warn)
                return agent.run()
            except dist.DistError as error:
                _end_cut_off(store_address, str(error).partition("\n")[0])


def _end_cut_off(store_address: tuple[str, int], told: str) -> NoReturn:
    host, port = store_address
    print(f"motet: the store at {host}:{port} does not answer any more ({told})", file=sys.stderr, flush=True)
    os._exit(1)  # Its processes end with it.


def _start_processes(
    children: Children, config: RunConfig, store_address: tuple[str, int], node_size: int
) -> list[WatchedProcess]:
    """Those that train on this node."""
    processes: list[WatchedProcess] = []
    for place in range(node_size):
        mine, theirs = multiprocessing.Pipe()
        ends = [*(other.pipe for other in processes), mine]
        process = children.start(_run_process, config, store_address, place, node_size, theirs, ends)
        theirs.close()
        processes.append(WatchedProcess(process, mine))
    return processes


def _run_process(
    config: RunConfig,
    store_address: tuple[str, int],
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
        TrainingProcess(config, control, store_address, node_size).run()
    except BaseException as error:
        kind = next((name for name, known in KINDS.items() if isinstance(error, known)), "failure")
        message = str(error) if kind != "failure" else f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        control.tell("failed", json.dumps({"kind": kind, "message": message}))
        time.sleep(5)
        os._exit(1)
    os._exit(0)
