"""What mapping layers to devices is given for a template: seconds and bytes of each module's layers, for every number
of devices that a stage may have (`motet.planner.templates.planner`, `motet.planner.templates.stage_mapping`).

They are those of the simulation, for the mean of all microbatches. Under context parallelism each rank computes its
share of the tokens, exchanges keys and values in the forward and in the backward, and saves the activations of its
share; but before and behind an encoder's blocks each computes and saves all, and the head's gather what the blocks
made. Parameters are whole on each rank of the context-parallel group, unless the stage is fully sharded: then each
keeps a share, and all of them are gathered in the forward and in the backward.

A language model's samples are packed in all stages of a replica if tokens are shared out in one. Where they are padded
otherwise, a stage without context parallelism costs one thing beside stages with it and another without: templates
without any are mapped apart. An encoder's items stand apart in any case.

Limits: what a stage or an action takes whatever its layers are is not in it, nor what gathering tokens takes between
stages that share them out otherwise: messages are those between equal groups. A microbatch without images exchanges as
much as one with them. Fully sharded stages have no tensor parallelism; what they gather counts as if each had a block,
and a backward if the module has one.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from motet.costs.communication import message_seconds
from motet.costs.memory import RESERVE, gathered_bytes
from motet.costs.stage_seconds import is_gathered_in_backward, key_exchange, parameter_gather, token_gather
from motet.errors import UserError
from motet.plan import Stage
from motet.planner.degrees import template_cp_sizes, tp_sizes
from motet.planner.explicit import check_degrees
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
    """Of their best mappings the better one makes the template. Where there are two, the first is for pipelines whose
    language model has no context parallelism, and the second for those where it has. `fully_sharded`: modules of which
    ranks that share tokens share the parameters.

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
                f"parallel.limits: of {each}'s tp {list(problem.modules[each].tp_sizes)} and cp "
                f"{list(problem.modules[each].cp_sizes)} no two make a stage within a node of "
                f"{problem.cluster.devices_per_node} devices that leaves each rank some tokens; allow smaller ones"
            )
    return [
        MappingProblem(
            modules={**{source: costs for source, costs in encoders.items() if costs is not None}, name: chain},
            devices_per_node=problem.cluster.devices_per_node,
            num_microbatches=problem.num_microbatches,
            device_bytes=problem.cluster.device.memory_bytes * (1 - RESERVE),
        )
        for chain in chains
    ]


def _choice(problem: PlanningProblem, name: str, allowed: Sequence[Sharing]) -> ChainCosts | None:
    """A module's stages choose from these; None if none makes a group within a node."""
    chains = [_chain_costs(problem, name, sharing) for sharing in allowed]
    chains = [chain for chain in chains if chain.seconds]
    return replace(chains[0], others=tuple(chains[1:])) if chains else None


def _chain_costs(problem: PlanningProblem, name: str, sharing: Sharing) -> ChainCosts:
    cp = sharing.cp_size
    tps = _tp_sizes(problem, name, sharing)
    return ChainCosts(
        seconds={tp * cp: _seconds(problem, name, tp, sharing) for tp in tps},
        static_bytes={tp * cp: _static_bytes(problem, name, tp, sharing) for tp in tps},
        saved_bytes={tp * cp: _saved_bytes(problem, name, tp, sharing) for tp in tps},
        fixed_bytes={tp * cp: _gathered_blocks_bytes(problem, name, cp) for tp in tps} if sharing.is_sharded else None,
        cut_s=_cut_seconds(problem, name, sharing),
        cp_size=cp,
    )


def _cut_seconds(problem: PlanningProblem, name: str, sharing: Sharing) -> CutCosts:
    """Of the messages from a stage to the next one, and back."""
    workload, trainable = problem.modules[name].workload, problem.modules[name].trainable_layers
    load = problem.estimator.typical_load(name, problem.failures + 1, cp=sharing.cp_size, packed=sharing.is_packed)
    outputs = problem.estimator.typical_load(name, problem.failures + 1).outputs
    cuts: tuple[list[float], list[float]] = ([0.0], [0.0])
    for border in range(1, workload.num_layers + 1):
        rows, width = workload.boundary(border)
        num_bytes = (load.tokens if rows == "tokens" else outputs) * width * problem.memory.activation_bytes
        comes_back = border < workload.num_layers and problem.gradients[name][border].input_gradient
        comes_back = comes_back or (border == workload.num_layers and any(trainable))
        is_end = border == workload.num_layers and name in problem.sinks
        for cut, receiver in zip(cuts, (1, problem.cluster.devices_per_node), strict=True):
            once_s = message_seconds(problem.table, problem.cluster, 0, receiver, num_bytes)
            cut.append(0.0 if is_end else (1 + comes_back) * once_s)
    return CutCosts(*cuts)


