"""Starts a training that survives the loss of nodes: a store, an agent for each node, and each node's processes.

On one machine, groups of processes stand for nodes. The store has a process of its own; everything ends with the
process that calls this.

    this process -- store
                 -- agent of node 0 -- processes
                 -- agent of node 1 -- processes

On several machines, this process may be on one of them, or on a machine that trains nothing: it runs only the store,
waits until all nodes have joined (`join_training`, one process per machine), and ends when the training does. If the
store is lost, all nodes restart from the last checkpoint as soon as there is a store again.
"""

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

from motet.addresses import address_text, interface_towards
from motet.config import RunConfig
from motet.errors import UserError
from motet.plan import Plan
from motet.planner.templates.pipelines import Templates
from motet.resilience.agent import NodeAgent
from motet.resilience.failure_log import write_end
from motet.resilience.health.free_memory import NO_NEEDS, MemoryNeeds
from motet.resilience.health.neighbours import NeighbourTrials
from motet.resilience.health.trial_process import serve_trials
from motet.resilience.membership import (
    RUN,
    Change,
    RunRecord,
    as_json,
    check_record,
    first_difference,
    silence_s,
    store_timeout_s,
)
from motet.resilience.process_control import AgentLink, Children, WatchedProcess, describe_exit
from motet.resilience.recover import StoppedError, TooFewNodesError, TrainingProcess
from motet.resilience.store.channel import UntrustedPeerError
from motet.resilience.store.embedded import EmbeddedStore, StoreProcess
from motet.resilience.store.etcd import EtcdAddress, EtcdStore, StoreAddress
from motet.resilience.store.store import Store, StoreAwayError, StoreLostError, make_secret, read_secret
from motet.resilience.succession import Succession
from motet.resilience.training_end import TrainingEnd, begin_training, first_membership, watch_training
from motet.runtime.launch import WorkerFailedError, share_cores

LOOPBACK = "127.0.0.1"
ERROR_KINDS = {"mistake": UserError, "too few nodes": TooFewNodesError, "stopped": StoppedError}
"""Errors of training processes that are told apart; all others are of kind `failure`."""
FINAL_ERRORS = {"mistake": UserError, "stopped": WorkerFailedError, "failure": WorkerFailedError}
"""Exceptions by kind of end after which the nodes are not restarted."""
OUTLIVING_PEERS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
}
"""Settings without which torch ends a process whose NCCL peer was lost, or reads communicators for its flight recorder
while they are aborted: seen once on torch 2.11, as a wait of 60 s and a segmentation fault."""
CONNECT_S = 10.0
"""Time for a store to take a connection."""
RETRY_S = 0.2
"""Interval between two looks for a store that was lost."""


def _text(address: StoreAddress) -> str:
    return str(address) if isinstance(address, EtcdAddress) else address_text(address)


