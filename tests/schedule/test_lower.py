import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from drawing import Limits, draw_problem
from plans import chain, contrastive, language_model, module, replica, routes_of, samples, vision_audio_llm

from motet.plan import Edge, Plan, Replica, Stage
from motet.schedule.action import Compute, Kind, Reduce
from motet.schedule.dependencies import Activation, Dependencies, Gradient
from motet.schedule.generators import GENERATORS
from motet.schedule.lower import Message, Program, lower, messages
from motet.schedule.order import CyclicScheduleError
from motet.schedule.routes import Cell
from motet.schedule.schedule import Schedule


def program_of(plan: Plan) -> Program:
    routes = routes_of(plan)
    return lower(GENERATORS["1f1b"](routes), Dependencies(routes))


def test_a_chain_of_two() -> None:
    program = program_of(chain(2, 1))
    assert [str(step) for step in program.steps] == [
        "llm[0].0F0",
        "llm[0].0:0->llm[0].1:0 0>1",
        "llm[0].1F0",
        "llm[0].1B0",
        "llm[0].0:0<-llm[0].1:0 1>0",
        "llm.R[1:2)",
        "llm[0].0B0",
        "llm.R[0:1)",
    ]
    assert [str(step) for step in program.projections[1]] == [
        "llm[0].0:0->llm[0].1:0 0>1",
        "llm[0].1F0",
        "llm[0].1B0",
        "llm[0].0:0<-llm[0].1:0 1>0",
        "llm.R[1:2)",
    ]


def test_every_step_comes_after_what_it_needs() -> None:
    for seed in range(100):
        problem = draw_problem(Random(seed), Limits(tied=True))
        dependencies = problem.dependencies
        schedule = GENERATORS[problem.plan.schedule](problem.routes)
        program = lower(schedule, dependencies)
        held: list[set] = [set() for _ in range(problem.plan.num_ranks)]
        for step in program.steps:
            if isinstance(step, Message):
                assert step.value in held[step.sender], f"{step} has nothing to send"
                held[step.receiver].add(step.value)
            else:
                for rank in program.participants(step):
                    needed = dependencies.reads(step)
                    if isinstance(step, Reduce):  # Each holder brings its own.
                        needed = [v for v in needed if rank in dependencies.ranks(Compute(Kind.WEIGHT, v.cell))]  # type: ignore[union-attr]
                    assert held[rank].issuperset(needed), f"{step} on rank {rank}"
                for rank in program.participants(step):
                    held[rank].update(dependencies.writes(step))
        assert len(set(program.steps)) == len(program.steps)
        assert {s for s in program.steps if isinstance(s, Reduce)} == set(dependencies.reductions)
        assert {s for s in program.steps if isinstance(s, Compute)} == {
            a for actions in schedule.ranks for a in actions
        }


