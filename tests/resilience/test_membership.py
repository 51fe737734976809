"""Who is missing, by the signs of life in a store."""

from itertools import accumulate, takewhile
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.resilience.agent import POLL_S
from motet.resilience.membership import HEARTBEAT_S, Heartbeats, silence_s


class Store(dict[str, str]):
    """Whose `get` would wait for a key that is not there."""

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key].encode()

    def set(self, key: str, value: str) -> None:
        self[key] = value


def missing_at(beats: Heartbeats, node: int, *times: float) -> list[bool]:
    return [node in beats.missing([node], now) for now in times]


def test_a_node_whose_sign_does_not_change_is_missing() -> None:
    store = Store()
    ours, theirs = Heartbeats(store, 1.0), Heartbeats(store, 1.0)  # type: ignore[arg-type]
    theirs.send(1)
    assert missing_at(ours, 1, 0.0, 0.4, 0.8) == [False, False, False]
    theirs.send(1)
    assert missing_at(ours, 1, 1.2, 1.6, 2.0) == [False, False, False]
    assert missing_at(ours, 1, 2.4) == [True]


def test_a_node_that_died_before_its_first_sign_is_missing() -> None:
    """It has a number, so others take it in."""
    store = Store()
    beats = Heartbeats(store, 1.0)  # type: ignore[arg-type]
    assert missing_at(beats, 1, 0.0, 0.4, 0.8, 1.2) == [False, False, False, True]
    Heartbeats(store, 1.0).send(1)  # type: ignore[arg-type]
    assert missing_at(beats, 1, 1.6) == [False]


@given(st.floats(0.3, 10), st.randoms(use_true_random=False))
def test_a_silence_is_noticed_in_time(detect_s: float, rng: Random) -> None:
    """Heartbeats and looks, each a round of the agent late at most; the other one dies at any moment."""
    store = Store()
    ours, theirs = Heartbeats(store, silence_s(detect_s)), Heartbeats(store, 1.0)  # type: ignore[arg-type]
    dies_at = 2 + rng.random()
    events = [(at, "beat") for at in rounds(rng, dies_at)] + [(at, "look") for at in rounds(rng, dies_at + detect_s)]
    noticed = []
    for at, what in sorted(events):
        if what == "beat":
            theirs.send(1)
        elif ours.missing([1], at):
            noticed.append(at)
    assert noticed
    assert min(noticed) > dies_at


def rounds(rng: Random, end: float) -> list[float]:
    times = accumulate(iter(lambda: HEARTBEAT_S + POLL_S * rng.random(), None), initial=HEARTBEAT_S * rng.random())
    return list(takewhile(lambda at: at <= end, times))


@pytest.mark.parametrize("timeout_s", [0.15, 1.0])
def test_who_was_held_up_does_not_judge_others(timeout_s: float) -> None:
    beats = Heartbeats(Store({"beat/1": "5"}), timeout_s)  # type: ignore[arg-type]
    assert missing_at(beats, 1, 0.0, 100.0, 100.1, 200.0) == [False] * 4
    assert missing_at(beats, 1, *(200.0 + i / 20 for i in range(1, 40)))[-1]
