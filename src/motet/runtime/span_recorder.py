"""Measured spans of an iteration on one rank: by the host's clock on CPUs, elsewhere by events that the device stamps.

A device runs behind the host, so the times at which the host gives it work say little. Around each action two events
are put into the device's stream, and they are read when the iteration is over: nothing waits for them. An event's time
is known relative to other events alone. Two facts place it on the host's clock: it happened after the host had issued
it, and before the host saw that it had happened. Where the host had to wait for the last event, the second bound is
tight; where it did not, the device was never far behind, and the first one is.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from motet.devices import has_own_memory
from motet.timeline import Span


class Mark(NamedTuple):
    """A moment: on a CPU when the host came to it, elsewhere when the device did."""

    host_s: float
    """By `time.perf_counter`."""
    event: torch.Event | None = None


class SpanRecorder:
    """The spans of one iteration, from its construction on."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._has_events = has_own_memory(device)
        self._recorded: list[tuple[object, str, Mark, Mark]] = []
        self._first = self._last = self.mark()
        self._seen_s: float | None = None
        """When the host saw that the last event had happened, if it had to wait for it."""

    def mark(self) -> Mark:
        """Now, or when the device has done what it was given so far."""
        if not self._has_events:
            return Mark(time.perf_counter())
        event = torch.Event(device=self._device, enable_timing=True)
        issued_s = time.perf_counter()
        event.record()
        return Mark(issued_s, event)

    def record(self, what: object, kind: str, start: Mark) -> None:
        """A span from `start` until now. `what`: whose text is its name; `kind`: a key of `SPAN_KINDS`."""
        self._last = self.mark()
        self._recorded.append((what, kind, start, self._last))

    @contextmanager
    def measured(self, what: object, kind: str) -> Iterator[None]:
        """Records a span."""
        start = self.mark()
        yield
        self.record(what, kind, start)

    def wait(self) -> None:
        """Waits until the device has come to the end of the last span."""
        event = self._last.event
        if event is not None and not event.query():
            event.synchronize()
            self._seen_s = time.perf_counter()

    def read(self) -> tuple[float, list[Span]]:
        """The iteration's begin, by `time.perf_counter`, and its spans, in seconds from there. Waits for the device."""
        self.wait()
        spans = [
            Span(self._rank, str(what), kind, self._since_first(start), self._since_first(end))
            for what, kind, start, end in self._recorded
        ]
        if not self._has_events:
            return self._first.host_s, spans
        if self._seen_s is not None:
            return self._seen_s - self._since_first(self._last), spans
        marks = [self._first, *(mark for _, _, *both in self._recorded for mark in both)]
        return max(mark.host_s - self._since_first(mark) for mark in marks), spans

    @property
    def duration_s(self) -> float:
        """Seconds from the iteration's begin to the end of the last span. Waits for the device."""
        self.wait()
        return self._since_first(self._last)

    def _since_first(self, mark: Mark) -> float:
        if self._first.event is None or mark.event is None:
            return mark.host_s - self._first.host_s
        return self._first.event.elapsed_time(mark.event) / 1e3
