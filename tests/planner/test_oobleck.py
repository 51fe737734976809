"""Pipelines from templates as a planner's plan: complete, on nodes of their own, ready for reconfiguration."""

from dataclasses import replace

import numpy as np
import pytest
from small_problem import small_problem, with_memory

from motet.errors import UserError
from motet.plan import ContextOptions
from motet.planner import PLANNERS
from motet.planner.evaluate import evaluate
from motet.planner.oobleck import _mapping_problem, _template, check_cover, make_templates, oobleck, plan_of
from motet.planner.problem import PlanningProblem
from motet.resilience.combinations import combinations
from motet.resilience.pipelines import Templates, nodes_of_pipelines
from motet.resilience.reconfigure import reconfigure
from motet.resilience.stage_mapping import map_stages
from motet.schedule.action import Compute, Kind


def on_nodes(num_nodes: int, devices_per_node: int = 1, *, failures: int = 1, **options: object) -> PlanningProblem:
    problem = small_problem(num_devices=num_nodes * devices_per_node, **options)
    return replace(
        problem,
        cluster=replace(problem.cluster, devices_per_node=devices_per_node),
        failures=failures,
        num_cores=None,
    )


@pytest.mark.parametrize(("num_nodes", "devices_per_node", "failures"), [(7, 1, 1), (5, 2, 1), (4, 3, 2), (3, 1, 0)])
def test_every_pipeline_has_nodes_of_its_own(num_nodes: int, devices_per_node: int, failures: int) -> None:
    problem = on_nodes(num_nodes, devices_per_node, failures=failures)
    plan = oobleck(problem)
    pipelines = nodes_of_pipelines(plan, devices_per_node)
    assert len(pipelines) >= failures + 1
    assert sorted(node for nodes in pipelines for node in nodes) == list(range(num_nodes))
    assert sum(plan.replica_microbatches) == 4 * (failures + 1)
    assert PLANNERS["oobleck"](problem) == plan


def test_no_combination_is_simulated_faster() -> None:
    problem = on_nodes(7)
    templates = make_templates(problem)
    assert list(templates.by_nodes) == [3, 4]
    best = evaluate(problem, oobleck(problem)).iteration_time_s
    for sizes in combinations(range(3, 5), 7, 2):
        assert best <= evaluate(problem, plan_of(problem, templates, sizes)).iteration_time_s * (1 + 1e-9)


