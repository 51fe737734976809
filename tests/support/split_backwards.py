"""Any schedule with backwards cut in two, for tests of what runs the halves: the weight halves stand anywhere after."""

from random import Random

from motet.schedule.action import Compute, Durations, Kind, unit_duration
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators import Generator
from motet.schedule.generators.list_schedule import MemoryLimit
from motet.schedule.lower import lower
from motet.schedule.routes import Routes
from motet.schedule.schedule import Schedule


def split_at_random(generator: Generator, seed: str, share: float = 0.7) -> Generator:
    """`share`: of the backwards that are cut. The same on every rank."""

    def generate(routes: Routes, costs: Durations | None = None, *, memory: MemoryLimit | None = None) -> Schedule:
        dependencies = Dependencies(routes)
        rng = Random(seed)
        # Inserted into one total order, nothing can become cyclic.
        program = lower(generator(routes, costs, memory=memory), dependencies, costs or unit_duration)
        order = [step for step in program.steps if isinstance(step, Compute)]
        for action in [action for action in order if action.kind is Kind.BACKWARD]:
            if rng.random() < share:
                place = order.index(action)
                order[place] = Compute(Kind.INPUT, action.cell)
                order.insert(rng.randint(place + 1, len(order)), Compute(Kind.WEIGHT, action.cell))
        ranks: list[list[Compute]] = [[] for _ in range(routes.plan.num_ranks)]
        for action in order:
            for rank in dependencies.ranks(action):
                ranks[rank].append(action)
        return Schedule(tuple(map(tuple, ranks)))

    return generate
