"""Seconds of a stage, for one pattern of gradients, as functions of its ranks' load: sums over the layers' costs.

Recomputation runs a block's forward, or that of its attention, once more if the block computes any gradient; recomputed
features run the forward of the whole stage once more (DistMM 5.4). Context-parallel ranks share the work of all layers
but those around an encoder's blocks, and exchange keys and values; a table that was measured with such a group says
what both take together. A cost table holds groups on the first ranks of a node; for a group that spans more nodes, the
additional time of its collectives is computed and added.

A contrastive loss (a batch-sync, DistMM sections 5.3.2 and 5.4) is shared by its members. A member compares its own
features with those of the towers opposite to its own. It gathers their features before, and the log-sum-exps of the
opposite direction after its forward; no gradient of a feature leaves its rank. A member of one of two towers receives
half of what a member receives that holds both. The member with most work counts: of a tower on few ranks, or of several
towers on the same ranks. Samples that lack a tower count as if they had it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from motet.cluster import Cluster
from motet.costs.cells import CellKind, Cells, LayerGradients
from motet.costs.communication import collective_terms, ring_terms
from motet.costs.cost_model import (
    NO_COST,
    ZERO,
    CostTable,
    LayerCost,
    LayerPasses,
    ModuleCosts,
    Quadratic,
    Sharing,
    total,
)
from motet.costs.kernels import KernelShape, layer_kernels
from motet.costs.memory import MemoryOptions
from motet.costs.recomputed import layer_passes
from motet.plan import ContextOptions, ModulePlan, Plan, Stage, expert_groups
from motet.schedule.lower import keeps_row_shares, row_shares
from motet.shapes.module_shape import LayerShape, ModuleWorkload

LOG_SUM_EXP_BYTES = 4
HEAD_GROUPS = 2
"""Portions in which all-gather context parallelism gets keys and values (`ContextParallel.head_groups`)."""
SUM_BYTES = 3 * 4
"""Bytes that go through memory for each value of a sum of two tensors in float32."""
EXPERT_IMBALANCE = 1.25
"""Rows of the busiest rank of an expert-parallel group over the mean, which balanced training stays below."""


@dataclass(frozen=True)
class LossShare:
    """The work of the member with most of it."""

    comparisons: float
    """Its share of all comparisons of the loss."""
    gathered: float
    """Feature vectors that it receives per sample of the contrastive batch; 1 for a member of one of two towers."""
    log_sum_exps: float
    """Log-sum-exps that it receives per sample."""


def loss_share(plan: Plan, loss: str, workload: ModuleWorkload) -> LossShare:
    """The largest share of a contrastive loss. `loss`: its module, with `workload`."""
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
    """The towers with which each tower is compared."""
    result: dict[str, set[str]] = {tower: set() for tower in towers}
    for first, second in workload.config["pairs"]:
        result[first].add(second)
        result[second].add(first)
    return result


@dataclass(frozen=True)
class LossSeconds:
    """Seconds as functions of a contrastive batch's load, whose tokens are samples."""

    forward: Quadratic
    """Includes the exchange."""
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
    """The cost of a share; the constant, which kernels take to start, stays."""
    return cost.times(share)._replace(constant=cost.constant)


def loss_saved_bytes(share: LossShare, workload: ModuleWorkload, num_samples: float, feature_bytes: int) -> int:
    """Bytes that a member saves for the backward: gathered features and log-sum-exps."""
    return round(
        num_samples
        * (share.gathered * workload.hidden_size * feature_bytes + 2 * share.log_sum_exps * LOG_SUM_EXP_BYTES)
    )


@dataclass(frozen=True, slots=True)
class StageCosts:
    forward: Quadratic
    input_half: Quadratic
    weight_half: Quadratic


class Overlap(NamedTuple):
    """Communication that runs while the device computes; both are functions of one rank's load. It hides the shorter of
    the two."""

    communication: Quadratic
    computation: Quadratic


class Overlaps(NamedTuple):
    """Overlaps with the number of equal ones, by kind of action."""

    forward: Mapping[Overlap, int]
    backward: Mapping[Overlap, int]
    input_half: Mapping[Overlap, int]
    """Of a split backward, whose weight half has none."""


