"""kill -9 of servers, workers and the training job in every phase: training sees the undisturbed sequence of samples.

Two servers with two workers each, and a training job of two ranks: one takes pixels, the other tokens. The job notes
each batch that it has seen with a digest of all that is in it, and writes its position down now and then; killed, it is
started again from there. It goes on until the last kill is over. Servers are started again on their ports after a
while. Each process tells its phase in memory that all share, and it is killed when it is in the one that was drawn;
phases are stretched a little, to be met.
"""

import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_servers import MODULES, TOKEN, BatchSequence, ServerProcess, batches, data_config, with_servers
from waiting import wait_until

from motet.data.service import server as service
from motet.data.service.tickets import TOKEN_VARIABLE
from motet.data.service.workers import Preparer

FEWEST_STEPS = 24
STEPS_PER_CHECKPOINT = 3
PHASES = {
    "server": ("idle", "takes a ticket", "streams metadata", "streams tensors"),
    "worker": ("idle", "prepares metadata", "prepares tensors"),
    "training job": ("starts", "waits for data", "computes", "writes its position"),
}
_phases = multiprocessing.RawArray("i", 64)
"""By slot: the number of the phase that a process is in."""
_kills_are_over = multiprocessing.RawValue("i")


class Slot:
    """Where one process, or a group of alike ones, tells its phase."""

    def __init__(self, place: int) -> None:
        self._place = place

    def tell(self, kind: str, phase: str, stretch_s: float = 0.002) -> None:
        _phases[self._place] = PHASES[kind].index(phase)
        time.sleep(stretch_s)

    def told(self, kind: str) -> str:
        return PHASES[kind][_phases[self._place]]


def tell_phases_of_server(monkeypatch: pytest.MonkeyPatch, server: Slot, worker: Slot) -> None:
    """From here on, of what is forked."""
    messages, do_get, answer = service.DataServer._messages, service.DataServer.do_get, Preparer.answer

    def telling_messages(self: Any, ticket: Any) -> Iterator[Any]:
        for message in messages(self, ticket):
            server.tell("server", "streams metadata" if ticket.module is None else "streams tensors")
            yield message
        server.tell("server", "idle", 0)

    def telling_do_get(self: Any, context: Any, ticket: Any) -> Any:
        server.tell("server", "takes a ticket")
        return do_get(self, context, ticket)

    def telling_answer(self: Preparer, ticket: Any, *allocate: Any) -> Any:
        worker.tell("worker", "prepares metadata" if ticket.module is None else "prepares tensors")
        answered = answer(self, ticket, *allocate)
        worker.tell("worker", "idle", 0)
        return answered

    monkeypatch.setattr(service.DataServer, "_messages", telling_messages)
    monkeypatch.setattr(service.DataServer, "do_get", telling_do_get)
    monkeypatch.setattr(Preparer, "answer", telling_answer)


def work_of_rank(config: Any, module: str, folder: Path, slot: Slot) -> None:
    """One rank of the training job: from its last position to the end."""
    os.environ[TOKEN_VARIABLE] = TOKEN
    slot.tell("training job", "starts")
    position = folder / f"position_{module}.json"
    begin = json.loads(position.read_text()) if position.exists() else 0
    sequence = BatchSequence(config, begin=begin, modules=(module,))
    with (folder / f"seen_{module}.jsonl").open("a") as seen:
        for step in count(begin):
            if step >= FEWEST_STEPS and _kills_are_over.value:
                break
            slot.tell("training job", "waits for data")
            digest = next(sequence)
            slot.tell("training job", "computes", 0.02)
            seen.write(json.dumps([begin, step, digest]) + "\n")
            seen.flush()
            if (step + 1) % STEPS_PER_CHECKPOINT == 0:
                slot.tell("training job", "writes its position")
                written = position.with_suffix(".tmp")
                written.write_text(json.dumps(step + 1))
                written.replace(position)
    os._exit(0)


@dataclass
class Job:
    """The training job: all ranks are started together, and killed together."""

    config: Any
    folder: Path
    slots: dict[str, Slot]

    def start(self) -> None:
        context = multiprocessing.get_context("fork")
        self.ranks = [
            context.Process(target=work_of_rank, args=(self.config, module, self.folder, slot))
            for module, slot in self.slots.items()
        ]
        for rank in self.ranks:
            rank.start()

    @property
    def is_done(self) -> bool:
        return all(rank.exitcode is not None for rank in self.ranks)

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.join()


