"""DistMM and Megatron-LM as section 7 describes them, laid out and simulated.

* Megatron-LM: both towers on the same devices, tensor parallelism of 1, 8 and 16 (section 7.1), data parallelism over
  the rest, no pipelines.
* DistMM: towers apart; a tower's partition is the first of those in section 5.1 that a replica's 16 bytes a parameter
  fit into. That gives all the degrees that the paper mentions (the smaller tower of CLIP(6.7B, 2.7B): 4 instead of 8;
  both of CoCa(6.7B, 6.7B): the same; pipelines at multi-node scale). Devices are those that section 7.2.2 publishes,
  else balanced by computation alone (section 5.2).
* motet's own: the fastest candidate of planner `distmm`, without these limits.

Both sum gradients after the last backward, all of a device's at once: Megatron-LM has summed them so, and overlapping
would help both. NCCL sums over more than two nodes in rings through all devices (over two it takes trees, as
Megatron-LM's tensor parallelism does here: github.com/NVIDIA/nccl issues 812 and 946).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from motet.costs.analytic import layer_flops
from motet.costs.communication import ring_terms
from motet.costs.cost_model import microbatch_load
from motet.costs.memory import RESERVE, usable_bytes
from motet.plan import Plan
from motet.planner.distmm.planner import assign_devices, assigned_plan, candidates
from motet.planner.distmm.towers import TowerLayout, tower_plan
from motet.planner.distmm.units import Choices, unit_choices
from motet.planner.evaluate import Evaluation, evaluate
from motet.planner.problem import Degrees, PlanningProblem
from motet.schedule.action import Compute, Kind
from papers.distmm.models import ASSUMED, DEVICES_PER_NODE, NUM_DEVICES, SCALES, Assumed, problem

TOWERS = ("vision", "text")
MEGATRON_TP = {"single device": 1, "single node": 8, "multi-node": 16}
SINGLE_DEVICE_BATCH = 512
"""Megatron-LM's: 8 samples a device (section 7.2.2)."""
DISTMM_BATCH = 600
"""DistMM's for CLIP(760M, 350M): 10 samples on each of 60 replicas, 150 on each of 4."""
LARGEST_REPLICA_BATCH = 127
"""Samples of a replica of Megatron-LM's at larger scales; none comes near it."""
BYTES_OF_A_REPLICA = 16
"""A parameter, its gradient and what the optimizer keeps for it, shared with no other replica."""
ALL_PARTITIONS = 16
PUBLISHED_REPLICAS: Mapping[tuple[str, str], tuple[int, int]] = {
    ("single device", "CLIP"): (60, 4),
    ("single device", "CoCa"): (48, 16),
}
"""(vision, text), section 7.2.2. CLIP's are the only ones that batches of 10 and 150 samples allow on 64 GPUs."""


@dataclass(frozen=True)
class Setting:
    """A model at its scale, with the batch that is trained."""

    scale: str
    model: str
    vision: str
    text: str
    assumed: Assumed
    problem: PlanningProblem

    @property
    def batch(self) -> int:
        return len(self.problem.samples)

    def __hash__(self) -> int:
        return hash((self.scale, self.model, self.assumed))


@dataclass(frozen=True)
class Outcome:
    evaluation: Evaluation

    @property
    def iteration_s(self) -> float:
        return self.computation_s + self.reduction_s + self.evaluation.costs.fixed_s

    @property
    def computation_s(self) -> float:
        """Until the last backward has ended: batch-syncs and tensor parallelism included."""
        return float(self.evaluation.result.times.action_end.max())

    @property
    def reduction_s(self) -> float:
        """Seconds of reductions on the device that sums most gradients."""
        return max(_reductions_s(self.evaluation))

    @property
    def communication_share(self) -> float:
        """Share of the iteration that gathers features and sums gradients."""
        costs, routes = self.evaluation.costs, self.evaluation.program.dependencies.routes
        gathers = [Compute(Kind.FORWARD, cell) for cell in routes.cells if cell.module == "loss"]
        seconds = sum(map(costs.group_communication_s, gathers)) + self.reduction_s
        return seconds / self.iteration_s

    def utilization(self, tower: str) -> float:
        """Model FLOPs over the peak of the tower's devices and the time in which they compute it."""
        costs, routes = self.evaluation.costs, self.evaluation.program.dependencies.routes
        busy_s = sum(
            len(routes.stage(cell).ranks)
            * sum(costs.compute_s(Compute(k, cell)) for k in (Kind.FORWARD, Kind.BACKWARD))
            for cell in routes.cells
            if cell.module == tower
        )
        device = self.evaluation.problem.cluster.device
        return _model_flops(self.evaluation.problem, tower) / (busy_s * device.peak("float16"))


def _reductions_s(evaluation: Evaluation) -> list[float]:
    """For each device: the sums of the gradients of its stages, each as one tensor."""
    plan, options = evaluation.plan, evaluation.problem.memory
    seconds = [0.0] * plan.num_ranks
    for name in TOWERS:
        layers, replicas = evaluation.problem.modules[name].workload.layers, plan.modules[name].replicas
        for s, stage in enumerate(replicas[0].stages):
            number = sum(layers[i].num_parameters_per_rank(stage.tp_size) for i in range(*stage.layers))
            ranks = [replica.stages[s].ranks[0] for replica in replicas]
            if len(replicas) > 1:
                ring = ring_terms(evaluation.problem.cluster, "all_reduce", ranks)
                for replica in replicas:
                    for rank in replica.stages[s].ranks:
                        seconds[rank] += ring.seconds(number * options.parameter_bytes)
    return seconds


