"""Whoever keeps the store: starts its process, and again when it is lost; sees how the training ends.

The store may be lost at any moment, and with it what was written a moment ago. So what the keeper has read it writes
again into the next one, and the agents do the same (reunion.py); nobody proposes a membership before (`OPEN`). Training
goes on meanwhile: it needs the store for new memberships alone. A store that is stopped has its port still; so it is
killed first.

If the keeper itself is lost, on one machine all ends with it; on several another machine has the next one
(standby.py).
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from motet.errors import UserError
from motet.resilience.agent import SEEN_END
from motet.resilience.failure_log import write_store_end
from motet.resilience.membership import (
    FAILURE,
    FIRST_GENERATION,
    OPEN,
    OVER,
    Beats,
    Change,
    Membership,
    Store,
    StoreLostError,
    call_s,
    done_key,
    ended_key,
    logged_key,
    next_membership,
    propose,
    registered,
    result_key,
    settled_key,
    unlogged_changes,
)
from motet.resilience.node_process import FINISH_S, Children, how_it_ended
from motet.resilience.store.gathering import FIRST_TERM, MOVES, TERM, Gathered, Term, is_read_by_enough, term_text
from motet.resilience.store.run_record import RunRecord
from motet.resilience.store.store import StoreClient, StoreProcess

POLL_S = 0.1
MOST_FRUITLESS = 5
"""Stores, one after another, that were lost before they could be looked into once."""
NUMBERS_APART = 1000
"""Between the first numbers that two stores give while nodes are awaited: none is given twice."""


class StoreDiesError(RuntimeError):
    """As often as it is started."""


@dataclass(frozen=True)
class End:
    """Of a training. Without a result or a failure, all nodes were lost."""

    result: str | None
    """JSON, as rank 0 put it."""
    failure: str | None
    """JSON of kind and message."""
    last: Membership
    unlogged: tuple[Change, ...]
    """Of which the failure log does not tell."""
    is_settled: bool
    """No node can have gone on elsewhere from an older membership than the last."""


@dataclass
class Keeper:
    process: StoreProcess
    children: Children
    run: RunRecord
    plan: str
    """JSON: the first membership's."""
    num_nodes: int
    """Of the first membership."""
    detect_s: float
    silence_s: float
    """If all nodes are silent for so long, they are lost; longer than they go on without a store."""
    output: Path
    tolerate: int = 1
    """Nodes that may be lost at once."""
    moves: bool = False
    """If this process or its machine is lost, nodes go on with a store on another machine."""
    term: Term = FIRST_TERM
    """Of this store."""
    agents: Sequence[BaseProcess] = ()
    """Of the first nodes, if they are children of this process. Those that have ended are not waited for."""
    _history: list[Membership] = field(default_factory=list)
    """All memberships."""
    _written: dict[str, str] = field(default_factory=dict)
    """What else the next store has to begin with."""
    _settled: int = FIRST_GENERATION
    """The newest generation that enough nodes have read."""
    _end: End | None = None
    _deadline: float = 0.0
    """For all agents to have seen the end."""
    _num_lost: int = 0
    """Stores."""
    _num_fruitless: int = 0
    _beats: Beats | None = None

    def begin(self, *, awaits_nodes: bool) -> None:
        """Starts the store. If nodes are not awaited, they are there: those with the first numbers."""
        if not awaits_nodes:
            self._history.append(self._first())
        self.process.start(self.children)

    @property
    def has_begun(self) -> bool:
        """All nodes of the first membership have come."""
        return bool(self._history)

    def attend_from(self, found: Gathered) -> End:
        """`attend`, where the store has gathered nodes that lost another one."""
        self._history, self._settled = list(found.line), found.settled
        self._written[settled_key(found.settled)] = ""
        return self.attend()

    def attend(self) -> End:
        """Until all is over and all agents know it, or all nodes are lost. Raises `StoreDiesError`."""
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
        # Not while another store's process is forked: the client has a thread.
        with StoreClient(self.process.address, call_s(self.detect_s), self.process.kill) as client:
            client.connect()
            yield client

    def _start_again(self, loss: StoreLostError) -> None:
        code = self.process.wait_for_end()
        self._num_lost += 1
        self._num_fruitless += 1
        if self._num_fruitless > MOST_FRUITLESS:
            raise StoreDiesError("the process that has the store dies whenever it is started") from None
        how = str(loss) if code is None else f"its process {how_it_ended(code)}"
        print(f"motet: the store was lost ({how}); it is started again", file=sys.stderr, flush=True)
        try:
            self.process.start(self.children)
        except UserError as error:  # Somebody else listens there now.
            raise StoreDiesError(str(error)) from None
        write_store_end(self.output, how, "it was started again, at the same address")

    def _first(self, number: int = 0) -> Membership:
        """`number`: of its first node."""
        nodes, after = tuple(range(number, number + self.num_nodes)), number + self.num_nodes
        return Membership(generation=FIRST_GENERATION, nodes=nodes, num_known=after, plan=self.plan)

    def _write_again(self, store: Store) -> None:
        for membership in self._history:
            propose(store, membership)
        if self.moves:
            store.set(MOVES, "")
            store.set(TERM, term_text(self.term))
        for key, value in self._written.items():
            store.set(key, value)
        if not self._history:
            store.set(OPEN, str(self._num_lost * NUMBERS_APART))
        elif not self._num_lost:
            store.set(OPEN, str(self._history[-1].num_known))
        self.run.write(store)  # Last: nobody looks for anything else before this is there.
        self._beats = Beats(store, self.silence_s)

    def _write(self, store: Store, key: str, value: str) -> None:
        self._written[key] = value
        store.set(key, value)

    def _is_over(self, store: Store) -> bool:
        if self._end is None:
            self._follow(store)
            self._end = self._seen_end(store)
            self._num_fruitless = 0
            if self._end is None or (self._end.result is None and self._end.failure is None):
                return self._end is not None
            self._deadline = time.monotonic() + FINISH_S + 1.0
            # First here: if the store is lost at this moment, the next one has to begin with it.
            self._written |= {OVER: ""} if self._end.failure is None else {FAILURE: self._end.failure, OVER: ""}
            store.set(OVER, "")
        last = self._end.last
        # If an agent found no store where it looks for the end, it would wait for another one.
        all_know = store.check([f"{SEEN_END}/{node}" for node in (*last.everyone, *last.waiting)])
        has_ended = all_know and not any(agent.is_alive() for agent in self.agents)
        return has_ended or time.monotonic() > self._deadline

    def _follow(self, store: Store) -> None:
        """Takes what is new in the store over."""
        first = self._num_lost * NUMBERS_APART
        if not self._history and registered(store) - first >= self.num_nodes:
            self._history.append(self._first(first))
            propose(store, self._first(first))
        while self._history and (newer := next_membership(store, self._history[-1].generation)) is not None:
            self._history.append(newer)
        if self._history:
            self._settle(store)
        for node, agent in enumerate(self.agents):
            if ended_key(node) not in self._written and not agent.is_alive():
                self._write(store, ended_key(node), "")
        for membership in reversed(self._history):
            key = logged_key(membership.generation)
            if key in self._written or not store.check([key]):
                break
            self._written[key] = ""

    def _settle(self, store: Store) -> None:
        """What this process has seen survives the store."""
        newest = self._history[-1].generation
        if not self.moves or self._settled == newest:
            return
        if is_read_by_enough(store, self._history, self._settled, self.tolerate):
            self._settled = newest
            self._write(store, settled_key(newest), "")

    def _seen_end(self, store: Store) -> End | None:
        if not self._history:
            return None
        last = self._history[-1]
        if store.check([FAILURE]):
            return self._ended(store, failure=store.get(FAILURE).decode())
        if last.nodes and store.check([done_key(last.generation, node) for node in last.nodes]):
            return self._ended(store, result=store.get(result_key(last.generation)).decode())
        alive = [n for n in last.everyone if n >= len(self.agents) or self.agents[n].is_alive()]
        assert self._beats is not None
        if len(self._beats.missing(alive, time.monotonic())) == len(alive):
            return self._ended(store)
        return None

    def _ended(self, store: Store, *, result: str | None = None, failure: str | None = None) -> End:
        last = self._history[-1]
        is_settled = not self.moves or self._settled == last.generation
        return End(result, failure, last, unlogged_changes(store, last.generation), is_settled)