def groups(
    producers: tuple[int, ...], consumers: tuple[int, ...]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(sender, receiver) of the activation's and of the gradient's messages."""
    plan = Plan(modules={"llm": language_model(replica(producers, consumers))}, edges=(), num_microbatches=1)
    dependencies = Dependencies(routes_of(plan))
    ends = (Cell("llm", 0, 0, 0), Cell("llm", 0, 1, 0))
    there, back = (messages(value, dependencies) for value in (Activation(*ends), Gradient(*ends)))
    return [(m.sender, m.receiver) for m in there], [(m.sender, m.receiver) for m in back]


def test_each_receiver_has_one_sender_and_none_if_it_has_the_value() -> None:
    assert groups((0,), (1,)) == ([(0, 1)], [(1, 0)])
    assert groups((0, 1), (2, 3)) == ([(0, 2), (1, 3)], [(2, 0), (3, 1)])
    assert groups((0,), (1, 2, 3)) == ([(0, 1), (0, 2), (0, 3)], [(1, 0)])
    assert groups((0, 1, 2), (3,)) == ([(0, 3)], [(3, 0), (3, 1), (3, 2)])
    assert groups((0, 1), (1, 2)) == ([(1, 2)], [(1, 0)])
    assert groups((0, 1), (0, 1)) == ([], [])
    assert groups((0,), (0, 1)) == ([(0, 1)], [])


def test_context_parallel_members_pass_on_what_their_place_holds() -> None:
    """Ranks are ranks[c * tp_size + t]: 0 and 1 hold the first part of the sequence, 2 and 3 the second."""

    def pairs(first: Stage, second: Stage) -> list[list[tuple[int, int]]]:
        replica = Replica(stages=(first, second))
        llm = module(replica, kind="language_model", loss_weight=1.0)
        dependencies = Dependencies(routes_of(Plan(modules={"llm": llm}, edges=(), num_microbatches=1)))
        ends = (Cell("llm", 0, 0, 0), Cell("llm", 0, 1, 0))
        both = (messages(value, dependencies) for value in (Activation(*ends), Gradient(*ends)))
        return [[(m.sender, m.receiver) for m in one_way] for one_way in both]

    wide = Stage(layers=(0, 1), ranks=(0, 1, 2, 3), tp_size=2, cp_size=2)
    narrow = Stage(layers=(1, 2), ranks=(4, 5), tp_size=1, cp_size=2)
    assert pairs(wide, narrow) == [[(0, 4), (2, 5)], [(4, 0), (4, 1), (5, 2), (5, 3)]]
    shifted = Stage(layers=(1, 2), ranks=(1, 2), tp_size=1, cp_size=2)
    straight = Stage(layers=(0, 1), ranks=(0, 1), tp_size=1, cp_size=2)
    assert pairs(straight, shifted) == [[(0, 1), (1, 2)], [(1, 0), (2, 1)]]
    assert pairs(straight, replace(straight, layers=(1, 2))) == [[], []]
    # Groups of unequal size: a piece from every place that the receiver does not hold itself.
    one = Stage(layers=(1, 2), ranks=(1,), tp_size=1, cp_size=1)
    assert pairs(straight, one) == [[(0, 1)], [(1, 0)]]
    three = Stage(layers=(1, 2), ranks=(4, 5, 6), tp_size=1, cp_size=3)
    assert pairs(wide, three) == [
        [(0, 4), (2, 4), (0, 5), (2, 5), (0, 6), (2, 6)],
        [(sender, receiver) for receiver in range(4) for sender in (4, 5, 6)],
    ]


def test_other_values_stay_where_they_are() -> None:
    dependencies = Dependencies(routes_of(chain(2, 1)))
    kept = [v for action in dependencies.required() for v in dependencies.writes(action)]
    assert sum(bool(messages(value, dependencies)) for value in kept) == 2


def test_a_run_of_layers_that_no_microbatch_reached_is_reduced_too() -> None:
    plan = Plan(
        modules={"vision": module(replica(0), replica(1)), "llm": language_model(replica(2))},
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=2,
    )
    routes = routes_of(plan, samples(2, ["vision", "llm"], {0: ["vision"], 1: ["vision"]}))
    program = lower(GENERATORS["1f1b"](routes), Dependencies(routes))
    assert program.projections[0] == program.projections[1] == (Reduce("vision", 0, 1),)


def test_a_reduction_comes_right_after_the_last_gradient_that_it_sums() -> None:
    plan = Plan(modules={"llm": language_model(replica(0, 1), replica(2, 3))}, edges=(), num_microbatches=2)
    routes = routes_of(plan, samples(4, ["llm"]))
    steps = lower(GENERATORS["1f1b"](routes), Dependencies(routes)).steps
    for stage in (0, 1):
        reduce = steps.index(Reduce("llm", stage, stage + 1))
        last = max(
            i
            for i, s in enumerate(steps)
            if isinstance(s, Compute) and s.kind is Kind.BACKWARD and s.cell.stage == stage
        )
        between = steps[last + 1 : reduce]
        assert reduce > last
        assert all(isinstance(step, Message) for step in between)


def test_the_gradients_of_later_layers_are_reduced_first() -> None:
    whole = Replica(stages=(Stage(layers=(0, 3), ranks=(0,)),))
    llm = module(whole, replica(1, 1, 1), kind="language_model", loss_weight=1.0, tied=((0, 2),))
    plan = Plan(modules={"llm": llm}, edges=(), num_microbatches=1)
    routes = routes_of(plan, samples(2, ["llm"], {1: ["llm"]}))
    program = lower(GENERATORS["1f1b"](routes), Dependencies(routes))
    assert [str(step) for step in program.projections[0]] == [
        "llm[0].0F0",
        "llm[0].0B0",
        "llm.R[2:3)",
        "llm.R[1:2)",
        "llm.R[0:1)",
        "llm.R[0=2)",
    ]


def test_cycles_are_refused_with_the_place_marked() -> None:
    routes = routes_of(chain(2, 2))
    text = "0: llm[0].0F0 llm[0].0B0 llm[0].0F1 llm[0].0B1\n1: llm[0].1F1 llm[0].1F0 llm[0].1B0 llm[0].1B1"
    with pytest.raises(CyclicScheduleError) as caught:
        lower(Schedule.parse(text), Dependencies(routes))
    assert ">>llm[0].0B0<<" in str(caught.value)
    assert ">>llm[0].1F1<<" in str(caught.value)


def test_what_no_action_writes_is_named() -> None:
    text = "0: llm[0].0F0 llm[0].0B0\n1: llm[0].1F0"
    with pytest.raises(CyclicScheduleError, match=r"llm\[0\].0B0 reads Gradient\(.*which no action writes"):
        lower(Schedule.parse(text), Dependencies(routes_of(chain(2, 1))))


def test_receives_are_posted_before_what_they_overlap() -> None:
    """While rank 0 is at its long forward, rank 1 makes what it needs next: the receive stands before that forward."""
    plan = Plan(
        modules={"audio": module(replica(1)), "llm": language_model(replica(0))},
        edges=(Edge(source="audio", target="llm"),),
        num_microbatches=2,
    )
    routes = routes_of(plan)
    program = lower(GENERATORS["gpipe"](routes), Dependencies(routes), lambda a: 5.0 if a.cell.module == "llm" else 2.0)
    assert [str(step) for step in program.projections[0][:4]] == [
        "audio[0].0:0->llm[0].0:0 1>0",
        "audio[0].0:1->llm[0].0:1 1>0",
        "llm[0].0F0",
        "llm[0].0F1",
    ]


SCRIPT = """
import sys
sys.path[:0] = [{tests!r}]
from random import Random
from drawing import draw_problem
from motet.schedule.generators import GENERATORS
from motet.schedule.lower import lower
for seed in range(20):
    problem = draw_problem(Random(seed))
    for generate in GENERATORS.values():
        print(lower(generate(problem.routes), problem.dependencies).digest())
"""


def test_all_processes_derive_the_same_program() -> None:
    """Whatever Python's hashes of strings are, which differ between processes."""
    script = SCRIPT.format(tests=str(Path(__file__).parent.parent / "support"))
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(outputs) == 1
    assert len(outputs.pop().split()) == 20 * len(GENERATORS)


def test_the_digest_tells_programs_apart() -> None:
    digests = {program_of(plan).digest() for plan in (chain(2, 1), chain(2, 2), chain(3, 1), vision_audio_llm(1))}
    assert len(digests) == 4


def test_what_the_members_of_a_loss_exchange_is_no_message() -> None:
    plan = contrastive({"image": [replica(0, 1)], "text": [replica(2)]}, schedule="1f1b")
    routes = routes_of(plan, samples(2, ["image", "text"]))
    program = lower(GENERATORS["1f1b"](routes), Dependencies(routes))
    assert [str(message) for message in program.messages] == [
        "image[0].0:0->image[0].1:0 0>1",
        "image[0].0:0<-image[0].1:0 1>0",
    ]
    (route,) = routes.incoming[Cell("loss", 0, 0, 0)][:1]
    assert messages(Activation(route.source, route.target), Dependencies(routes)) == []
    assert [str(step) for step in program.projections[2]] == [
        "text[0].0F0",
        "loss[0].0F0",
        "loss[0].0B0",
        "loss.R[0:1)",
        "text[0].0B0",
        "text.R[0:1)",
    ]
