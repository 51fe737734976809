import pytest
from plans import chain, language_model, module, replica, routes_of
from queue_rules import QueueRule, can_deadlock, find_deadlock, naive_lists

from motet.plan import Edge, Plan
from motet.schedule.action import Compute, Reduce, parse_action
from motet.schedule.dependencies import Dependencies
from motet.schedule.generators import GENERATORS
from motet.schedule.lower import Message, Step, lower
from motet.schedule.routes import Cell
from motet.schedule.schedule import Schedule

RULES = list(QueueRule)


def verdicts(lists: list[list[Step]], dependencies: Dependencies) -> dict[QueueRule, bool]:
    """Under which rules the lists get stuck."""
    return {rule: find_deadlock(lists, dependencies, rule) is not None for rule in RULES}


def two_exchanging() -> tuple[Dependencies, Message, Message, Compute, Compute, Compute, Compute]:
    """Two pairs of modules: a on rank 0 feeds b on rank 1, c on rank 1 feeds d on rank 0."""
    plan = Plan(
        modules={
            "a": module(replica(0), trainable=()),
            "c": module(replica(1), trainable=()),
            "b": module(replica(1), trainable=(), loss_weight=1.0),
            "d": module(replica(0), trainable=(), loss_weight=1.0),
        },
        edges=(Edge(source="a", target="b"), Edge(source="c", target="d")),
        num_microbatches=1,
    )
    a, b, c, d = (Cell(name, 0, 0, 0) for name in "abcd")
    forwards = [parse_action(f"{name}[0].0F0") for name in "abcd"]
    assert all(isinstance(action, Compute) for action in forwards)
    dependencies = Dependencies(routes_of(plan))
    return dependencies, Message(a, b, False, 0, 1), Message(c, d, False, 1, 0), *forwards  # type: ignore[return-value]


def test_two_sends_that_cross() -> None:
    """Each rank sends first and then receives: fine only if pairing looks past what is first."""
    dependencies, there, back, a, b, c, d = two_exchanging()
    lists: list[list[Step]] = [[a, there, back, d], [c, back, there, b]]
    assert verdicts(lists, dependencies) == {
        QueueRule.TAGGED: False,
        QueueRule.PER_PAIR: True,
        QueueRule.PER_RANK: True,
        QueueRule.BLOCKING: True,
    }
    agreed: list[list[Step]] = [[a, there, back, d], [c, there, back, b]]
    assert not any(verdicts(agreed, dependencies).values())


def test_a_ring_of_three_that_each_send_first() -> None:
    """No pair disagrees, but every rank's queue begins with a send that its receiver has not come to."""
    names = "abc"
    plan = Plan(
        modules={
            **{name: module(replica(i), trainable=()) for i, name in enumerate(names)},
            **{f"to_{name}": module(replica((i + 1) % 3), trainable=()) for i, name in enumerate(names)},
        },
        edges=tuple(Edge(source=name, target=f"to_{name}") for name in names),
        num_microbatches=1,
    )
    dependencies = Dependencies(routes_of(plan))
    sends = [Message(Cell(n, 0, 0, 0), Cell(f"to_{n}", 0, 0, 0), False, i, (i + 1) % 3) for i, n in enumerate(names)]
    lists: list[list[Step]] = []
    for i, name in enumerate(names):
        consumer = parse_action(f"to_{names[i - 1]}[0].0F0")
        producer = parse_action(f"{name}[0].0F0")
        lists.append([producer, sends[i], sends[i - 1], consumer])
    assert verdicts(lists, dependencies) == {
        QueueRule.TAGGED: False,
        QueueRule.PER_PAIR: False,
        QueueRule.PER_RANK: True,
        QueueRule.BLOCKING: True,
    }


