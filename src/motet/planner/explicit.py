"""From degrees of parallelism to a plan: what the user asks for by number, and what every search builds its plans with.

Placements (Cornstarch section 4.1 and its baselines in section 6):

* `parallel`: each encoder has ranks of its own, so encoders run side by side (modality parallelism);
* `colocated`: stage s of every encoder is on the same ranks, so encoders take turns there;
* `replicated`: the encoders are on the ranks of every stage of the language model. Where their output enters later
  stages too (cross-attention), that saves sending it; with token merging the later copies compute what nobody uses, and
  a trainable encoder's copies get no gradient: a baseline.

Modules on ranks of their own may have unequal numbers of replicas (DistTrain 4.1). A share of the whole model then is
its smallest part in which all modules have whole replicas; otherwise it is one replica of everything. Ranks are
numbered within a share first: modules in their order, then replicas, then stages, and tensor parallelism fastest;
where that would divide groups among nodes, as `motet.planner.rank_placement` says.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import gcd
from typing import Literal

from motet.attention.masks.distribution import check_ulysses
from motet.errors import UserError
from motet.parallel.tensor_plans import check_tp
from motet.plan import Edge, LayerRange, ModulePlan, Plan, Replica, Stage
from motet.planner.partition import partition, partition_by_sizes
from motet.planner.problem import Degrees, PlanningProblem

# Whether a module can be laid out as the user or a planner asks.


def check_degrees(problem: PlanningProblem, name: str, degrees: Degrees) -> None:
    """Raises `UserError` naming what is wrong with a module's degrees."""
    workload = problem.modules[name].workload
    for key in ("tp", "cp", "pp", "dp"):
        if getattr(degrees, key) < 1:
            raise UserError(f"parallel: {name}.{key} is {getattr(degrees, key)}; give at least 1")
    if degrees.pp > workload.num_layers:
        raise UserError(
            f"parallel: {name}.pp is {degrees.pp}, but it has {workload.num_layers} layers; "
            f"give at most {workload.num_layers}"
        )
    try:
        check_tp(workload.family, workload.config, degrees.tp)
    except UserError as error:
        raise UserError(f"parallel: {name}.{error}") from None
    if degrees.cp > 1:
        _check_context(problem, name, degrees)
    elif degrees.fully_sharded:
        raise UserError(
            f"parallel: {name}.fully_sharded: context-parallel ranks share the parameters, but cp is 1; "
            "give a larger cp, or leave fully_sharded out"
        )


SHARED_BY_NONE = ("clip_text_model", "pixtral", "qwen2_5_vl_vision", "qwen2_audio_encoder", "siglip_text_model")
"""Encoders whose tokens do not see their whole item and nothing else, or whose blocks know more than the tokens
(`motet.families.encoders.EncoderFamily.has_full_attention`)."""


