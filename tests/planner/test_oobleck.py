"""Pipelines from templates as a planner's plan: complete, on nodes of their own, ready for reconfiguration."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from small_problem import VISION, sample, small_problem, with_memory

from motet.costs.analytic import analytic_table
from motet.costs.iteration import IterationCosts
from motet.data.sample import Sample, Segment
from motet.errors import UserError
from motet.plan import ContextOptions, Replica, Stage
from motet.planner import PLANNERS, make_plan
from motet.planner.evaluate import evaluate
from motet.planner.oobleck import _template, check_cover, make_templates, oobleck, plan_of
from motet.planner.problem import PlanningProblem
from motet.planner.template_costs import mapping_problems
from motet.resilience.combinations import combinations
from motet.resilience.mapping_problem import ChainCosts
from motet.resilience.pipelines import Template, Templates, nodes_of_pipelines
from motet.resilience.reconfigure import reconfigure
from motet.resilience.stage_mapping import map_stages
from motet.schedule.action import Compute, Kind
from motet.schedule.lower import Message
from motet.schedule.routes import Cell
from motet.workload import module_workload, with_projector


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


def test_states_that_some_pipelines_keep_are_counted_so() -> None:
    """With ZeRO-1: n0 is that of f + 1 pipelines, which keep everything; more pipelines keep less each."""
    problem = on_nodes(9, frozen=())
    shared = replace(problem, memory=replace(problem.memory, zero1=True, state_copies=2))
    tight = int(max(evaluate(problem, oobleck(problem)).result.peak_memory_bytes) * 1.5)
    n0 = make_templates(with_memory(problem, tight)).fewest_nodes
    assert make_templates(with_memory(shared, tight)).fewest_nodes == n0
    templates = make_templates(problem)
    for sizes in ((3, 3, 3), (4, 5)):
        plan = plan_of(problem, templates, sizes)
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
        check_cover(range(4, 6), 11, 0)
    with pytest.raises(UserError, match="do not make merged pipelines"):
        check_cover(range(3, 5), 8, 1)


def shared(
    problem: PlanningProblem, *sizes: int, name: str = "language_model", fully: bool = False, **options: object
) -> PlanningProblem:
    """Context parallelism is allowed in the module's stages; `fully`: FSDP."""
    module = problem.modules[name]
    context = ContextOptions(block_size=16)
    module = replace(module, cp_sizes=(1, *sizes), may_be_sharded=fully, context=context, **options)
    return replace(problem, modules={**problem.modules, name: module})


def with_tp(problem: PlanningProblem, *sizes: int) -> PlanningProblem:
    return replace(problem, modules={name: replace(m, tp_sizes=sizes) for name, m in problem.modules.items()})


def chains_of(
    problem: PlanningProblem, name: str = "language_model", fully: tuple[str, ...] = ()
) -> dict[int, ChainCosts]:
    """By context-parallel size."""
    *_, together = mapping_problems(problem, fully_sharded=fully)
    return {chain.cp_size: chain for chain in together.modules[name].all}


def check_costs(problem: PlanningProblem, template: Template, *names: str, fully: tuple[str, ...] = ()) -> None:
    """Those of these modules' stages against two such pipelines' simulation: seconds and memory."""
    pair = Templates(failures=1, devices_per_node=4, by_nodes={2: template}, fully_sharded=fully)
    plan = plan_of(problem, pair, (2, 2))
    assert {name for name, module in plan.modules.items() if module.fully_sharded} == set(fully)
    costs = evaluate(problem, plan).costs
    for name in names:
        chains, stages = chains_of(problem, name, fully), template.replicas[name].stages
        for number, stage in enumerate(stages):
            chain, size = chains[stage.cp_size], len(stage.ranks)
            # Of both pipelines, as the templates' costs are means over all microbatches.
            cells = [cell for cell in costs.routes.cells if (cell.module, cell.stage) == (name, number)]
            actions = [Compute(kind, cell) for cell in cells for kind in (Kind.FORWARD, Kind.BACKWARD)]
            mean = sum(map(costs.compute_s, actions)) / len(cells)
            around = stages[max(0, number - 1) : number + 2]
            gathers = stage.cp_size > 1 and {other.cp_size for other in around} != {stage.cp_size}
            # What gathering tokens for unlike neighbours takes is not in it.
            exact = sum(chain.seconds[size][slice(*stage.layers)])
            assert exact <= mean * (1 + 1e-9) if gathers else exact == pytest.approx(mean)
            static = sum((chain.static_bytes or {})[size][slice(*stage.layers)])
            # A block that is gathered.
            has_block = problem.modules[name].workload.has_block(stage.layers)
            fixed = (chain.fixed_bytes or {size: 0})[size] * has_block
            assert static + fixed == pytest.approx(costs.static_bytes(stage.ranks[0]), rel=1e-3)
            saved = sum((chain.saved_bytes or {})[size][slice(*stage.layers)])
            of_cells = [costs.saved_bytes(cell, False) for cell in cells]
            # The input of the stage is not in it.
            assert saved <= np.mean(of_cells) * (1 + 1e-3)
            if stage.layers[0] == 0:
                assert saved == pytest.approx(np.mean(of_cells), rel=1e-3)
            after = stages[number + 1] if number + 1 < len(stages) else template.replicas["language_model"].stages[0]
            if name != "language_model" and number + 1 == len(stages):
                # It goes to another node, as there are two.
                check_messages(costs, chain, cells, stage.layers[1], 0, 4)
            elif number + 1 < len(stages) and after.cp_size == stage.cp_size:
                check_messages(costs, chain, cells, stage.layers[1], stage.ranks[-1], after.ranks[0])


