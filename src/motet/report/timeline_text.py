"""A timeline as text: one line per rank, time from left to right.

Each module is a letter, small while it computes forward and large while it computes backward; dots are idle time.

Limits: a column shows what takes most of its time; what is much shorter than a column vanishes.
"""

from collections import defaultdict
from collections.abc import Iterable

from motet.timeline import BUSY_KINDS, Timeline

IDLE = "."
OPTIMIZER = "*"


def timeline_text(timeline: Timeline, width: int = 100) -> str:
    """Lines of `width` columns after the rank, and a legend."""
    modules = sorted({span.module for span in timeline.spans if span.kind in "FBIW"})
    letters = _letters(modules)
    column_s = timeline.iteration_time_s / width
    shares: list[dict[tuple[int, str], float]] = [defaultdict(float) for _ in range(timeline.num_ranks)]
    for span in timeline.spans:
        if span.kind not in BUSY_KINDS or not column_s:
            continue
        letter = OPTIMIZER if span.kind == "optimizer" else letters[span.module]
        text = letter.upper() if span.kind in "BIW" else letter
        start, end = span.start - timeline.start_s, span.end - timeline.start_s
        for column in range(int(start / column_s), min(width, int(end / column_s) + 1)):
            shares[span.rank][column, text] += min(end, (column + 1) * column_s) - max(start, column * column_s)
    digits = len(str(timeline.num_ranks - 1))
    lines = [f"rank {rank:>{digits}} |{_line(shares[rank], width, column_s)}|" for rank in range(timeline.num_ranks)]
    legend = ", ".join(f"{letters[module]} {module}" for module in modules)
    return "\n".join([*lines, f"{legend}; capital: backward; {OPTIMIZER} optimizer; {IDLE} idle"])


def _line(share_s: dict[tuple[int, str], float], width: int, column_s: float) -> str:
    line = []
    for column in range(width):
        busy = {text: seconds for (at, text), seconds in share_s.items() if at == column}
        idle_s = column_s - sum(busy.values())
        longest = max(busy, key=lambda text: busy[text], default=IDLE)
        line.append(longest if busy and busy[longest] >= idle_s else IDLE)
    return "".join(line)


def _letters(modules: Iterable[str]) -> dict[str, str]:
    """The first letter of each name that no other has taken."""
    taken: dict[str, str] = {}
    for module in modules:
        free = [c for c in module.lower() + "abcdefghijklmnopqrstuvwxyz" if c.isalpha() and c not in taken.values()]
        taken[module] = free[0] if free else "?"
    return taken
