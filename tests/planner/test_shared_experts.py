"""Plans whose experts are shared by ranks: what they cost, and where `auto` chooses them."""

from dataclasses import replace

import pytest

from motet.assignment.sample import Sample, Segment
from motet.cluster import cluster_from_dict
from motet.costs.analytic import analytic_table
from motet.errors import UserError
from motet.planner.auto import choose_among
from motet.planner.evaluate import Evaluation, evaluate
from motet.planner.layouts.layout import build_plan
from motet.planner.problem import Degrees, ModuleProblem, PlanningProblem
from motet.shapes.module_shape import Attention, LayerShape, Linear, ModuleWorkload

WIDTH, INNER, EXPERTS = 1024, 3584, 8
LLM = "language_model"


def mixture(num_blocks: int = 4) -> ModuleWorkload:
    def experts(inputs: int, outputs: int, cut: str) -> Linear:
        return Linear(inputs, outputs, cut=cut, num_copies=EXPERTS, rows_per_token=2.0)  # type: ignore[arg-type]

    queries, keys, router = Linear(WIDTH, WIDTH, cut="column"), Linear(WIDTH, 256, cut="column"), Linear(WIDTH, EXPERTS)
    block = LayerShape(
        part="block",
        hidden_size=WIDTH,
        linears=(
            *(queries, keys, keys, Linear(WIDTH, WIDTH, cut="row"), router),
            *(experts(WIDTH, 2 * INNER, "column"), experts(INNER, WIDTH, "row")),
        ),
        attention=Attention(num_heads=16, num_key_value_heads=4, head_dim=64),
        other_parameters=2 * WIDTH,
        saved_vectors=2,
        gated=True,
    )
    head = Linear(WIDTH, 32000, cut="column", rows="outputs")
    return ModuleWorkload(
        kind="language_model",
        family="mixtral",
        config={"model_type": "mixtral"},
        hidden_size=WIDTH,
        output_size=WIDTH,
        layers=(
            LayerShape(part="embed", hidden_size=WIDTH, vocabulary=32000),
            *[block] * num_blocks,
            LayerShape(part="head", hidden_size=WIDTH, linears=(head,), other_parameters=WIDTH, saved_vectors=1),
        ),
        must_divide={"num_key_value_heads": 4},
    )


def problem_of(memory_bytes: float, family: str = "mixtral", tp_sizes: tuple[int, ...] = (1, 2)) -> PlanningProblem:
    workload = replace(mixture(), family=family)
    cluster = cluster_from_dict({"num_devices": 8, "device": "h100"})
    cluster = replace(cluster, device=replace(cluster.device, memory_bytes=memory_bytes))
    module = ModuleProblem(workload=workload, trainable=((0, workload.num_layers),), loss_weight=1.0, tp_sizes=tp_sizes)
    return PlanningProblem(
        modules={LLM: module},
        edges=(),
        cluster=cluster,
        table=analytic_table({LLM: workload}, cluster, tp_sizes=tp_sizes),
        samples=tuple(Sample(str(i), {LLM: (Segment(512 + 16 * (i % 5)),)}, {LLM: 500}) for i in range(64)),
        num_microbatches=4,
        dp_sizes=(1, 2, 4, 8),
    )


def evaluated(problem: PlanningProblem, **degrees: int) -> Evaluation:
    return evaluate(problem, build_plan(problem, {LLM: Degrees(**degrees)}))


def test_experts_that_ranks_share_take_less_memory_and_smaller_sums_but_more_time() -> None:
    problem = problem_of(80e9)
    whole, shared = evaluated(problem, dp=8), evaluated(problem, dp=8, ep=8)
    num_experts = 4 * EXPERTS * 3 * WIDTH * INNER
    saved = num_experts * (1 - 1 / 8) * 4 * 4  # Parameters, gradients and two moments.
    assert whole.costs.static_bytes(0) - shared.costs.static_bytes(0) == pytest.approx(saved)
    (reduce,) = whole.costs._reductions
    assert shared.costs.reduce_s(reduce) < 0.3 * whole.costs.reduce_s(reduce)
    assert shared.iteration_time_s > whole.iteration_time_s - whole.costs.reduce_s(reduce)
    in_group, cut = evaluated(problem, tp=2, dp=4, ep=2), evaluated(problem, tp=2, dp=4)
    assert in_group.costs.static_bytes(0) == cut.costs.static_bytes(0)
    assert in_group.iteration_time_s == cut.iteration_time_s


def test_replicas_that_share_experts_wait_for_the_longest_microbatch() -> None:
    problem = problem_of(80e9)
    samples = tuple(replace(s, layouts={LLM: (Segment(2048 if i < 8 else 64),)}) for i, s in enumerate(problem.samples))
    plan = build_plan(problem, {LLM: Degrees(dp=8, ep=8)})
    evaluation = evaluate(replace(problem, samples=samples), plan)
    cells = [cell for cell in evaluation.costs.routes.cells if cell.microbatch == 0]
    seconds = {evaluation.costs._seconds_of[0][evaluation.costs.routes.number_of_cell[cell]] for cell in cells}
    assert len(cells) == 8
    assert len(seconds) == 1


def test_auto_shares_experts_where_replicas_do_not_fit_otherwise() -> None:
    plenty, tight = (evaluated(problem_of(80e9), dp=8, **ep) for ep in ({}, {"ep": 8}))
    most, least = (max(e.result.peak_memory_bytes) for e in (plenty, tight))
    choice = choose_among(problem_of((most + least) / 2 / 0.9, tp_sizes=(1,)), {})
    module = choice.evaluation.plan.modules[LLM]
    assert module.ep > 1
    assert choice.evaluation.fits
    assert choice.lower_bound_s <= choice.evaluation.iteration_time_s
    without = replace(choice.evaluation.plan, modules={LLM: replace(module, ep=1)})
    assert not evaluate(choice.evaluation.problem, without).fits
    not_shown = choose_among(problem_of((most + least) / 2 / 0.9, family="unknown", tp_sizes=(1,)), {})
    assert not_shown.evaluation.plan.modules[LLM].ep == 1


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"dp": 4, "ep": 3}, r"language_model.ep is 3; give 1, or tp \(1\) times a divisor of dp \(4\)"),
        ({"dp": 16, "ep": 16}, "language_model.ep is 16, which does not divide its 8 experts"),
    ],
)
def test_numbers_of_ranks_that_do_not_fit_are_refused(degrees: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_plan(problem_of(80e9), {LLM: Degrees(**degrees)})


def test_a_model_without_experts_is_refused() -> None:
    problem = problem_of(80e9)
    dense = replace(
        problem.modules[LLM], workload=replace(mixture(0), layers=mixture().layers[:1] + mixture().layers[-1:])
    )
    with pytest.raises(UserError, match=r"language_model\.ep is 2, but it has no experts"):
        build_plan(replace(problem, modules={LLM: dense}), {LLM: Degrees(dp=2, ep=2)})
