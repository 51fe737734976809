"""A queue of events in time, and processors that computing ranks share.

Events come out by (time, priority, sequence): of two at the same time the one of smaller priority first, and of two
that are equal in that too the one that was put in first. So a simulation is deterministic.
"""

import heapq
from math import inf
from typing import Generic, TypeVar

T = TypeVar("T")


class EventQueue(Generic[T]):
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, T]] = []
        self._num_pushed = 0

    def push(self, time_s: float, priority: int, event: T) -> None:
        heapq.heappush(self._heap, (time_s, priority, self._num_pushed, event))
        self._num_pushed += 1

    def pop(self) -> tuple[float, T]:
        """The next event and its time."""
        time_s, _, _, event = heapq.heappop(self._heap)
        return time_s, event

    @property
    def next_time_s(self) -> float:
        """Infinite if the queue is empty."""
        return self._heap[0][0] if self._heap else inf


class SharedCores(Generic[T]):
    """Processor sharing: k computing ranks on c cores progress at rate min(1, c/k), all alike.

    Because all progress alike, work is kept in *progress* rather than time: what has begun at progress p and needs w
    seconds alone ends at progress p + w, whatever happens between. Nothing is recomputed when a rank joins or leaves.
    """

    def __init__(self, num_cores: float = inf) -> None:
        self._num_cores = num_cores
        self._num_computing = 0
        self._now_s = 0.0
        self._progress_s = 0.0
        self._ends: EventQueue[tuple[T, int]] = EventQueue()

    @property
    def _rate(self) -> float:
        return min(1.0, self._num_cores / self._num_computing) if self._num_computing else 1.0

    def _advance(self, now_s: float) -> None:
        if self._num_cores == inf:
            self._progress_s = now_s  # Exactly, without rounding.
        else:
            self._progress_s += (now_s - self._now_s) * self._rate
        self._now_s = now_s

    def start(self, now_s: float, work_s: float, num_ranks: int, event: T) -> None:
        """`num_ranks` ranks begin to compute for `work_s` seconds (of undisturbed time) each."""
        self._advance(now_s)
        self._num_computing += num_ranks
        self._ends.push(self._progress_s + work_s, 0, (event, num_ranks))

    @property
    def next_end_s(self) -> float:
        """When the next work ends if nothing else begins; infinite if there is none."""
        if self._ends.next_time_s == inf:
            return inf
        if self._num_cores == inf:
            return self._ends.next_time_s
        return self._now_s + max(0.0, self._ends.next_time_s - self._progress_s) / self._rate

    def pop(self) -> tuple[float, T]:
        """The work that ends next and when."""
        now_s = self.next_end_s
        self._advance(now_s)
        _, (event, num_ranks) = self._ends.pop()
        self._num_computing -= num_ranks
        return now_s, event
