"""Costs of mapping layers to devices for a template, for every number of devices that a stage may have.

The estimator's seconds and bytes of each module's layers become the `MappingProblem` of
`motet.planner.templates.stage_mapping`. They agree with the simulation of a mean microbatch.

A language model's samples are packed in all stages of a replica as soon as one stage has context parallelism. Where
they would be padded otherwise, the costs of a stage without context parallelism differ between the two cases, so
templates without any context parallelism are mapped separately.

Limits: costs of a stage or an action as such are not included, nor is gathering tokens between stages of different
context parallelism. Fully sharded stages have no tensor parallelism.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from motet.costs.memory import usable_bytes
from motet.errors import UserError
from motet.planner.layouts.degrees import check_degrees, template_cp_sizes, tp_sizes
from motet.planner.problem import Degrees, PlanningProblem
from motet.planner.templates.stage_mapping import ChainCosts, CutCosts, MappingProblem


@dataclass(frozen=True)
class Sharing:
    """How the ranks of a stage share a microbatch's tokens."""

    cp_size: int = 1
    is_packed: bool = False
    """Samples share a row."""
    is_sharded: bool = False
    """They share the parameters too (FSDP)."""


def mapping_problems(problem: PlanningProblem, *, fully_sharded: Collection[str]) -> list[MappingProblem]:
    """Returns the mapping problems of a template, which is the best of their solutions. If there are two, the first is
    for pipelines whose language model has no context parallelism, and the second for those where it has.
    `fully_sharded`: modules of which ranks that share tokens share the parameters.

    Raises `UserError` if the user's limits leave a module no group of devices within a node."""
    name = problem.sinks[0]
    sizes = template_cp_sizes(problem, name)
    lists = [[Sharing()]] if 1 in sizes else []
    if any(cp > 1 for cp in sizes):
        lists.append([Sharing(cp, is_packed=True, is_sharded=name in fully_sharded and cp > 1) for cp in sizes])
    chains = [chain for allowed in lists if (chain := _choice(problem, name, allowed)) is not None]
    encoders = {
        source: _choice(
            problem,
            source,
            [Sharing(cp, is_sharded=source in fully_sharded and cp > 1) for cp in template_cp_sizes(problem, source)],
        )
        for source in problem.sources
    }
    for each, found in [*encoders.items(), (name, chains)]:
        if not found:
            raise UserError(
                f"parallel.limits: no tp of {list(problem.modules[each].tp_sizes)} with a cp of "
                f"{list(problem.modules[each].cp_sizes)} gives {each} a stage within a node of "
                f"{problem.cluster.devices_per_node} devices that leaves each rank some tokens; allow smaller ones"
            )
    return [
        MappingProblem(
            modules={**{source: costs for source, costs in encoders.items() if costs is not None}, name: chain},
            devices_per_node=problem.cluster.devices_per_node,
            num_microbatches=problem.num_microbatches,
            device_bytes=usable_bytes(problem.cluster),
        )
        for chain in chains
    ]


def _choice(problem: PlanningProblem, name: str, allowed: Sequence[Sharing]) -> ChainCosts | None:
    """A module's stages choose from these; None if none makes a group within a node."""
    chains = [_chain_costs(problem, name, sharing) for sharing in allowed]
    chains = [chain for chain in chains if chain.seconds]
    return replace(chains[0], others=tuple(chains[1:])) if chains else None


def _chain_costs(problem: PlanningProblem, name: str, sharing: Sharing) -> ChainCosts:
    estimator, dp, cp = problem.estimator, problem.failures + 1, sharing.cp_size
    packed, sharded = sharing.is_packed, sharing.is_sharded
    tps = _tp_sizes(problem, name, sharing)
    return ChainCosts(
        seconds={
            tp * cp: estimator.seconds_with_exchange(name, tp, dp, cp=cp, packed=packed, fully_sharded=sharded)
            for tp in tps
        },
        static_bytes={tp * cp: estimator.static_bytes(name, tp, dp, cp=cp, fully_sharded=sharded) for tp in tps},
        saved_bytes={tp * cp: estimator.saved_bytes(name, tp, dp, cp=cp, packed=packed) for tp in tps},
        fixed_bytes={tp * cp: estimator.gathered_block_bytes(name, tp, cp) for tp in tps} if sharded else None,
        cut_s={tp * cp: _cut_seconds(problem, name, sharing, tp) for tp in tps},
        cp_size=cp,
    )


def _cut_seconds(problem: PlanningProblem, name: str, sharing: Sharing, tp: int) -> CutCosts:
    """Messages from a stage to the next one, and back, each rank's share of the rows. The neighbour's group is taken to
    be as large."""
    estimator, dp = problem.estimator, problem.failures + 1
    workload, trainable = problem.modules[name].workload, problem.modules[name].trainable_layers
    load = estimator.typical_load(name, dp, packed=sharing.is_packed)
    cuts: tuple[list[float], list[float]] = ([0.0], [0.0])
    for border in range(1, workload.num_layers + 1):
        num_bytes = estimator.boundary_bytes(name, border, load, num_shares=sharing.cp_size, num_row_shares=tp)
        comes_back = border < workload.num_layers and problem.gradients[name][border].input_gradient
        comes_back = comes_back or (border == workload.num_layers and any(trainable))
        is_end = border == workload.num_layers and name in problem.sinks
        for cut, receiver in zip(cuts, (1, problem.cluster.devices_per_node), strict=True):
            cut.append(0.0 if is_end else (1 + comes_back) * estimator.link(0, receiver).seconds(num_bytes))
    return CutCosts(*cuts)


def _tp_sizes(problem: PlanningProblem, name: str, sharing: Sharing) -> list[int]:
    most = problem.cluster.devices_per_node // sharing.cp_size
    sizes = [tp for tp in tp_sizes(problem, name) if tp <= most and _can_share(problem, name, tp, sharing.cp_size)]
    return [tp for tp in sizes if tp == 1] if sharing.is_sharded else sizes


def _can_share(problem: PlanningProblem, name: str, tp: int, cp: int) -> bool:
    """Ulysses shares out the heads that tensor parallelism leaves."""
    degrees = Degrees(tp=tp, cp=cp, dp=problem.failures + 1, context=problem.modules[name].context)
    try:
        check_degrees(problem, name, degrees)
    except UserError:
        return False
    return True