def test_two_messages_of_a_pair_in_different_orders() -> None:
    plan = Plan(modules={"llm": language_model(replica(0, 1), trainable=())}, edges=(), num_microbatches=2)
    dependencies = Dependencies(routes_of(plan))
    f00, f01, f10, f11 = (parse_action(f"llm[0].{text}") for text in ("0F0", "0F1", "1F0", "1F1"))
    first, second = (Message(Cell("llm", 0, 0, m), Cell("llm", 0, 1, m), False, 0, 1) for m in (0, 1))
    lists: list[list[Step]] = [[f00, first, f01, second], [second, f11, first, f10]]
    assert verdicts(lists, dependencies) == {
        QueueRule.TAGGED: False,
        QueueRule.PER_PAIR: True,
        QueueRule.PER_RANK: True,
        QueueRule.BLOCKING: True,
    }


def test_only_ranks_that_block_mind_a_receiver_that_first_computes_with_the_sender() -> None:
    plan = Plan(
        modules={
            "a": module(replica(0), trainable=()),
            "b": module(replica(1), trainable=()),
            "group": module(replica((0, 1)), trainable=()),
        },
        edges=(Edge(source="a", target="b"),),
        num_microbatches=1,
    )
    dependencies = Dependencies(routes_of(plan))
    a, b, group = (parse_action(f"{name}[0].0F0") for name in ("a", "b", "group"))
    message = Message(Cell("a", 0, 0, 0), Cell("b", 0, 0, 0), False, 0, 1)
    assert verdicts([[a, message, group], [group, message, b]], dependencies) == {
        QueueRule.TAGGED: False,
        QueueRule.PER_PAIR: False,
        QueueRule.PER_RANK: False,
        QueueRule.BLOCKING: True,
    }


def test_reductions_in_different_orders() -> None:
    plan = Plan(modules={"llm": language_model(replica(0, 0), replica(1, 1))}, edges=(), num_microbatches=1)
    dependencies = Dependencies(routes_of(plan))
    one, two = Reduce("llm", 0, 1), Reduce("llm", 1, 2)
    assert verdicts([[one, two], [two, one]], dependencies) == {
        QueueRule.TAGGED: False,
        QueueRule.PER_PAIR: True,  # They are of the same group.
        QueueRule.PER_RANK: True,
        QueueRule.BLOCKING: True,
    }
    assert not any(verdicts([[one, two], [one, two]], dependencies).values())


@pytest.mark.parametrize("rule", RULES)
def test_a_send_without_its_receive_is_stuck(rule: QueueRule) -> None:
    dependencies, there, _, a, _, _, _ = two_exchanging()
    stuck = find_deadlock([[a, there], []], dependencies, rule)
    assert stuck is not None
    assert f">>{there}<<" in stuck


@pytest.mark.parametrize("rule", RULES)
def test_a_cycle_of_actions_is_stuck_under_every_rule(rule: QueueRule) -> None:
    dependencies = Dependencies(routes_of(chain(2, 2)))
    text = "0: llm[0].0F0 llm[0].0B0 llm[0].0F1 llm[0].0B1\n1: llm[0].1F0 llm[0].1F1 llm[0].1B0 llm[0].1B1"
    stuck = find_deadlock(naive_lists(Schedule.parse(text), dependencies), dependencies, rule)
    assert stuck is not None
    assert ">>llm[0].0:0<-llm[0].1:0 1>0<< llm[0].0B0" in stuck  # The gradient never comes.


def test_naive_placement_of_1f1b_needs_tags_and_the_program_does_not() -> None:
    routes = routes_of(chain(3, 4))
    dependencies = Dependencies(routes)
    schedule = GENERATORS["1f1b"](routes)
    naive = [list(steps) for steps in naive_lists(schedule, dependencies)]
    assert verdicts(naive, dependencies) == {
        QueueRule.TAGGED: False,
        QueueRule.PER_PAIR: True,
        QueueRule.PER_RANK: True,
        QueueRule.BLOCKING: True,
    }
    assert not any(can_deadlock(lower(schedule, dependencies), rule) for rule in RULES)
