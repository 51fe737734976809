"""Experts of unmodified transformers modules, distributed over ranks: each rank holds some of them whole.

Only `forward` of the modules that hold experts is replaced, one instance at a time; routers stay whole on every rank.
The module's own forward computes with the rank's experts alone, given one row for each token and expert chosen.

* Over a tensor-parallel group, whose ranks hold the same tokens, each rank computes the rows of its own experts, and
  the results are summed over the group as those of any parallel region (`motet.parallel.tensor.sequence_parallel`).
* Over several replicas, whose tokens differ, rows travel to the ranks of their experts and back (all-to-all). None is
  dropped: the ranks first tell each other how many rows they send. Where replicas are tensor-parallel groups, each of
  their ranks sends a share of the tokens. Every rank takes part in each exchange, whether it has tokens or not.

(Lepikhin et al. 2021, "GShard", section 3.2; without dropped tokens: Gale et al. 2023, "MegaBlocks".)

Limits: experts whose forward is not told which tokens go to which expert (Llama 4) cannot be distributed; tensor
parallelism cuts their widths.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from motet.errors import UserError
from motet.parallel.tensor.tensor_collectives import TensorParallel, exchange_rows, shard_parameter
from motet.parallel.tensor.tensor_plans import Shard

BY_EXPERT = Shard(0)
"""How the parameters of distributed experts are cut: [experts, ...]."""

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(tokens [T, H], the experts chosen for each [T, k], their weights [T, k]) -> [T, H]"""


def can_be_distributed(module: nn.Module) -> bool:
    """Whether a module's forward receives the assignment of tokens to its experts."""
    return bool(expert_parameters(module)) and len(_inputs_of(module)) == 3


def expert_parameters(module: nn.Module) -> list[str]:
    """The names of the parameters of which each expert has its part."""
    number = getattr(module, "num_experts", None)
    return [name for name, p in module.named_parameters() if p.dim() > 0 and p.shape[0] == number]


def distribute_experts(module: nn.Module, paths: Iterable[str], tp: TensorParallel) -> dict[str, Shard]:
    """Keeps this rank's experts of the modules at `paths`, which compute for the group `tp.experts` from now on.

    Returns the cuts of their parameters, by their names in `module`. Parameters become new ones with the same names.
    Raises `UserError` if the group's size does not divide the number of experts."""
    group = tp.experts
    assert group is not None
    shards: dict[str, Shard] = {}
    for path in paths:
        experts: Any = module.get_submodule(path)
        number = experts.num_experts
        if number % group.size:
            raise UserError(f"ep: {group.size} does not divide the {number} experts of {path}; use a divisor of them")
        for name in expert_parameters(experts):
            owner, _, attribute = name.rpartition(".")
            holder = experts.get_submodule(owner)
            whole = getattr(holder, attribute)
            part = shard_parameter(whole.detach(), BY_EXPERT, group.rank, group.size)
            setattr(holder, attribute, nn.Parameter(part, whole.requires_grad))
            shards[f"{path}.{name}"] = BY_EXPERT
        experts.num_experts = number // group.size
        make = _own_rows if group.size == tp.size else _exchanged_rows
        experts.forward = _with_inputs_of(experts, make(experts.forward, experts.num_experts, tp))
    return shards


def _inputs_of(experts: nn.Module) -> list[str]:
    return list(inspect.signature(type(experts).forward).parameters)[1:]


def expert_inputs(experts: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Of a call of experts that can be distributed: tokens, choices and weights."""
    names = _inputs_of(experts)
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    tokens, choices, weights = (given[name] for name in names)
    return tokens, choices, weights


def _with_inputs_of(experts: nn.Module, compute: Compute) -> Callable[..., Tensor]:
    """`compute` as a forward of these experts: families name its inputs differently."""

    def forward(*args: Tensor, **kwargs: Tensor) -> Tensor:
        return compute(*expert_inputs(experts, args, kwargs))

    return forward


def _compute_rows(original: Compute, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """[n, H]: each row by one of this rank's experts. Without rows too, the result depends on `rows` and `weights`."""
    if len(rows) == 0:
        return rows * weights[:, None].to(rows.dtype)
    return original(rows, experts[:, None], weights[:, None])


def _own_rows(original: Compute, num_own: int, tp: TensorParallel) -> Compute:
    """Returns this rank's summand of the result, for experts over the tensor-parallel group."""

    def compute(tokens: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        token, slot = torch.nonzero(choices // num_own == tp.rank, as_tuple=True)
        local = choices[token, slot] - tp.rank * num_own
        rows = _compute_rows(original, tokens[token], local, weights[token, slot])
        return torch.zeros_like(tokens).index_add(0, token, rows.to(tokens.dtype))

    return compute


def _exchanged_rows(original: Compute, num_own: int, tp: TensorParallel) -> Compute:
    """Returns the result for this rank's tokens, for experts over several replicas; of several ranks that hold the same
    tokens, each one's summand of it."""
    group = tp.experts
    assert group is not None

    def compute(tokens: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not tokens.requires_grad:
            tokens = tokens.detach().requires_grad_()  # The exchange back is for all ranks or none.
        sent_tokens = torch.arange(tp.rank, len(tokens), tp.size, device=tokens.device)
        chosen = choices[sent_tokens].reshape(-1)
        order = torch.argsort(chosen, stable=True)
        token = sent_tokens[order // choices.shape[1]]
        slot = order % choices.shape[1]
        # `bincount` and `repeat_interleave` would look at values; the host waits once, for the sizes of the exchange.
        sent = chosen.new_zeros(group.size * num_own).index_add_(0, chosen, torch.ones_like(chosen))
        sent = sent.view(group.size, num_own)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group.group)
        num_sent, num_received = torch.stack((sent.sum(1), received.sum(1))).tolist()
        rows = exchange_rows(tokens[token], num_sent, num_received, group.group)
        own = torch.arange(num_own, device=tokens.device).repeat(group.size)
        own = own.repeat_interleave(received.reshape(-1), output_size=sum(num_received))
        made = _compute_rows(original, rows, own, rows.new_ones(len(rows)))
        returned = exchange_rows(made, num_received, num_sent, group.group)
        weighted = returned * weights[token, slot, None]
        return torch.zeros_like(tokens).index_add(0, token, weighted.to(tokens.dtype))

    return compute
