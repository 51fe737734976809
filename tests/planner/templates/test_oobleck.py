"""Pipelines from templates as a planner's plan: complete, on nodes of their own, ready for reconfiguration."""

from dataclasses import replace

import numpy as np
import pytest
from small_problem import VISION, sample, with_memory
from template_problems import chains_of, on_nodes, shared, with_tp

from motet.assignment.sample import Sample, Segment
from motet.cluster.pipelines_on_nodes import nodes_of_pipelines
from motet.costs.analytic import analytic_table
from motet.errors import UserError
from motet.families.shape_reading.module_shapes import module_workload
from motet.planner.evaluate import evaluate
from motet.planner.problem import PlanningProblem
from motet.planner.reconfiguration.reconfigure import reconfigure
from motet.planner.registry import PLANNERS, make_plan
from motet.planner.templates.pipelines import combinations
from motet.planner.templates.planner import check_coverage, make_templates, oobleck, plan_with_sizes
from motet.shapes.module_shape import with_projector


@pytest.mark.parametrize(("num_nodes", "devices_per_node", "failures"), [(7, 1, 1), (5, 2, 1), (4, 3, 2), (3, 1, 0)])
def test_every_pipeline_has_nodes_of_its_own(num_nodes: int, devices_per_node: int, failures: int) -> None:
    problem = on_nodes(num_nodes, devices_per_node, failures=failures)
    plan = oobleck(problem)
    pipelines = nodes_of_pipelines(plan, devices_per_node)
    assert len(pipelines) >= failures + 1
    assert sorted(node for nodes in pipelines for node in nodes) == list(range(num_nodes))
    assert sum(plan.replica_microbatches) == 4 * (failures + 1)
    assert PLANNERS["oobleck"].plan(problem) == plan


def test_no_combination_is_simulated_faster() -> None:
    problem = on_nodes(7)
    templates = make_templates(problem)
    assert list(templates.by_nodes) == [3, 4]
    best = evaluate(problem, oobleck(problem)).iteration_time_s
    for sizes in combinations(range(3, 5), 7, 2):
        assert best <= evaluate(problem, plan_with_sizes(problem, templates, sizes)).iteration_time_s * (1 + 1e-9)


def test_it_survives_losses_until_too_few_nodes_are_left() -> None:
    problem = on_nodes(8, 2, frozen=())
    templates, plan = make_templates(problem), oobleck(problem)
    assert templates.min_nodes == 2
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
    smallest = make_templates(problem).min_nodes
    tight = with_memory(problem, int(largest * 1.4))
    assert make_templates(tight).min_nodes > smallest
    assert evaluate(tight, oobleck(tight)).fits


def test_states_that_some_pipelines_keep_are_counted_so() -> None:
    """With ZeRO-1: n0 is that of f + 1 pipelines, which keep everything; more pipelines keep less each."""
    problem = on_nodes(9, frozen=())
    shared = replace(problem, memory=replace(problem.memory, zero1=True, state_copies=2))
    tight = int(max(evaluate(problem, oobleck(problem)).result.peak_memory_bytes) * 1.5)
    n0 = make_templates(with_memory(problem, tight)).min_nodes
    assert make_templates(with_memory(shared, tight)).min_nodes == n0
    templates = make_templates(problem)
    for sizes in ((3, 3, 3), (4, 5)):
        plan = plan_with_sizes(problem, templates, sizes)
        kept, kept_by_some = (evaluate(p, plan).result.peak_memory_bytes for p in (problem, shared))
        if len(sizes) == 2:
            assert list(kept) == list(kept_by_some)
        else:
            assert all(some < everything for some, everything in zip(kept_by_some, kept, strict=True))


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
        check_coverage(range(4, 6), 11, 0)
    with pytest.raises(UserError, match="do not make merged pipelines"):
        check_coverage(range(3, 5), 8, 1)


def test_templates_with_context_parallelism_are_no_slower() -> None:
    problem = on_nodes(6, 4, encoders=("vision",), frozen=())
    plain = make_templates(problem)
    for fully in (False, True):
        templates = make_templates(shared(problem, 2, 4, fully=fully))
        assert templates.min_nodes <= plain.min_nodes
        for n, template in plain.by_nodes.items():
            assert templates.by_nodes[n].iteration_s(4) <= template.iteration_s(4) * (1 + 1e-9)


