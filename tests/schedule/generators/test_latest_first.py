"""Schedules shifted to the end: an order that respects what actions read, and that makes schedules shorter."""

from collections.abc import Sequence
from random import Random

import pytest
from plans import chain, interleaved, routes_of, vision_audio_llm

from motet.schedule.action import Compute, Kind
from motet.schedule.generators.latest_first import LatestFirst
from motet.schedule.generators.list_schedule import ListClock, Policy, Ranks
from motet.schedule.routes import Routes


def clock_of(routes: Routes, seconds: Sequence[float], splits: bool = False) -> ListClock:
    def duration_s(action: Compute) -> float:
        return seconds[action.cell.stage] * (1 if action.kind is Kind.FORWARD else 2)

    return ListClock(routes, Ranks(routes), duration_s, None, splits=splits)


@pytest.mark.parametrize("splits", [False, True])
def test_what_is_read_comes_first_and_schedules_become_shorter(splits: bool) -> None:
    gains = []
    for seed in range(12):
        rng = Random(seed)
        routes = routes_of([chain(4, 6), interleaved(3, 4, 6), vision_audio_llm(4)][seed % 3])
        seconds = [rng.choice([1.0, 2.0, 5.0, 7.0]) for _ in range(12)]
        clock = clock_of(routes, seconds, splits)
        clock.run(Policy(4.0, 0.3))
        ended_s = clock.ended_s[0]
        order = LatestFirst(clock).by_latest_start(clock.ends_s)
        assert sorted(order) == sorted(clock.actions)
        place = {action: i for i, action in enumerate(order.tolist())}
        for action in place:
            assert all(place[action] < place[reader] for reader in clock.tables.readers[action])
        clock.run(most_urgent_first=order)
        gains.append(ended_s / clock.ended_s[0] - 1)
    if splits:  # Weight halves fill idle times anyway, so there is little left to gain.
        assert sum(gains) > -0.05, gains
    else:
        assert max(gains) > 0.05, gains
        assert sum(gains) > 0, gains


def test_equally_long_stages_in_a_row_do_not_end_later() -> None:
    clock = clock_of(routes_of(chain(4, 6)), [1.0] * 4)
    clock.run(Policy(1.0, -0.3))
    ended_s = clock.ended_s[0]
    clock.run(most_urgent_first=LatestFirst(clock).by_latest_start(clock.ends_s))
    assert clock.ended_s[0] <= ended_s
