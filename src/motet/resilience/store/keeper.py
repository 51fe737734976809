"""Keeps the store: starts its process, restarts it when it is lost, and sees how the training ends.

The store may be lost at any moment, and with it what was written a moment ago. So the keeper writes what it has read
into the next store, and the agents write what they know (store_failover.py); nobody proposes a membership before that
(`OPEN`). Training continues meanwhile: it needs the store only for new memberships. A store that is stopped still has
its port, so it is killed first.

If the keeper itself is lost, on one machine everything ends with it. On several machines, a `StandbyProcess` beside
each node's agent reserves a port from the start. When its agent asks, it opens a store there to which other nodes come;
if they are enough, it keeps the store from then on, as the process of `--listen` did. Otherwise it gives up, and may be
asked again. It ends with the agent's process, which stays until the training is over if it keeps the store.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from motet.config import RunConfig
from motet.errors import UserError
from motet.resilience.agent import SEEN_END
from motet.resilience.failure_log import write_store_end
from motet.resilience.membership import (
    FAILURE,
    FIRST_GENERATION,
    OPEN,
    OVER,
    Address,
    Change,
    Heartbeats,
    Membership,
    RunRecord,
    Store,
    StoreLostError,
    key,
    next_membership,
    propose,
    registered,
    silence_s,
    store_timeout_s,
    unlogged_changes,
)
from motet.resilience.process_control import FINISH_S, Children, describe_exit
from motet.resilience.store.store import StoreClient, StoreNotStartedError, StoreProcess
from motet.resilience.store.store_failover import (
    FIRST_TERM,
    GATHERING,
    MOVES,
    REJOIN_S,
    TERM,
    Gathered,
    Term,
    gathered,
    is_read_by_enough,
    may_open,
    term_text,
)

POLL_S = 0.1
MAX_FRUITLESS = 5
"""Stores in a row that may be lost before they could be read once."""
NUMBERS_APART = 1000
"""Distance of the first node numbers of two stores while nodes are awaited, so that no number is given twice."""


class StoreDiesError(RuntimeError):
    """The store dies whenever it is started."""


@dataclass(frozen=True)
class TrainingEnd:
    """How a training ended. Without a result or a failure, all nodes were lost."""

    result: str | None
    """JSON from rank 0."""
    failure: str | None
    """JSON of kind and message."""
    last: Membership
    unlogged: tuple[Change, ...]
    """Changes that the failure log does not have."""
    is_settled: bool
    """No node can have continued with another store from an older membership than the last."""


@dataclass
class StoreKeeper:
    """Runs the store of one training until it ends."""

    process: StoreProcess
    children: Children
    run_record: RunRecord
    plan: str
    """JSON of the first membership's plan."""
    num_nodes: int
    """Number of nodes of the first membership."""
    detect_s: float
    silence_s: float
    """Silence of all nodes after which they count as lost; longer than they continue without a store."""
    output: Path
    tolerate: int = 1
    """Nodes that may be lost at once."""
    moves: bool = False
    """If this process or its machine is lost, nodes continue with a store on another machine."""
    term: Term = FIRST_TERM
    """The store's term."""
    agents: Sequence[BaseProcess] = ()
    """Agents of the first nodes, if they are children of this process. Agents that have ended are not waited for."""
    _history: list[Membership] = field(default_factory=list)
    """All memberships."""
    _written: dict[str, str] = field(default_factory=dict)
    """Other values that the next store must start with."""
    _settled: int = FIRST_GENERATION
    """The newest generation that enough nodes have read."""
    _end: TrainingEnd | None = None
    _deadline: float = 0.0
    """For all agents to have seen the end."""
    _num_lost: int = 0
    """Number of stores that were lost."""
    _num_fruitless: int = 0
    _heartbeats: Heartbeats | None = None

    def begin(self, *, awaits_nodes: bool) -> None:
        """Starts the store. If nodes are not awaited, those with the first numbers are present already."""
        if not awaits_nodes:
            self._history.append(self._first())
        self.process.start(self.children)

    @property
    def has_begun(self) -> bool:
        """Whether all nodes of the first membership have come."""
        return bool(self._history)

    def run_from(self, found: Gathered) -> TrainingEnd:
        """Runs a store that has gathered nodes which lost another store."""
        self._history, self._settled = list(found.line), found.settled
        self._written[key("settled", found.settled)] = ""
        return self.run()

    def run(self) -> TrainingEnd:
        """Runs until the training is over and all agents know it, or all nodes are lost. Raises `StoreDiesError`."""
        while True:
            try:
                with self._client() as store:
                    self._write_again(store)
                    while not self._is_over(store):
                        time.sleep(POLL_S)
                    assert self._end is not None
                    return self._end
            except StoreLostError as error:
                self._start_again(error)

    @contextmanager
    def _client(self) -> Iterator[StoreClient]:
        # Must not be open while a store's process is forked, as the client has a thread.
        with StoreClient(self.process.address, store_timeout_s(self.detect_s), self.process.kill) as client:
            client.connect()
            yield client

    def _start_again(self, loss: StoreLostError) -> None:
        code = self.process.wait_for_end()
        self._num_lost += 1
        self._num_fruitless += 1
        if self._num_fruitless > MAX_FRUITLESS:
            raise StoreDiesError("the store's process dies whenever it is started") from None
        how = str(loss) if code is None else f"its process {describe_exit(code)}"
        print(f"motet: the store was lost ({how}); it is started again", file=sys.stderr, flush=True)
        try:
            self.process.start(self.children)
        except UserError as error:  # Another process listens there now.
            raise StoreDiesError(str(error)) from None
        write_store_end(self.output, how, "it was started again, at the same address")

    def _first(self, number: int = 0) -> Membership:
        """Returns the first membership. `number`: of its first node."""
        nodes, after = tuple(range(number, number + self.num_nodes)), number + self.num_nodes
        return Membership(generation=FIRST_GENERATION, nodes=nodes, num_admitted=after, plan=self.plan)

    def _write_again(self, store: Store) -> None:
        for membership in self._history:
            propose(store, membership)
        if self.moves:
            store.set(MOVES, "")
            store.set(TERM, term_text(self.term))
        for name, value in self._written.items():
            store.set(name, value)
        if not self._history:
            store.set(OPEN, str(self._num_lost * NUMBERS_APART))
        elif not self._num_lost:
            store.set(OPEN, str(self._history[-1].num_admitted))
        self.run_record.write(store)  # Last: nobody looks for anything else before this is there.
        self._heartbeats = Heartbeats(store, self.silence_s)

    def _write(self, store: Store, name: str, value: str) -> None:
        self._written[name] = value
        store.set(name, value)

    def _is_over(self, store: Store) -> bool:
        if self._end is None:
            self._follow(store)
            self._end = self._seen_end(store)
            self._num_fruitless = 0
            if self._end is None or (self._end.result is None and self._end.failure is None):
                return self._end is not None
            self._deadline = time.monotonic() + FINISH_S + 1.0
            # Recorded here first: if the store is lost at this moment, the next one must start with it.
            self._written |= {OVER: ""} if self._end.failure is None else {FAILURE: self._end.failure, OVER: ""}
            store.set(OVER, "")
        last = self._end.last
        # An agent that found no store when it looks for the end would wait for another one.
        all_know = store.check([f"{SEEN_END}/{node}" for node in (*last.all_nodes, *last.waiting)])
        has_ended = all_know and not any(agent.is_alive() for agent in self.agents)
        return has_ended or time.monotonic() > self._deadline

    def _follow(self, store: Store) -> None:
        """Reads what is new in the store."""
        first = self._num_lost * NUMBERS_APART
        if not self._history and registered(store) - first >= self.num_nodes:
            self._history.append(self._first(first))
            propose(store, self._first(first))
        while self._history and (newer := next_membership(store, self._history[-1].generation)) is not None:
            self._history.append(newer)
        if self._history:
            newest = self._history[-1].generation
            is_new = self.moves and self._settled < newest
            if is_new and is_read_by_enough(store, self._history, self._settled, self.tolerate):
                # What this process has seen survives the store.
                self._settled = newest
                self._write(store, key("settled", newest), "")
        for node, agent in enumerate(self.agents):
            if key("ended", node) not in self._written and not agent.is_alive():
                self._write(store, key("ended", node), "")
        for membership in reversed(self._history):
            logged = key("logged", membership.generation)
            if logged in self._written or not store.check([logged]):
                break
            self._written[logged] = ""

    def _seen_end(self, store: Store) -> TrainingEnd | None:
        if not self._history:
            return None
        last = self._history[-1]
        if store.check([FAILURE]):
            return self._ended(store, failure=store.get(FAILURE).decode())
        if last.nodes and store.check([key("done", last.generation, node) for node in last.nodes]):
            return self._ended(store, result=store.get(key("result", last.generation)).decode())
        alive = [n for n in last.all_nodes if n >= len(self.agents) or self.agents[n].is_alive()]
        assert self._heartbeats is not None
        if len(self._heartbeats.missing(alive, time.monotonic())) == len(alive):
            return self._ended(store)
        return None

    def _ended(self, store: Store, *, result: str | None = None, failure: str | None = None) -> TrainingEnd:
        last = self._history[-1]
        is_settled = not self.moves or self._settled == last.generation
        return TrainingEnd(result, failure, last, unlogged_changes(store, last.generation), is_settled)


