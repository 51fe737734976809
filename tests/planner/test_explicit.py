"""Degrees to plans: where ranks go, and what no plan can have."""

from dataclasses import replace

import pytest
from small_problem import small_problem

from motet.errors import UserError
from motet.plan import ContextOptions, Edge, Plan
from motet.planner.evaluate import check_same_model, evaluate
from motet.planner.layouts.layout import build_plan
from motet.planner.problem import Degrees
from motet.planner.registry import make_plan

ONE = Degrees()
SHARED_BY_TWO = Degrees(cp=2, context=ContextOptions(block_size=4))


def ranks(plan, name):
    return [[stage.ranks for stage in replica.stages] for replica in plan.modules[name].replicas]


def test_ranks_tensor_parallel_fastest_then_stages_then_modules_then_replicas():
    degrees = {"vision": Degrees(tp=2, dp=2), "audio": Degrees(dp=2), "language_model": Degrees(pp=2, dp=2)}
    plan = make_plan(small_problem(num_devices=10), "explicit", degrees=degrees)
    assert ranks(plan, "vision") == [[(0, 1)], [(5, 6)]]
    assert ranks(plan, "audio") == [[(2,)], [(7,)]]
    assert ranks(plan, "language_model") == [[(3,), (4,)], [(8,), (9,)]]
    assert Plan.from_json(plan.to_json()) == plan


def test_colocated_encoders_share_their_ranks():
    degrees = {"vision": Degrees(pp=2), "audio": Degrees(pp=2), "language_model": Degrees(pp=2)}
    plan = make_plan(small_problem(), "explicit", degrees=degrees, placement="colocated")
    assert ranks(plan, "vision") == ranks(plan, "audio") == [[(0,), (1,)]]
    assert ranks(plan, "language_model") == [[(2,), (3,)]]


def test_replicated_encoders_are_copied_to_each_stage():
    degrees = {"vision": Degrees(), "audio": Degrees(), "language_model": Degrees(pp=2)}
    plan = make_plan(small_problem(num_devices=2), "explicit", degrees=degrees, placement="replicated")
    assert list(plan.modules) == ["vision", "vision@1", "audio", "audio@1", "language_model"]
    assert plan.modules["vision@1"].copy_of == "vision"
    assert ranks(plan, "vision@1") == [[(1,)]]
    # Tokens are merged at layer 0: only the first stage's encoders are used.
    assert {(e.source, e.layers) for e in plan.edges} == {("vision", (0,)), ("audio", (0,))}


def test_copies_share_tokens_as_the_stages_do_on_whose_ranks_they_are():
    degrees = {
        name: replace(SHARED_BY_TWO, pp=2 if name == "language_model" else 1)
        for name in ("vision", "audio", "language_model")
    }
    plan = make_plan(small_problem(num_devices=4), "explicit", degrees=degrees, placement="replicated")
    assert ranks(plan, "vision") == [[(0, 1)]]
    assert ranks(plan, "vision@1") == [[(2, 3)]]
    assert plan.modules["vision@1"].replicas[0].stages[0].cp_size == 2


def test_copies_that_each_feed_a_part_of_the_layers_are_the_same_model():
    """Under cross-attention each stage's copy of an encoder feeds the layers of that stage."""
    problem = small_problem(num_devices=2)
    edges = tuple(replace(edge, layers=(3, 6)) for edge in problem.edges)
    degrees = {"vision": ONE, "audio": ONE, "language_model": Degrees(pp=2, layers_per_stage=(5, 5))}
    problem = replace(problem, edges=edges)
    plan = make_plan(problem, "explicit", degrees=degrees, placement="replicated")
    assert Edge(source="vision@1", target="language_model", layers=(6,)) in plan.edges
    check_same_model(problem, plan)
    fewer = replace(plan, edges=tuple(edge for edge in plan.edges if edge.source != "vision@1"))
    with pytest.raises(UserError, match=r"vision must enter language_model at layers \[3, 6\]"):
        check_same_model(problem, fewer)


def test_layers_per_stage():
    degrees = {
        "vision": Degrees(),
        "audio": Degrees(),
        "language_model": Degrees(pp=2, layers_per_stage=(1, 9), sequence_parallel=True),
    }
    module = make_plan(small_problem(), "explicit", degrees=degrees).modules["language_model"]
    assert [stage.layers for stage in module.replicas[0].stages] == [(0, 1), (1, 10)]
    assert module.sequence_parallel


