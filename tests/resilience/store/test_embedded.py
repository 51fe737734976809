"""The embedded store: what is written first stays, and nodes that are silent are taken out."""

import pytest

from motet.resilience.store import embedded
from motet.resilience.store.channel import MalformedMessageError
from motet.resilience.store.embedded import FIRST_SIGN_S, StoreContents


def sync(contents: StoreContents, now: float, alive: int | None = None, since: int = 0) -> dict[str, str | None]:
    changes = contents.answer({"op": "sync", "since": since, "alive": alive}, now)["changes"]
    assert isinstance(changes, dict)
    return changes


@pytest.fixture
def contents(monkeypatch: pytest.MonkeyPatch) -> StoreContents:
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    return StoreContents(1.0)


def tick(contents: StoreContents, until: float, since: float = 0.0) -> None:
    """Every tenth of a second."""
    for tenth in range(round(10 * since) + 1, round(10 * until) + 1):
        contents.tick(tenth / 10)


def test_what_was_written_first_stays(contents: StoreContents) -> None:
    for value in ("first", "second"):
        assert contents.answer({"op": "create", "key": "membership/2", "value": value}, 0.0) == {"value": "first"}
    revision = contents.answer({"op": "sync", "since": 0, "alive": None}, 0.0)["revision"]
    contents.answer({"op": "create", "key": "membership/3", "value": "third"}, 0.0)
    assert sync(contents, 0.0, since=revision) == {"membership/3": "third"}


def test_numbers_are_given_once(contents: StoreContents) -> None:
    given = [contents.answer({"op": "register", "node": node}, 0.0)["node"] for node in (None, 1, None)]
    assert given == [0, 1, 2]


def test_a_silent_node_is_taken_out(contents: StoreContents) -> None:
    contents.answer({"op": "register", "node": 0}, 0.0)
    sync(contents, 0.0, alive=0)
    tick(contents, 0.9)
    assert sync(contents, 0.9)["alive/0"] == ""
    sync(contents, 0.9, alive=0)
    tick(contents, 1.8, since=0.9)
    assert sync(contents, 1.8)["alive/0"] == ""
    tick(contents, 2.0, since=1.8)
    assert sync(contents, 2.0)["alive/0"] is None


def test_a_node_that_never_came_is_taken_out_later(contents: StoreContents) -> None:
    contents.answer({"op": "register", "node": 0}, 0.0)
    tick(contents, FIRST_SIGN_S - 0.1)
    assert sync(contents, 0.0)["alive/0"] == ""
    tick(contents, FIRST_SIGN_S + 0.2, since=FIRST_SIGN_S - 0.1)
    assert sync(contents, 0.0)["alive/0"] is None


def test_a_store_that_was_held_up_itself_judges_nobody(contents: StoreContents) -> None:
    contents.answer({"op": "register", "node": 0}, 0.0)
    sync(contents, 0.0, alive=0)
    tick(contents, 0.5)
    contents.tick(100.0)
    assert sync(contents, 100.0)["alive/0"] == ""
    tick(contents, 100.4, since=100.0)
    assert sync(contents, 100.4)["alive/0"] == ""
    tick(contents, 101.0, since=100.4)
    assert sync(contents, 101.0)["alive/0"] is None


def test_nodes_that_come_and_go_leave_room_for_those_who_train(
    contents: StoreContents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "MAX_KEYS", 10)
    for _ in range(3):
        contents.answer({"op": "register", "node": None}, 0.0)
    for request in ({"op": "register", "node": None}, {"op": "create", "key": "trial/0", "value": ""}):
        with pytest.raises(MalformedMessageError, match="a request to join after 5 changes"):
            contents.answer(request, 0.0)
    for number in range(4):
        contents.answer({"op": "create", "key": f"membership/{number}", "value": ""}, 0.0)