def _client(
    address: StoreAddress,
    secret: bytes,
    detect_s: float,
    *,
    is_new: bool = False,
    replaces: bool = False,
    is_patient: bool = False,
) -> Store:
    """Connects to the store. `is_new`: a training begins there. `replaces`: this process had a training there that has
    ended. `is_patient`: waits twice as long for an answer."""
    if isinstance(address, EtcdAddress):
        return EtcdStore(address, secret, silence_s(detect_s), is_new=is_new, replaces=replaces, check=check_record)
    return EmbeddedStore(address, secret, (1 + is_patient) * store_timeout_s(detect_s))


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
    listen: StoreAddress | None = None,
    store: EtcdAddress | None = None,
    needs: MemoryNeeds = NO_NEEDS,
) -> dict[str, Any]:
    """Trains, and returns the JSON of `motet train`.

    `templates`: pipelines on other numbers of nodes; None: only as they are in the plan. `listen`: where nodes on other
    machines join, in the embedded store or in etcd; None: the nodes are processes of this machine. `store`: for these;
    None: the embedded one. `needs`: predicted for the plan, which a node must have free when it joins.
    Where too few nodes are left, all are restarted from the last checkpoint (`train.failures.restarts` times).
    Raises `UserError` or `WorkerFailedError` if the training could not continue."""
    failures, output = config.train.failures, Path(config.train.output)
    assert failures is not None
    run = RunRecord(
        config=as_json(config),
        plan=plan.to_json(),
        rank_device_bytes=needs.device_bytes,
        rank_host_bytes=needs.host_bytes,
    )
    first = first_membership(num_nodes, plan.to_json())
    secret = make_secret() if listen is None else read_secret(failures.secret_file)
    in_etcd = listen if isinstance(listen, EtcdAddress) else store
    embedded = listen if isinstance(listen, tuple) else (LOOPBACK, 0)
    with nullcontext() if in_etcd else StoreProcess(embedded, secret, silence_s(failures.detect_s)) as process:
        while True:
            try:
                with ExitStack() as stack:
                    children = stack.enter_context(Children())
                    if process is not None:
                        process.start(children)
                    address = in_etcd or cast(StoreProcess, process).address
                    made = _client(address, secret, failures.detect_s, is_new=True, replaces=run.restarts > 0)
                    client = stack.enter_context(closing(made))
                    begin_training(client, run, first if listen is None else None)
                    agents: list[BaseProcess] = []
                    if listen is None:
                        succession = Succession(node_size, templates, failures.stop_below_guarantee, run.plan)
                        agents = [
                            children.start(
                                run_agent, config, address, secret, node, node_size, succession, num_nodes, needs
                            )
                            for node in range(num_nodes)
                        ]
                    else:
                        told = f"waiting for {num_nodes} nodes: motet train RUN.yaml --join"
                        print(f"motet: {told} {_text(address)}", file=sys.stderr, flush=True)
                    return _outcome(watch_training(client, first, agents), failures.detect_s, agents)
            except (NodesLostError, StoreLostError, StoreAwayError) as error:
                changes = error.changes if isinstance(error, NodesLostError) else ()
                # Nodes that reach each other but not etcd may still train, so a second set must not be started beside.
                most = 0 if isinstance(listen, EtcdAddress) else failures.restarts
                if run.restarts == most:
                    done = f"{error}: not restarted, as train.failures.restarts is {most}"
                    write_end(output, changes, done)
                    raise NodesLostError(str(error), changes) from None
                run = replace(run, restarts=run.restarts + 1)
                done = f"{error}: all nodes are restarted (restart {run.restarts} of {most})"
                write_end(output, changes, done)
                print(f"motet: {error}; restarting all nodes", file=sys.stderr, flush=True)


def join_training(
    config: RunConfig, make_templates: Callable[[], Templates | None], store_address: StoreAddress, node_size: int
) -> None:
    """Turns this process into the agent of one more node. Templates are made if the training accepts the run file. If
    the store is lost, the node waits for it to be there again, and joins anew.

    Raises `UserError` if no store answers, or if the run has another run file or secret; `WorkerFailedError` if the
    node was lost, or the training failed."""
    failures = config.train.failures
    assert failures is not None
    secret = read_secret(failures.secret_file)
    run = _check_run_file(config, store_address, secret)
    succession = Succession(node_size, make_templates(), failures.stop_below_guarantee, run.plan)
    needs = MemoryNeeds(device_bytes=run.rank_device_bytes, host_bytes=run.rank_host_bytes)
    while True:
        try:
            why = run_agent(config, store_address, secret, None, node_size, succession, needs=needs)
            break
        except StoreLostError as error:
            print(f"motet: {error}; waiting for it to be there again", file=sys.stderr, flush=True)
            _wait_for_store(config, store_address, secret, failures.store_patience_s)
    if why:
        raise WorkerFailedError(why)


def _connection_to(address: StoreAddress) -> socket.socket:
    """A connection to the store; to the first of etcd's servers that answers."""
    *others, last = address.servers if isinstance(address, EtcdAddress) else (address,)
    for server in others:
        with suppress(OSError, UnicodeError):
            return socket.create_connection(server, timeout=CONNECT_S)
    return socket.create_connection(last, timeout=CONNECT_S)


def _check_run_file(config: RunConfig, address: StoreAddress, secret: bytes) -> RunRecord:
    """Returns the run. Raises `UserError` unless the run file is that of the training."""
    assert config.train.failures is not None
    where = f"--join: {_text(address)}"
    try:
        with _connection_to(address) as connection:
            if (interface := interface_towards(connection)) is not None:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        with closing(_client(address, secret, config.train.failures.detect_s)) as store:
            store.sync()
            run = RunRecord.from_json(store.values[RUN])
    except UntrustedPeerError as error:
        raise UserError(f"{where}: {error}") from None
    except (OSError, UnicodeError, StoreLostError, KeyError) as error:
        raise UserError(f"{where}: no training answers there ({error}); is it still running?") from None
    if difference := first_difference(config, run):
        raise UserError(f"{difference}, in the training at {_text(address)}; give its run file")
    return run


