"""Optimus as a planner: its plans run, every layout gives a valid schedule, and memory prunes what cannot stand."""

from dataclasses import replace
from itertools import product

import pytest
from small_problem import small_problem

from motet.errors import UserError
from motet.planner.evaluate import evaluate
from motet.planner.optimus.layouts import (
    MAX_LLM_LAYOUTS,
    EncoderLayout,
    LlmLayout,
    LlmSide,
    encoder_layouts,
    llm_layouts,
    solutions,
)
from motet.planner.optimus.planner import plan_of
from motet.planner.registry import make_plan
from motet.schedule.generators import GENERATORS
from motet.schedule.validate import validate


def problem_with(*, num_devices=4, tp_sizes=(1, 2, 4), dp_sizes=(1, 2), **options):
    problem = small_problem(num_devices=num_devices, **options)
    modules = {name: replace(module, tp_sizes=tp_sizes) for name, module in problem.modules.items()}
    return replace(problem, modules=modules, dp_sizes=dp_sizes)


LAYOUTS = [
    (LlmLayout(dp=dp, pp=4 // (dp * tp), tp=tp, num_chunks=chunks), EncoderLayout(pp=pp, tp=enc_tp))
    for dp, tp, chunks, pp, enc_tp in product((1, 2), (1, 2), (1, 2), (1, 2, 4), (1, 2))
    if dp * tp <= 4 and tp % enc_tp == 0 and 4 // (dp * tp) % pp == 0 and (chunks == 1 or 4 // (dp * tp) > 1)
]


@pytest.mark.parametrize("frozen", [("vision", "audio"), ("language_model",), ()])
@pytest.mark.parametrize(("llm", "encoder"), LAYOUTS)
def test_every_layout_gives_a_plan_that_runs(llm, encoder, frozen):
    problem = problem_with(frozen=frozen, num_microbatches=4)
    side = LlmSide(problem, llm)
    plan = plan_of(side.solve(encoder, side.timeline()))
    evaluation = evaluate(problem, plan)
    dependencies = evaluation.program.dependencies
    validate(GENERATORS[plan.schedule](dependencies.routes, evaluation.costs.compute_s), dependencies)
    assert plan.num_ranks == 4
    assert len(plan.modules["vision"].replicas) == llm.dp * encoder.pipelines(llm)


@pytest.mark.parametrize("llm", [LlmLayout(dp=4, pp=2, tp=1), LlmLayout(dp=4, pp=1, tp=2)])
def test_states_that_several_replicas_keep_count(llm):
    """Where nodes may fail, ZeRO-1 leaves each state with several replicas."""

    def bytes_with(num_keepers: int) -> tuple[list[int], list[int], float]:
        problem = problem_with(num_devices=8, frozen=(), dp_sizes=(4,))
        problem = replace(problem, memory=replace(problem.memory, zero1=True, state_copies=num_keepers))
        side = LlmSide(problem, llm)
        solution = side.solve(EncoderLayout(pp=1, tp=1), side.timeline())
        peaks = evaluate(problem, plan_of(solution)).result.peak_memory_bytes
        return (
            [need for need in solution.needed_bytes for _ in range(llm.tp)],
            peaks[: llm.pp * llm.tp],
            side._collectives()[0],
        )

    needed, peaks, gather_s = zip(*(bytes_with(n) for n in (1, 2, 4)), strict=True)
    for more in (1, 2):
        added = [a - b for a, b in zip(needed[more], needed[0], strict=True)]
        assert added == pytest.approx([a - b for a, b in zip(peaks[more], peaks[0], strict=True)], abs=100)
        assert min(added) > 1000
    assert gather_s[1] == pytest.approx(gather_s[0] * 2 / 3)
    assert gather_s[2] == 0 < gather_s[0]


def test_every_rank_holds_encoder_and_language_model():
    plan = make_plan(problem_with(), "optimus")
    for rank in range(4):
        assert {name for name, *_ in plan.stages_of_rank(rank)} == {"vision", "audio", "language_model"}


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_the_plan_can_be_evaluated(num_devices):
    problem = problem_with(num_devices=num_devices)
    evaluation = evaluate(problem, make_plan(problem, "optimus"))
    dependencies = evaluation.program.dependencies
    validate(GENERATORS[evaluation.plan.schedule](dependencies.routes, evaluation.costs.compute_s), dependencies)
    assert evaluation.fits
    assert evaluation.plan.num_ranks == num_devices
    assert evaluation.iteration_time_s >= evaluation.lower_bound_s


def test_a_schedule_that_the_user_fixed_is_kept():
    problem = problem_with()
    assert make_plan(problem, "optimus").schedule == "bubble_filling"
    assert make_plan(replace(problem, schedules=("1f1b", "gpipe")), "optimus").schedule == "1f1b"


def test_encoder_layouts_divide_those_of_the_language_model():
    problem = problem_with(num_devices=8)
    layouts = list(encoder_layouts(problem, LlmLayout(dp=1, pp=4, tp=2)))
    assert {(layout.pp, layout.tp) for layout in layouts} == set(product((1, 2, 4), (1, 2)))
    assert EncoderLayout(pp=2, tp=1).pipelines(LlmLayout(dp=1, pp=4, tp=2)) == 4


@pytest.mark.parametrize("num_devices", [4, 8])
def test_language_model_layouts_are_the_best_of_all(num_devices):
    problem = problem_with(num_devices=num_devices, tp_sizes=(1, 2, 4))
    every = [
        (side.timeline().iteration_s, side.layout)
        for dp, tp, chunks in product((1, 2), (1, 2, 4), (1, 2, 4, 8))
        if num_devices % (dp * tp) == 0 and (pp := num_devices // (dp * tp)) * chunks <= 10 and (pp > 1 or chunks == 1)
        for side in [LlmSide(problem, LlmLayout(dp=dp, pp=pp, tp=tp, num_chunks=chunks))]
    ]
    found = llm_layouts(problem)
    assert problem.modules["language_model"].workload.num_layers == 10
    assert [timeline.iteration_s for _, timeline in found] == sorted(seconds for seconds, _ in every)[:MAX_LLM_LAYOUTS]
    assert all((timeline.iteration_s, layout) in every for layout, timeline in found)
    # Sums of the same numbers in another order.
    assert all(seconds >= LlmSide(problem, layout).least_s() * (1 - 1e-12) for seconds, layout in every)


def test_states_that_do_not_fit_are_pruned():
    problem = problem_with(frozen=(), dp_sizes=(1,))
    llm = LlmLayout(dp=1, pp=2, tp=2)
    side = LlmSide(problem, llm)
    wide, narrow = EncoderLayout(pp=2, tp=2), EncoderLayout(pp=1, tp=1)
    # All states of the encoders on every rank, against a quarter of them.
    states = {
        layout: max(side.needed_bytes(side.timeline())) + max(side._encoder_states(layout)) for layout in (wide, narrow)
    }
    assert states[wide] < states[narrow]
    own = side._stages_of_places()
    least = max(sum(side._states(side.name, stages, 2, 1)) for stages in own) + max(side._encoder_states(wide))
    device = replace(problem.cluster.device, memory_bytes=least / 0.9 + 1000)
    tight = LlmSide(replace(problem, cluster=replace(problem.cluster, device=device)), llm)
    assert tight.states_fit(wide)
    assert not tight.states_fit(narrow)


def test_memory_chooses_the_encoder_layout():
    problem = problem_with(frozen=(), dp_sizes=(1,))
    roomy = solutions(problem)[0]
    device = replace(problem.cluster.device, memory_bytes=max(roomy.needed_bytes) * 0.98 / 0.9)
    tight = solutions(replace(problem, cluster=replace(problem.cluster, device=device)))[0]
    assert max(tight.needed_bytes) < max(roomy.needed_bytes)
    assert tight.iteration_s >= roomy.iteration_s


def test_more_memory_than_any_layout_needs_is_never_exceeded_silently():
    problem = problem_with(frozen=())
    device = replace(problem.cluster.device, memory_bytes=1000)
    solution = solutions(replace(problem, cluster=replace(problem.cluster, device=device)))[0]
    assert solution.excess_bytes > 0


def test_it_says_where_it_does_not_apply():
    problem = small_problem()
    alone = replace(problem, modules={"language_model": problem.modules["language_model"]}, edges=())
    with pytest.raises(UserError, match="optimus needs encoders"):
        make_plan(alone, "optimus")
    with pytest.raises(UserError, match="leave placement out"):
        make_plan(problem, "optimus", placement="parallel")