def test_templates_that_share_no_tokens_pad_them() -> None:
    """Only stages that share tokens pack samples, so only beside one do stages without cost what packed ones do."""
    problem = on_nodes(6, 4, encoders=("vision",), frozen=())
    samples = tuple(sample(i, sound=False, words=40 if i % 2 else 400) for i in range(len(problem.samples)))
    slow = replace(problem.cluster.within_node, latency_s=0.01)
    problem = replace(problem, samples=samples, cluster=replace(problem.cluster, within_node=slow))
    plain, templates = make_templates(problem), make_templates(shared(problem, 2))
    without = [n for n, t in templates.by_nodes.items() if not t.replicas["language_model"].shares_context]
    assert without
    for n in without:
        assert templates.by_nodes[n].iteration_s(4) == pytest.approx(plain.by_nodes[n].iteration_s(4))


def long_problem(num_nodes: int = 4, num_microbatches: int = 4) -> PlanningProblem:
    """Sequences so long that attention and activations are nearly all there is; one in each microbatch."""
    problem = on_nodes(num_nodes, 4, encoders=("vision",), frozen=("vision",), num_microbatches=num_microbatches)
    samples = tuple(sample(i, sound=False, words=16_000) for i in range(2 * num_microbatches))
    return with_tp(shared(replace(problem, samples=samples), 2, 4), 1)


def test_long_sequences_are_shared() -> None:
    """By as many ranks as is fastest, stage by stage, so that no device is left over; parameters are not."""
    problem = long_problem()
    templates = make_templates(problem)
    sizes = [[stage.cp_size for stage in t.replicas["language_model"].stages] for t in templates.by_nodes.values()]
    assert all(max(of_template) > 1 for of_template in sizes)
    assert sizes[0] == [2, 1]  # The encoder has the node's fourth device.
    assert not templates.fully_sharded
    plan = oobleck(problem)
    assert not plan.modules["language_model"].fully_sharded
    alone = replace(problem, modules=shared(problem).modules)
    assert evaluate(problem, plan).iteration_time_s < evaluate(alone, oobleck(alone)).iteration_time_s
    for left in (3, 2):
        result = reconfigure(plan, templates, lost=[0])
        assert result.plan is not None
        plan = result.plan
        assert evaluate(problem.with_num_devices(4 * left), plan).iteration_time_s > 0


def test_activations_fall_with_context_parallelism() -> None:
    """Where one layer's of a whole sequence are too many for a device, only sharing helps; parameters stay whole."""
    problem = long_problem(10, num_microbatches=1)
    chains = chains_of(problem)
    saved = {cp: (chain.saved_bytes or {})[cp] for cp, chain in chains.items()}
    for cp in (2, 4):
        assert saved[cp] == pytest.approx([num_bytes / cp for num_bytes in saved[1]], rel=0.01)
        assert (chains[cp].static_bytes or {})[cp] == (chains[1].static_bytes or {})[1]
    tight = with_memory(problem, int(max(saved[1])))
    with pytest.raises(UserError, match="finds no pipeline"):
        make_templates(replace(tight, modules=shared(tight).modules))
    plan = oobleck(tight)
    assert {s.cp_size for r in plan.modules["language_model"].replicas for s in r.stages} <= {2, 4}
    assert evaluate(tight, plan).fits


def detailed_problem(num_nodes: int = 4, num_microbatches: int = 4, frozen: tuple[str, ...] = ()) -> PlanningProblem:
    """Images of 4096 patches, of which few tokens are left: their attention is nearly all there is."""
    problem = on_nodes(num_nodes, 4, encoders=("vision",), frozen=frozen, num_microbatches=num_microbatches)
    layouts = {"vision": (Segment(4096, num_outputs=64, grid=(64, 64)),)}
    text = (Segment(64, source="vision"), Segment(20))
    samples = tuple(
        Sample(str(i), {**layouts, "language_model": text}, {"language_model": 5}) for i in range(2 * num_microbatches)
    )
    vision = replace(problem.modules["vision"].workload, config={**VISION, "image_size": 512})
    module = replace(problem.modules["vision"], workload=vision)
    problem = replace(problem, samples=samples, modules={**problem.modules, "vision": module})
    return with_tp(shared(problem, 2, 4, name="vision"), 1)


