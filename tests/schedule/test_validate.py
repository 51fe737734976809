import re
from random import Random

import pytest
from drawing import draw_problem
from plans import chain, language_model, replica, routes_of
from random_costs import RandomCosts

from motet.plan import Plan
from motet.schedule.dependencies import Dependencies, SavedGraph
from motet.schedule.generators import GENERATORS
from motet.schedule.order import CyclicScheduleError
from motet.schedule.schedule import Schedule
from motet.schedule.validate import IncompleteScheduleError, Liveness, validate

GOOD = "0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1"


def judge(short: str, saved: tuple[int, int] | None = None) -> Liveness:
    """Of two stages and two microbatches; 0F1 stands for llm[0].0F1."""
    text = re.sub(r"(\d)([FBIW])", r"llm[0].\1\2", short)
    dependencies = Dependencies(routes_of(chain(2, 2)))
    return validate(Schedule.parse(text), dependencies, None if saved is None else lambda cell, half: saved[half])


def test_peaks() -> None:
    assert judge(GOOD) == Liveness((2, 1), None)
    assert judge(GOOD, (10, 4)) == Liveness((2, 1), (20, 10))


def test_the_half_of_a_backward_keeps_its_share() -> None:
    split = "0: 0F0 0F1 0B0 0B1\n1: 1F0 1I0 1F1 1I1 1W0 1W1"
    # On rank 1: 10, 4, 4 + 10, 4 + 4, 4, 0.
    assert judge(split, (10, 4)) == Liveness((2, 1), (20, 14))


@pytest.mark.parametrize(
    ("text", "fault", "place"),
    [
        ("0: 0F0 0F1 0B0\n1: 1F0 1B0 1F1 1B1", "llm[0].0B1 is missing on rank 0", ">>end<<"),
        ("0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1B1", "llm[0].1F1 is missing on rank 1", ">>end<<"),
        ("0: 0F0 0F1 0B0 0F1 0B1\n1: 1F0 1B0 1F1 1B1", "llm[0].0F1 stands 2 times", "0B0 >>llm[0].0F1<<"),
        ("0: 0F0 1F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1", "llm[0].1F0 does not belong on rank 0", ">>llm[0].1F0<<"),
        ("0: 0F0 0F1 0B0 0B1 0F2\n1: 1F0 1B0 1F1 1B1", "llm[0].0F2 does not belong on rank 0", ">>llm[0].0F2<<"),
        ("0: 0F0 0F1 0B0 0B1\n1: 1F0 1I0 1F1 1B1", "llm[0].1W0 is missing on rank 1", ">>end<<"),
        ("0: 0F0 0F1 0B0 0B1\n1: 1F0 1W0 1F1 1B1", "llm[0].1I0 is missing on rank 1", ">>end<<"),
        ("0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1I0 1F1 1B1", "llm[0].1B0 stands beside its own half", ">>llm[0].1B0<<"),
    ],
)
def test_incomplete_schedules_are_refused(text: str, fault: str, place: str) -> None:
    with pytest.raises(IncompleteScheduleError) as caught:
        judge(text)
    assert str(caught.value).startswith(fault)
    assert place in str(caught.value)


def test_the_number_of_ranks_must_fit() -> None:
    with pytest.raises(IncompleteScheduleError, match="has 1 ranks, but the plan has 2"):
        judge("0: 0F0 0F1 0B0 0B1")


def test_actions_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(CyclicScheduleError, match=">>"):
        judge("0: 0F0 0B0 0F1 0B1\n1: 1F0 1F1 1B0 1B1")
    with pytest.raises(CyclicScheduleError):
        judge("0: 0B0 0F0 0F1 0B1\n1: 1F0 1B0 1F1 1B1")


def test_a_group_must_agree() -> None:
    plan = Plan(modules={"llm": language_model(replica((0, 1)))}, edges=(), num_microbatches=2)
    dependencies = Dependencies(routes_of(plan))
    crossed = "0: llm[0].0F0 llm[0].0F1 llm[0].0B0 llm[0].0B1\n1: llm[0].0F1 llm[0].0F0 llm[0].0B0 llm[0].0B1"
    with pytest.raises(CyclicScheduleError, match=r">>llm\[0\].0F0<<"):
        validate(Schedule.parse(crossed), dependencies)
    split_on_one = (
        "0: llm[0].0F0 llm[0].0F1 llm[0].0B0 llm[0].0B1\n1: llm[0].0F0 llm[0].0F1 llm[0].0I0 llm[0].0W0 llm[0].0B1"
    )
    with pytest.raises(IncompleteScheduleError, match=r"llm\[0\].0B0 is split on some ranks"):
        validate(Schedule.parse(split_on_one), dependencies)


def test_a_backward_without_need_is_refused() -> None:
    plan = Plan(modules={"llm": language_model(replica(0, 1), trainable=((1, 2),))}, edges=(), num_microbatches=1)
    dependencies = Dependencies(routes_of(plan))
    validate(GENERATORS["1f1b"](dependencies.routes), dependencies)
    with pytest.raises(IncompleteScheduleError, match=r"llm\[0\].0B0 has nothing to compute a gradient for"):
        validate(Schedule.parse("0: llm[0].0F0 llm[0].0B0\n1: llm[0].1F0 llm[0].1B0"), dependencies)


def peaks_by_walking(schedule: Schedule, dependencies: Dependencies, sizes: RandomCosts) -> Liveness:
    """Action by action, with objects."""
    activations, in_bytes = [], []
    for actions in schedule.ranks:
        held: set[SavedGraph] = set()
        counts, totals = [0], [0]
        for action in actions:
            held -= {value for value in dependencies.reads(action) if isinstance(value, SavedGraph)}
            held |= {value for value in dependencies.writes(action) if isinstance(value, SavedGraph)}
            counts.append(sum(not value.half for value in held))
            totals.append(sum(sizes.saved_bytes(value.cell, value.half) for value in held))
        activations.append(max(counts))
        in_bytes.append(max(totals))
    return Liveness(tuple(activations), tuple(in_bytes))


@pytest.mark.parametrize("generator", sorted(GENERATORS))
def test_peaks_are_those_of_a_walk_over_drawn_schedules(generator: str) -> None:
    for seed in range(25):
        problem = draw_problem(Random(seed))
        dependencies, sizes = problem.dependencies, RandomCosts(seed)
        schedule = GENERATORS[generator](problem.routes)
        expected = peaks_by_walking(schedule, dependencies, sizes)
        assert validate(schedule, dependencies, sizes.saved_bytes) == expected
        assert validate(Schedule(schedule.ranks), dependencies, sizes.saved_bytes) == expected


def test_every_schedule_with_an_action_too_few_or_too_many_is_refused() -> None:
    for seed in range(40):
        rng = Random(seed)
        problem = draw_problem(rng)
        dependencies = problem.dependencies
        ranks = [list(actions) for actions in GENERATORS["1f1b"](problem.routes).ranks]
        busy = [actions for actions in ranks if actions]
        if not busy:
            continue
        actions = rng.choice(busy)
        if rng.random() < 0.5:
            actions.pop(rng.randrange(len(actions)))
        else:
            actions.insert(rng.randrange(len(actions)), rng.choice(rng.choice(busy)))
        with pytest.raises(IncompleteScheduleError):
            validate(Schedule(ranks), dependencies)
