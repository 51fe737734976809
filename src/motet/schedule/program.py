"""Makes the program of an iteration from a schedule's name; planners, simulator and engine all use it.

What is simulated is what runs only if both order the same actions by the same expected times.
"""

from motet.schedule.action import Durations, unit_duration
from motet.schedule.dependencies import Dependencies
from motet.schedule.fill_ahead import schedule_with_next_batch
from motet.schedule.generators import GENERATORS, WITHIN_MEMORY
from motet.schedule.generators.list_schedule import MemoryLimit
from motet.schedule.joint_cells import joint_schedule
from motet.schedule.lower import Program, lower
from motet.schedule.routes import Routes
from motet.schedule.schedule import Schedule


def make_program(
    schedule: str, routes: Routes, duration_s: Durations | None = None, *, memory: MemoryLimit | None = None
) -> Program:
    """The program of an iteration.

    `schedule`: a key of `GENERATORS`. `duration_s`: seconds of each compute action, as far as they are known
    (`Costs.compute_s`); None: all equal. `memory`: for the schedules that depend on it (`WITHIN_MEMORY`)."""
    ordered = make_schedule(schedule, routes, duration_s, memory=memory)
    return lower(ordered, Dependencies(routes), duration_s or unit_duration)


def make_schedule(
    schedule: str, routes: Routes, duration_s: Durations | None = None, *, memory: MemoryLimit | None = None
) -> Schedule:
    """The order of its compute actions; as for `make_program`."""
    generator, limit = GENERATORS[schedule], memory if schedule in WITHIN_MEMORY else None

    def make(shown: Routes, costs: Durations | None) -> Schedule:
        return joint_schedule(shown, costs, limit, lambda r, costs, most: generator(r, costs, memory=most))

    return schedule_with_next_batch(routes, duration_s, make) if routes.runs_ahead else make(routes, duration_s)