GAVE_UP, KEEPS = "gave up", "keeps"


@dataclass(frozen=True)
class OpenRequest:
    """Asks the standby to open a store. `run`: as `RunRecord` writes it."""

    term: Term
    run: bytes


class StandbyProcess:
    """The agent's handle of its standby process. `host`: where other machines reach this one.

    Raises `UserError` if no port can be reserved there."""

    def __init__(self, children: Children, host: str, config: RunConfig) -> None:
        self._pipe, theirs = Pipe()
        children.start(_stand_by, theirs, host, config)
        theirs.close()
        told = self._pipe.recv()
        if isinstance(told, UserError):
            raise told
        self.address: Address = told
        self._is_free, self._keeps = True, False
        self._end: TrainingEnd | str | None = None

    @property
    def is_free(self) -> bool:
        """Whether nothing has been asked of it, or it has given up."""
        self._hear()
        return self._is_free

    def begin(self, term: Term, run: bytes) -> None:
        """Asks it to open a store, and to keep it if enough nodes come."""
        self._is_free = False
        self._pipe.send(OpenRequest(term, run))

    def wait(self) -> TrainingEnd | str | None:
        """If it keeps the store: waits until the training is over, and returns how it ended, or in words why the store
        could not be kept. None: it does not keep the store."""
        self._hear()
        try:
            while self._keeps and self._end is None:
                self._take(self._pipe.recv())
        except EOFError:
            return "its process died"
        return self._end

    def _hear(self) -> None:
        try:
            while self._pipe.poll():
                self._take(self._pipe.recv())
        except EOFError:
            self._is_free = False

    def _take(self, told: object) -> None:
        self._is_free = self._is_free or told == GAVE_UP
        self._keeps = self._keeps or told == KEEPS
        if told not in (GAVE_UP, KEEPS):
            assert isinstance(told, TrainingEnd | str)
            self._end = told