@pytest.mark.parametrize("frozen", [(), ("vision",)])
def test_long_items_are_shared(frozen: tuple[str, ...]) -> None:
    """By the ranks of an encoder's stages, each by as many as is fastest."""
    problem = detailed_problem(frozen=frozen)
    templates = make_templates(problem)
    sizes = {stage.cp_size for t in templates.by_nodes.values() for stage in t.replicas["vision"].stages}
    assert max(sizes) > 1
    assert all(s.cp_size == 1 for t in templates.by_nodes.values() for s in t.replicas["language_model"].stages)
    plan = oobleck(problem)
    alone = replace(problem, modules=shared(problem, name="vision").modules)
    assert evaluate(problem, plan).iteration_time_s < evaluate(alone, oobleck(alone)).iteration_time_s
    for left in (3, 2):
        result = reconfigure(plan, templates, lost=[0])
        assert result.plan is not None
        plan = result.plan
        assert evaluate(problem.with_num_devices(4 * left), plan).iteration_time_s > 0


def test_what_is_saved_of_long_items_is_shared() -> None:
    """Where one block's activations of a whole item are too many for a device, only sharing helps."""
    problem = detailed_problem(10, num_microbatches=1)
    saved = {cp: (chain.saved_bytes or {})[cp] for cp, chain in chains_of(problem, "vision").items()}
    blocks = slice(1, -2)
    for cp in (2, 4):
        assert saved[cp][blocks] == pytest.approx([num_bytes / cp for num_bytes in saved[1][blocks]], rel=0.01)
        assert saved[cp][0] == saved[1][0]
        assert saved[cp][-2:] == saved[1][-2:]
    tight = with_memory(problem, int(max(saved[1])))
    with pytest.raises(UserError, match="finds no pipeline"):
        make_templates(replace(tight, modules=shared(tight, name="vision").modules))
    plan = oobleck(tight)
    assert max(stage.cp_size for replica in plan.modules["vision"].replicas for stage in replica.stages) > 1
    assert evaluate(tight, plan).fits


def test_limits_on_context_parallelism() -> None:
    problem = long_problem()
    llm = replace(problem.modules["language_model"], cp_sizes=(2,))
    only = replace(problem, modules={**problem.modules, "language_model": llm})
    plan = make_plan(only, "oobleck")
    assert {s.cp_size for r in plan.modules["language_model"].replicas for s in r.stages} == {2}
    llm = replace(llm, cp_sizes=(8,))
    with pytest.raises(
        UserError, match=r"no tp of \[1\] with a cp of \[8\] gives language_model a stage within a node of 4"
    ):
        oobleck(replace(problem, modules={**problem.modules, "language_model": llm}))
    llm = replace(llm, cp_sizes=(4,), tp_sizes=(2,))
    with pytest.raises(UserError, match=r"no tp of \[2\] with a cp of \[4\] gives language_model a stage within"):
        oobleck(replace(problem, modules={**problem.modules, "language_model": llm}))


def with_large_encoder(problem: PlanningProblem) -> PlanningProblem:
    """Its two blocks have more parameters than all of the language model's."""
    large = module_workload({**VISION, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2})
    workload = with_projector(large, "mlp", 128)
    vision = replace(problem.modules["vision"], workload=workload, trainable=((0, workload.num_layers),))
    modules = {**problem.modules, "vision": vision}
    table = analytic_table({name: m.workload for name, m in modules.items()}, problem.cluster, tp_sizes=(1, 2, 4))
    return replace(problem, modules=modules, table=table)


@pytest.mark.parametrize(("name", "most"), [("vision", 1e8), ("language_model", 3e7)])
def test_what_does_not_fit_one_by_one_is_shared(name: str, most: float) -> None:
    """Where tensor parallelism is not allowed, only shared parameters fit into little memory."""
    problem = on_nodes(4, 4, encoders=("vision",), frozen=())
    problem = shared(with_tp(with_large_encoder(problem) if name == "vision" else problem, 1), 4, name=name, fully=True)
    for memory in np.geomspace(most, most / 10, 24):
        tight = with_memory(problem, int(memory))
        try:
            templates = make_templates(tight)
        except UserError:
            continue
        if templates.fully_sharded and any(t.replicas[name].shares_context for t in templates.by_nodes.values()):
            assert evaluate(tight, oobleck(tight)).fits
            return
    pytest.fail("sharing was never chosen")
