"""Measured spans on a device that runs behind its host: placed on the host's clock by what the host knows."""

from types import SimpleNamespace

import pytest
import torch

from motet.runtime.span_recorder import SpanRecorder


class Device:
    """A device that takes `work_s` for what it is given before each event, and comes to it when all before is done.

    `now_s`: the host's clock, which goes on where the host computes or waits."""

    def __init__(self, work_s: float) -> None:
        self.work_s, self.free_s, self.now_s = work_s, 0.0, 100.0

    def event(self, device: object, *, enable_timing: bool) -> "Event":
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device, self.happened_s = device, 0.0

    def record(self) -> None:
        self._device.free_s = self.happened_s = max(self._device.free_s, self._device.now_s) + self._device.work_s

    def query(self) -> bool:
        return self._device.now_s >= self.happened_s

    def synchronize(self) -> None:
        self._device.now_s = max(self._device.now_s, self.happened_s)

    def elapsed_time(self, end: "Event") -> float:
        return (end.happened_s - self.happened_s) * 1e3


@pytest.mark.parametrize(
    ("host_s", "reads_s", "start_s", "took_s"),
    [(0.0, 0.0, 100.125, [0.125, 0.125]), (0.5, 1.0, 100.0, [0.375, 0.5])],
    ids=["the host is ahead", "the device is ahead"],
)
def test_spans_are_placed_on_the_clock_of_the_host(monkeypatch, host_s, reads_s, start_s, took_s):
    """Exactly where the host waits at the end; else up to the time that the device takes to come to an event."""
    device = Device(0.125)
    monkeypatch.setattr(torch, "Event", device.event)
    monkeypatch.setattr("motet.runtime.span_recorder.time", SimpleNamespace(perf_counter=lambda: device.now_s))
    recorder = SpanRecorder(3, torch.device("meta"))
    for name in ("a", "b"):
        with recorder.measured(name, "F"):
            device.now_s += host_s
        device.now_s += host_s
    device.now_s += reads_s
    issued_s = device.now_s
    began_s, spans = recorder.read()
    assert began_s == start_s
    assert (device.now_s > issued_s) == (host_s == 0.0)
    assert [(span.rank, span.name, span.kind) for span in spans] == [(3, "a", "F"), (3, "b", "F")]
    assert [span.end - span.start for span in spans] == took_s
    assert recorder.duration_s == spans[-1].end


def test_on_a_cpu_spans_are_those_of_the_host(monkeypatch):
    now = iter([5.0, 6.0, 8.0])
    monkeypatch.setattr("motet.runtime.span_recorder.time", SimpleNamespace(perf_counter=lambda: next(now)))
    recorder = SpanRecorder(0, torch.device("cpu"))
    with recorder.measured("a", "wait"):
        pass
    began_s, (span,) = recorder.read()
    assert (began_s, span.start, span.end) == (5.0, 1.0, 3.0)


def test_time_between_iterations_is_the_devices(monkeypatch):
    """The host issues both and then waits, so by its clock the second would take no time."""
    device = Device(0.125)
    monkeypatch.setattr(torch, "Event", device.event)
    recorders = []
    for _ in range(2):
        recorders.append(SpanRecorder(0, torch.device("meta")))
        with recorders[-1].measured("a", "F"):
            pass
    first, second = recorders
    assert second.seconds_after(first) == 0.375  # The marks at its begin and around its span.
    assert second.duration_s == 0.25
