"""Plans written out by hand: which layers of which module stand on which ranks."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from motet.plan import LayerRange, ModulePlan, Plan, Replica, Stage
from motet.planner.layouts.layout import build_plan
from motet.planner.layouts.partition import partition, stage_costs
from motet.planner.problem import Degrees, PlanningProblem

Placed = Sequence[tuple[LayerRange, tuple[int, ...]]]
"""The stages of one replica: layers, and the ranks that hold them, cut by tensor parallelism."""


def plan_of(problem: PlanningProblem, replicas: Mapping[str, Sequence[Placed]], *, planner: str = "explicit") -> Plan:
    """`replicas`: of every module."""
    return Plan(
        modules={
            name: ModulePlan(
                kind=module.workload.kind,
                num_layers=module.workload.num_layers,
                replicas=tuple(
                    Replica(stages=tuple(Stage(layers=run, ranks=ranks, tp_size=len(ranks)) for run, ranks in placed))
                    for placed in replicas[name]
                ),
                trainable=module.trainable,
                tied=module.workload.tied,
                loss_weight=module.loss_weight,
            )
            for name, module in problem.modules.items()
        },
        edges=problem.edges,
        num_microbatches=problem.num_microbatches,
        schedule=problem.schedule,
        planner=planner,
    )


def language_model_plan(
    bounds: Sequence[int], ranks: Sequence[int], *, num_microbatches: int, schedule: str = "1f1b"
) -> Plan:
    """A trainable language model alone. `bounds`: of its stages' layers; `ranks`: one for each stage."""
    stages = tuple(Stage(layers=layers, ranks=(rank,)) for rank, layers in zip(ranks, pairwise(bounds), strict=True))
    module = ModulePlan(
        kind="language_model",
        num_layers=bounds[-1],
        replicas=(Replica(stages=stages),),
        trainable=((0, bounds[-1]),),
        loss_weight=1.0,
    )
    return Plan(modules={"language_model": module}, edges=(), num_microbatches=num_microbatches, schedule=schedule)


def chain_plan(
    problem: PlanningProblem,
    *,
    num_stages: int,
    tp: int = 1,
    dp: int = 1,
    frozen_aware: bool = True,
) -> Plan:
    """All modules, one after the other, as one chain that the exact partition cuts into stages (thesis 3.4.1).

    A stage in which one module ends and the next begins is a stage of both, on the same ranks."""
    times = {n: problem.estimator.layer_times(n, tp, dp, frozen_aware=frozen_aware) for n in problem.modules}
    cut = partition([time.total_s for of_module in times.values() for time in of_module], num_stages)
    begins = [0]
    for of_module in times.values():
        begins.append(begins[-1] + len(of_module))
    replicas: dict[str, list[Placed]] = {}
    for name, (begin, end) in zip(times, pairwise(begins), strict=True):
        inside = [(s, max(first, begin) - begin, min(last, end) - begin) for s, (first, last) in enumerate(cut)]
        replicas[name] = [
            [
                ((first, last), tuple(range((d * num_stages + s) * tp, (d * num_stages + s + 1) * tp)))
                for s, first, last in inside
                if first < last
            ]
            for d in range(dp)
        ]
    return plan_of(problem, replicas, planner="frozen-aware chain" if frozen_aware else "frozen-unaware chain")


def describe(plan: Plan) -> str:
    """`vision 0..7@0; language_model 0..3@0 4..9@1`: layers and ranks, of the first replica of each module."""
    return "; ".join(
        f"{name} "
        + " ".join(f"{s.layers[0]}..{s.layers[1] - 1}@{'+'.join(map(str, s.ranks))}" for s in module.replicas[0].stages)
        for name, module in plan.modules.items()
    )


def modality_parallel_plan(problem: PlanningProblem, *, frozen_aware: bool) -> Plan:
    """Stages of one module each, on all of the cluster's devices: of all ways to share them out between an encoder and
    the language model, and of all cuts, the one whose slowest stage is fastest, as far as `frozen_aware` lets see."""
    encoder, language_model = problem.modules
    times = {n: problem.estimator.layer_seconds(n, frozen_aware=frozen_aware) for n in problem.modules}

    def slowest_s(num_encoder_stages: int) -> float:
        stages = {encoder: num_encoder_stages, language_model: problem.num_devices - num_encoder_stages}
        return max(max(stage_costs(times[n], partition(times[n], pp))) for n, pp in stages.items())

    fewest = max(1, problem.num_devices - len(times[language_model]))
    most = min(problem.num_devices - 1, len(times[encoder]))
    num_encoder_stages = min(range(fewest, most + 1), key=slowest_s)
    return build_plan(
        problem,
        {
            encoder: Degrees(pp=num_encoder_stages),
            language_model: Degrees(pp=problem.num_devices - num_encoder_stages),
        },
        frozen_aware=frozen_aware,
        planner="frozen-aware" if frozen_aware else "frozen-unaware",
    )
