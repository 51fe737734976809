"""DistMM and Megatron-LM as section 7 describes them, laid out and simulated.

* Megatron-LM: both towers on the same devices, tensor parallelism of 1, 8 and 16 (section 7.1), data parallelism over
  the rest, no pipelines.
* DistMM: towers apart; a tower's partition is the first of those in section 5.1 whose parameters, gradients and moments
  leave half of a device's memory to activations. That gives all the degrees that the paper mentions (the smaller tower
  of CLIP(6.7B, 2.7B): 4 instead of 8; both of CoCa(6.7B, 6.7B): the same; pipelines at multi-node scale). Devices are
  then balanced by computation alone (section 5.2).
* motet's own: the fastest candidate of planner `distmm`, without these limits.

Both sum gradients after the last backward, all of a device's at once: Megatron-LM has summed them so, and overlapping
would help both.
"""

from dataclasses import dataclass, replace
from functools import cache

from motet.costs.analytic import layer_flops
from motet.costs.collectives import collective_seconds
from motet.costs.load import microbatch_load
from motet.costs.memory import ADAMW_STATES, RESERVE
from motet.plan import Plan
from motet.planner.distmm import assign_devices, assigned_plan, candidates
from motet.planner.distmm_units import Choices, unit_choices
from motet.planner.evaluate import Evaluation, evaluate
from motet.planner.problem import Degrees, PlanningProblem
from motet.planner.towers import TowerLayout, tower_plan
from motet.reproduce.distmm_models import DEVICES_PER_NODE, NUM_DEVICES, SCALES, problem
from motet.schedule.action import Compute, Kind

TOWERS = ("vision", "text")
MEGATRON_TP = {"single device": 1, "single node": 8, "multi-node": 16}
SINGLE_DEVICE_BATCH = 512
LARGEST_REPLICA_BATCH = 127
"""Samples of a replica of Megatron-LM's at larger scales; none comes near it."""
LARGEST_STATE_SHARE = 0.5
ALL_PARTITIONS = 16


@dataclass(frozen=True)
class Setting:
    """A model at its scale, with the batch that is trained."""

    scale: str
    model: str
    vision: str
    text: str
    problem: PlanningProblem

    @property
    def batch(self) -> int:
        return len(self.problem.samples)

    def __hash__(self) -> int:
        return hash((self.scale, self.model))


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
        """Of the device that sums most gradients."""
        return max(_reductions_s(self.evaluation))

    @property
    def communication_share(self) -> float:
        """Of gathering features and summing gradients in the iteration."""
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
            summed = collective_seconds(
                evaluation.problem.cluster, "all_reduce", ranks, number * options.parameter_bytes
            )
            for replica in replicas:
                for rank in replica.stages[s].ranks:
                    seconds[rank] += summed
    return seconds


def _model_flops(given: PlanningProblem, tower: str) -> float:
    module = given.modules[tower]
    load = microbatch_load(module.workload, tower, given.samples)
    return sum(
        cost.forward.plus(cost.backward(input_gradient=needs.input_gradient, weight_gradient=True)).seconds(load)
        for cost, needs in zip(map(layer_flops, module.workload.layers), given.gradients[tower], strict=True)
    )


# Settings -----------------------------------------------------------------------------------------------------------


@cache
def setting(scale: str, model: str) -> Setting:
    vision, text = SCALES[scale][model]
    if scale == "single device":
        plain = _whole_memory(problem(vision, text, SINGLE_DEVICE_BATCH))
        fits = evaluate(plain, _megatron_plan(plain, scale)).fits
        chosen = plain if fits else _whole_memory(problem(vision, text, SINGLE_DEVICE_BATCH, recompute=True))
        return Setting(scale, model, vision, text, chosen)
    replicas, fitting = NUM_DEVICES // MEGATRON_TP[scale], []
    # Samples a replica: memory grows with them, so the largest number that fits is found by halving.
    few, many = 0, LARGEST_REPLICA_BATCH + 1
    while many - few > 1:
        middle = (few + many) // 2
        given = _whole_memory(problem(vision, text, middle * replicas, recompute=True))
        if evaluate(given, _megatron_plan(given, scale)).fits:
            few, fitting = middle, [given]
        else:
            many = middle
    assert fitting, f"{model} at {scale} scale does not fit Megatron-LM"
    return Setting(scale, model, vision, text, *fitting)


def accumulated(each: Setting, number: int) -> Setting:
    """Steps of so many contrastive batches, after which gradients are summed once."""
    given = each.problem
    longer = problem(each.vision, each.text, number * each.batch, recompute=bool(given.recompute))
    longer = replace(_whole_memory(longer), contrastive_batch_size=each.batch)
    return replace(each, problem=longer)


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
    choices = [_published_choices(each.problem, tower) for tower in TOWERS]
    found = assign_devices(tuple((tower,) for tower in TOWERS), choices, NUM_DEVICES)
    assert found is not None, f"{each.model} at {each.scale} scale does not fit DistMM's partitions"
    return Outcome(evaluate(each.problem, assigned_plan(each.problem, found)))


def _published_choices(given: PlanningProblem, tower: str) -> Choices:
    tp, pp = published_partition(given, tower)
    choices = unit_choices(given, (tower,), may_recompute=False, num_partitions=ALL_PARTITIONS, computation_only=True)
    return choices.take((choices.tp == tp) & (choices.pp == pp))


def published_partition(given: PlanningProblem, tower: str) -> tuple[int, int]:
    """The first (tp, pp) whose state leaves half of a device's memory."""
    memory = given.memory
    state = given.modules[tower].workload.num_parameters * memory.parameter_bytes * (2 + ADAMW_STATES)
    limit = LARGEST_STATE_SHARE * given.cluster.device.memory_bytes * (1 - RESERVE)
    sizes = [(tp, 1) for tp in (1, 2, 4, 8)] + [(DEVICES_PER_NODE, pp) for pp in range(2, 9)]
    return next((tp, pp) for tp, pp in sizes if state / (tp * pp) <= limit)


@cache
def separated_outcome(each: Setting) -> Outcome:
    """Section 7.2.3: towers on different nodes, half of them each, without load balancing."""
    layout = TowerLayout(degrees=Degrees(dp=NUM_DEVICES // 2))
    return Outcome(evaluate(each.problem, tower_plan(each.problem, dict.fromkeys(TOWERS, layout), schedule="gpipe")))


@cache
def own_outcome(each: Setting) -> Outcome:
    plans = [assigned_plan(each.problem, found) for found in candidates(each.problem)]
    outcomes = [Outcome(evaluate(each.problem, plan)) for plan in plans]
    return min((o for o in outcomes if o.evaluation.fits), key=lambda outcome: outcome.iteration_s)
