from math import inf

import pytest

from motet.simulator.event_loop import EventQueue, SharedCores


def test_events_come_by_time_then_priority_then_sequence() -> None:
    queue: EventQueue[str] = EventQueue()
    for time_s, priority, name in [(2, 0, "late"), (1, 1, "b"), (1, 0, "first"), (1, 1, "a"), (0, 9, "early")]:
        queue.push(time_s, priority, name)
    assert queue.next_time_s == 0
    assert [queue.pop() for _ in range(5)] == [(0, "early"), (1, "first"), (1, "b"), (1, "a"), (2, "late")]
    assert queue.next_time_s == inf


def test_events_themselves_are_never_compared() -> None:
    queue: EventQueue[object] = EventQueue()
    first, second = object(), object()
    queue.push(1, 0, first)
    queue.push(1, 0, second)
    assert queue.pop()[1] is first
    assert queue.pop()[1] is second


def test_one_core_is_shared_by_who_computes_at_the_time() -> None:
    cores: SharedCores[str] = SharedCores(1)
    assert cores.next_end_s == inf
    cores.start(0, 3, 1, "long")
    assert cores.next_end_s == 3
    cores.start(1, 1, 1, "short")  # The long one has 2 left, both run at half speed.
    assert cores.pop() == (3, "short")
    assert cores.pop() == (4, "long")  # It had 1 left and the core to itself.
    assert cores.next_end_s == inf


def test_more_cores_than_ranks_change_nothing() -> None:
    cores: SharedCores[str] = SharedCores(4)
    cores.start(0, 3, 2, "a")
    cores.start(1, 1, 2, "b")
    assert [cores.pop(), cores.pop()] == [(2, "b"), (3, "a")]


def test_a_group_takes_a_core_for_each_of_its_ranks() -> None:
    cores: SharedCores[str] = SharedCores(2)
    cores.start(0, 4, 3, "group of three")
    assert cores.pop() == (pytest.approx(6), "group of three")
