"""Sums with neighbours: before a node joins a training, it sums a few numbers with a node that trains.

    candidate's agent -> its trial process: open a meeting place
    candidate's agent -> store: trial/k (with which node, and where)
    neighbour's agent -> its trial process: go there, and sum
    neighbour's agent -> store: tried/k (whether the sum was right)

Both must find the sum right; then the candidate registers, and only then do the others count it in. If a neighbour
fails, or is lost meanwhile, the candidate tries another one, so one node's fault keeps no other node out.

Those who train are not disturbed: each agent has a process for these trials, which is idle otherwise and makes a
process for each trial (`motet.resilience.health.trial_process`), and the kernel ends that after `TRIAL_S`. No training
process takes part, and no agent waits. Until there is a first membership, nobody trains and there is nobody to ask.

It imports no torch.
"""

import json
import os
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from motet.addresses import address_text, host_and_port
from motet.resilience.membership import Membership, TrialOutcome, TrialRequest, key
from motet.resilience.store.store import Store

TRIAL_S = 30.0
"""Time for one sum. It takes a tenth of a second; machines may be much busier than their cores."""
DEATH_S = 30.0
"""Time from the last failure until a node is refused: a neighbour that has died is no reason, and may be silent so long
before the store tells of it."""
MAX_NEIGHBOURS = 3
"""So many neighbours are tried, if there are so many."""
MAX_MESSAGE_BYTES = 4096
GONE = "its trial process has ended"


@dataclass
class _Trial:
    """The candidate's view of a sum with one neighbour."""

    neighbour: int
    name: str
    deadline: float
    request: TrialRequest | None = None
    number: int | None = None
    """Of its key in the store."""
    is_right: bool = False
    """Whether the sum was right here."""


@dataclass
class NeighbourTrials:
    """An agent's part in sums with neighbours, as the candidate and then as a neighbour of others.

    `pipe`: to the trial process of this node."""

    pipe: Connection
    failure: str | None = None
    """Why this node is not fit to join."""
    _has_passed: bool = False
    _trial: _Trial | None = None
    _failed: dict[int, str] = field(default_factory=dict)
    """By neighbour that is still there, what went wrong."""
    _refused_after: float = 0.0
    """When this node is refused if nothing changes."""
    _num_seen: int = 0
    """Trials in the store that this agent has looked at."""
    _waiting: list[tuple[int, TrialRequest]] = field(default_factory=list)
    """Trials in which this node is the neighbour, the first of which runs."""
    _deadline: float | None = None
    """When the first of these is given up; None: it has not begun."""

    def is_fit(self, store: Store, membership: Membership | None, now: float) -> bool:
        """Does one round of the candidate's part. Returns whether the node may join; sets `failure` if it may not.

        `membership`: the newest one."""
        if membership is None or self._has_passed:
            return True
        if self._trial is not None:
            why = self._why_over(self._trial, store, membership, now)
            if why is None:
                return False
            self._send({"do": "stop"})
            neighbour, self._trial = self._trial.neighbour, None
            if not why:
                self._has_passed = True
                return True
            self._failed[neighbour], self._refused_after = why, now + DEATH_S
        there = [n for n in membership.nodes if key("alive", n) in store.values]
        self._failed = {n: why for n, why in self._failed.items() if n in there}
        untried = [n for n in there if n not in self._failed]
        if untried and len(self._failed) < MAX_NEIGHBOURS:  # At random, as several may come at once.
            self._trial = _Trial(random.choice(untried), os.urandom(8).hex(), now + TRIAL_S)
            self._send({"do": "open", "name": self._trial.name, "host": store.here})
        elif self._failed and now > self._refused_after:
            told = "; ".join(f"node {node}: {why}" for node, why in sorted(self._failed.items()))
            self.failure = f"it could not sum with a node that trains ({told})"
        return False

    def answer(self, node: int, values: Mapping[str, str], write: Callable[[str, str], None], now: float) -> None:
        """Does one round of the neighbour's part. `write`: writes a value into the store."""
        while (text := values.get(key("trial", self._num_seen))) is not None:
            request = TrialRequest.from_json(text)
            if request.neighbour == node and key("tried", self._num_seen) not in values:
                self._waiting.append((self._num_seen, request))
            self._num_seen += 1
        if not self._waiting:
            return
        number, request = self._waiting[0]
        if self._deadline is None:
            self._deadline = now + TRIAL_S
            self._send({"do": "meet", "name": request.name, "address": host_and_port(request.address)})
        outcome: TrialOutcome | None = None
        for message in self._received():
            if message.get("name") == request.name and "failure" in message:
                outcome = TrialOutcome(failure=message["failure"])
        if outcome is None and now > self._deadline:
            outcome = TrialOutcome(failure=f"no sum within {TRIAL_S:g} s")
        if outcome is not None:
            write(key("tried", number), outcome.to_json())
            del self._waiting[0]
            self._deadline = None

    def _why_over(self, trial: _Trial, store: Store, membership: Membership, now: float) -> str | None:
        """Returns what went wrong in the trial, "" if it has succeeded, None if it goes on."""
        for message in self._received():
            if message.get("name") != trial.name:
                continue
            if "port" in message:
                address = address_text((store.here, message["port"]))
                trial.request = TrialRequest(neighbour=trial.neighbour, address=address, name=trial.name)
            elif message["failure"] is not None:
                return str(message["failure"])
            else:
                trial.is_right = True
        if trial.request is not None and trial.number is None:
            text, number = trial.request.to_json(), self._num_seen
            while key("trial", number) in store.values or store.create(key("trial", number), text) != text:
                number += 1
            self._num_seen = trial.number = number
        if trial.number is not None and (text := store.values.get(key("tried", trial.number), "")):
            outcome = TrialOutcome.from_json(text)
            if outcome.failure is not None:
                return outcome.failure
            if trial.is_right:
                return ""
        if key("alive", trial.neighbour) not in store.values or trial.neighbour not in membership.all_nodes:
            return "it has gone"
        return f"no sum within {TRIAL_S:g} s" if now > trial.deadline else None

    def _send(self, message: Mapping[str, Any]) -> None:
        with suppress(OSError):  # The process has ended, which `_received` tells.
            self.pipe.send_bytes(json.dumps(message).encode())

    def _received(self) -> list[dict[str, Any]]:
        """What the trial process has said. Its end is the failure of whatever it was to do."""
        messages = []
        try:
            while self.pipe.poll():
                messages.append(json.loads(self.pipe.recv_bytes(MAX_MESSAGE_BYTES)))
        except (EOFError, OSError):
            name = self._trial.name if self._trial is not None else self._waiting[0][1].name if self._waiting else ""
            messages.append({"name": name, "failure": GONE})
        return messages
