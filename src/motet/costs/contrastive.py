"""What a batch-sync costs: the contrastive loss as its members share it (DistMM sections 5.3.2 and 5.4).

A member compares the features that it makes with those of every tower opposite to its own, block by block. Before, it
gathers these towers' features from their ranks; after its forward, the log-sum-exps of the opposite direction, a float
for each sample, without which its gradients would be incomplete. No gradient of a feature leaves its rank. A member of
one tower of two so receives half of what one receives that holds both: it needs its own tower's features from nobody.

The fullest member decides: of a tower on few ranks, or of several towers on the same ranks. Samples that lack a tower
are counted as if they had it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from motet.cluster import Cluster
from motet.costs.communication import collective_terms
from motet.costs.cost_model import LayerCost, Quadratic
from motet.plan import Plan
from motet.shapes.module_shape import ModuleWorkload

LOG_SUM_EXP_BYTES = 4


@dataclass(frozen=True)
class LossShare:
    """Of the fullest member."""

    comparisons: float
    """Its share of the whole loss's."""
    gathered: float
    """Features that it receives for each sample of the contrastive batch, in vectors: of one tower of two, one."""
    log_sum_exps: float
    """Those that it receives for each sample."""


def loss_share(plan: Plan, loss: str, workload: ModuleWorkload) -> LossShare:
    """`loss`: the loss's module, `workload`: its own."""
    towers_of = _towers_of_members(plan, loss)
    num_members = {tower: sum(tower in held for held in towers_of) for held in towers_of for tower in held}
    opposite = _opposite(workload, tuple(num_members))
    total = sum(map(len, opposite.values()))
    comparisons = max(sum(len(opposite[t]) / num_members[t] for t in held) for held in towers_of) / max(1, total)
    needed = [{other for tower in held for other in opposite[tower]} for held in towers_of]
    gathered = max(
        sum(1 - (1 / num_members[other] if other in held else 0.0) for other in others)
        for held, others in zip(towers_of, needed, strict=True)
    )
    return LossShare(comparisons, gathered, max(sum(len(opposite[t]) for t in held) for held in towers_of))


def _towers_of_members(plan: Plan, loss: str) -> Sequence[frozenset[str]]:
    held: dict[int, set[str]] = {}
    for edge in plan.edges:
        if edge.target == loss:
            for replica in plan.modules[edge.source].replicas:
                for rank in replica.stages[-1].ranks:
                    held.setdefault(rank, set()).add(plan.modules[edge.source].data_module(edge.source))
    return [frozenset(towers) for towers in held.values()]


def _opposite(workload: ModuleWorkload, towers: Sequence[str]) -> Mapping[str, set[str]]:
    """For each tower, those with which it is compared."""
    result: dict[str, set[str]] = {tower: set() for tower in towers}
    for first, second in workload.config["pairs"]:
        result[first].add(second)
        result[second].add(first)
    return result


@dataclass(frozen=True)
class LossSeconds:
    """As functions of a contrastive batch's load: its tokens are samples."""

    forward: Quadratic
    """Exchange included."""
    backward: Quadratic
    exchange: Quadratic


def loss_seconds(
    plan: Plan, loss: str, workload: ModuleWorkload, layer: LayerCost, cluster: Cluster, *, feature_bytes: int
) -> LossSeconds:
    """`layer`: seconds of all comparisons on one device. `feature_bytes`: of each element that travels."""
    share = loss_share(plan, loss, workload)
    (stage,) = plan.modules[loss].replicas[0].stages
    per_sample = share.gathered * workload.hidden_size * feature_bytes + share.log_sum_exps * LOG_SUM_EXP_BYTES
    terms = collective_terms(cluster, "all_gather", stage.ranks)
    exchange = Quadratic(
        constant=2 * terms.latency_s if share.gathered else 0.0, per_token=per_sample / terms.bytes_per_s
    )
    return LossSeconds(
        forward=_shared(layer.forward, share.comparisons).plus(exchange),
        backward=_shared(layer.input_gradient, share.comparisons),
        exchange=exchange,
    )


def _shared(cost: Quadratic, share: float) -> Quadratic:
    """What every kernel takes to start is not shared."""
    return cost.times(share)._replace(constant=cost.constant)


def loss_saved_bytes(share: LossShare, workload: ModuleWorkload, num_samples: float, feature_bytes: int) -> int:
    """What a member keeps from the forward to the backward: the features that it gathered, and log-sum-exps."""
    return round(
        num_samples
        * (share.gathered * workload.hidden_size * feature_bytes + 2 * share.log_sum_exps * LOG_SUM_EXP_BYTES)
    )
