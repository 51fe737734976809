from collections import Counter
from random import Random

from drawing import Limits, draw_problem
from plans import chain, language_model, module, replica, routes_of, samples, vision_audio_llm

from motet.assignment.batch_assignment import contiguous_assignment
from motet.plan import Edge, Plan, Replica, Stage
from motet.schedule.action import Compute, Kind, Reduce
from motet.schedule.dependencies import (
    Activation,
    Dependencies,
    Gradient,
    Holder,
    SavedGraph,
    Value,
    WeightGradient,
    reductions,
)
from motet.schedule.routes import Cell, derive_routes


def test_an_activation_is_not_the_gradient_of_its_route() -> None:
    a, b = Cell("llm", 0, 0, 0), Cell("llm", 0, 1, 0)
    assert len({Activation(a, b), Gradient(a, b), SavedGraph(a), SavedGraph(a, half=True), WeightGradient(a)}) == 5


def test_what_the_middle_of_a_chain_reads_and_writes() -> None:
    dependencies = Dependencies(routes_of(chain(3, 1)))
    before, here, after = (Cell("llm", 0, s, 0) for s in range(3))
    forward, backward, half, weight = (Compute(kind, here) for kind in Kind)
    assert dependencies.reads(forward) == [Activation(before, here)]
    assert dependencies.writes(forward) == [Activation(here, after), SavedGraph(here)]
    assert dependencies.reads(backward) == [Gradient(here, after), SavedGraph(here)]
    assert dependencies.writes(backward) == [Gradient(before, here), WeightGradient(here)]
    assert dependencies.reads(half) == dependencies.reads(backward)
    assert dependencies.writes(half) == [Gradient(before, here), SavedGraph(here, half=True)]
    assert dependencies.reads(weight) == [SavedGraph(here, half=True)]
    assert dependencies.writes(weight) == [WeightGradient(here)]


def test_every_value_is_written_once_and_every_value_read_is_written() -> None:
    for seed in range(100):
        dependencies = draw_problem(Random(seed), Limits(tied=True)).dependencies
        actions = [*dependencies.required(), *dependencies.reductions]
        written: Counter[Value] = Counter(v for action in actions for v in dependencies.writes(action))
        assert not written or max(written.values()) == 1
        assert all(v in written for action in actions for v in dependencies.reads(action))


def test_every_trainable_layer_is_reduced_once_over_all_that_hold_it() -> None:
    for seed in range(100):
        plan = draw_problem(Random(seed)).plan
        found = reductions(plan)
        for name, module_plan in plan.modules.items():
            if module_plan.copy_of is not None:
                continue
            for layer in range(module_plan.num_layers):
                covering = [r for r in found if r.module == name and r.first <= layer < r.last]
                holders = {
                    Holder(n, r, s, stage.ranks)
                    for n, r, s, stage in plan.stages()
                    if name in (n, plan.modules[n].copy_of) and stage.layers[0] <= layer < stage.layers[1]
                }
                if module_plan.is_trainable((layer, layer + 1)):
                    assert len(covering) == 1
                assert all(set(found[r]) == holders for r in covering)


def test_runs_of_layers_with_the_same_holders_are_reduced_together() -> None:
    uneven = [
        Replica(stages=(Stage(layers=(0, 3), ranks=(0,)), Stage(layers=(3, 4), ranks=(1,)))),
        Replica(stages=(Stage(layers=(0, 2), ranks=(2,)), Stage(layers=(2, 4), ranks=(3,)))),
    ]
    plan = Plan(modules={"llm": language_model(*uneven)}, edges=(), num_microbatches=1)
    ranks = {str(r): [h.ranks[0] for h in holders] for r, holders in reductions(plan).items()}
    assert ranks == {"llm.R[0:2)": [0, 2], "llm.R[2:3)": [0, 3], "llm.R[3:4)": [1, 3]}


def test_copies_hold_the_layers_too_and_frozen_runs_are_not_reduced() -> None:
    plan = Plan(
        modules={
            "vision": module(replica(0, 1), trainable=((1, 2),)),
            "vision@1": module(
                Replica(stages=(Stage(layers=(0, 2), ranks=(2,)),)), trainable=((1, 2),), copy_of="vision"
            ),
            "llm": language_model(replica(2), trainable=()),
        },
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=1,
    )
    assert reductions(plan) == {Reduce("vision", 1, 2): (Holder("vision", 0, 1, (1,)), Holder("vision@1", 0, 0, (2,)))}


def test_a_shared_parameter_is_reduced_over_the_holders_of_either_layer() -> None:
    llm = module(replica(0, 1, 2), kind="language_model", loss_weight=1.0, tied=((0, 2),))
    plan = Plan(modules={"llm": llm}, edges=(), num_microbatches=1)
    dependencies = Dependencies(routes_of(plan))
    tied = Reduce("llm", 0, 2, tied=True)
    assert dependencies.ranks(tied) == (0, 2)
    assert dependencies.reads(tied) == [WeightGradient(Cell("llm", 0, 0, 0)), WeightGradient(Cell("llm", 0, 2, 0))]


def test_evaluation_reduces_nothing() -> None:
    plan = vision_audio_llm(2)
    batch = samples(2, ["vision", "audio", "llm"])
    routes = derive_routes(plan, contiguous_assignment(plan, batch), batch, forward_only=True)
    assert Dependencies(routes).reductions == {}
    assert all(action.kind is Kind.FORWARD for action in Dependencies(routes).required())
