"""Agents of nodes without processes, on a store in memory."""

import time
from collections.abc import Mapping
from pathlib import Path

from motet.resilience.agent import NodeAgent, Successor
from motet.resilience.membership import RUN, RunRecord, key
from motet.resilience.store.store import StoreAwayError

PATIENCE_S = 1e6
NOWHERE = Path()


class FullStore:
    """In which anything may stand. Nodes 0 and 1 are there."""

    here = "127.0.0.1"

    def __init__(self, values: Mapping[str, str] | None = None) -> None:
        run = RunRecord(config={}).to_json()
        nodes = {name: "" for n in (0, 1) for name in (key("node", n), key("alive", n))}
        self.values = {RUN: run, **nodes, **(values or {})}
        self.is_away = False

    def sync(self) -> None:
        if self.is_away:
            raise StoreAwayError("nobody answers")

    def create(self, key: str, value: str) -> str:
        self.sync()
        return self.values.setdefault(key, value)

    def register(self, node: int | None = None) -> int:
        return 7

    def keep_alive(self, node: int) -> None:
        pass

    def time(self) -> float:
        return time.time()

    def close(self) -> None:
        pass


def agent_of(
    node: int | None, store: FullStore, successor: Successor | None = None, output: Path = NOWHERE
) -> NodeAgent:
    return NodeAgent(
        node, store, (), successor or (lambda membership, _, is_settled: membership), 1.0, PATIENCE_S, output
    )
