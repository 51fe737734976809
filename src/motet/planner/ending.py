"""Ends a search at any time, by a budget of seconds or an interrupt (Ctrl-C), without losing what it has found.

The budget is a timer of the main thread, which raises within whatever the search does at that moment. So nothing that
a search calls has to know of it; a search keeps its findings in a list and adds to it only what is finished.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from motet.errors import UserError

Progress = Callable[[str], None]
"""Told what a search finds, a line at a time."""


def silent(line: str) -> None:
    """Reports nothing."""


class BudgetSpent(BaseException):
    """Raised within a search when its time is over; no `except Exception` takes it for a failure."""


@dataclass
class Ending:
    why: str | None = None
    """Why the search ended early; None: it did not."""


@contextmanager
def until(budget_s: float | None, *, interruptible: bool = True) -> Iterator[Ending]:
    """Runs its body until the end, for `budget_s` seconds at most, or until an interrupt if it is `interruptible`. A
    second interrupt is raised as usual.

    Raises `UserError` for a budget outside of the main thread."""
    ending = Ending()
    if budget_s is None:
        try:
            yield ending
        except KeyboardInterrupt:
            if not interruptible:
                raise
            ending.why = "interrupted"
        return
    if threading.current_thread() is not threading.main_thread():
        raise UserError("budget_s: a search can be timed in the main thread only; leave it out")
    before = signal.signal(signal.SIGALRM, _raise_spent)
    try:
        signal.setitimer(signal.ITIMER_REAL, budget_s)
        yield ending
    except BudgetSpent:
        ending.why = f"the budget of {budget_s:g} s was spent"
    except KeyboardInterrupt:
        if not interruptible:
            raise
        ending.why = "interrupted"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _raise_spent(number: int, frame: FrameType | None) -> NoReturn:
    raise BudgetSpent
