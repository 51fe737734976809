"""The contrastive loss as a stage: one action of all ranks that make features (DistMM section 5.4, batch-sync).

Each rank has the features of some samples of some towers. It gets those of all samples of the *opposite* towers only
(DistMM section 5.3.2), computes its rows of each similarity matrix block by block (`motet.models.contrastive_loss`),
and swaps log-sum-exps with the owners of the other direction; then its rows' gradients are complete where they are
needed, and none have to be sent.

The loss of a sample is the mean over the pairs of towers: all of them, or those with the anchor. Features are
normalized here, so that a tower hands on what transformers calls its embeddings.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from motet.arrays import Ints
from motet.attention.context_parallel import ContextParallel
from motet.data.sample import Sample
from motet.models.contrastive_loss import Gradients, LossKind, Similarity, Values, gradients, values
from motet.plan import ContextOptions
from motet.schedule.batch_sync import Pair, Shares

ALONE = ContextParallel(group=None, rank=0, size=1, options=ContextOptions())


class ContrastiveStage(nn.Module):
    """Stands among the stages as the one layer of the module "contrastive".

    Args:
        kind: "softmax" (CLIP) or "sigmoid" (SigLIP).
        pairs: the pairs of towers that are compared.
        width: of features.
        logit_scale: log of the scale, a parameter or a plain number's tensor.
        logit_bias: None: there is none.
    """

    needs_features = False
    layers = (0, 1)

    def __init__(
        self,
        kind: LossKind,
        pairs: Sequence[Pair],
        width: int,
        logit_scale: nn.Parameter,
        logit_bias: nn.Parameter | None,
    ) -> None:
        super().__init__()
        self.kind, self.pairs = kind, tuple(pairs)
        self.hidden_size = self.output_size = width
        self.logit_scale, self.logit_bias = logit_scale, logit_bias
        self._cp = ALONE

    def share_context(self, cp: ContextParallel) -> None:
        """The group that shares the rows."""
        self._cp = cp

    def canonical_name(self, local_name: str) -> str:
        return f"module.{local_name}"

    def layers_of(self, local_name: str) -> tuple[int, ...]:
        return (0,)

    def input_shape(self, samples: Sequence[Sample]) -> tuple[int, ...]:
        raise AssertionError("nothing is sent into a contrastive loss")

    output_shape = input_shape

    def loss(self, features: Mapping[str, Tensor], shares: Shares) -> Tensor:
        """The sum of the losses of all samples, alike on all ranks of the group. Collective.

        `features`: for each tower of which this rank holds some: [own samples, width], in the order of its places.
        The backward exchanges nothing."""
        own = {name: nn.functional.normalize(tensor, dim=-1) for name, tensor in features.items()}
        reference = self.logit_scale
        towers = dict.fromkeys(name for pair in self.pairs for name in pair)
        rows = [own.get(name, reference.new_zeros(0, self.hidden_size)) for name in towers]
        bias = reference.new_zeros(()) if self.logit_bias is None else self.logit_bias
        share = _Share(self.kind, self.pairs, tuple(towers), shares, self._cp)
        with torch.autocast(reference.device.type, enabled=False):
            return _ContrastiveLoss.apply(share, self.logit_scale.exp(), bias, *rows)


class _Side:
    """Rows of one tower here against all samples of another one."""

    def __init__(self, pair: int, rows: str, columns: str, *, both: bool, counts: bool) -> None:
        self.pair, self.rows, self.columns = pair, rows, columns
        self.both = both
        """Whether this rank has all rows of both towers; one side does the other's work then."""
        self.counts = counts
        """Whether the gradients of scale and bias are counted here and not on the other side."""


