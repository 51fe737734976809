"""The permanent fuzz: what the validator passes never deadlocks, what it refuses does.

`MOTET_FUZZ_DRAWS` sets the number of draws, `MOTET_FUZZ_SEED` the seed. With the first alone the seed is the time; it
is printed, and every failure says how to draw its problem again.
"""

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import pytest
from drawing import Limits, Problem, draw_problem
from queue_rules import QueueRule, can_deadlock, find_deadlock, naive_lists

from motet.schedule.action import Compute, Kind
from motet.schedule.generators import GENERATORS
from motet.schedule.generators.list_schedule import MemoryLimit
from motet.schedule.lower import lower
from motet.schedule.order import CyclicScheduleError
from motet.schedule.routes import Cell
from motet.schedule.schedule import Schedule
from motet.schedule.validate import IncompleteScheduleError, validate

NUM_DRAWS = int(os.environ.get("MOTET_FUZZ_DRAWS", "100"))
LIMITS = Limits(inner_losses=True, tied=True)
SEED = os.environ.get("MOTET_FUZZ_SEED") or (str(time.time_ns()) if "MOTET_FUZZ_DRAWS" in os.environ else "0")


def draws() -> Iterator[tuple[int, Random, Problem]]:
    print(f"MOTET_FUZZ_SEED={SEED} MOTET_FUZZ_DRAWS={NUM_DRAWS}")
    for i in range(NUM_DRAWS):
        rng = Random(f"{SEED}/{i}")
        yield i, rng, draw_problem(rng, LIMITS)


@contextmanager
def told(draw: int, problem: Problem) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"draw {draw} of MOTET_FUZZ_SEED={SEED}: draw_problem(Random('{SEED}/{draw}'), LIMITS)")
        error.add_note(str(problem))
        raise


def generate_all(problem: Problem, rng: Random) -> Iterator[tuple[str, Schedule]]:
    """Schedules of two generators, also under a limit in bytes that is sometimes too small for anything."""
    routes = problem.routes
    durations = {stage: rng.choice([0.5, 1.0, 3.0]) for stage in dict.fromkeys(cell[:3] for cell in routes.cells)}
    memory = MemoryLimit(saved_bytes=lambda cell: 1 + len(routes.samples(cell)), limit_bytes=lambda rank: 2 * rank + 1)
    for name in rng.sample(sorted(GENERATORS), k=2):
        generate = GENERATORS[name]
        yield name, generate(routes)
        yield f"{name} with costs", generate(routes, lambda action: durations[action.cell[:3]])
        yield f"{name} within memory", generate(routes, memory=memory)


def test_what_the_generators_make_is_valid_and_never_deadlocks() -> None:
    num_shared = num_different = 0
    for draw, rng, problem in draws():
        with told(draw, problem):
            dependencies = problem.dependencies
            for name, schedule in generate_all(problem, rng):
                validate(schedule, dependencies)
                validate(split_backwards(schedule, rng), dependencies)
                program = lower(schedule, dependencies)
                for rule in QueueRule:
                    assert not can_deadlock(program, rule), f"{name} under {rule}"
            stages = [stage for *_, stage in problem.plan.stages()]
            num_shared += sum(len(stage.ranks) for stage in stages) > problem.plan.num_ranks
            num_different += len({len(module.replicas) for module in problem.plan.modules.values()}) > 1
    if NUM_DRAWS >= 100:
        assert num_shared >= NUM_DRAWS / 5, "few of the drawn problems share ranks"
        assert num_different >= NUM_DRAWS / 10, "few of the drawn problems have unequal numbers of replicas"


