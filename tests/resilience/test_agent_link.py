"""A training process's line to its agent. Each test's is in a process of its own, which ends when the line does."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any
from unittest import mock

from distributed import run_distributed

from motet.resilience.membership import Membership, MembershipNotice, RunRecord
from motet.resilience.process_control import STORE_AWAY, STORE_BACK, AgentLink

LONG_S = 3600.0


def notice(generation: int, *, is_urgent: bool = True) -> MembershipNotice:
    membership = Membership(generation=generation, nodes=(0,), num_admitted=1, plan="", is_urgent=is_urgent)
    return MembershipNotice(membership, 0, RunRecord(config={}), "127.0.0.1")


def with_line(test: Callable[[AgentLink, Connection], Any]) -> Any:
    """What it returns of a process's end and its agent's."""

    def work(_: int) -> Any:
        pipe, agent = multiprocessing.Pipe()
        result = test(AgentLink(pipe), agent)
        lines.append(agent)
        return result

    lines: list[Connection] = []
    return run_distributed(work, 1)[0]


def words(agent: Connection, *, until: str, times: int = 1) -> list[tuple[str, Any]]:
    heard = [agent.recv()]
    while sum(word == until for word, _ in heard) < times:
        heard.append(agent.recv())
    return heard


def test_who_does_not_leave_is_told_of_once() -> None:
    def test(link: AgentLink, agent: Connection) -> list[str]:
        link.begin(1, 1, 0.0)
        agent.send(notice(2))
        told = [more for word, more in words(agent, until="hung") if word == "hung"]
        told += [more for word, more in words(agent, until="alive", times=3) if word == "hung"]
        link.begin(2, 1, LONG_S)
        agent.send(notice(3))
        told += [more for word, more in words(agent, until="alive", times=3) if word == "hung"]
        return told

    (told,) = with_line(test)
    assert "did not leave generation 1" in told


def test_signs_of_life_while_waits_are_ended() -> None:
    def test(link: AgentLink, agent: Connection) -> bool:
        link.begin(1, 1, LONG_S)
        ending, ended = threading.Event(), threading.Event()

        class SlowConnections:
            def shut_down(self, *, num_ranks: int) -> None:
                ending.set()
                ended.wait()

        link._connections = SlowConnections()  # type: ignore[assignment]
        agent.send(notice(2))
        ending.wait()
        while agent.poll():
            agent.recv()
        is_heard = agent.poll(30)
        ended.set()
        return is_heard

    assert with_line(test)


def test_when_it_was_heard_of() -> None:
    """Not when the training loop asked."""

    def test(link: AgentLink, agent: Connection) -> bool:
        before = time.monotonic()
        agent.send(notice(1, is_urgent=False))
        while not link.is_change_due():
            os.sched_yield()
        noticed = time.monotonic()
        heard = link.wait_for_next(None)
        assert heard is not None
        return before <= heard.heard_at <= noticed

    assert with_line(test)


def test_memberships_come_in_order_but_for_urgent_ones() -> None:
    """Of ranks that recover, some would wait under the one that others skip."""

    def test(link: AgentLink, agent: Connection) -> list[int]:
        for generation in (1, 2, 3, 4, 5):
            agent.send(notice(generation, is_urgent=generation == 2))
        while not (link._notices and link._notices[-1].membership.generation == 5):
            os.sched_yield()
        taken = []
        while (newer := link.wait_for_next(0.0)) is not None:
            taken.append(newer.membership.generation)
            link.begin(taken[-1], 1, LONG_S)
        return taken

    assert with_line(test) == [2, 3, 4, 5]


def test_a_process_whose_waits_nobody_would_end_dies() -> None:
    """Its node is lost then; else its peers would wait for it."""

    def train(pipe: Connection) -> None:
        link = AgentLink(pipe)
        link.begin(1, 1, LONG_S)
        assert link._connections is not None
        link._connections.shut_down = mock.Mock(side_effect=OSError("too many open files"))  # type: ignore[method-assign]
        threading.Event().wait()

    pipe, agent = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=train, args=(pipe,))
    process.start()
    words(agent, until="alive")
    agent.send(notice(2))
    process.join(30)
    assert process.exitcode == 1


def test_no_time_counts_while_the_store_is_away() -> None:
    """Nothing can explain what has failed before it is back."""

    def test(link: AgentLink, agent: Connection) -> list[bool]:
        link.begin(1, 1, LONG_S)
        agent.send(STORE_AWAY)
        while not link._store_is_away:
            os.sched_yield()
        heard: SimpleQueue[MembershipNotice | None] = SimpleQueue()
        threading.Thread(target=lambda: heard.put(link.wait_for_next(0.05)), daemon=True).start()
        waited = [heard.empty() for _ in range(20) if time.sleep(0.01) is None]
        agent.send(STORE_BACK)
        return [*waited, heard.get(timeout=300) is None]

    assert all(with_line(test))
