"""Who is missing, by the signs of life in a store."""

import pytest

from motet.resilience.membership import Beats


class Store(dict[str, str]):
    """Whose `get` would wait for a key that is not there."""

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key].encode()

    def set(self, key: str, value: str) -> None:
        self[key] = value


def missing_at(beats: Beats, node: int, *times: float) -> list[bool]:
    return [node in beats.missing([node], now) for now in times]


def test_a_node_whose_sign_does_not_change_is_missing() -> None:
    store = Store()
    ours, theirs = Beats(store, 1.0), Beats(store, 1.0)  # type: ignore[arg-type]
    theirs.give(1)
    assert missing_at(ours, 1, 0.0, 0.4, 0.8) == [False, False, False]
    theirs.give(1)
    assert missing_at(ours, 1, 1.2, 1.6, 2.0) == [False, False, False]
    assert missing_at(ours, 1, 2.4) == [True]


def test_a_node_that_died_before_its_first_sign_is_missing() -> None:
    """It has a number, so others take it in."""
    store = Store()
    beats = Beats(store, 1.0)  # type: ignore[arg-type]
    assert missing_at(beats, 1, 0.0, 0.4, 0.8, 1.2) == [False, False, False, True]
    Beats(store, 1.0).give(1)  # type: ignore[arg-type]
    assert missing_at(beats, 1, 1.6) == [False]


@pytest.mark.parametrize("timeout_s", [0.15, 1.0])
def test_who_was_held_up_does_not_judge_others(timeout_s: float) -> None:
    beats = Beats(Store({"beat/1": "5"}), timeout_s)  # type: ignore[arg-type]
    assert missing_at(beats, 1, 0.0, 100.0, 100.1, 200.0) == [False] * 4
    assert missing_at(beats, 1, *(200.0 + i / 10 for i in range(1, 20)))[-1]
