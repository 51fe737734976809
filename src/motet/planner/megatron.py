"""Megatron-LM, extended to multimodal models in the three ways that papers compare their systems with.

* `megatron` (Optimus 5.1): the language model's blocks evenly over the stages, all encoders inside the first stage.
* `megatron_extra_stages` (DistTrain 2.1, 8.1): one more stage for each encoder (and generator), all with the language
  model's TP and DP. The module is not cut but replicated over the ranks of its TP group, which take turns at the
  samples; in the plan it has a replica of one rank for each rank of the group (`Layout.split`).
* `megatron_balanced` (Optimus appendix B): all layers in a row, cut into V x PP virtual stages so that the slowest one
  is as fast as possible, virtual stage i on group i mod PP; V and the degrees by simulation.

Deviations: DP, TP and V are searched within the user's limits (the papers set them by hand). The papers divide the
images of one sample over the TP group; here the group divides whole samples. Several encoders follow one another in the
row, a case that appendix B leaves open. Stages need not divide the blocks; the first ones then get one more.
"""

from collections.abc import Iterable, Iterator

from motet.plan import LayerRange, Plan
from motet.planner.layouts.degrees import check_allows_tp_1, uniform_degrees
from motet.planner.layouts.layout import Chunk, Layout, Placement, cut_chain, has_few_stages
from motet.planner.layouts.partition import even_partition
from motet.planner.problem import PlanningProblem
from motet.planner.selection import best_plan

VIRTUAL_STAGES = (1, 2, 3, 4, 6, 12)
"""Numbers V of model chunks per group that are tried (Optimus tables 11 and 12 use 6 and 12)."""


def megatron(problem: PlanningProblem, *, placement: Placement | None = None) -> Plan:
    return best_plan(problem, _first_stage(problem, uniform_degrees(problem)), "megatron", placement)


def megatron_extra_stages(problem: PlanningProblem, *, placement: Placement | None = None) -> Plan:
    backbone = language_model(problem)
    check_allows_tp_1(problem, "megatron_extra_stages", (name for name in problem.modules if name != backbone))
    layouts = _extra_stages(problem, uniform_degrees(problem, (backbone,)))
    return best_plan(problem, layouts, "megatron_extra_stages", placement)


def megatron_balanced(problem: PlanningProblem, *, placement: Placement | None = None) -> Plan:
    name, sizes = "megatron_balanced", list(uniform_degrees(problem))
    layouts = [layout for v in VIRTUAL_STAGES for layout in balanced_chains(problem, sizes, v, planner=name)]
    return best_plan(problem, layouts, name, placement)


GroupSizes = Iterable[tuple[int, int, int]]
"""(DP, TP, groups of each replica)."""


def _first_stage(problem: PlanningProblem, sizes: GroupSizes) -> Iterator[Layout]:
    backbone = language_model(problem)
    for dp, tp, num_groups in sizes:
        if not _can_cut(problem, backbone, num_groups):
            continue
        stages = _even_blocks(problem, backbone, num_groups)
        chunks = []
        for name in problem.modules:
            if name == backbone:
                chunks += [Chunk(name, layers, s) for s, layers in enumerate(stages)]
            else:
                is_encoder = name in problem.sources
                chunks.append(Chunk(name, (0, _num_layers(problem, name)), 0 if is_encoder else num_groups - 1))
        yield Layout(planner="megatron", chunks=tuple(chunks), group_sizes=(tp,) * num_groups, dp=dp)


def _extra_stages(problem: PlanningProblem, sizes: GroupSizes) -> Iterator[Layout]:
    backbone = language_model(problem)
    others = [name for name in problem.modules if name != backbone]
    for dp, tp, num_groups in sizes:
        if not _can_cut(problem, backbone, num_groups - len(others)):
            continue
        stages = _even_blocks(problem, backbone, num_groups - len(others))
        chunks: list[Chunk] = []
        group = 0
        for name in problem.modules:
            runs = stages if name == backbone else ((0, _num_layers(problem, name)),)
            chunks += [Chunk(name, layers, group + s) for s, layers in enumerate(runs)]
            group += len(runs)
        yield Layout(
            planner="megatron_extra_stages",
            chunks=tuple(chunks),
            group_sizes=(tp,) * num_groups,
            dp=dp,
            split=frozenset(others if tp > 1 else ()),
        )


def balanced_chains(problem: PlanningProblem, sizes: GroupSizes, num_chunks: int, *, planner: str) -> Iterator[Layout]:
    """All layers in a row over V x PP virtual stages, cut as if all were trainable (appendix B)."""
    total = sum(_num_layers(problem, name) for name in problem.modules)
    for dp, tp, num_groups in sizes:
        if num_chunks * num_groups > total or (num_chunks > 1 and num_groups == 1):
            continue
        costs = {name: problem.estimator.layer_seconds(name, tp, dp, frozen_aware=False) for name in problem.modules}
        chunks = cut_chain(costs, [v % num_groups for v in range(num_chunks * num_groups)])
        if has_few_stages(problem, chunks):
            yield Layout(planner=planner, chunks=tuple(chunks), group_sizes=(tp,) * num_groups, dp=dp)


def language_model(problem: PlanningProblem) -> str:
    """The module that Megatron cuts into a pipeline."""
    kinds = [name for name in problem.modules if problem.modules[name].workload.kind == "language_model"]
    return kinds[-1] if kinds else list(problem.modules)[-1]


def _num_layers(problem: PlanningProblem, name: str) -> int:
    return problem.modules[name].workload.num_layers


def _can_cut(problem: PlanningProblem, name: str, num_stages: int) -> bool:
    limit = problem.modules[name].max_stages or num_stages
    return 1 <= num_stages <= min(limit, problem.modules[name].workload.num_blocks)


def _even_blocks(problem: PlanningProblem, name: str, num_stages: int) -> tuple[LayerRange, ...]:
    """The embedding goes with the first blocks, the head with the last."""
    blocks = even_partition(problem.modules[name].workload.num_blocks, num_stages)
    bounds = [0, *(last + 1 for _, last in blocks[:-1]), _num_layers(problem, name)]
    return tuple((bounds[s], bounds[s + 1]) for s in range(num_stages))
