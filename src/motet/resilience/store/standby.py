"""A process beside each node's agent that keeps the store if the machine that had it is lost.

It holds a port of its machine from the start. When the agent says so, it opens a store there, to which other nodes come
(gathering.py); if they are enough, it keeps the store from then on, as the process of `--listen` did (keeper.py).
Otherwise it gives up, and may be asked again.

It ends with the agent's process: who kept the store for others must stay until the training is over, whatever became of
its own node.
"""

import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from motet.config import RunConfig
from motet.errors import UserError
from motet.resilience.failure_log import write_store_end
from motet.resilience.membership import Address, StoreLostError, call_s, silence_s
from motet.resilience.node_process import Children
from motet.resilience.store.gathering import GATHERING, MOVES, TERM, Gathered, Term, gathered, may_go_on, term_text
from motet.resilience.store.keeper import POLL_S, End, Keeper, StoreDiesError
from motet.resilience.store.run_record import RunRecord
from motet.resilience.store.store import StoreClient, StoreNotStartedError, StoreProcess
from motet.resilience.store.store_failover import REUNION_S

GAVE_UP, KEEPS = "gave up", "keeps"


@dataclass(frozen=True)
class Begin:
    term: Term
    run: bytes
    """As `RunRecord` writes it."""


class StandbyProcess:
    """The agent's end. `host`: where other machines reach this one.

    Raises `UserError` if no port can be held there."""

    def __init__(self, children: Children, host: str, config: RunConfig) -> None:
        self._pipe, theirs = Pipe()
        children.start(_stand_by, theirs, host, config)
        theirs.close()
        told = self._pipe.recv()
        if isinstance(told, UserError):
            raise told
        self.address: Address = told
        self._is_free, self._keeps = True, False
        self._end: End | str | None = None

    @property
    def is_free(self) -> bool:
        """Nothing has been asked of it, or it has given up."""
        self._hear()
        return self._is_free

    def begin(self, term: Term, run: bytes) -> None:
        """Opens a store, if enough nodes come to it."""
        self._is_free = False
        self._pipe.send(Begin(term, run))

    def wait(self) -> End | str | None:
        """If it keeps the store: until the training is over; how it has ended (in words: the store could not be kept).
        None: it does not keep it."""
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
            assert isinstance(told, End | str)
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
            begin = pipe.recv()
            keeper = _keeper(config, begin, process, children)
            found = _gather(keeper, begin)
            if found is None:
                process.kill()
                pipe.send(GAVE_UP)
                continue
            pipe.send(KEEPS)
            _tell(keeper)
            try:
                pipe.send(keeper.attend_from(found))
            except (StoreNotStartedError, StoreDiesError) as error:
                pipe.send(str(error))
            return


def _keeper(config: RunConfig, begin: Begin, process: StoreProcess, children: Children) -> Keeper:
    failures = config.train.failures
    assert failures is not None
    return Keeper(
        process=process,
        children=children,
        run=RunRecord.from_json(begin.run),
        plan="",
        num_nodes=0,
        detect_s=failures.detect_s,
        silence_s=failures.store_patience_s + 4 * call_s(failures.detect_s),
        output=Path(config.train.output),
        tolerate=failures.tolerate,
        moves=True,
        term=begin.term,
    )


def _gather(keeper: Keeper, begin: Begin) -> Gathered | None:
    """Until enough nodes have come, and the others too or not within a while. None: they have not."""
    answer_s = call_s(keeper.detect_s)
    more_s = silence_s(keeper.detect_s) + REUNION_S
    deadline, enough_since = time.monotonic() + 4 * answer_s, None
    try:
        keeper.process.start(keeper.children)
        with StoreClient(keeper.process.address, answer_s, keeper.process.kill) as store:
            store.connect()
            for key, value in ((TERM, term_text(begin.term)), (MOVES, ""), (GATHERING, "")):
                store.set(key, value)
            keeper.run.write(store)  # Last: nobody looks for anything else before this is there.
            while (now := time.monotonic()) < deadline:
                found = gathered(store, keeper.tolerate)
                if found is not None and may_go_on(found, keeper.tolerate):
                    enough_since = enough_since or now
                    if found.nodes >= {*found.line[-1].everyone} or now - enough_since > more_s:
                        return found
                time.sleep(POLL_S)
    except (StoreLostError, StoreNotStartedError, UserError) as error:
        print(f"motet: no store could be opened here: {error}", file=sys.stderr, flush=True)
    return None


def _tell(keeper: Keeper) -> None:
    host, port = keeper.process.address
    told = f"the store's machine was lost; this one keeps it now: motet train RUN.yaml --join {host}:{port}"
    print(f"motet: {told}", file=sys.stderr, flush=True)
    write_store_end(keeper.output, "it did not answer any more", f"another one took its place, at {host}:{port}")
