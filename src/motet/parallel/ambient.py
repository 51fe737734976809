"""Contexts that functions deep inside of unmodified models find without being handed them."""

from typing import Any, ClassVar, Self


class Ambient:
    """In a `with` block, and in whatever blocks are within it: what `current` of its class is.

    The whole process's, not a thread's own: autograd may recompute layers in threads that it starts."""

    current: ClassVar[Self | None]  # Each subclass has its own.

    def __init_subclass__(cls) -> None:
        cls.current = None

    def __init__(self) -> None:
        self._outer: Any = None

    def __enter__(self) -> None:
        self._outer, type(self).current = type(self).current, self

    def __exit__(self, *_: object) -> None:
        type(self).current = self._outer
