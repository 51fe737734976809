"""Costs of an iteration whose computations take given seconds: for papers that print stages' times, not shapes."""

from collections.abc import Callable
from dataclasses import dataclass

from motet.schedule.action import Compute, Reduce
from motet.schedule.lower import Message
from motet.schedule.routes import Cell


@dataclass(frozen=True)
class GivenTimes:
    """All else costs nothing."""

    seconds: Callable[[Compute], float]
    fixed_s: float = 0.0

    def compute_s(self, action: Compute) -> float:
        return self.seconds(action)

    def message_s(self, message: Message) -> float:
        return 0.0

    def message_bytes(self, message: Message) -> int:
        return 0

    def reduce_s(self, reduce: Reduce) -> float:
        return 0.0

    def saved_bytes(self, cell: Cell, half: bool) -> int:
        return 0

    def static_bytes(self, rank: int) -> int:
        return 0