def _stand_by(pipe: Connection, host: str, config: RunConfig) -> None:
    with ExitStack() as stack:
        try:
            process = stack.enter_context(StoreProcess((host, 0)))
        except UserError as error:
            pipe.send(error)
            return
        children = stack.enter_context(Children())
        pipe.send(process.address)
        while True:
            request = pipe.recv()
            keeper = _keeper(config, request, process, children)
            found = _gather(keeper, request)
            if found is None:
                process.kill()
                pipe.send(GAVE_UP)
                continue
            pipe.send(KEEPS)
            host, port = process.address
            told = f"the store's machine was lost; this one keeps it now: motet train RUN.yaml --join {host}:{port}"
            print(f"motet: {told}", file=sys.stderr, flush=True)
            replaced = f"another one took its place, at {host}:{port}"
            write_store_end(keeper.output, "it did not answer any more", replaced)
            try:
                pipe.send(keeper.run_from(found))
            except (StoreNotStartedError, StoreDiesError) as error:
                pipe.send(str(error))
            return


def _keeper(config: RunConfig, request: OpenRequest, process: StoreProcess, children: Children) -> StoreKeeper:
    failures = config.train.failures
    assert failures is not None
    return StoreKeeper(
        process=process,
        children=children,
        run_record=RunRecord.from_json(request.run),
        plan="",
        num_nodes=0,
        detect_s=failures.detect_s,
        silence_s=failures.store_patience_s + 4 * store_timeout_s(failures.detect_s),
        output=Path(config.train.output),
        tolerate=failures.tolerate,
        moves=True,
        term=request.term,
    )


def _gather(keeper: StoreKeeper, request: OpenRequest) -> Gathered | None:
    """Waits until enough nodes have come, and then for the others for a while. None: too few have come."""
    answer_s = store_timeout_s(keeper.detect_s)
    more_s = silence_s(keeper.detect_s) + REJOIN_S
    deadline, enough_since = time.monotonic() + 4 * answer_s, None
    try:
        keeper.process.start(keeper.children)
        with StoreClient(keeper.process.address, answer_s, keeper.process.kill) as store:
            store.connect()
            for name, value in ((TERM, term_text(request.term)), (MOVES, ""), (GATHERING, "")):
                store.set(name, value)
            keeper.run_record.write(store)  # Last: nobody looks for anything else before this is there.
            while (now := time.monotonic()) < deadline:
                found = gathered(store, keeper.tolerate)
                if found is not None and may_open(found.tail, found.nodes, keeper.tolerate):
                    enough_since = enough_since or now
                    if found.nodes >= {*found.line[-1].all_nodes} or now - enough_since > more_s:
                        return found
                time.sleep(POLL_S)
    except (StoreLostError, StoreNotStartedError, UserError) as error:
        print(f"motet: no store could be opened here: {error}", file=sys.stderr, flush=True)
    return None