def test_it_survives_losses_until_too_few_nodes_are_left() -> None:
    problem = on_nodes(8, 2, frozen=())
    templates, plan = make_templates(problem), oobleck(problem)
    assert templates.fewest_nodes == 2
    for left in range(7, 3, -1):
        result = reconfigure(plan, templates, lost=[left // 2])
        assert result.outcome == "continue"
        assert result.plan is not None
        plan = result.plan
        assert plan.num_ranks == 2 * left
        smaller = problem.with_num_devices(2 * left)
        assert evaluate(smaller, plan).iteration_time_s > 0
    assert reconfigure(plan, templates, lost=[0]).outcome == "save_and_stop"


def test_less_memory_needs_more_nodes() -> None:
    problem = on_nodes(12, frozen=(), recompute=("vision", "audio", "language_model"))
    plan = oobleck(problem)
    largest = max(evaluate(problem, plan).result.peak_memory_bytes)
    smallest = make_templates(problem).fewest_nodes
    tight = with_memory(problem, int(largest * 1.4))
    assert make_templates(tight).fewest_nodes > smallest
    assert evaluate(tight, oobleck(tight)).fits


def test_what_cannot_be_planned_is_said() -> None:
    with pytest.raises(UserError, match="finds no pipeline of vision and audio and language_model on up to 2 of 4"):
        oobleck(on_nodes(4))
    with pytest.raises(UserError, match=r"is 16, but 5 pipelines with parallel.num_microbatches 4 need 20; give 20"):
        oobleck(on_nodes(20, failures=4))
    with pytest.raises(UserError, match="7 devices do not fill 4 nodes of 2"):
        oobleck(on_nodes(4, 2).with_num_devices(7))
    with pytest.raises(UserError, match=r"parallel\.placement: oobleck gives every module its own ranks"):
        oobleck(on_nodes(8), placement="colocated")
    with pytest.raises(UserError, match=r"has templates for 4 to 5 nodes only .* do not make 6, 7, 11 nodes"):
        check_cover(range(4, 6), 11, 0)
    with pytest.raises(UserError, match="do not make merged pipelines"):
        check_cover(range(3, 5), 8, 1)


def sharded(problem: PlanningProblem, *sizes: int) -> PlanningProblem:
    """FSDP is allowed in the language model's stages."""
    llm = problem.modules["language_model"]
    context = ContextOptions(block_size=16)
    llm = replace(llm, cp_sizes=(1, *sizes), may_be_sharded=True, context=context)
    return replace(problem, modules={**problem.modules, "language_model": llm})


@pytest.mark.parametrize("size", [2, 4])
def test_stages_may_share_tokens_and_parameters(size: int) -> None:
    """Their costs are those of the simulation, and so is their memory."""
    problem = on_nodes(6, 4, encoders=("vision",), frozen=())
    plain, templates = make_templates(problem), make_templates(sharded(problem, size))
    assert set(plain.by_nodes) <= set(templates.by_nodes)
    for n, template in plain.by_nodes.items():
        assert templates.by_nodes[n].iteration_s(4) <= template.iteration_s(4) * (1 + 1e-9)
    choice = _mapping_problem(sharded(problem, size), size)
    found = map_stages(choice, 2)
    assert found is not None
    template = _template(problem, 2, choice, found)
    stages = template.replicas["language_model"].stages
    assert {(stage.tp_size, stage.cp_size) for stage in stages} == {(1, size)}
    assert sorted(rank for replica in template.replicas.values() for s in replica.stages for rank in s.ranks) == [
        *range(8)
    ]
    pair = Templates(failures=1, devices_per_node=4, by_nodes={2: template})
    four = on_nodes(4, 4, encoders=("vision",), frozen=())
    plan = plan_of(sharded(four, size), pair, (2, 2))
    assert plan.modules["language_model"].fully_sharded
    costs = evaluate(four, plan).costs
    for number, stage in enumerate(stages):
        # Of both pipelines, as the templates' costs are means over all microbatches.
        cells = [cell for cell in costs.routes.cells if (cell.module, cell.stage) == ("language_model", number)]
        actions = [Compute(kind, cell) for cell in cells for kind in (Kind.FORWARD, Kind.BACKWARD)]
        mean = sum(map(costs.compute_s, actions)) / len(cells)
        expected = sum(choice.modules["language_model"].seconds[size][slice(*stage.layers)])
        assert mean == pytest.approx(expected)
    static = choice.modules["language_model"].static_bytes
    fixed = choice.modules["language_model"].fixed_bytes
    assert static is not None
    assert fixed is not None
    for stage in stages:
        blocks = slice(*stage.layers)
        assert sum(static[size][blocks]) + fixed[size] == pytest.approx(costs.static_bytes(stage.ranks[0]), rel=1e-3)


def test_what_does_not_fit_one_by_one_is_shared() -> None:
    """Where tensor parallelism is not allowed, only shared parameters fit into little memory."""
    problem = on_nodes(4, 4, encoders=("vision",), frozen=())
    problem = replace(
        problem, modules={name: replace(module, tp_sizes=(1,)) for name, module in problem.modules.items()}
    )
    shared = sharded(problem, 4)
    for memory in np.geomspace(3e7, 3e6, 24):
        tight = with_memory(shared, int(memory))
        try:
            templates = make_templates(tight)
        except UserError:
            continue
        if any(t.replicas["language_model"].stages[0].cp_size > 1 for t in templates.by_nodes.values()):
            assert evaluate(tight, oobleck(tight)).fits
            return
    pytest.fail("sharing was never chosen")
