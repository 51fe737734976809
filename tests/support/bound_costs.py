"""The costs of an iteration on small plans, from a table of round numbers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tiny_configs import EVERY_MODEL

from motet.assignment.batch_assignment import contiguous_assignment
from motet.assignment.sample import Sample, Segment
from motet.cluster import cpu_cluster
from motet.costs.cost_model import CostTable, LayerCost, ModuleCosts, Quadratic
from motet.costs.iteration import IterationCosts
from motet.families.shape_reading.module_shapes import module_workload
from motet.plan import Edge, LayerRange, ModulePlan, Plan, Replica, Stage
from motet.schedule.action import Compute, Kind
from motet.schedule.routes import Cell, derive_routes
from motet.shapes.module_shape import with_projector

VISION = with_projector(module_workload(EVERY_MODEL["siglip"][0]), "mlp", 64)
TEXT = module_workload(EVERY_MODEL["llama"][0])
PARTS = {"forward": 1.0, "forward_without_graph": 0.5, "input_gradient": 10.0, "weight_gradient": 100.0}


def layer_cost(scale: float) -> LayerCost:
    parts = {name: Quadratic(constant=scale * value) for name, value in PARTS.items()}
    return LayerCost(**parts, weight_gradient_alone=Quadratic(constant=1000.0 * scale))


def costs_of(num_layers: int, stage: float = 0.0) -> ModuleCosts:
    return ModuleCosts(
        layers=(layer_cost(1),) * num_layers,
        stage_forward=Quadratic(constant=stage),
        stage_backward=Quadratic(constant=2 * stage),
    )


TABLE = CostTable(
    modules={"vision": {1: costs_of(5)}, "text": {1: costs_of(4, 0.25), 2: costs_of(4)}},
    source="profiled",
    hardware="",
    date="",
    optimizer_constant_s=1.0,
    optimizer_s_per_parameter=1e-6,
)
SAMPLES = [
    Sample(
        str(i),
        {"text": (Segment(144, source="vision"), Segment(6 + i)), "vision": (Segment(144, grid=(12, 12)),)}
        if i != 3
        else {"text": (Segment(10),)},
        {"text": 3},
    )
    for i in range(4)
]


def stage_on(layers: LayerRange, *ranks: int) -> Stage:
    return Stage(layers=layers, ranks=ranks, tp_size=len(ranks))


def small_plan(
    *,
    vision_trainable: tuple[LayerRange, ...] = ((4, 5),),
    text_trainable: tuple[LayerRange, ...] = (),
    tp: bool = False,
    recompute: tuple[str, ...] = (),
    tied: tuple[tuple[int, int], ...] = (),
) -> Plan:
    """A frozen encoder with a trainable projector on one rank, a frozen language model on two stages."""
    text = [stage_on((0, 2), 1, 2), stage_on((2, 4), 3, 4)] if tp else [stage_on((0, 2), 1), stage_on((2, 4), 2)]
    return Plan(
        modules={
            "vision": ModulePlan(
                kind="encoder",
                num_layers=5,
                replicas=(Replica(stages=(stage_on((0, 5), 0),)),),
                trainable=vision_trainable,
            ),
            "text": ModulePlan(
                kind="language_model",
                num_layers=4,
                replicas=(Replica(stages=tuple(text)),),
                trainable=text_trainable,
                loss_weight=1.0,
                tied=tied,
            ),
        },
        edges=(Edge(source="vision", target="text"),),
        num_microbatches=4,
        recompute=recompute,
    )


def bind(plan: Plan, samples: Sequence[Sample] = SAMPLES, **options: Any) -> IterationCosts:
    routes = derive_routes(plan, contiguous_assignment(plan, samples), samples)
    given: dict[str, Any] = {
        "workloads": {"vision": VISION, "text": TEXT},
        "table": TABLE,
        "cluster": cpu_cluster(8),
        **options,
    }
    return IterationCosts(routes, samples, **given)


def seconds(costs: IterationCosts, kind: Kind, *cell: Any) -> float:
    return costs.compute_s(Compute(kind, Cell(*cell)))


LONG = [Sample(str(i), {"text": (Segment(240),)}, {"text": 120}) for i in range(4)]
CELL = Cell("text", 0, 0, 0)


def cut_plan(
    tp_size: int = 1,
    cp_size: int = 1,
    sequence_parallel: bool = False,
    recompute: tuple[str, ...] = (),
    fully_sharded: bool = False,
) -> Plan:
    """One trainable language model on one group; `CELL` is its first, `LONG` are samples for it."""
    group = Stage(layers=(0, 4), ranks=tuple(range(tp_size * cp_size)), tp_size=tp_size, cp_size=cp_size)
    return Plan(
        modules={
            "text": ModulePlan(
                kind="language_model",
                num_layers=4,
                replicas=(Replica(stages=(group,)),),
                trainable=((0, 4),),
                loss_weight=1.0,
                sequence_parallel=sequence_parallel,
                fully_sharded=fully_sharded,
            )
        },
        edges=(),
        num_microbatches=4,
        recompute=recompute,
    )


def unlike_stages(*cp_sizes: int) -> Plan:
    """One layer on each."""
    plan = cut_plan()
    firsts = [sum(cp_sizes[:i]) for i in range(4)]
    stages = tuple(
        Stage(layers=(i, i + 1), ranks=tuple(range(first, first + cp)), cp_size=cp)
        for i, (first, cp) in enumerate(zip(firsts, cp_sizes, strict=True))
    )
    return replace(plan, modules={"text": replace(plan.modules["text"], replicas=(Replica(stages=stages),))})


def cut_encoder(*cp_sizes: int) -> Plan:
    """Embedding, two blocks, head and projector, each on ranks of its own; behind them the language model."""
    plan = small_plan(vision_trainable=((0, 5),), text_trainable=((0, 4),))
    firsts = [sum(cp_sizes[:i]) for i in range(6)]
    stages = tuple(
        Stage(layers=(i, i + 1), ranks=tuple(range(first, first + cp)), cp_size=cp)
        for i, (first, cp) in enumerate(zip(firsts, cp_sizes, strict=False))
    )
    modules = {
        "vision": replace(plan.modules["vision"], replicas=(Replica(stages=stages),)),
        "text": replace(plan.modules["text"], replicas=(Replica(stages=(stage_on((0, 4), firsts[-1]),)),)),
    }
    return replace(plan, modules=modules)