def test_what_the_validator_refuses_deadlocks_and_what_it_passes_does_not() -> None:
    verdicts: Counter[bool] = Counter()
    for draw, rng, problem in draws():
        with told(draw, problem):
            dependencies = problem.dependencies
            schedule = split_backwards(GENERATORS[problem.plan.schedule](problem.routes), rng)
            for _ in range(4):
                mutant = swap_two(schedule, rng)
                try:
                    validate(mutant, dependencies)
                except CyclicScheduleError:
                    # Not even a transport that pairs by tags in any order gets through.
                    for rule in QueueRule:
                        assert find_deadlock(naive_lists(mutant, dependencies), dependencies, rule), rule
                    verdicts[False] += 1
                else:
                    program = lower(mutant, dependencies)
                    for rule in QueueRule:
                        assert not can_deadlock(program, rule), rule
                    assert find_deadlock(naive_lists(mutant, dependencies), dependencies, QueueRule.TAGGED) is None
                    verdicts[True] += 1
    assert min(verdicts.values()) >= NUM_DRAWS / 10, f"nearly all mutants are alike: {verdicts}"


def test_a_schedule_without_something_that_others_read_is_refused_and_deadlocks() -> None:
    num_refused = 0
    for draw, rng, problem in draws():
        with told(draw, problem):
            dependencies = problem.dependencies
            schedule = GENERATORS[problem.plan.schedule](problem.routes)
            actions = sorted({action for actions in schedule.ranks for action in actions})
            read = {value for action in actions for value in dependencies.reads(action)}
            candidates = [action for action in actions if read & set(dependencies.writes(action))]
            if not candidates:
                continue
            dropped = rng.choice(candidates)
            mutant = Schedule(tuple(tuple(a for a in actions if a != dropped) for actions in schedule.ranks))
            with pytest.raises(IncompleteScheduleError, match="is missing"):
                validate(mutant, dependencies)
            assert find_deadlock(naive_lists(mutant, dependencies), dependencies, QueueRule.TAGGED)
            num_refused += 1
    assert num_refused >= NUM_DRAWS / 2


def test_naive_placement_of_messages_deadlocks_often_unless_messages_have_tags() -> None:
    """So that the absence of deadlocks elsewhere is a finding and not the blindness of the search."""
    deadlocks: Counter[QueueRule] = Counter()
    for draw, _, problem in draws():
        with told(draw, problem):
            dependencies = problem.dependencies
            schedule = GENERATORS["1f1b"](problem.routes)
            for rule in QueueRule:
                found = find_deadlock(naive_lists(schedule, dependencies), dependencies, rule)
                deadlocks[rule] += found is not None
    assert deadlocks[QueueRule.TAGGED] == 0
    for rule in (QueueRule.PER_PAIR, QueueRule.PER_RANK, QueueRule.BLOCKING):
        assert deadlocks[rule] >= NUM_DRAWS / 10, rule
    assert deadlocks[QueueRule.PER_PAIR] <= deadlocks[QueueRule.PER_RANK] <= deadlocks[QueueRule.BLOCKING]


def split_backwards(schedule: Schedule, rng: Random) -> Schedule:
    """Some backwards in two halves, alike on all ranks of a stage.

    The weight halves come last, ordered by their cells: so no two ranks can have them in different orders."""
    cells = sorted({action.cell for actions in schedule.ranks for action in actions if action.kind is Kind.BACKWARD})
    split = [cell for cell in cells if rng.random() < 0.5]
    return Schedule(tuple(_split(actions, split) for actions in schedule.ranks))


def _split(actions: tuple[Compute, ...], split: list[Cell]) -> tuple[Compute, ...]:
    halved = [Compute(Kind.INPUT, a.cell) if a.kind is Kind.BACKWARD and a.cell in split else a for a in actions]
    return (*halved, *(Compute(Kind.WEIGHT, cell) for cell in split if Compute(Kind.INPUT, cell) in halved))


def swap_two(schedule: Schedule, rng: Random) -> Schedule:
    """Two neighbours, or two actions anywhere, of one rank change places."""
    ranks = [list(actions) for actions in schedule.ranks]
    actions = rng.choice([actions for actions in ranks if len(actions) > 1] or [[]])
    if actions:
        i = rng.randrange(len(actions) - 1)
        j = rng.choice([i + 1, rng.randrange(len(actions))])
        actions[i], actions[j] = actions[j], actions[i]
    return Schedule(tuple(map(tuple, ranks)))