@pytest.mark.parametrize("placement", ["parallel", "colocated", "replicated"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_every_placement_can_be_scheduled_and_simulated(placement, schedule):
    problem = small_problem(schedule=schedule)
    degrees = {
        "vision": Degrees(dp=2),
        "audio": Degrees(dp=2),
        "language_model": Degrees(pp=2, dp=2),
    }
    evaluation = evaluate(problem, build_plan(problem, degrees, placement=placement))
    assert evaluation.iteration_time_s >= evaluation.lower_bound_s * (1 - 1e-9) > 0
    assert evaluation.fits


def test_context_parallel_ranks_follow_each_other():
    degrees = {
        "vision": Degrees(),
        "audio": Degrees(),
        "language_model": Degrees(tp=2, cp=2, pp=2, context=ContextOptions(block_size=16, policy="zigzag")),
    }
    plan = build_plan(small_problem(num_devices=10), degrees)
    llm = plan.modules["language_model"]
    assert [stage.ranks for stage in llm.replicas[0].stages] == [(2, 3, 4, 5), (6, 7, 8, 9)]
    assert all((stage.tp_size, stage.cp_size) == (2, 2) for stage in llm.replicas[0].stages)
    assert llm.context == ContextOptions(block_size=16, policy="zigzag")
    assert Plan.from_json(plan.to_json()) == plan
    assert evaluate(small_problem(num_devices=10), plan).fits


@pytest.mark.parametrize(
    ("degrees", "placement", "message"),
    [
        (
            {"language_model": Degrees(pp=11)},
            "parallel",
            "language_model.pp is 11, but it has 10 layers; give at most 10",
        ),
        ({"language_model": Degrees(tp=3)}, "parallel", "language_model.tp_size: 3 does not divide"),
        ({"vision": Degrees(dp=2)}, "colocated", "dp is 2 for vision but 1 for audio, which share ranks"),
        ({"vision": Degrees(pp=0)}, "parallel", "vision.pp is 0; give at least 1"),
        ({"vision": Degrees(pp=2)}, "colocated", "vision and audio on the same ranks; give them the same tp, cp"),
        ({"vision": SHARED_BY_TWO}, "colocated", "vision and audio on the same ranks; give them the same tp, cp"),
        ({"vision": Degrees(pp=2)}, "replicated", "give it pp 1, tp 1 and cp 1"),
        ({"vision": SHARED_BY_TWO}, "replicated", "give it pp 1, tp 1 and cp 1"),
        ({}, "parallel", "the plan uses 3 ranks but cluster has 4"),
        ({"speech": ONE}, "parallel", "there is no module 'speech'"),
        ({"language_model": Degrees(pp=2, layers_per_stage=(5, 6))}, "parallel", "add up to 10"),
        (
            {"vision": Degrees(cp=3)},
            "parallel",
            "vision.cp is 3, but .* too few for 3 blocks of 128; give a smaller cp",
        ),
        (
            {"language_model": Degrees(cp=9, context=ContextOptions(block_size=64))},
            "parallel",
            "language_model.cp is 9, but .* too few for 9 blocks of 64; give a smaller cp",
        ),
        (
            {"language_model": Degrees(cp=4, context=ContextOptions(block_size=8, method="ulysses"))},
            "parallel",
            "language_model.context.method: ulysses cannot divide 2 key heads by 4 ranks; use all_gather",
        ),
    ],
)
def test_what_no_plan_can_have(degrees, placement, message):
    given = {"vision": ONE, "audio": ONE, "language_model": ONE, **degrees}
    with pytest.raises(ValueError, match=message):
        make_plan(small_problem(), "explicit", degrees=given, placement=placement)


def test_degrees_of_every_module_are_needed():
    with pytest.raises(ValueError, match="audio has no degrees"):
        make_plan(small_problem(), "explicit", degrees={"vision": ONE, "language_model": ONE})
    with pytest.raises(ValueError, match="explicit: is empty"):
        make_plan(small_problem(), "explicit")
    with pytest.raises(ValueError, match="'magic' is not known; give one of explicit, cornstarch"):
        make_plan(small_problem(), "magic")


def test_virtual_stages_go_round_the_groups():
    degrees = {"vision": ONE, "audio": ONE, "language_model": Degrees(pp=2, virtual_stages=2)}
    problem = replace(small_problem(), schedule="interleaved_1f1b")
    plan = make_plan(problem, "explicit", degrees=degrees)
    assert ranks(plan, "language_model") == [[(2,), (3,), (2,), (3,)]]
    stages = plan.modules["language_model"].replicas[0].stages
    assert [first for first, _ in (stage.layers for stage in stages[1:])] == [
        last for _, last in (s.layers for s in stages[:-1])
    ]
    assert evaluate(problem, plan).iteration_time_s > 0
    num_layers = problem.modules["language_model"].workload.num_layers
    by_hand = (1, 1, 1, num_layers - 3)
    chosen = {**degrees, "language_model": replace(degrees["language_model"], layers_per_stage=by_hand)}
    of_plan = make_plan(problem, "explicit", degrees=chosen).modules["language_model"].replicas[0].stages
    assert [last - first for first, last in (stage.layers for stage in of_plan)] == list(by_hand)


@pytest.mark.parametrize(
    ("own", "placement", "message"),
    [
        (Degrees(virtual_stages=2), "parallel", "virtual_stages is 2, but has no effect with pp 1"),
        (Degrees(pp=2, virtual_stages=50), "parallel", "pp is 2 with virtual_stages 50, but it has"),
        (Degrees(pp=2, virtual_stages=2), "replicated", "placement replicated puts the encoders on each stage"),
    ],
)
def test_virtual_stages_that_no_plan_can_have(own, placement, message):
    degrees = {"vision": ONE, "audio": ONE, "language_model": own}
    with pytest.raises(UserError, match=message):
        make_plan(small_problem(), "explicit", degrees=degrees, placement=placement)
