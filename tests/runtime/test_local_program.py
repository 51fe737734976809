"""What follows from a program for one rank: tags, uses and final backwards."""

from plans import chain, language_model, module, replica, routes_of
from split_backwards import split_at_random

from motet.plan import Edge, Plan
from motet.runtime.communication.messages import LocalProgram, local_program
from motet.schedule.action import Kind
from motet.schedule.dependencies import Activation, Dependencies, Gradient
from motet.schedule.generators import GENERATORS
from motet.schedule.lower import Message, lower


def local_programs(plan: Plan) -> list[LocalProgram]:
    routes = routes_of(plan)
    program = lower(GENERATORS["1f1b"](routes), Dependencies(routes))
    return [local_program(program, rank) for rank in range(plan.num_ranks)]


def test_both_ends_of_a_message_have_its_tag_and_no_other_message_has() -> None:
    plan = Plan(
        modules={"vision": module(replica(0, 1)), "llm": language_model(replica((2, 3)))},
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=3,
    )
    tags: dict[Message, set[int]] = {}
    for rank, program in enumerate(local_programs(plan)):
        assert program.rank == rank
        assert program.tags.keys() == {step for step in program.steps if isinstance(step, Message)}
        for message, tag in program.tags.items():
            assert rank in (message.sender, message.receiver)
            tags.setdefault(message, set()).add(tag)
    assert all(len(values) == 1 for values in tags.values())
    assert len({tag for values in tags.values() for tag in values}) == len(tags)


def test_a_value_is_used_once_for_each_send_and_once_if_it_is_read_here() -> None:
    """Rank 0 makes what it reads itself and sends to the second member of the language model's group."""
    plan = Plan(
        modules={"vision": module(replica(0)), "llm": language_model(replica((0, 1)))},
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=1,
    )
    first, second = local_programs(plan)
    (route,) = (route for routes in routes_of(plan).outgoing.values() for route in routes)
    activation, gradient = Activation(route.source, route.target), Gradient(route.source, route.target)
    assert dict(first.uses) == {activation: 2, gradient: 1}
    assert dict(second.uses) == {}


def test_the_final_backward_is_the_last_with_a_weight_gradient() -> None:
    for program in local_programs(chain(2, 4)):
        assert [str(action) for action in program.final_backwards.values()] == [f"llm[0].{program.rank}B3"]


def test_of_halves_the_last_weight_half_is_final() -> None:
    """Wherever it stands; an input half never is."""
    plan = chain(2, 4)
    routes = routes_of(plan)
    for seed in range(5):
        schedule = split_at_random(GENERATORS["1f1b"], str(seed), share=1.0)(routes)
        for rank, actions in enumerate(schedule.ranks):
            program = local_program(lower(schedule, Dependencies(routes)), rank)
            last = [action for action in actions if action.kind is Kind.WEIGHT][-1]
            assert list(program.final_backwards.values()) == [last]
            assert program.split == {action.cell for action in actions}


def test_a_frozen_stage_has_no_final_backward() -> None:
    """The encoder's gradient still passes through it."""
    plan = Plan(
        modules={"vision": module(replica(0)), "llm": language_model(replica(1), trainable=())},
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=2,
    )
    vision, llm = local_programs(plan)
    assert [str(action) for action in vision.final_backwards.values()] == ["vision[0].0B1"]
    assert llm.final_backwards == {}
    assert "llm[0].0B1" in map(str, llm.steps)
