"""When nodes come and go: traces of failures and spot instances, read from a file or drawn at a rate.

A trace is a CSV file without a header: milliseconds, `add` or `remove`, and the node's name (Bamboo's format, in which
it published traces of spot instances). What happens in the same millisecond happens at once.
"""

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import inf
from pathlib import Path
from random import Random

from motet.errors import UserError

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class Change:
    """What happens at one moment."""

    time_s: float
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()


def read_trace(path: Path) -> list[Change]:
    """In the order of time. Raises `UserError` naming the line that is wrong."""
    try:
        rows = list(csv.reader(path.read_text().splitlines()))
    except OSError as error:
        raise UserError(
            f"--failures: {path} cannot be read ({error.strerror}); give a trace, or a rate like 6h"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"--failures: {path} is not text; give a trace, or a rate like 6h") from None
    events = [_event(path, number, row) for number, row in enumerate(rows, start=1) if row]
    if not events:
        raise UserError(f"--failures: {path} is empty; give lines like 60000,add,node1")
    present: set[str] = set()
    changes = []
    for time_s, group in groupby(sorted(events, key=lambda event: event[0]), key=lambda event: event[0]):
        before = set(present)
        for _, number, kind, node in group:
            if (node in present) == (kind == "add"):
                state = "is there already" if kind == "add" else "is not there"
                raise UserError(f"--failures: {path}, line {number}: {kind} {node}, but it {state}")
            (present.add if kind == "add" else present.remove)(node)
        changes.append(Change(time_s, tuple(sorted(before - present)), tuple(sorted(present - before))))
    return changes


def most_nodes(changes: Sequence[Change]) -> int:
    """That are there at once, at some moment."""
    return max(accumulate(len(change.joined) - len(change.lost) for change in changes))


def _event(path: Path, number: int, row: Sequence[str]) -> tuple[float, int, str, str]:
    try:
        time_ms, kind, node = (cell.strip() for cell in row)
        time_s = float(time_ms) / 1000
    except ValueError:
        time_s, kind, node = -1.0, "", ""
    if kind not in ("add", "remove") or not node or not 0 <= time_s < inf:
        raise UserError(
            f"--failures: {path}, line {number}: {','.join(row)!r} is not MILLISECONDS,add|remove,NODE, "
            "such as 60000,remove,node3"
        )
    return time_s, number, kind, node


def duration_s(text: str) -> float | None:
    """Seconds of `90s`, `10m`, `6h` or `1.5d`; None for what is none of these."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    return float(match[1]) * UNITS[match[2]] if match and float(match[1]) > 0 else None


def draw_changes(
    num_nodes: int, mean_s: float, end_s: float, *, seed: int = 0, back_after_s: float | None = None
) -> list[Change]:
    """All nodes at the beginning, then one is lost every `mean_s` on average (a Poisson process), each as likely as any
    other. `back_after_s`: a lost node comes back after so long on average; None: never."""
    return list(_drawn(num_nodes, mean_s, end_s, Random(seed), back_after_s))


def _drawn(num_nodes: int, mean_s: float, end_s: float, random: Random, back_after_s: float | None) -> Iterator[Change]:
    present = [f"node{i}" for i in range(num_nodes)]
    yield Change(0.0, (), tuple(present))
    away: list[tuple[float, str]] = []
    now = random.expovariate(1 / mean_s)
    while True:
        due = min(away, default=None)
        if due is not None and due[0] < now:
            if due[0] >= end_s:
                return
            away.remove(due)
            present.append(due[1])
            yield Change(due[0], (), (due[1],))
            continue
        if now >= end_s:
            return
        if present:
            node = present.pop(random.randrange(len(present)))
            yield Change(now, (node,), ())
            if back_after_s is not None:
                away.append((now + random.expovariate(1 / back_after_s), node))
        elif not away:
            return
        now += random.expovariate(1 / mean_s)