@dataclass(frozen=True)
class StageSeconds:
    cells: Cells
    table: CostTable
    cluster: Cluster
    memory: MemoryOptions

    def seconds(self, kind: CellKind) -> StageCosts:
        near = self._near_seconds(kind)
        if kind.is_loss or self._is_placed_as_measured(kind):
            return near
        far, as_measured = self.exchanges(kind), self.exchanges(kind, as_measured=True)
        return StageCosts(
            total([near.forward, far.forward, as_measured.forward.times(-1)]),
            total([near.input_half, far.input_half, as_measured.input_half.times(-1)]),
            total([near.weight_half, far.weight_half, as_measured.weight_half.times(-1)]),
        )

    def _is_placed_as_measured(self, kind: CellKind) -> bool:
        """Whether groups spread over nodes as those of the table, which are on the first ranks of a node."""
        groups = [self._tensor_parallel_ranks(kind.stage)]
        if self._shared_costs(kind) is not None:
            groups += [kind.stage.ranks, self._expert_ranks(kind)]
        return all(self._nodes(ranks) == self._nodes(range(len(ranks))) for ranks in groups)

    def _near_seconds(self, kind: CellKind) -> StageCosts:
        """Seconds with the groups of the table."""
        name, stage, gradients, _ = kind
        costs = self._costs(kind)
        if kind.is_loss:
            seconds = self._loss_seconds(name, costs.layers[0])
            return StageCosts(seconds.forward, seconds.backward if gradients[0].any else ZERO, ZERO)
        reruns = name in self.cells.plan.recompute_features and any(g.any for g in gradients)
        workload = self.cells.workload(name)
        forward, input_half, weight_half = [costs.stage_forward], [], []
        has_block = workload.has_block(stage.layers)
        if has_block:
            forward.append(costs.blocks_forward)
        has_exchanges, experts = self._shared_costs(kind) is not None, self._expert_ranks(kind)
        outputs_s, gradients_s = (ZERO, ZERO) if has_exchanges else self._token_gathers(kind, stage)
        taken_s, returned_s = self._row_gathers(kind, range(stage.tp_size))
        forward += [outputs_s, taken_s]
        if any(g.any for g in gradients):
            input_half += [costs.stage_backward, gradients_s, returned_s]
            if has_block:
                input_half.append(costs.blocks_backward)
        for index, needs in zip(range(*stage.layers), gradients, strict=True):
            layer = self._on_each_rank(kind, workload.layers[index], costs.layers[index])
            shape = workload.layers[index]
            passes = self._passes(kind, costs, index, needs)
            exchange = returned = repeated = ZERO
            if not has_exchanges:
                exchange, returned, repeated = self._exchanges_of(kind, shape, stage, experts)
            gather = self._parameter_gather(name, shape, stage)
            scatter = self._parameter_gather(name, shape, stage, of_gradients=True)
            forward += [layer.forward_without_graph if reruns else passes.forward, exchange, gather]
            if is_gathered_in_backward(shape, needs, gradients):
                input_half.append(gather)
            if needs.weight_gradient:
                weight_half.append(scatter)
            input_half.append(passes.recomputation)
            if needs.any:
                input_half.append(repeated)
            if reruns:
                input_half += [layer.forward if needs.any else layer.forward_without_graph, exchange, gather]
            if needs.any:
                (input_half if needs.input_gradient else weight_half).append(returned)
            input_half.append(passes.input_gradient)
            weight_half.append(passes.weight_gradient)
        if reruns:
            input_half += [costs.stage_forward, costs.blocks_forward if has_block else ZERO]
        return StageCosts(total(forward), total(input_half), total(weight_half))

    def overlaps(self, kind: CellKind) -> Overlaps:
        """What `seconds` contains in full though it runs while the stage computes:

        * gathers of blocks whose parameters replicas share, while the block before computes: of the following block in
          a forward, of the preceding one in a backward;
        * keys and values on their way to other queries, while attention computes with those that have arrived.

        None on CPUs: the processes' own cores carry out their communication."""
        forward: Counter[Overlap] = Counter()
        backward: Counter[Overlap] = Counter()
        input_half: Counter[Overlap] = Counter()
        if kind.is_loss or self.cluster.device.name == "cpu":
            return Overlaps(forward, backward, input_half)
        module, workload, costs = (
            self.cells.plan.modules[kind.module],
            self.cells.workload(kind.module),
            self._costs(kind),
        )
        before: tuple[LayerGradients, LayerPasses, Quadratic] | None = None
        for index, needs in zip(range(*kind.stage.layers), kind.gradients, strict=True):
            shape = workload.layers[index]
            if not shape.runs:
                continue
            passes = self._passes(kind, costs, index, needs)
            keys = None
            if self._shared_costs(kind) is None:  # Else measured with what is hidden.
                keys = key_overlaps(shape, kind.stage, module.context, self.cluster, self.memory, passes)
            if keys is not None:
                forward[keys[0]] += 1
                in_backward = [keys[1]] if needs.input_gradient else []
                in_backward += [keys[0]] if needs.any and shape.treatment in ("recomputed", "attention") else []
                for overlap in in_backward:
                    backward[overlap] += 1
                    input_half[overlap] += 1
            if shape.part != "block" or not module.shares_over_replicas:
                continue
            gather = self._parameter_gather(kind.module, shape, kind.stage)
            if before is not None:
                needs_before, passes_before, gather_before = before
                forward[Overlap(gather, passes_before.forward)] += 1
                if needs.any and needs_before.any:
                    backward[Overlap(gather_before, passes.backward)] += 1
                    in_half = passes.input_gradient.plus(passes.recomputation)
                    input_half[Overlap(gather_before, in_half)] += 1
            before = needs, passes, gather
        return Overlaps(forward, backward, input_half)

    def _passes(self, kind: CellKind, costs: ModuleCosts, index: int, needs: LayerGradients) -> LayerPasses:
        """The passes of a layer as functions of one rank's load. `costs`: of its module."""
        shape = self.cells.workload(kind.module).layers[index]
        return layer_passes(
            self._on_each_rank(kind, shape, costs.layers[index]),
            shape,
            needs.input_gradient,
            needs.weight_gradient,
            tp_size=kind.stage.tp_size,
            cluster=self.cluster,
            memory=self.memory,
            sequence_parallel=self.cells.plan.modules[kind.module].sequence_parallel,
        )

    def _shared_costs(self, kind: CellKind) -> ModuleCosts | None:
        """The stage's costs as measured with its context-parallel group and the ranks that share its experts."""
        module, stage = self.cells.plan.modules[kind.module], kind.stage
        if not self.table.groups or (module.sequence_parallel and stage.tp_size > 1):
            return None
        return self.table.of_group(
            self.cells.owner(kind.module), Sharing.of(stage.tp_size, stage.cp_size, module.context, module.ep)
        )

    def _costs(self, kind: CellKind) -> ModuleCosts:
        shared = self._shared_costs(kind)
        if shared is not None:
            return shared
        return self.table.of(
            self.cells.owner(kind.module),
            kind.stage.tp_size,
            sequence_parallel=self.cells.plan.modules[kind.module].sequence_parallel,
        )

    def _on_each_rank(self, kind: CellKind, layer: LayerShape, cost: LayerCost) -> LayerCost:
        """The layer's cost as a function of one rank's load."""
        is_shared = kind.stage.cp_size == 1 or self.cells.workload(kind.module).is_shared(layer)
        return cost if is_shared or self._shared_costs(kind) is not None else cost.of_rank(kind.stage.cp_size)

    def _loss_seconds(self, name: str, layer: LayerCost) -> LossSeconds:
        return loss_seconds(
            self.cells.plan,
            name,
            self.cells.workload(name),
            layer,
            self.cluster,
            feature_bytes=self.memory.activation_bytes,
        )

    def exchanges(self, kind: CellKind, *, as_measured: bool = False) -> StageCosts:
        """The part of `seconds` that collectives of tensor-parallel and context-parallel groups take, and of ranks that
        share experts.

        `as_measured`: of groups that are placed as those that the table was measured with, where it was."""
        if kind.is_loss:
            return StageCosts(self._loss_seconds(kind.module, NO_COST).exchange, ZERO, ZERO)
        forward: list[Quadratic] = []
        input_half: list[Quadratic] = []
        weight_half: list[Quadratic] = []
        reruns = kind.module in self.cells.plan.recompute_features and any(needs.any for needs in kind.gradients)
        stage, ranks, experts = kind.stage, self._tensor_parallel_ranks(kind.stage), self._expert_ranks(kind)
        if as_measured:
            ranks = range(stage.tp_size)
        if as_measured and self._shared_costs(kind) is not None:
            stage, experts = replace(stage, ranks=tuple(range(len(stage.ranks)))), range(len(experts))
        outputs_s, gradients_s = self._token_gathers(kind, stage)
        taken_s, returned_s = self._row_gathers(kind, ranks)
        forward += [outputs_s, taken_s]
        input_half += [gradients_s, returned_s] if any(needs.any for needs in kind.gradients) else [gradients_s]
        for layer, needs, count in kind.different:
            kernels = layer_kernels(
                layer,
                tp_size=kind.stage.tp_size,
                sequence_parallel=self.cells.plan.modules[kind.module].sequence_parallel,
                element_bytes=self.memory.activation_bytes,
                residual_bytes=self.memory.activation_bytes,
            )
            exchange, returned, repeated = self._exchanges_of(kind, layer, stage, experts)
            gather = self._parameter_gather(kind.module, layer, kind.stage).times(count)
            scatter = self._parameter_gather(kind.module, layer, kind.stage, of_gradients=True).times(count)
            once = total([exchange, *self._collectives(kernels.forward, ranks)]).times(count)
            forward += [once, gather]
            input_half += [gather] * (int(is_gathered_in_backward(layer, needs, kind.gradients)) + int(reruns))
            input_half += [once] * int(reruns)
            if needs.any:
                input_half.append(total([repeated, *self._collectives(kernels.recomputed, ranks)]).times(count))
            if needs.weight_gradient:
                weight_half.append(scatter)
            if needs.input_gradient:
                again = total([returned, *self._collectives(kernels.input_gradient, ranks)])
                input_half.append(again.times(count))
            elif needs.weight_gradient:
                alone = total([returned, *self._collectives(kernels.weight_gradient_alone, ranks)])
                weight_half.append(alone.times(count))
        return StageCosts(total(forward), total(input_half), total(weight_half))

    def _tensor_parallel_ranks(self, stage: Stage) -> Sequence[int]:
        """The tensor-parallel group that spans most nodes."""
        members = [stage.ranks[first : first + stage.tp_size] for first in range(0, len(stage.ranks), stage.tp_size)]
        return max(members, key=lambda ranks: len(self._nodes(ranks)))

    def _nodes(self, ranks: Iterable[int]) -> list[int]:
        """The numbers of ranks on each node, sorted."""
        return sorted(Counter(map(self.cluster.node, ranks)).values())

    def _collectives(self, kernels: Iterable[KernelShape], ranks: Sequence[int]) -> Iterator[Quadratic]:
        """Seconds of the collectives among the kernels."""
        for kernel in kernels:
            if kernel.collective is not None:
                terms = collective_terms(self.cluster, kernel.collective, ranks)
                yield Quadratic(constant=terms.latency_s).plus(kernel.num_bytes.times(1 / terms.bytes_per_s))

    def _expert_ranks(self, kind: CellKind) -> Sequence[int]:
        """The ranks over which the stage's experts are distributed."""
        module, stage = self.cells.plan.modules[kind.module], kind.stage
        if module.replicas_sharing_experts == 1:
            return stage.ranks[: stage.tp_size]
        return next(ranks for ranks in expert_groups(module, stage.layers) if stage.ranks[0] in ranks)

    def _exchanges_of(
        self, kind: CellKind, layer: LayerShape, stage: Stage, experts: Sequence[int]
    ) -> tuple[Quadratic, Quadratic, Quadratic]:
        """Seconds in which context-parallel groups exchange keys and values, and replicas that share experts tokens: in
        a forward, in a backward, and once more in a backward with what it recomputes."""
        module = self.cells.plan.modules[kind.module]
        keys = [
            key_exchange(layer, stage, module.context, self.cluster, self.memory, backward=backward)
            for backward in (False, True)
        ]
        tokens = [
            token_exchange(layer, module, experts, stage, self.cluster, self.memory, backward=backward)
            for backward in (False, True)
        ]
        once = keys[0].plus(tokens[0])
        repeated = {"recomputed": once, "attention": keys[0]}.get(layer.treatment, ZERO)
        return once, keys[1].plus(tokens[1]), repeated

    def _token_gathers(self, kind: CellKind, stage: Stage) -> tuple[Quadratic, Quadratic]:
        """Seconds in which context-parallel ranks gather their outputs and the gradients of their inputs.

        They do so for an encoder's head. Functions of one rank's load."""
        workload = self.cells.workload(kind.module)
        if stage.cp_size == 1:
            return ZERO, ZERO
        first, last = stage.layers
        whole, of_gradients = [], []
        for index in range(first, last):
            if workload.encodes_items and workload.layers[index].part == "head":
                whole.append(index)
                of_gradients += [index] * kind.gradients[index - first].input_gradient
        gathers = [
            [token_gather(workload, border, stage, self.cluster, self.memory) for border in borders]
            for borders in (whole, of_gradients)
        ]
        return total(gathers[0]), total(gathers[1])

    def _row_gathers(self, kind: CellKind, ranks: Sequence[int]) -> tuple[Quadratic, Quadratic]:
        """Seconds in which the tensor-parallel group `ranks` puts together what came in shares of its rows: inputs, and
        gradients of outputs. Functions of one rank's load."""
        plan, name, stage = self.cells.plan, kind.module, kind.stage
        if stage.tp_size == 1:
            return ZERO, ZERO
        module, workload = plan.modules[name], self.cells.workload(name)
        replica, index = place_of(module, stage)
        stages = module.replicas[replica].stages
        terms = collective_terms(self.cluster, "all_gather", ranks)
        s_per_byte = self.memory.activation_bytes / terms.bytes_per_s

        def gather(rows: str, width: int) -> Quadratic:
            per_row = width * s_per_byte
            return Quadratic(constant=terms.latency_s)._replace(**{f"per_{rows.removesuffix('s')}": per_row})

        inputs: list[Quadratic] = []
        gradients: list[Quadratic] = []
        for border, first, found in ((index - 1, stage.layers[0], inputs), (index, stage.layers[1], gradients)):
            if not 0 <= border < len(stages) - 1 or keeps_row_shares(module, replica, border):
                continue
            shares = row_shares(*stages[border : border + 2], gradient=found is gradients, same_module=True)
            if shares > 1:
                found.append(gather(*workload.boundary(first)))
        entering = shared = 0
        for edge in plan.edges:
            source, target = plan.modules[edge.source], plan.modules[edge.target]
            if target.kind == "loss":
                continue
            if edge.target == name and any(stage.layers[0] <= layer < stage.layers[1] for layer in edge.layers):
                sender = source.replicas[min(replica, len(source.replicas) - 1)].stages[-1]
                entering += 1
                shared += row_shares(sender, stage, gradient=False, same_module=False) > 1
            if edge.source == name and index == len(stages) - 1:
                stages_behind = target.replicas[min(replica, len(target.replicas) - 1)].stages
                behind = next(s for s in stages_behind if s.layers[0] <= edge.layers[0] < s.layers[1])
                if row_shares(stage, behind, gradient=True, same_module=False) > 1:
                    gradients.append(gather(*workload.boundary(workload.num_layers)))
        if shared:  # A load has the rows of all modules that enter together; each is taken to bring as many.
            rows = gather("incoming", workload.hidden_size)
            inputs.append(rows.times(shared / entering)._replace(constant=shared * rows.constant))
        return total(inputs), total(gradients)

    def _parameter_gather(
        self, module: str, layer: LayerShape, stage: Stage, *, of_gradients: bool = False
    ) -> Quadratic:
        """Seconds of one action's gathers of parameters, or reduce-scatters of gradients; zero where parameters are
        gathered once in a step."""
        planned = self.cells.plan.modules[module]
        if planned.whole_parameters and not of_gradients:
            return ZERO
        if not planned.fully_sharded or not self.cells.gathers_by_block(module, place_of(planned, stage)[1]):
            return ZERO
        ranks = sharing_ranks(planned, stage)
        return parameter_gather(layer, stage.tp_size, ranks, self.cluster, self.memory, of_gradients=of_gradients)


