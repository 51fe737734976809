"""Measured spans of an iteration on one rank: by the host's clock on CPUs, elsewhere by events that the device stamps.

A device runs behind the host, so the times at which the host gives it work say little. Around each action two events
are put into the device's stream, and they are read when the iteration is over: nothing waits for them. An event's time
is known relative to other events alone. Two facts place it on the host's clock: it happened after the host had issued
it, and before the host saw that it had happened. Where the host had to wait for the last event, the second bound is
tight; where it did not, the device was never far behind, and the first one is.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from motet.devices import has_own_memory
from motet.timeline import Span


class Stamp(NamedTuple):
    """A moment that the device comes to."""

    issued_s: float
    """When the host had it recorded, by `time.perf_counter`."""
    event: torch.Event


Mark = float | Stamp
"""A moment: on a CPU the time at which the host came to it."""


class SpanRecorder:
    """The spans of one iteration, from its construction on."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self.mark: Callable[[], Mark] = self._stamp if has_own_memory(device) else time.perf_counter
        """Returns the moment that is now, or when the device has done what it was given so far."""
        self._recorded: list[tuple[object, str, Mark, Mark]] = []
        self._first = self._last = self.mark()
        self._seen_s: float | None = None
        """When the host saw that the last event had happened, if it had to wait for it."""

    def _stamp(self) -> Stamp:
        event = torch.Event(device=self._device, enable_timing=True)
        issued_s = time.perf_counter()
        event.record()
        return Stamp(issued_s, event)

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
        if isinstance(self._last, Stamp) and not self._last.event.query():
            self._last.event.synchronize()
            self._seen_s = time.perf_counter()

    def read(self) -> tuple[float, list[Span]]:
        """The iteration's begin, by `time.perf_counter`, and its spans, in seconds from there. Waits for the device."""
        self.wait()
        spans = [
            Span(self._rank, str(what), kind, self._since_first(start), self._since_first(end))
            for what, kind, start, end in self._recorded
        ]
        if not isinstance(self._first, Stamp):
            return self._first, spans
        if self._seen_s is not None:
            return self._seen_s - self._since_first(self._last), spans
        marks = [self._first, *(mark for _, _, *both in self._recorded for mark in both)]
        return max(mark.issued_s - self._since_first(mark) for mark in marks if isinstance(mark, Stamp)), spans

    @property
    def duration_s(self) -> float:
        """Seconds from the iteration's begin to the end of the last span. Waits for the device."""
        self.wait()
        return self._since_first(self._last)

    def seconds_after(self, before: "SpanRecorder") -> float:
        """Seconds from the end of the last span of an earlier iteration to that of this one. Waits for the device."""
        self.wait()
        return _seconds_between(before._last, self._last)

    def _since_first(self, mark: Mark) -> float:
        return _seconds_between(self._first, mark)


def _seconds_between(start: Mark, end: Mark) -> float:
    if isinstance(start, Stamp) and isinstance(end, Stamp):
        return start.event.elapsed_time(end.event) / 1e3
    assert not isinstance(start, Stamp)
    assert not isinstance(end, Stamp)
    return end - start