def _check_context(problem: PlanningProblem, name: str, degrees: Degrees) -> None:
    workload = problem.modules[name].workload
    if workload.family in SHARED_BY_NONE:
        raise UserError(
            f"parallel: {name}.cp is {degrees.cp}, but ranks cannot share the tokens of a {workload.family}; give cp 1"
        )
    samples_each = -(-len(problem.samples) // (problem.num_microbatches * degrees.dp))
    longest = samples_each * max(sample.num_tokens(name) for sample in problem.samples)
    block_size = degrees.context.block_size
    if longest <= (degrees.cp - 1) * block_size:
        raise UserError(
            f"parallel: {name}.cp is {degrees.cp}, but microbatches have about {longest} tokens, too few for "
            f"{degrees.cp} blocks of {block_size}; give a smaller cp or context.block_size"
        )
    attention = next((layer.attention for layer in workload.layers if layer.attention is not None), None)
    if degrees.context.method == "ulysses" and attention is not None:
        try:
            check_ulysses(attention.num_heads // degrees.tp, attention.num_key_value_heads // degrees.tp, degrees.cp)
        except UserError as error:
            raise UserError(f"parallel: {name}.{error}") from None


Placement = Literal["parallel", "colocated", "replicated"]


def explicit_plan(
    problem: PlanningProblem,
    degrees: Mapping[str, Degrees],
    *,
    placement: Placement = "parallel",
    frozen_aware: bool = True,
    planner: str = "explicit",
) -> Plan:
    """The plan with these degrees. Stages are cut by the exact partition, where the degrees do not say how.

    Raises `ValueError` for degrees that no plan can have: more stages than layers, tensor parallelism that does not
    divide the heads, unequal data parallelism on shared ranks, more ranks than the cluster has devices or fewer.
    """
    plan = build_plan(problem, degrees, placement=placement, frozen_aware=frozen_aware, planner=planner)
    if plan.num_ranks != problem.num_devices:
        raise UserError(
            f"parallel: the plan uses {plan.num_ranks} ranks but cluster has {problem.num_devices}; "
            f"set cluster.num_devices to {plan.num_ranks} or change tp, pp and dp"
        )
    return plan


def build_plan(
    problem: PlanningProblem,
    degrees: Mapping[str, Degrees],
    *,
    placement: Placement = "parallel",
    frozen_aware: bool = True,
    planner: str = "explicit",
) -> Plan:
    """As `explicit_plan`, but of any size."""
    _check(problem, degrees, placement)
    cuts = {name: cut_module(problem, name, degrees[name], frozen_aware=frozen_aware) for name in problem.modules}
    num_shares = gcd(*(degrees[name].dp for name in problem.modules))
    offsets, ranks_per_share = _offsets(problem, degrees, placement, num_shares)
    modules = {
        name: _module_plan(problem, name, degrees[name], cuts[name], offsets[name], ranks_per_share, num_shares)
        for name in problem.modules
    }
    edges = problem.edges
    if placement == "replicated":
        modules, edges = _replicate(problem, modules, cuts)
    return problem.plan(modules, planner=planner, edges=edges)


def cut_module(
    problem: PlanningProblem, name: str, degrees: Degrees, *, frozen_aware: bool = True
) -> tuple[LayerRange, ...]:
    """The stages of one module."""
    num_layers = problem.modules[name].workload.num_layers
    if degrees.layers_per_stage is not None:
        try:
            return partition_by_sizes(num_layers, degrees.layers_per_stage)
        except UserError as error:
            raise UserError(f"parallel: {name}.{error}") from None
    times = problem.estimator.layer_times(name, degrees.tp, degrees.dp, cp=degrees.cp, frozen_aware=frozen_aware)
    return partition([time.total_s for time in times], degrees.pp)


def _check(problem: PlanningProblem, degrees: Mapping[str, Degrees], placement: Placement) -> None:
    for name in degrees:
        if name not in problem.modules:
            raise UserError(f"parallel: there is no module {name!r}; the model has {', '.join(problem.modules)}")
    for name in problem.modules:
        if name not in degrees:
            raise UserError(f"parallel: {name} has no degrees; give its tp, pp and dp")
        check_degrees(problem, name, degrees[name])
    by_dp: dict[int, str] = {}
    for name in problem.modules:
        by_dp.setdefault(degrees[name].dp, name)
    if len(by_dp) > 1 and placement != "parallel":
        (dp, name), (other_dp, other) = list(by_dp.items())[:2]
        raise UserError(
            f"parallel: dp is {dp} for {name} but {other_dp} for {other}, which share ranks; "
            "give all modules the same, or placement parallel"
        )
    if placement == "colocated":
        shapes: dict[tuple[int, int, int], str] = {}
        for name in problem.sources:
            shapes.setdefault((degrees[name].tp, degrees[name].cp, degrees[name].pp), name)
        if len(shapes) > 1:
            first, second = list(shapes.values())[:2]
            raise UserError(
                f"parallel: placement colocated puts {first} and {second} on the same ranks; "
                "give them the same tp, cp and pp"
            )
    if placement == "replicated":
        _check_replicated(problem, degrees)


def _check_replicated(problem: PlanningProblem, degrees: Mapping[str, Degrees]) -> None:
    if len(problem.sinks) != 1:
        raise UserError("parallel: placement replicated needs one module that all others enter")
    sink = degrees[problem.sinks[0]]
    for name in problem.sources:
        if (degrees[name].pp, degrees[name].tp, degrees[name].cp) != (1, sink.tp, sink.cp):
            raise UserError(
                f"parallel: placement replicated puts {name} whole on each stage of {problem.sinks[0]}; "
                f"give it pp 1, tp {sink.tp} and cp {sink.cp}"
            )


def _offsets(
    problem: PlanningProblem, degrees: Mapping[str, Degrees], placement: Placement, num_shares: int
) -> tuple[dict[str, int], int]:
    """Each module's first rank in a share of the whole model, and how many ranks that has."""
    offsets: dict[str, int] = {}
    next_rank = shared = 0
    for name in problem.modules:
        size = degrees[name].ranks_per_stage * degrees[name].pp * (degrees[name].dp // num_shares)
        if name in problem.sources and placement != "parallel":
            offsets[name] = 0
            shared = size if placement == "colocated" else 0
        else:
            offsets[name] = shared + next_rank
            next_rank += size
    return offsets, shared + next_rank


def _module_plan(
    problem: PlanningProblem,
    name: str,
    degrees: Degrees,
    cut: tuple[LayerRange, ...],
    offset: int,
    ranks_per_share: int,
    num_shares: int,
) -> ModulePlan:
    module = problem.modules[name]
    replicas = []
    size = degrees.ranks_per_stage
    for d in range(degrees.dp):
        share, place = divmod(d, degrees.dp // num_shares)
        first = share * ranks_per_share + offset + place * size * degrees.pp
        replicas.append(
            Replica(
                stages=tuple(
                    Stage(
                        layers=layers,
                        ranks=tuple(range(first + s * size, first + (s + 1) * size)),
                        tp_size=degrees.tp,
                        cp_size=degrees.cp,
                    )
                    for s, layers in enumerate(cut)
                )
            )
        )
    return module.planned(
        replicas,
        sequence_parallel=degrees.sequence_parallel,
        fully_sharded=degrees.fully_sharded,
        context=degrees.context,
    )


def _replicate(
    problem: PlanningProblem, modules: dict[str, ModulePlan], cuts: Mapping[str, tuple[LayerRange, ...]]
) -> tuple[dict[str, ModulePlan], tuple[Edge, ...]]:
    """Copies of every encoder on the later stages of the sink; each copy feeds the layers of its own stage."""
    sink = problem.sinks[0]
    result: dict[str, ModulePlan] = {}
    edges: list[Edge] = []
    for name in problem.sources:
        module = modules[name]
        edge = next(edge for edge in problem.edges if edge.source == name)
        for s, (first, last) in enumerate(cuts[sink]):
            copy = name if s == 0 else f"{name}@{s}"
            replicas = tuple(
                Replica(
                    stages=(
                        Stage(
                            layers=(0, module.num_layers),
                            ranks=modules[sink].replicas[d].stages[s].ranks,
                            tp_size=module.replicas[d].stages[0].tp_size,
                            cp_size=module.replicas[d].stages[0].cp_size,
                        ),
                    )
                )
                for d in range(len(module.replicas))
            )
            result[copy] = replace(module, replicas=replicas, copy_of=name if s else None)
            layers = tuple(layer for layer in edge.layers if first <= layer < last)
            if layers:
                edges.append(Edge(source=copy, target=sink, layers=layers))
    result[sink] = modules[sink]
    return result, tuple(edges)
