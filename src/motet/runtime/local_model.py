"""The part of the model on this rank: its stages, and the global name and the holders of each parameter."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from motet.models.stages.causal import CausalStage
from motet.models.stages.contrastive import ContrastiveStage
from motet.models.stages.encoder import EncoderStage
from motet.models.stages.language_model import LanguageModelStage
from motet.models.stages.stage import StageModule
from motet.parallel.context.context_attention import ContextParallel
from motet.parallel.fully_sharded import FullySharded
from motet.parallel.mesh import Mesh
from motet.parallel.row_shards import RowShard
from motet.parallel.tensor.tensor_collectives import gather_full, shard_parameter
from motet.parallel.tensor.tensor_parallel import (
    TensorParallel,
    sum_over_group,
    tensor_parallel_layout,
    tp_reduce_gradients,
)
from motet.parallel.tensor.tensor_plans import Shard
from motet.plan import ModulePlan, Plan, Stage, tensor_parallel_groups
from motet.runtime.communication.gradient_reduction import (
    Copies,
    GradientReducer,
    HeldParameter,
    Key,
    Portion,
    WholeSum,
    evenly_cut,
    portions,
    squared_norm,
)
from motet.schedule.action import Reduce
from motet.schedule.dependencies import reductions
from motet.schedule.lower import keeps_row_shares

StageKey = tuple[str, int, int]
"""(module, replica, stage)."""

StageMaker = Callable[[str, ModulePlan, Stage, TensorParallel], StageModule]
"""(module name, its plan, stage, this rank's place in the stage's group) -> the stage, already cut for the group."""


@dataclass(frozen=True, eq=False)
class LocalParameter:
    name: str
    """Its name in the whole model, the same under every plan; copies of a module share it."""
    stage: StageKey
    part: str
    """`<module>.module` or `<module>.projector`."""
    parameter: nn.Parameter
    """Or a buffer that belongs to the weights, and is treated as a frozen parameter."""
    shard: Shard | None
    """Its cut over the group `tp`; None: every rank has the whole parameter."""
    rows: RowShard | None
    """Where replicas share parameters: the cut of that part by rows; `parameter` is then this rank's rows."""
    tp: TensorParallel
    """The tensor-parallel group; of distributed experts, the group that shares them."""
    reduce: Reduce | None
    """The reduction that sums its gradient; None if it is frozen."""
    reduce_group: dist.ProcessGroup | None
    """The ranks that hold the same elements; None: this rank alone, or others hold other shares of it."""
    is_shared_expert: bool
    """Whether it is of experts that replicas share: its gradient is summed over those that hold the same ones."""
    is_partial: bool
    """Whether its gradient is a share, to be summed inside the tensor-parallel group."""
    is_first: bool
    """Whether this is the first of all replicas and copies that hold it."""
    is_kept: bool
    """Whether its memory is here between actions; in a fully sharded stage one rank of the group keeps it."""

    @property
    def is_counted(self) -> bool:
        """Whether this rank counts it in norms: one rank does for each shard."""
        return self.is_first and (self.shard is not None or self.tp.rank == 0)

    @property
    def is_written(self) -> bool:
        """Whether this rank writes the whole parameter into checkpoints."""
        return self.is_first and self.tp.rank == 0 and (self.rows is None or self.rows.members.rank == 0)

    def gather(self, tensor: Tensor) -> Tensor:
        """The whole of a tensor that is cut as the parameter is. Collective over the tensor-parallel group, and over
        the ranks that share the parameter by rows."""
        part = tensor if self.rows is None else self.rows.gather(tensor)
        return gather_full(part, self.shard, self.tp)

    def cut(self, full: Tensor) -> Tensor:
        """This rank's part of a whole tensor."""
        part = shard_parameter(full, self.shard, self.tp.rank, self.tp.size)
        return part if self.rows is None else self.rows.cut(part)

    @property
    def full_shape(self) -> tuple[int, ...]:
        shape = list(self.parameter.shape if self.rows is None else self.rows.shape)
        if self.shard is not None:
            shape[self.shard.dim] *= self.tp.size
        return tuple(shape)