def _model_flops(given: PlanningProblem, tower: str) -> float:
    module = given.modules[tower]
    load = microbatch_load(module.workload, tower, given.samples)
    return sum(
        cost.forward.plus(cost.passes(input_gradient=needs.input_gradient, weight_gradient=True).backward).seconds(load)
        for cost, needs in zip(map(layer_flops, module.workload.layers), given.gradients[tower], strict=True)
    )


# Settings -----------------------------------------------------------------------------------------------------------


@cache
def setting(scale: str, model: str, assumed: Assumed = ASSUMED) -> Setting:
    vision, text = SCALES[scale][model]

    def given(batch: int, *, recompute: bool) -> PlanningProblem:
        return _whole_memory(problem(vision, text, batch, recompute=recompute, assumed=assumed))

    def fits(each: PlanningProblem) -> bool:
        return evaluate(each, _megatron_plan(each, scale)).fits

    if scale == "single device":
        plain = given(SINGLE_DEVICE_BATCH, recompute=False)
        chosen = plain if fits(plain) else given(SINGLE_DEVICE_BATCH, recompute=True)
        return Setting(scale, model, vision, text, assumed, chosen)
    replicas, fitting = NUM_DEVICES // MEGATRON_TP[scale], []
    # Samples a replica: memory grows with them, so the largest number that fits is found by halving.
    few, many = 0, LARGEST_REPLICA_BATCH + 1
    while many - few > 1:
        middle = (few + many) // 2
        each = given(middle * replicas, recompute=True)
        if fits(each):
            few, fitting = middle, [each]
        else:
            many = middle
    assert fitting, f"{model} at {scale} scale does not fit Megatron-LM"
    return Setting(scale, model, vision, text, assumed, *fitting)


def _whole_memory(given: PlanningProblem) -> PlanningProblem:
    """All of a device's memory may be used, not only what planners otherwise use of it."""
    device = given.cluster.device
    whole = replace(device, memory_bytes=device.memory_bytes / (1 - RESERVE))
    return replace(given, cluster=replace(given.cluster, device=whole))


# Systems ------------------------------------------------------------------------------------------------------------


@cache
def megatron_outcome(each: Setting) -> Outcome:
    return Outcome(evaluate(each.problem, _megatron_plan(each.problem, each.scale)))


def _megatron_plan(given: PlanningProblem, scale: str) -> Plan:
    tp = MEGATRON_TP[scale]
    layout = TowerLayout(degrees=Degrees(tp=tp, dp=NUM_DEVICES // tp))
    layouts = dict.fromkeys(TOWERS, layout)
    return tower_plan(given, layouts, together=[TOWERS], schedule="gpipe", planner="megatron")


@cache
def distmm_outcome(each: Setting) -> Outcome:
    """DistMM with the replicas that the paper gives, else balanced ones."""
    published = PUBLISHED_REPLICAS.get((each.scale, each.model))
    return balanced_outcome(each) if published is None else _replicated(each.problem, published)


@cache
def larger_batch_outcome(each: Setting) -> Outcome:
    """DistMM with the samples per replica that section 7.2.2 gives."""
    larger = _whole_memory(problem(each.vision, each.text, DISTMM_BATCH, assumed=each.assumed))
    return _replicated(larger, PUBLISHED_REPLICAS[each.scale, each.model])


def _replicated(given: PlanningProblem, numbers: tuple[int, int]) -> Outcome:
    layouts = {tower: TowerLayout(degrees=Degrees(dp=dp)) for tower, dp in zip(TOWERS, numbers, strict=True)}
    return Outcome(evaluate(given, tower_plan(given, layouts, schedule="gpipe")))


@cache
def balanced_outcome(each: Setting) -> Outcome:
    choices = [_choices(each.problem, tower) for tower in TOWERS]
    found = assign_devices(tuple((tower,) for tower in TOWERS), choices, NUM_DEVICES)
    assert found is not None, f"{each.model} at {each.scale} scale does not fit DistMM's partitions"
    return Outcome(evaluate(each.problem, assigned_plan(each.problem, found)))


def _choices(given: PlanningProblem, tower: str) -> Choices:
    tp, pp = published_partition(given, tower)
    choices = unit_choices(given, (tower,), may_recompute=False, num_partitions=ALL_PARTITIONS, computation_only=True)
    return choices.take((choices.tp == tp) & (choices.pp == pp))


def published_partition(given: PlanningProblem, tower: str) -> tuple[int, int]:
    """The first (tp, pp) into which a replica fits by itself, its activations aside."""
    state = given.modules[tower].workload.num_parameters * BYTES_OF_A_REPLICA
    memory = usable_bytes(given.cluster)
    sizes = [(tp, 1) for tp in (1, 2, 4, 8)] + [(DEVICES_PER_NODE, pp) for pp in range(2, 9)]
    return next((tp, pp) for tp, pp in sizes if state / (tp * pp) <= memory)


@cache
def separated_outcome(each: Setting) -> Outcome:
    """Section 7.2.3: towers on different nodes, half of them each, without load balancing."""
    return _replicated(each.problem, (NUM_DEVICES // 2, NUM_DEVICES // 2))


@cache
def own_outcome(each: Setting) -> Outcome:
    plans = [assigned_plan(each.problem, found) for found in candidates(each.problem)]
    outcomes = [Outcome(evaluate(each.problem, plan)) for plan in plans]
    return min((o for o in outcomes if o.evaluation.fits), key=lambda outcome: outcome.iteration_s)


# DistMM's nine models as planning problems, with the batches that Megatron-LM can hold (`distmm_systems`).


def problems() -> list[tuple[str, PlanningProblem]]:
    settings = [setting(scale, model) for scale, models in SCALES.items() for model in models]
    return [
        (f"{each.model}({each.vision}, {each.text}) on {NUM_DEVICES} V100, batch {each.batch}", each.problem)
        for each in settings
    ]