def place_of(module: ModulePlan, stage: Stage) -> tuple[int, int]:
    """Replica and number of a stage of the plan."""
    return next((r, s) for r, own in enumerate(module.replicas) for s, other in enumerate(own.stages) if other == stage)


def sharing_ranks(module: ModulePlan, stage: Stage) -> tuple[int, ...]:
    """One of the groups of ranks that share a fully sharded stage's parameters."""
    if not module.shares_over_replicas:
        return stage.ranks[:: stage.tp_size]
    return module.sharing_groups(*place_of(module, stage))[0]


def key_exchange(
    layer: LayerShape,
    stage: Stage,
    context: ContextOptions,
    cluster: Cluster,
    memory: MemoryOptions,
    *,
    backward: bool = False,
) -> Quadratic:
    """Seconds in which the queries of context-parallel ranks get the keys and values of the whole sequence, as a
    function of one rank's load.

    Queries, keys and values are traded for heads among some ranks, and results back, and keys and values gathered, or
    passed around a ring, among those with the same heads; `context` says among how many. A backward trades as much, and
    gets keys and values once more before their gradients return: those of a ring by one more hop, to their owners.
    `key_overlaps` says what of it computation hides. In a ring, the results for each member's keys, or the gradients of
    queries, are added up in float32."""
    attention = layer.attention
    if stage.cp_size == 1 or attention is None or attention.reads_encoder or not layer.runs:
        return ZERO
    traders = context.num_traders(stage.cp_size)
    passed = _key_pass(layer, stage, context, cluster, memory)
    if backward:
        passed = passed.plus(_key_pass(layer, stage, context, cluster, memory, of_gradients=True))
    if context.method in ("ring", "hybrid"):
        num_sums = stage.cp_size // traders - 1
        moved = SUM_BYTES * attention.num_heads * attention.head_dim / stage.tp_size
        bytes_per_s = cluster.device.memory_bytes_per_s * cluster.device.memory_efficiency
        passed = passed.plus(Quadratic(per_token=num_sums * moved / bytes_per_s))
    if traders == 1:
        return passed
    terms = collective_terms(cluster, "all_to_all", stage.ranks[:: stage.tp_size][:traders])
    num_heads = 2 * attention.num_key_value_heads + 2 * attention.num_heads
    num_bytes = num_heads * attention.head_dim * memory.activation_bytes / stage.tp_size
    return passed.plus(Quadratic(constant=2 * terms.latency_s, per_token=num_bytes / terms.bytes_per_s))


