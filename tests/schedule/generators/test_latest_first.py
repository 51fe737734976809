"""Schedules shifted to the end: an order that respects what actions read, and that makes schedules shorter."""

from random import Random

import numpy as np
from plans import chain, interleaved, routes_of, vision_audio_llm

from motet.schedule.action import Compute, Kind
from motet.schedule.generators.latest_first import by_latest_start
from motet.schedule.generators.list_schedule import ListClock, Policy, Ranks
from motet.schedule.routes import Routes


def clock_of(routes: Routes, seconds: dict[int, float], **urgency: object) -> ListClock:
    def duration_s(action: Compute) -> float:
        return seconds[action.cell.stage] * (1 if action.kind is Kind.FORWARD else 2)

    clock = ListClock(routes, Ranks(routes), duration_s, {}, None, splits=True, **urgency)
    clock.run()
    return clock


def test_what_is_read_comes_first_and_schedules_become_shorter() -> None:
    gains = []
    for seed, make in enumerate((chain, interleaved, vision_audio_llm) * 8):
        rng = Random(seed)
        plans = {
            chain: lambda: chain(3, 4),
            interleaved: lambda: interleaved(3, 2, 4),
            vision_audio_llm: lambda: vision_audio_llm(4),
        }
        routes = routes_of(plans[make]())
        seconds = {stage: rng.choice([1.0, 2.0, 5.0]) for stage in range(12)}
        clock = clock_of(routes, seconds, policy=Policy(1.0, -0.3))
        order = by_latest_start(clock, clock.ends_s)
        assert sorted(order) == sorted(clock.actions)
        place = {action: i for i, action in enumerate(order.tolist())}
        for action in place:
            for value in clock.tables.writes[action]:
                assert all(place[action] < place[reader] for reader in clock.tables.readers.get(value, ()))
        improved = clock_of(routes, seconds, most_urgent_first=order)
        gains.append(clock.ended_s[0] / improved.ended_s[0] - 1)
    assert np.mean(gains) > 0
    assert max(gains) > 0.03


def test_equally_long_stages_in_a_row_stay_as_they_are() -> None:
    """A schedule without any bubble that could be filled."""
    routes = routes_of(chain(1, 4))
    clock = clock_of(routes, {0: 1.0}, policy=Policy(1.0, -0.3))
    improved = clock_of(routes, {0: 1.0}, most_urgent_first=by_latest_start(clock, clock.ends_s))
    assert improved.ended_s == clock.ended_s
