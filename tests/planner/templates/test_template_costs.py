"""What mapping is told of stages, against the simulation of plans that are made of them: seconds, bytes, messages."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from template_problems import chains_of, on_nodes, shared, with_tp

from motet.costs.iteration import IterationCosts
from motet.plan import Replica, Stage
from motet.planner.evaluate import evaluate
from motet.planner.problem import PlanningProblem
from motet.planner.templates.pipelines import Template, Templates
from motet.planner.templates.planner import _template, plan_with_sizes
from motet.planner.templates.stage_mapping import CutCosts, map_stages
from motet.planner.templates.template_costs import mapping_problems
from motet.schedule.action import Compute, Kind
from motet.schedule.lower import Message
from motet.schedule.routes import Cell


def check_costs(problem: PlanningProblem, template: Template, *names: str, fully: tuple[str, ...] = ()) -> None:
    """Those of these modules' stages against two such pipelines' simulation: seconds and memory."""
    pair = Templates(failures=1, devices_per_node=4, by_nodes={2: template}, fully_sharded=fully)
    plan = plan_with_sizes(problem, pair, (2, 2))
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
            gathers |= stage.tp_size > 1
            # What gathering tokens for unlike neighbours, and shares of messages, takes is not in it.
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
            if after.tp_size != stage.tp_size:
                continue
            if name != "language_model" and number + 1 == len(stages):
                # It goes to another node, as there are two.
                check_messages(costs, chain.cut_s, size, cells, stage.layers[1], 0, 4)
            elif number + 1 < len(stages) and after.cp_size == stage.cp_size:
                ranks = stage.ranks[-1], after.ranks[0]
                check_messages(costs, chain.cut_s, size, cells, stage.layers[1], *ranks)


def check_messages(
    costs: IterationCosts,
    cuts: Mapping[int, CutCosts] | None,
    size: int,
    cells: Sequence[Cell],
    border: int,
    sender: int,
    receiver: int,
) -> None:
    """What the stage of these cells, on `size` devices, hands on, and gets back: the mean seconds in the simulation."""
    assert cuts is not None
    routes = [route for cell in cells for route in costs.routes.outgoing[cell]]
    seconds = [
        costs.message_s(Message(route.source, route.target, back, sender, receiver))
        for route in routes
        for back in (False, True)[: 1 + route.carries_gradient]
    ]
    expected = cuts[size][sender // 4 != receiver // 4][border]
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