class LocalModel:
    """This rank's stages. Every rank of the mesh makes its own, from the same plan."""

    def __init__(self, plan: Plan, mesh: Mesh, make_stage: StageMaker) -> None:
        self.plan, self.mesh = plan, mesh
        self.stages: dict[StageKey, StageModule] = {}
        self.tensor_parallel: dict[StageKey, TensorParallel] = {}
        """By stage: this rank's place in the tensor-parallel group."""
        self.kept_shares: dict[StageKey, set[int]] = {}
        """By stage: the layers at its ends whose input is this rank's share of the rows, as the neighbour hands it on.
        """
        self.context_parallel: dict[StageKey, ContextParallel] = {}
        """By stage that holds a share of its tokens: this rank's place in the context-parallel group."""
        self.sharded: dict[StageKey, FullySharded] = {}
        """By stage that keeps a share of its parameters: those parameters."""
        self.attending: dict[StageKey, LanguageModelStage | EncoderStage] = {}
        """Stages with motet's attention, because of their masks or because they hold a share of the tokens."""
        for name, r, s, stage in plan.stages_of_rank(mesh.rank):
            module = plan.modules[name]
            tp = mesh.tensor_parallel(module, stage)
            made = make_stage(name, module, stage, tp)
            if stage.cp_size > 1:
                cp = self.context_parallel[name, r, s] = mesh.context_parallel(stage, module.context)
                assert isinstance(made, LanguageModelStage | EncoderStage | ContrastiveStage)
                made.enable_context_parallel(cp)
            elif isinstance(made, LanguageModelStage) and (made.has_own_attention or module.replicas[r].shares_context):
                made.enable_context_parallel(ContextParallel(group=None, rank=0, size=1, options=module.context))
            self.stages[name, r, s] = made
            if isinstance(made, LanguageModelStage | EncoderStage) and made.has_own_attention:
                self.attending[name, r, s] = made
            self.tensor_parallel[name, r, s] = tp
            self._keep_shares((name, r, s), made)
            if module.shares_over_replicas:
                group = mesh.sharing(module, r, s)
                self.sharded[name, r, s] = FullySharded(
                    cast(nn.Module, made), group, by_rows=True, whole_parameters=module.whole_parameters
                )
            elif module.fully_sharded and stage.cp_size > 1:
                made_whole = cast(nn.Module, made)
                self.sharded[name, r, s] = FullySharded(made_whole, self.context_parallel[name, r, s])
        self._reduce_of_layer = _reduce_of_layer(plan)
        self.parameters: list[LocalParameter] = []
        for key in self.stages:
            self.parameters += self._parameters_of(key)
        self._counted = [p.parameter for p in self.parameters if p.is_counted]
        self._whole_sums: list[WholeSum] = []
        self.reducers = self._make_reducers()

    def _keep_shares(self, key: StageKey, stage: StageModule) -> None:
        """Under sequence parallelism, leaves shares of the rows as they are at the stage's ends, where possible."""
        name, replica, index = key
        module = self.plan.modules[name]
        if not isinstance(stage, LanguageModelStage) or not module.sequence_parallel:
            return
        first, last = module.replicas[replica].stages[index].layers
        takes, gives = (
            s >= 0 and keeps_row_shares(module, replica, s) and stage.can_hand_on_shares(border)
            for s, border in ((index - 1, first), (index, last))
        )
        if takes or gives:
            stage.hand_on_shares(takes_share=takes, gives_share=gives)
            self.kept_shares[key] = {layer for layer, kept in ((first, takes), (last, gives)) if kept}

    def _parameters_of(self, key: StageKey) -> Iterator[LocalParameter]:
        stage, tp = self.stages[key], self.tensor_parallel[key]
        owner = self.plan.modules[key[0]].data_module(key[0])
        layout = tensor_parallel_layout(cast(nn.Module, stage))
        held = {p.name for p in self.parameters}
        buffers: dict[str, nn.Parameter] = {}
        if isinstance(stage, CausalStage):
            buffers = {name: cast(nn.Parameter, buffer) for name, buffer in stage.saved_buffers()}
        for local_name, parameter in [*stage.named_parameters(), *buffers.items()]:
            name = stage.canonical_name(local_name)
            shard = layout.shards.get(local_name) if layout else None
            holders = tp
            if layout is not None and local_name in layout.experts:
                assert tp.experts is not None
                shard, holders = layout.experts[local_name], tp.experts
            layers = stage.layers_of(local_name)
            reduce = self._reduce_of(owner, layers) if parameter.requires_grad else None
            groups = self.mesh.reduce[reduce] if reduce else None
            of_experts = groups.experts if groups and holders is not tp else None
            first = groups.first_experts if groups and of_experts else groups.first if groups else None
            whole_group = groups.pieces[0].group if groups and len(groups.tp_sizes) == 1 else None
            sharded = None if local_name in buffers else self.sharded.get(key)
            is_kept = sharded is None or sharded.keeps(parameter)
            rows = None if sharded is None else sharded.rows_of(parameter)
            stands_first = is_kept and self._stands_first(key, first, layers, is_sharded=sharded is not None)
            yield LocalParameter(
                name=f"{owner}.{name}",
                stage=key,
                part=f"{owner}.{'projector' if name.startswith('projector.') else 'module'}",
                parameter=parameter if rows is None else rows.rows,
                shard=shard,
                rows=rows,
                tp=holders,
                reduce=reduce,
                reduce_group=of_experts.group if of_experts else whole_group,
                is_shared_expert=of_experts is not None,
                is_partial=layout is not None and local_name in layout.partial_gradients,
                is_first=stands_first and f"{owner}.{name}" not in held,
                is_kept=is_kept,
            )

    def _reduce_of(self, owner: str, layers: tuple[int, ...]) -> Reduce:
        """`layers`: the one that the parameter belongs to, or the two that share it."""
        if len(layers) == 2:
            return Reduce(owner, layers[0], layers[1], tied=True)
        return self._reduce_of_layer[owner, layers[0]]

    def _stands_first(
        self, key: StageKey, first: tuple[int, ...] | None, layers: tuple[int, ...], *, is_sharded: bool
    ) -> bool:
        """Whether this rank, or in a fully sharded stage its group, is the first of all that hold the layers. `first`:
        who that is; None: they are frozen, have no reduction, and the module's first replica stands for them."""
        module = self.plan.modules[key[0]]
        stage = module.replicas[key[1]].stages[key[2]]
        shares_rows = is_sharded and module.shares_over_replicas
        has_owners = is_sharded and not shares_rows
        of_stage = stage.ranks if has_owners else (self.mesh.rank,)
        if first is not None:
            return not set(first).isdisjoint(of_stage)
        of_first = tensor_parallel_groups(stage)[0]
        has_first_tokens = shares_rows or not set(of_first).isdisjoint(of_stage)
        return (
            module.copy_of is None
            and key[1] < (module.sharded_replicas if shares_rows else 1)
            and has_first_tokens
            and stage.layers[0] <= layers[0] < stage.layers[1]
        )

    def _make_reducers(self) -> dict[Reduce, GradientReducer]:
        """Collective where holders of some layer have groups of different sizes."""
        grouped: dict[Reduce, dict[str, list[LocalParameter]]] = {reduce: {} for reduce in self.mesh.reduce}
        for p in self.parameters:
            if p.reduce is not None:
                grouped[p.reduce].setdefault(p.name, []).append(p)
        unlike = [reduce for reduce, groups in self.mesh.reduce.items() if len(groups.tp_sizes) > 1]
        cut: Mapping[Key, Shard] = {}
        if self.mesh.has_mixed_tp_sizes:
            held = {
                (reduce, name): HeldParameter(p.shard, p.tp.size, p.full_shape, p.is_partial)
                for reduce in unlike
                for name, (p, *_) in grouped[reduce].items()
            }
            cut = evenly_cut(held, self.mesh)
        elsewhere = {p.parameter for p in self.parameters if not p.is_kept}
        reducers = {}
        for reduce, by_name in grouped.items():
            groups = self.mesh.reduce[reduce]
            if reduce not in unlike:
                experts = [copies for copies in by_name.values() if copies[0].is_shared_expert]
                others = [_tensors(copies) for copies in by_name.values() if not copies[0].is_shared_expert]
                of_experts = [Portion(groups.experts, only=list(map(_tensors, experts)))] if groups.experts else []
                reducers[reduce] = GradientReducer(
                    others,
                    Portion(groups.pieces[0]),
                    *of_experts,
                    elsewhere=elsewhere,
                    is_late=self.plan.modules[reduce.module].shares_over_replicas,
                )
                continue
            names = [name for name in by_name if (reduce, name) in cut]
            even = [_tensors(by_name[name]) for name in names]
            shards = [cut[reduce, name] for name in names]
            reducers[reduce] = GradientReducer(even, *portions(groups, even, shards), elsewhere=elsewhere)
            whole = [copies for name, copies in by_name.items() if name not in names]
            if whole:
                members = [(_tensors(copies), copies[0].shard) for copies in whole]
                self._whole_sums.append(WholeSum(groups.firsts, whole[0][0].tp, members))
        return reducers

    def reached(self) -> set[str]:
        """Names of the parameters to which this rank's microbatches brought gradients in the last iteration; before
        `finish_gradients`."""
        found: set[Tensor] = set().union(*(reducer.reached() for reducer in self.reducers.values()))
        found.update(parameter for whole_sum in self._whole_sums for parameter in whole_sum.reached())
        within = {key: sharded.take_reached() for key, sharded in self.sharded.items()}
        return {p.name for p in self.parameters if p.reduce is not None and p.parameter in within.get(p.stage, found)}

    def forget_gradients(self, names: Set[str]) -> None:
        for p in self.parameters:
            if p.name in names:
                p.parameter.grad = None

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """Sums, inside tensor-parallel groups, the gradients of which each member has a share, and then those that are
        summed whole."""
        for key, stage in self.stages.items():
            if not self.plan.modules[key[0]].shares_over_replicas:
                tp_reduce_gradients(cast(nn.Module, stage))
            elif partial := [p for p in self.parameters if p.stage == key and p.is_partial and p.reduce is not None]:
                sum_over_group([p.parameter for p in partial], self.tensor_parallel[key].group)
        for whole_sum in self._whole_sums:
            whole_sum.run()
        for p in self.parameters:
            if not p.is_kept:
                p.parameter.grad = None

    def counted_squared_norm(self) -> Tensor:
        """This rank's share of the squared norm of all gradients; the sum over all ranks counts each element once."""
        return squared_norm([p.grad for p in self._counted if p.grad is not None])

    def modules(self) -> list[nn.Module]:
        """This rank's stages."""
        return [cast(nn.Module, stage) for stage in self.stages.values()]

    @torch.no_grad()
    def clip_gradients(self, norm: float | Tensor, max_norm: float) -> None:
        """Scales the gradients down to `max_norm`, by the rule of `torch.nn.utils.clip_grad_norm_`.

        `norm`: that of the gradients of the whole model, over all ranks; a tensor is not read by the host."""
        factor = max_norm / (norm + 1e-6)
        if isinstance(factor, Tensor):
            factor = factor.clamp(max=1.0)
        elif not factor < 1:
            return
        for parameter in self.trainable():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def trainable(self) -> list[nn.Parameter]:
        return [p.parameter for p in self.parameters if p.parameter.requires_grad]

    def after_update(self) -> None:
        """Called after each step of the optimizer."""
        for stage in self.stages.values():
            stage.after_update()

    def zero_gradients(self) -> None:
        for parameter in self.trainable():
            parameter.grad = None


def _tensors(parameters: Sequence[LocalParameter]) -> Copies:
    return tuple(p.parameter for p in parameters)


def _reduce_of_layer(plan: Plan) -> Mapping[tuple[str, int], Reduce]:
    return {
        (reduce.module, layer): reduce
        for reduce in reductions(plan)
        if not reduce.tied
        for layer in range(reduce.first, reduce.last)
    }
