"""A wrong clock is reported, and keeps no node out."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from agents import FullStore, agent_of
from etcd_servers import etcd_servers

from motet.resilience import agent as agent_module
from motet.resilience.failure_log import FAILURES
from motet.resilience.health import clock
from motet.resilience.health.clock import clock_error
from motet.resilience.store.embedded import StoreContents
from motet.resilience.store.etcd import EtcdStore


class StoreOfAnotherTime(FullStore):
    """`here`: times that this machine's clock shows before and after the store's has been read."""

    def __init__(self, there: float, *here: float) -> None:
        super().__init__()
        self.there, self.shown = there, list(here)

    def time(self) -> float:
        return self.there


TOLD = "the store's: the times that it writes into the failure log are wrong"


@pytest.mark.parametrize(
    ("there", "before", "after", "error"),
    [
        (1000.0, 1000.0, 1000.0, None),
        (1000.0, 1006.0, 1006.0, None),  # The store may tell whole seconds.
        (1000.0, 1006.5, 1006.5, f"its clock is 6 s ahead of {TOLD}"),
        (1000.0, 995.0, 995.0, None),
        (1000.0, 994.0, 994.0, f"its clock is 6 s behind {TOLD}"),
        (1000.0, 990.0, 1010.0, None),  # Nobody knows when within that time the store has looked.
        (1000.0, 4600.0, 4620.0, f"its clock is 3599 s ahead of {TOLD}"),
        (1000.0, 0.0, 20.0, f"its clock is 980 s behind {TOLD}"),
    ],
)
def test_what_a_difference_means(
    monkeypatch: pytest.MonkeyPatch, there: float, before: float, after: float, error: str | None
) -> None:
    shown = [before, after]
    monkeypatch.setattr(clock, "time", SimpleNamespace(time=lambda: shown.pop(0)))
    assert clock_error(StoreOfAnotherTime(there)) == error
    assert not shown


def test_a_node_with_a_wrong_clock_joins_and_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store = StoreOfAnotherTime(time.time() - 3600)
    agent = agent_of(None, store, output=tmp_path)
    assert not agent.is_over()
    assert agent.node == 7
    [line] = [json.loads(text) for text in (tmp_path / FAILURES).read_text().splitlines()]
    [found] = line["changes"]
    assert (found["kind"], found["node"], line["done"]) == ("clock", 7, "nothing")
    assert found["how"].startswith("its clock is 3599 s ahead of the store's")
    assert "motet: node 7: its clock is 3599 s ahead" in capfd.readouterr().err


def test_a_right_clock_is_not_told(tmp_path: Path) -> None:
    agent = agent_of(None, FullStore(), output=tmp_path)
    agent.is_over()
    assert agent.node == 7
    assert not (tmp_path / FAILURES).exists()


def test_a_store_that_is_away_while_it_is_asked_for_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node has no number yet, and asks again."""
    store = FullStore()
    agent = agent_of(None, store, output=tmp_path)

    def away(asked: FullStore) -> None:
        asked.is_away = True
        asked.sync()

    with monkeypatch.context() as patched:
        patched.setattr(agent_module, "clock_error", away)
        assert not agent.is_over()
    assert agent.node is None
    store.is_away = False
    agent.is_over()
    assert agent.node == 7


def test_stores_tell_their_time(tmp_path: Path) -> None:
    before = time.time()
    assert before <= StoreContents(1e6).answer({"op": "time"}, 0.0)["time"] <= time.time()
    with (
        etcd_servers(tmp_path, 1) as servers,
        EtcdStore(servers.address("run"), b"a secret of this run", 10, is_new=True) as store,
    ):
        assert clock_error(store) is None
        assert before - 1 <= store.time() <= time.time()