def _wait_for_store(config: RunConfig, address: StoreAddress, secret: bytes, patience_s: float) -> None:
    """Raises `WorkerFailedError` if there is no store of the same run file within that time."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            _check_run_file(config, address, secret)
            return
        except UserError as error:
            if time.monotonic() > deadline:
                raise WorkerFailedError(
                    f"the store was lost, and not there again in {patience_s:g} s: {error}"
                ) from None
            time.sleep(RETRY_S)


def _outcome(end: TrainingEnd, detect_s: float, agents: Sequence[BaseProcess] = ()) -> dict[str, Any]:
    """Returns the training's result, or raises the error with which it ended."""
    if end.failure is not None:
        failure = json.loads(end.failure)
        if failure["kind"] in FINAL_ERRORS:
            raise FINAL_ERRORS[failure["kind"]](failure["message"])
        raise NodesLostError(failure["message"], end.unlogged)
    if end.result is not None:
        result: dict[str, Any] = json.loads(end.result)
        return result
    # No agent was left to report these nodes as lost.
    how = {
        node: f"its agent {describe_exit(agent.exitcode)}"
        for node, agent in enumerate(agents)
        if agent.exitcode is not None
    }
    silent = f"its agent was silent for {silence_s(detect_s):g} s"
    lost = [Change("lost", node, how.get(node, silent), time.time()) for node in end.last.all_nodes]
    raise NodesLostError(end.last.stop or "all nodes were lost", (*end.unlogged, *lost))


def run_agent(
    config: RunConfig,
    store_address: StoreAddress,
    secret: bytes,
    node: int | None,
    node_size: int,
    succession: Succession,
    nodes_here: int = 1,
    needs: MemoryNeeds = NO_NEEDS,
) -> str | None:
    """Runs a node's agent in this process. `node`: its number; None: it joins a training that is under way.
    `nodes_here`: nodes that share this machine's cores. `needs`: memory of one process.

    Returns why the node's part is over, if the node was lost or the training failed. Raises `StoreLostError`."""
    failures = config.train.failures
    assert failures is not None
    with Children() as children:
        processes: list[WatchedProcess] = []
        for place in range(node_size):
            mine, theirs = multiprocessing.Pipe()
            agent_ends = [*(other.pipe for other in processes), mine]
            # Nodes of one machine share its devices.
            device = (node or 0) * node_size + place
            process = children.start(_run_process, config, device, node_size, nodes_here, needs, theirs, agent_ends)
            theirs.close()
            processes.append(WatchedProcess(process, mine))
        # Before the store's client has threads, with which a process should not be forked.
        trials, theirs = multiprocessing.Pipe()
        children.start(serve_trials, theirs, [*(watched.pipe for watched in processes), trials])
        theirs.close()
        # An agent waits longer than the process that watches the store, which restarts everything.
        with closing(_client(store_address, secret, failures.detect_s, is_patient=True)) as store:
            agent = NodeAgent(
                node,
                store,
                processes,
                succession,
                silence_s(failures.detect_s),
                failures.store_patience_s,
                Path(config.train.output),
                NeighbourTrials(trials),
            )
            signal.signal(signal.SIGTERM, agent.warn)
            return agent.run()


def _run_process(
    config: RunConfig,
    device: int,
    node_size: int,
    nodes_here: int,
    needs: MemoryNeeds,
    pipe: Connection,
    agent_ends: Sequence[Connection],
) -> None:
    """Runs a training process. `device`: its number among the machine's."""
    for other in agent_ends:  # If these stayed open here, the agent's end would go unnoticed.
        other.close()
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(device), str(node_size)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", os.environ["GLOO_SOCKET_IFNAME"])
    os.environ |= OUTLIVING_PEERS
    share_cores(node_size * nodes_here)
    link = AgentLink(pipe)
    try:
        TrainingProcess(config, link, node_size, needs).run()
    except BaseException as error:
        kind = next((name for name, known in ERROR_KINDS.items() if isinstance(error, known)), "failure")
        message = str(error) if kind != "failure" else f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        link.send("failed", json.dumps({"kind": kind, "message": message}))
        time.sleep(5)
        os._exit(1)
    os._exit(0)