@dataclass
class Chaos:
    """One run of the job with kills drawn from `seed`; counts those that met their victim, by victim and phase."""

    seed: int
    folder: Path
    monkeypatch: pytest.MonkeyPatch

    def run(self, draws: list[tuple[str, str]]) -> Counter[tuple[str, str]]:
        config = data_config(workers=2)
        self._rng = np.random.default_rng(self.seed)
        self._config = config
        self._slots = {victim: [Slot(2 * i), Slot(2 * i + 1)] for i, victim in enumerate(PHASES)}
        self._servers = [self._start_server(i) for i in range(2)]
        addresses = [server.address for server in self._servers]
        slots = dict(zip(MODULES, self._slots["training job"], strict=True))
        self._job = Job(with_servers(config, *addresses, batches_ahead=1), self.folder, slots)
        _kills_are_over.value = False
        self._job.start()
        counts: Counter[tuple[str, str]] = Counter()
        try:
            for victim, phase in draws:
                self._wait_for(victim, phase)
                counts[victim, self._kill(victim)] += 1
            _kills_are_over.value = True
            wait_until(lambda: self._job.is_done, "the job hangs")
        finally:
            self._job.kill()
            for server in self._servers:
                server.kill()
        assert [rank.exitcode for rank in self._job.ranks] == [0, 0]
        return counts

    def _start_server(self, place: int, port: int | None = None) -> ServerProcess:
        with self.monkeypatch.context() as patched:
            tell_phases_of_server(patched, self._slots["server"][place], self._slots["worker"][place])
            return ServerProcess(self._config, port=port)

    def _wait_for(self, victim: str, phase: str) -> None:
        """Until it is in the phase. One that does not come is given up after a second: another one is met then, and
        counted as what it is."""
        self._place = int(self._rng.integers(2))
        self._slot = (
            list(self._job.slots.values())[self._place]
            if victim == "training job"
            else self._slots[victim][self._place]
        )
        time.sleep(float(self._rng.uniform(0, 0.05)))
        if phase == "starts":
            self._job.kill()
            self._slot.tell(victim, phase)
            self._job.start()
        gives_up_s = time.monotonic() + 1
        while self._slot.told(victim) != phase and time.monotonic() < gives_up_s:
            time.sleep(0.0002)

    def _kill(self, victim: str) -> str:
        """Returns the phase in which it died, as told at that moment."""
        if victim == "training job":
            phase = self._slot.told(victim)
            self._job.kill()
            self._job.start()
        elif victim == "server":
            server = self._servers[self._place]
            phase = self._slot.told(victim)
            server.kill()
            time.sleep(float(self._rng.uniform(0, 0.3)))
            self._servers[self._place] = self._start_server(self._place, server.port)
        else:
            workers = self._servers[self._place].workers()
            phase = self._slot.told(victim)
            for worker in workers[:1]:
                os.kill(worker, signal.SIGKILL)
        return phase


def check_what_was_seen(folder: Path) -> int:
    """Each rank saw the undisturbed sequence, from each start on without a gap. Returns how often the job started."""
    num_starts = 0
    for module in MODULES:
        lines = [json.loads(line) for line in (folder / f"seen_{module}.jsonl").read_text().splitlines()]
        num_steps = max(step for _, step, _ in lines) + 1
        assert {step for _, step, _ in lines} == set(range(max(FEWEST_STEPS, num_steps))), "none is lost"
        expected = batches(data_config(workers=0, batches_ahead=0), num_steps, modules=(module,))
        for _, step, digest in lines:
            assert digest == expected[step], f"{module}: step {step} saw other samples"
        begins = [begin for begin, step, _ in lines if begin == step]
        num_starts = max(num_starts, len(begins))
        previous: int | None = None
        for begin, step, _ in lines:
            assert step == (begin if previous is None or step <= previous else previous + 1), "none is doubled"
            previous = step
    return num_starts


def draws_of(seed: int, number: int) -> list[tuple[str, str]]:
    """Phases in turn, in an order that the seed decides."""
    every = [(victim, phase) for victim, phases in PHASES.items() for phase in phases]
    order = np.random.default_rng(seed).permutation(number)
    return [every[int(i) % len(every)] for i in order]


def told_of(counts: Counter[tuple[str, str]]) -> str:
    return ", ".join(f"{victim} {phase}: {number}" for (victim, phase), number in sorted(counts.items()))


def test_a_few_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Chaos(7, tmp_path, monkeypatch).run(draws_of(7, 6))
    assert sum(counts.values()) == 6
    check_what_was_seen(tmp_path)


@pytest.mark.campaign
def test_fifty_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total: Counter[tuple[str, str]] = Counter()
    waiting = draws_of(2026, 55)
    seed = 0
    while sum(total.values()) < 50:
        folder = tmp_path / str(seed)
        folder.mkdir()
        draws, waiting = waiting[:6], waiting[6:] or draws_of(2027 + seed, 22)
        counts = Chaos(seed, folder, monkeypatch).run(draws)
        num_starts = check_what_was_seen(folder)
        print(f"seed {seed}: {sum(counts.values())} kills, the job began {num_starts} times; {told_of(counts)}")
        total += counts
        seed += 1
    print(f"{sum(total.values())} kills in all: {told_of(total)}")
    assert {victim for victim, _ in total} == set(PHASES)
    assert len(total) >= 9, "the kills are spread over the phases"
