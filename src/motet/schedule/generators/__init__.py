"""One file per schedule. A generator orders compute actions; it knows nothing of messages or of time.

A new one is a file here, an entry in `GENERATORS` and a test.
"""

from collections.abc import Mapping
from typing import Protocol

from motet.schedule.action import Durations
from motet.schedule.generators.bubble_filling import bubble_filling
from motet.schedule.generators.critical_path import critical_path, iterated_critical_path
from motet.schedule.generators.dip import dip
from motet.schedule.generators.distmm_pipe import distmm_pipe
from motet.schedule.generators.eager_1f1b import eager_1f1b
from motet.schedule.generators.gpipe import gpipe
from motet.schedule.generators.interleaved_1f1b import interleaved_1f1b, interleaved_1f1b_adjusted
from motet.schedule.generators.list_schedule import MemoryLimit
from motet.schedule.generators.one_f_one_b import one_f_one_b
from motet.schedule.generators.zero_bubble import zero_bubble_h1, zero_bubble_h2, zero_bubble_v
from motet.schedule.routes import Routes
from motet.schedule.schedule import Schedule


class Generator(Protocol):
    def __call__(
        self, routes: Routes, costs: Durations | None = None, *, memory: MemoryLimit | None = None
    ) -> Schedule: ...


GENERATORS: Mapping[str, Generator] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager_1f1b": eager_1f1b,
    "interleaved_1f1b": interleaved_1f1b,
    "interleaved_1f1b_adjusted": interleaved_1f1b_adjusted,
    "zero_bubble_h1": zero_bubble_h1,
    "zero_bubble_h2": zero_bubble_h2,
    "zero_bubble_v": zero_bubble_v,
    "bubble_filling": bubble_filling,
    "critical_path": critical_path,
    "iterated_critical_path": iterated_critical_path,
    "dip": dip,
    "distmm_pipe": distmm_pipe,
}

SPLIT_BACKWARDS = frozenset(
    {"zero_bubble_h1", "zero_bubble_h2", "zero_bubble_v", "critical_path", "iterated_critical_path"}
)
"""Schedules that split backwards into halves. The lower bound for whole backwards holds for all others."""

CONTRASTING = frozenset({"distmm_pipe"})
"""Schedules for contrastive towers. Run files refuse them for other models, for which they are 1F1B."""

WITHIN_MEMORY = frozenset({"eager_1f1b", "bubble_filling", *SPLIT_BACKWARDS})
"""Schedules whose order depends on the available memory."""
