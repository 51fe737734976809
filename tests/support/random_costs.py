"""Costs drawn at random, in small multiples of a half, so that sums of them are exact."""

from dataclasses import dataclass
from random import Random

from motet.schedule.action import Compute, Reduce
from motet.schedule.lower import Message
from motet.schedule.routes import Cell


@dataclass(frozen=True)
class RandomCosts:
    seed: int
    fixed_s: float = 0.0

    def _draw(self, *key: object) -> int:
        return Random(f"{self.seed}/{key}").randint(0, 6)

    def compute_s(self, action: Compute) -> float:
        return (1 + self._draw(*action)) / 2

    def message_s(self, message: Message) -> float:
        return self._draw(*message) / 4

    def message_bytes(self, message: Message) -> int:
        return self._draw("bytes", *message)

    def reduce_s(self, reduce: Reduce) -> float:
        return self._draw(*reduce) / 2

    def saved_bytes(self, cell: Cell, half: bool) -> int:
        return 10 * self._draw("saved", *cell, half)

    def static_bytes(self, rank: int) -> int:
        return 1000 * self._draw("static", rank)