class _Share:
    """One rank's part of one contrastive batch."""

    def __init__(
        self, kind: LossKind, pairs: Sequence[Pair], towers: tuple[str, ...], shares: Shares, cp: ContextParallel
    ) -> None:
        self.kind, self.pairs, self.towers, self.shares, self.cp = kind, pairs, towers, shares, cp
        opposite = {name: {b if a == name else a for a, b in pairs if name in (a, b)} for name in towers}
        self.receivers = {
            name: [m for m in range(cp.size) if any(len(shares.places[other][m]) for other in opposite[name])]
            for name in towers
        }
        """Who needs a tower's features."""

    def places(self, tower: str) -> Ints:
        return self.shares.places[tower][self.cp.rank]

    def sides(self) -> Iterator[_Side]:
        for i, (a, b) in enumerate(self.pairs):
            both = len(self.places(a)) == len(self.places(b)) == self.shares.num_samples
            # A frozen tower's rows need no second pass, if only the other side finds scale and bias.
            counted = b if a not in self.shares.with_gradient and b in self.shares.with_gradient else a
            for rows, columns in [(a, b)] if both else [(a, b), (b, a)]:
                if len(self.places(rows)):
                    yield _Side(i, rows, columns, both=both, counts=both or rows == counted)

    def gather(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of each tower opposite to one of which this rank has rows: the rows of all samples."""
        exchange = RowExchange(self.cp)
        whole = {
            name: exchange.gather(own[name], self.shares.places[name], self.receivers[name]) for name in self.towers
        }
        exchange.finish()
        return {name: tensor for name, tensor in whole.items() if tensor is not None}


class RowExchange:
    """Rows that members of a group hand to one another, all at once. Every member calls `gather` equally often."""

    def __init__(self, cp: ContextParallel) -> None:
        self._cp = cp
        self._operations: list[dist.P2POp] = []
        self._scattered: list[tuple[Tensor, Tensor, Tensor]] = []
        self._tag = 0

    def gather(self, own: Tensor, places: Sequence[Ints], receivers: Collection[int]) -> Tensor | None:
        """The rows of all members, [number of all places, ...], complete after `finish`; None for no receiver.

        `own`: this member's rows, those of `places[rank]`; they must not change until `finish`."""
        rank, self._tag = self._cp.rank, self._tag + 1
        own = own.contiguous()
        if len(places[rank]):
            for member in receivers:
                if member != rank:
                    self._add(dist.isend, own, member)
        if rank not in receivers:
            return None
        if len(places[rank]) == sum(map(len, places)):
            return own
        whole = own.new_empty((sum(map(len, places)), *own.shape[1:]))
        if len(places[rank]):
            whole[torch.from_numpy(places[rank])] = own
        for member, at in enumerate(places):
            if member == rank or not len(at):
                continue
            if at[-1] - at[0] == len(at) - 1:
                self._add(dist.irecv, whole[at[0] : at[-1] + 1], member)
            else:
                buffer = own.new_empty((len(at), *own.shape[1:]))
                self._add(dist.irecv, buffer, member)
                self._scattered.append((whole, torch.from_numpy(at), buffer))
        return whole

    def _add(self, operation: Any, tensor: Tensor, member: int) -> None:
        self._operations.append(dist.P2POp(operation, tensor, group=self._cp.group, tag=self._tag, group_peer=member))

    def finish(self) -> None:
        for work in dist.batch_isend_irecv(self._operations) if self._operations else ():
            work.wait()
        for whole, at, buffer in self._scattered:
            whole[at.to(whole.device)] = buffer


class _ContrastiveLoss(torch.autograd.Function):
    """(share, scale, bias, rows of each tower) -> the loss, summed over all samples. Its backward is computed from
    blocks of similarities, which are computed a second time."""

    @staticmethod
    def forward(ctx: Any, share: _Share, scale: Tensor, bias: Tensor, *rows: Tensor) -> Tensor:
        own = dict(zip(share.towers, rows, strict=True))
        whole = share.gather(own)
        loss = torch.zeros((), dtype=torch.float64, device=scale.device)
        found: dict[tuple[str, str], Values] = {}
        for side in share.sides():
            if share.kind == "sigmoid" and not side.counts:
                continue  # The other side finds the same loss.
            result = values(share.kind, _similarity(share, side, own, whole, scale, bias), both=side.both)
            found[side.rows, side.columns] = result
            if result.column_lse is not None:
                found[side.columns, side.rows] = result._replace(lse=result.column_lse)
            loss += result.loss
        if share.cp.size > 1:
            dist.all_reduce(loss, group=share.cp.group)
        ctx.share, ctx.lse = share, _exchange_lse(share, found, own) if share.kind == "softmax" else {}
        ctx.save_for_backward(scale, bias, *rows, *whole.values())
        ctx.whole = tuple(whole)
        return (loss / len(share.pairs)).to(scale.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        share: _Share = ctx.share
        scale, bias, *tensors = ctx.saved_tensors
        own = dict(zip(share.towers, tensors, strict=False))
        whole = dict(zip(ctx.whole, tensors[len(own) :], strict=True))
        d_own = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
        d_scale = torch.zeros((), dtype=torch.float64, device=scale.device)
        d_bias = torch.zeros_like(d_scale)
        for side in share.sides():
            with_gradient = share.shares.with_gradient & ({side.rows, side.columns} if side.both else {side.rows})
            if not (with_gradient or side.counts):
                continue
            similarity = _similarity(share, side, own, whole, scale, bias)
            lse = ctx.lse.get((side.rows, side.columns), (similarity.rows, similarity.columns))
            found: Gradients = gradients(share.kind, similarity, *lse, both=side.both)
            d_own[side.rows] += found.rows
            if found.columns is not None:
                d_own[side.columns] += found.columns
            if side.counts:
                d_scale += found.scale
                d_bias += found.bias
        factor = d_loss / len(share.pairs)
        return (
            None,
            (d_scale * factor).to(scale.dtype),
            (d_bias * factor).to(bias.dtype),
            *(d_own[name].mul_(factor) for name in share.towers),
        )


def _similarity(
    share: _Share, side: _Side, own: Mapping[str, Tensor], whole: Mapping[str, Tensor], scale: Tensor, bias: Tensor
) -> Similarity:
    rows = own[side.rows]
    places = torch.from_numpy(share.places(side.rows)).to(rows.device)
    return Similarity(rows, whole[side.columns], places, scale.item(), bias.item())


def _exchange_lse(
    share: _Share, found: Mapping[tuple[str, str], Values], own: Mapping[str, Tensor]
) -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
    """For each side: the log-sum-exps of its own rows, and of the other direction's, of all samples."""
    exchange = RowExchange(share.cp)
    whole = {}
    for a, b in share.pairs:
        for rows, columns in ((a, b), (b, a)):
            lse = found[rows, columns].lse if (rows, columns) in found else own[rows].new_empty(0)
            # Whoever has rows of the other tower needs them.
            receivers = [m for m, places in enumerate(share.shares.places[columns]) if len(places)]
            whole[rows, columns] = exchange.gather(lse, share.shares.places[rows], receivers)
    exchange.finish()
    return {side: (here.lse, other) for side, here in found.items() if (other := whole[side[::-1]]) is not None}