def _saved_bytes(problem: PlanningProblem, name: str, tp: int, sharing: Sharing) -> Sequence[float]:
    """Of each layer, on each rank, for each microbatch in flight."""
    workload, num_pipelines = problem.modules[name].workload, problem.failures + 1
    whole, shared = (
        problem.estimator.saved_bytes(
            name,
            problem.estimator.typical_load(name, num_pipelines, cp=cp, packed=sharing.is_packed),
            tp=tp,
            fully_sharded=sharing.is_sharded,
        )
        for cp in (1, sharing.cp_size)
    )
    return [(shared if workload.is_shared(layer) else whole)[i] for i, layer in enumerate(workload.layers)]


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


def _seconds(problem: PlanningProblem, name: str, tp: int, sharing: Sharing) -> Sequence[float]:
    """Of each layer, forward and backward of one microbatch."""
    num_pipelines, cp = problem.failures + 1, sharing.cp_size
    times = problem.estimator.layer_times(name, tp, num_pipelines, cp=cp, packed=sharing.is_packed)
    if cp == 1:
        return [time.total_s for time in times]
    workload, gradients = problem.modules[name].workload, problem.gradients[name]
    whole = problem.estimator.layer_times(name, tp, num_pipelines, packed=sharing.is_packed)
    load = problem.estimator.typical_load(name, num_pipelines, cp=cp)
    stage = Stage(layers=(0, workload.num_layers), ranks=tuple(range(tp * cp)), tp_size=tp, cp_size=cp)
    seconds = []
    for index, (layer, needs) in enumerate(zip(workload.layers, gradients, strict=True)):
        runs_again = needs.any and name in problem.recompute and workload.has_block((index, index + 1))
        keys_s = key_exchange(layer, stage, problem.cluster, problem.memory).seconds(load)
        total_s = (times if workload.is_shared(layer) else whole)[index].total_s + (1 + needs.any + runs_again) * keys_s
        if workload.encodes_items and layer.part == "head":
            tokens_s = token_gather(workload, index, stage, problem.cluster, problem.memory).seconds(load)
            total_s += (1 + needs.input_gradient) * tokens_s
        if sharing.is_sharded:
            num_sent = 1 + is_gathered_in_backward(layer, needs, gradients) + needs.weight_gradient
            total_s += num_sent * parameter_gather(layer, stage, problem.cluster, problem.memory).seconds(load)
        seconds.append(total_s)
    return seconds


def _static_bytes(problem: PlanningProblem, name: str, tp: int, sharing: Sharing) -> Sequence[float]:
    """Of each layer, on each rank: what is there whatever is in flight."""
    num_pipelines, cp = problem.failures + 1, sharing.cp_size
    if not sharing.is_sharded:
        return problem.estimator.static_bytes(name, tp=tp, num_holders=num_pipelines * cp)
    own = problem.estimator.static_bytes(name, tp=tp, num_holders=num_pipelines, num_shares=cp)
    module = problem.modules[name]
    # What is in no block is gathered for as long as its stage computes.
    gathered = [
        0
        if layer.part == "block"
        else gathered_bytes([(layer, module.is_trainable(i))], tp_size=tp, num_shares=cp, options=problem.memory)
        for i, layer in enumerate(module.workload.layers)
    ]
    return [bytes_kept + more for bytes_kept, more in zip(own, gathered, strict=True)]


def _gathered_blocks_bytes(problem: PlanningProblem, name: str, cp: int) -> float:
    """Of the blocks that are gathered one by one."""
    module = problem.modules[name]
    blocks = [
        (layer, module.is_trainable(i)) for i, layer in enumerate(module.workload.layers) if layer.part == "block"
    ]
    return gathered_bytes(blocks, tp_size=1, num_shares=cp, options=problem.memory)
