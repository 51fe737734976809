"""Starts a training in its store, and waits for its end."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess

from motet.resilience.membership import (
    FAILURE,
    FIRST_GENERATION,
    RUN,
    Change,
    Membership,
    RunRecord,
    is_over,
    key,
    memberships_after,
    num_registered,
    unlogged_changes,
)
from motet.resilience.process_control import FINISH_S
from motet.resilience.store.store import Store, StoreAwayError

POLL_S = 0.1


@dataclass(frozen=True)
class TrainingEnd:
    """The end of a training. Without a result or a failure, all nodes were lost."""

    result: str | None
    """JSON from rank 0."""
    failure: str | None
    """JSON of kind and message."""
    last: Membership
    unlogged: tuple[Change, ...]
    """Changes that the failure log does not have."""


def begin_training(store: Store, run: RunRecord, first: Membership | None) -> None:
    """Writes the run into its store. `first`: the first membership, if its nodes are known; they count as alive until
    they connect, for some seconds."""
    if first is not None:
        for node in first.nodes:
            store.register(node)
        store.create(key("membership", FIRST_GENERATION), first.to_json())
    store.create(RUN, run.to_json())  # Last: nobody looks for anything else before this is there.


def first_membership(num_nodes: int, plan: str) -> Membership:
    return Membership(generation=FIRST_GENERATION, nodes=tuple(range(num_nodes)), num_admitted=num_nodes, plan=plan)


def watch_training(store: Store, first: Membership, agents: Sequence[BaseProcess] = ()) -> TrainingEnd:
    """Returns when the training is over and its nodes know it, or when all nodes are lost. It begins under the `first`
    membership when so many nodes have come. `agents`: those that are children of this process.

    While the store is away, training goes on, and nobody here can know how far it has come: this waits as long as that
    takes, unless all `agents` have ended."""
    known: list[Membership] = []
    is_away = False
    end, deadline = None, 0.0
    while True:
        try:
            store.sync()
            if is_away:
                is_away = False
                _tell("the store answers again")
            if not known and num_registered(store.values) >= len(first.nodes):
                store.create(key("membership", FIRST_GENERATION), first.to_json())
            known += memberships_after(store.values, len(known))
            newest = known[-1] if known else None
            if newest is None:
                continue
            if end is None and is_over(store.values, newest):
                result = store.values.get(key("result", newest.generation))
                end = _end(store, newest, result, store.values.get(FAILURE))
                deadline = time.monotonic() + FINISH_S + 1.0
            if end is None and not any(key("alive", node) in store.values for node in newest.all_nodes):
                return _end(store, newest, None, None)
            if end is not None:
                all_know = all(
                    key("seen_end", node) in store.values or key("alive", node) not in store.values
                    for node in (*newest.all_nodes, *newest.waiting)
                )
                if (all_know and not any(agent.is_alive() for agent in agents)) or time.monotonic() > deadline:
                    return end
        except StoreAwayError as error:
            if not is_away:
                is_away = True
                _tell(f"{error}; training goes on, and memberships do not change until the store answers")
            if agents and not any(agent.is_alive() for agent in agents):
                return end or TrainingEnd(None, None, known[-1] if known else first, ())
        finally:
            time.sleep(POLL_S)


def _tell(what: str) -> None:
    print(f"motet: {what}", file=sys.stderr, flush=True)


def _end(store: Store, last: Membership, result: str | None, failure: str | None) -> TrainingEnd:
    return TrainingEnd(None if failure else result, failure, last, unlogged_changes(store.values, last.generation))