def _key_pass(
    layer: LayerShape,
    stage: Stage,
    context: ContextOptions,
    cluster: Cluster,
    memory: MemoryOptions,
    *,
    of_gradients: bool = False,
) -> Quadratic:
    """Seconds in which keys and values get from their owners to all ranks with the same heads, or their gradients
    back."""
    traders = context.num_traders(stage.cp_size)
    size = stage.cp_size // traders
    if layer.attention is None or size == 1:
        return ZERO
    ranks = stage.ranks[:: stage.tp_size][::traders]
    keys = 2 * layer.attention.num_key_value_heads * layer.attention.head_dim * memory.activation_bytes / stage.tp_size
    if context.method in ("ring", "hybrid"):
        terms = ring_terms(cluster, "all_gather", ranks)
        hops = Quadratic(constant=terms.latency_s, per_token=keys * size / terms.bytes_per_s)
        return hops.times(size / (size - 1)) if of_gradients else hops
    terms = collective_terms(cluster, "all_to_all", ranks)
    return Quadratic(constant=_num_portions(layer, stage) * terms.latency_s, per_token=keys * size / terms.bytes_per_s)


def _num_portions(layer: LayerShape, stage: Stage) -> int:
    """In how many portions a rank gathers keys and values."""
    assert layer.attention is not None
    return min(HEAD_GROUPS, max(1, layer.attention.num_key_value_heads // stage.tp_size))


def key_overlaps(
    layer: LayerShape,
    stage: Stage,
    context: ContextOptions,
    cluster: Cluster,
    memory: MemoryOptions,
    passes: LayerPasses,
) -> tuple[Overlap, Overlap] | None:
    """What attention hides of the exchange of keys and values in a forward and in a backward; None: nothing.

    In a ring the next keys travel while a rank computes with those that it has, and gradients but for their last hop;
    gathered keys arrive in `HEAD_GROUPS` portions, of which each is gathered, and its gradients returned, while
    another is computed with. Trades are waited for."""
    attention = layer.attention
    if stage.cp_size == 1 or attention is None or attention.reads_encoder:
        return None
    size = stage.cp_size // context.num_traders(stage.cp_size)
    if context.method in ("ring", "hybrid"):
        computing, keys, gradients = (size - 1) / size, 1.0, (size - 1) / size
    else:
        num_portions = _num_portions(layer, stage)
        computing = keys = gradients = (num_portions - 1) / num_portions
    if size == 1 or not computing:
        return None
    passed = _key_pass(layer, stage, context, cluster, memory).times(keys)
    returned = _key_pass(layer, stage, context, cluster, memory, of_gradients=True).times(gradients)
    return (
        Overlap(passed, _of_pairs(passes.forward).times(computing)),
        Overlap(passed.plus(returned), _of_pairs(passes.input_gradient).times(computing)),
    )


def _of_pairs(cost: Quadratic) -> Quadratic:
    """The part of a layer's seconds that depends on pairs of tokens: its attention."""
    return Quadratic(per_pair=cost.per_pair, per_token_squared=cost.per_token_squared)


def token_exchange_bytes(layer: LayerShape, tp_size: int, element_bytes: int) -> float:
    """Bytes of each token that a rank gives to an exchange between replicas that share experts, its own experts' rows
    among it. There are two for a forward and two for a backward."""
    return layer.experts_per_token * layer.hidden_size * element_bytes / tp_size


def token_exchange(
    layer: LayerShape,
    module: ModulePlan,
    ranks: Sequence[int],
    stage: Stage,
    cluster: Cluster,
    memory: MemoryOptions,
    *,
    backward: bool = False,
) -> Quadratic:
    """Seconds in which tokens travel to the ranks of their experts, `ranks`, and back, as a function of one rank's
    load.

    Tokens are assumed to choose experts evenly, except on the busiest rank (`EXPERT_IMBALANCE`)."""
    if module.replicas_sharing_experts == 1 or not layer.experts_per_token or not layer.runs:
        return ZERO
    terms = collective_terms(cluster, "all_to_all", ranks)
    sent = token_exchange_bytes(layer, stage.tp_size, memory.activation_bytes)
    # Before a forward's, ranks exchange how many rows they send.
    num_exchanges = 2 if backward else 3
    return Quadratic(
        constant=num_exchanges * terms.latency_s, per_token=2 * EXPERT_IMBALANCE * sent / terms.bytes_per_s
    )


def token_gather(
    workload: ModuleWorkload, border: int, stage: Stage, cluster: Cluster, memory: MemoryOptions
) -> Quadratic:
    """Seconds in which context-parallel ranks gather the shared input of layer `border`, or its gradients, as a
    function of one rank's load."""
    rows, width = workload.boundary(border)
    if stage.cp_size == 1 or rows != "tokens":
        return ZERO
    terms = collective_terms(cluster, "all_gather", stage.ranks[:: stage.tp_size])
    return Quadratic(
        constant=terms.latency_s,
        per_token=width * memory.activation_bytes * stage.cp_size / terms.bytes_per_s,
    )


def parameter_gather(
    layer: LayerShape,
    tp_size: int,
    ranks: Sequence[int],
    cluster: Cluster,
    memory: MemoryOptions,
    *,
    of_gradients: bool = False,
) -> Quadratic:
    """Seconds in which the ranks that share a layer's parameters gather them, or reduce-scatter their gradients."""
    size = memory.summed_bytes if of_gradients else memory.parameter_bytes
    num_bytes = layer.num_parameters_per_rank(tp_size) * size
    if len(ranks) == 1 or not num_bytes:
        return ZERO
    terms = collective_terms(cluster, "reduce_scatter" if of_gradients else "all_gather", ranks, num_bytes)
    return Quadratic(constant=terms.seconds(num_bytes))


def is_gathered_in_backward(layer: LayerShape, needs: LayerGradients, of_stage: Sequence[LayerGradients]) -> bool:
    """Whether a fully sharded stage gathers the layer's parameters in its backward: a block that has a backward, or any
    other layer if one of the stage's layers has a backward."""
    return needs.any if layer.part == "block" else any(gradients.any for gradients in of_stage)