def check_messages(
    costs: IterationCosts, chain: ChainCosts, cells: Sequence[Cell], border: int, sender: int, receiver: int
) -> None:
    """What the stage of these cells hands on, and gets back: the mean seconds in the simulation."""
    assert chain.cut_s is not None
    routes = [route for cell in cells for route in costs.routes.outgoing[cell]]
    seconds = [
        costs.message_s(Message(route.source, route.target, back, sender, receiver))
        for route in routes
        for back in (False, True)[: 1 + route.carries_gradient]
    ]
    expected = chain.cut_s[sender // 4 != receiver // 4][border]
    assert expected == pytest.approx(sum(seconds) / len(cells), rel=1e-3)


@pytest.mark.parametrize("recompute", [(), ("language_model",)])
@pytest.mark.parametrize(
    ("cp", "tp_sizes", "fully"), [(2, {1, 2}, False), (4, {1}, False), (2, {1}, True), (4, {1}, True)]
)
def test_costs_of_stages_that_share_tokens_are_those_of_the_simulation(
    cp: int, tp_sizes: set[int], fully: bool, recompute: tuple[str, ...]
) -> None:
    four = with_tp(on_nodes(4, 4, encoders=("vision",), frozen=(), recompute=recompute), 1, 2)
    four = shared(four, cp, fully=fully)
    sharded = ("language_model",) if fully else ()
    *_, mapping = mapping_problems(four, fully_sharded=sharded)
    chain = chains_of(four, fully=sharded)[cp]
    assert set(chain.seconds) == {tp * cp for tp in tp_sizes}
    for tp in tp_sizes:
        alone = replace(chain, seconds={tp * cp: chain.seconds[tp * cp]})
        found = map_stages(replace(mapping, modules={**mapping.modules, "language_model": alone}), 2)
        assert found is not None
        template = _template(four, 2, found)
        stages = template.replicas["language_model"].stages
        assert {(stage.tp_size, stage.cp_size) for stage in stages} == {(tp, cp)}
        used = [rank for replica in template.replicas.values() for stage in replica.stages for rank in stage.ranks]
        assert sorted(used) == list(range(8))
        check_costs(four, template, "language_model", fully=sharded)


def chain_of(num_layers: int, *stages: tuple[int, int, int]) -> Replica:
    """(first layer, first rank, cp) of each."""
    ends = [*(first for first, _, _ in stages[1:]), num_layers]
    return Replica(
        stages=tuple(
            Stage(layers=(first, end), ranks=tuple(range(rank, rank + cp)), cp_size=cp)
            for (first, rank, cp), end in zip(stages, ends, strict=True)
        )
    )


@pytest.mark.parametrize("fully", [False, True])
def test_stages_of_one_template_may_share_tokens_otherwise(fully: bool) -> None:
    """Their costs are those of the simulation; those that share nothing pack samples as the others do."""
    four = with_tp(shared(on_nodes(4, 4, encoders=("vision",), frozen=()), 2, 4, fully=fully), 1, 2)
    num_layers = [module.workload.num_layers for module in four.modules.values()]
    two = Stage(layers=(8, num_layers[1]), ranks=(6, 7), tp_size=2)
    llm = chain_of(8, (0, 1, 1), (3, 2, 2), (5, 4, 2))
    replicas = {"vision": chain_of(num_layers[0], (0, 0, 1)), "language_model": Replica(stages=(*llm.stages, two))}
    template = Template(num_nodes=2, replicas=replicas)
    check_costs(four, template, "vision", "language_model", fully=("language_model",) if fully else ())


ENCODERS = [
    ((0, 0, 2), (3, 2, 2), (8, 4, 2)),
    ((0, 0, 2), (7, 2, 1), (8, 3, 3)),
    ((0, 0, 1), (1, 1, 3), (6, 4, 2)),
]


@pytest.mark.parametrize("recompute", [(), ("vision",)])
@pytest.mark.parametrize(
    ("fully", "frozen"), [((), ()), ((), ("vision",)), (("vision",), ()), (("vision", "language_model"), ())]
)
def test_encoders_stages_may_share_tokens(
    fully: tuple[str, ...], frozen: tuple[str, ...], recompute: tuple[str, ...]
) -> None:
    """All of them, some of them, before, in and behind the blocks: what they cost is what the simulation says."""
    four = on_nodes(4, 4, encoders=("vision",), frozen=frozen, recompute=recompute)
    four = shared(shared(four, 2, fully="language_model" in fully), 2, 3, name="vision", fully="vision" in fully)
    num_layers = [module.workload.num_layers for module in four.modules.values()]
    for vision in ENCODERS:
        replicas = {"vision": chain_of(num_layers[0], *vision), "language_model": chain_of(num_layers[1], (0, 6, 2))}
        check_costs(four, Template(num_nodes=2, replicas=replicas), "vision", "language_model", fully=fully)


def test_templates_with_context_parallelism_are_no_slower() -> None:
    problem = on_nodes(6, 4, encoders=("vision",), frozen=())
    plain = make_templates(problem)
    for fully in (False, True):
        templates = make_templates(shared(problem, 2, 4, fully=fully))
        assert templates.fewest_nodes <= plain.fewest_nodes
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
        UserError, match=r"of language_model's tp \[1\] and cp \[8\] no two make a stage within a node of 4"
    ):
        oobleck(replace(problem, modules={**problem.modules, "language_model": llm}))
    llm = replace(llm, cp_sizes=(4,), tp_sizes=(2,))
    with pytest.raises(UserError, match=r"of language_model's tp \[2\] and cp \[4\] no two make a stage within"):
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
