"""The contrastive loss as a stage: one action of all ranks that make features (DistMM section 5.4, batch-sync).

Each rank has the features of some samples of some towers. It gathers those of all samples of the *opposite* towers only
(DistMM section 5.3.2), computes its rows of each similarity matrix block by block, and exchanges log-sum-exps with the
owners of the other direction. Then the gradients of its rows are complete where they are needed, and none are sent.

A pair of towers compares the samples that have an item for both, with one another and with no other sample. The loss
is the sum over all pairs of towers (all of them, or those with the anchor) and their samples; divided by the number of
these comparisons it is their mean. Features are normalized here, so that a tower outputs what transformers calls its
embeddings.

With s_ij = scale x_i . y_j + bias for the features x and y of two towers, of N samples each, the losses are

* softmax (CLIP, Radford et al. 2021): loss_i = ((lse_j s_ij - s_ii) + (lse_j s_ji - s_ii)) / 2
* sigmoid (SigLIP, Zhai et al. 2023): loss_i = sum_j softplus(s_ij) - s_ii

so that ds_ij = (e^(s_ij - lse_i) + e^(s_ij - lse'_j)) / 2 - [i = j], or sigmoid(s_ij) - [i = j]. A rank with some rows
x needs, besides all y, the log-sum-exps lse' of the other direction, and then has the whole gradient of its rows: no
sum over ranks is needed (DistMM section 5.3.2 leaves these numbers out). The backward computes s once more instead of
keeping it. Where one process has all rows of both towers, each block serves both directions. Sums are in float32 along
a block and in float64 over blocks. Shapes: n own rows, N samples, d the width of features.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from motet.assignment.sample import Sample
from motet.config.model_section import INITIAL_LOGIT_SCALE
from motet.devices import to_device
from motet.errors import UserError
from motet.models.stages.stage import StageBase, StageInput, StageOutput
from motet.parallel.context.context_attention import ContextParallel
from motet.plan import CONTRASTIVE, ContextOptions
from motet.ragged_arrays import Ints
from motet.schedule.batch_sync import Pair, Shares

LossKind = Literal["softmax", "sigmoid"]

LOG_2 = math.log(2.0)

BLOCK_BYTES = 4 * 2**20
"""Size of the block of similarities that is held at a time; as much again is computed from it. Blocks are square: long
thin ones, of whole rows, make matrix products a third slower."""


class Block(NamedTuple):
    rows: slice
    columns: slice
    similarities: Tensor
    """[rows, columns]; these and `scratch` may be overwritten until the next block is asked for."""
    scratch: Tensor
    positives: tuple[Tensor, Tensor] | None
    """Where the two features of one sample meet: (rows, columns) within the block. None: nowhere."""


class Similarity(NamedTuple):
    """Similarities of this rank's rows to all samples of the opposite tower."""

    rows: Tensor
    """[n, d]"""
    columns: Tensor
    """[N, d]"""
    places: Ints
    """[n]: which sample each row belongs to, ascending."""
    scale: Tensor
    bias: Tensor | None
    """None: zero."""

    def blocks(self) -> Iterator[Block]:
        (num_rows, _), (num_columns, _) = self.rows.shape, self.columns.shape
        capacity = max(1, BLOCK_BYTES // self.rows.element_size())
        width = max(1, min(num_columns, math.isqrt(capacity)))
        height = max(1, min(num_rows, capacity // width))
        buffers = [self.rows.new_empty(height * width) for _ in range(2)]
        starts = range(0, num_columns, width)
        # Which rows' own samples stand at or after the beginning of each run of columns.
        firsts = np.searchsorted(self.places, [*starts, num_columns]).tolist()
        scaled, places = self.rows * self.scale, to_device(torch.from_numpy(self.places), self.rows.device)
        for top in range(0, num_rows, height):
            rows = slice(top, min(top + height, num_rows))
            for i, left in enumerate(starts):
                columns = slice(left, min(left + width, num_columns))
                shape = (rows.stop - top, columns.stop - left)
                block, scratch = (buffer[: shape[0] * shape[1]].view(shape) for buffer in buffers)
                # With beta = 0 what the block holds is not read.
                torch.addmm(block, scaled[rows], self.columns[columns].T, beta=0, out=block)
                if self.bias is not None:
                    block.add_(self.bias)
                own = slice(max(top, firsts[i]), min(rows.stop, firsts[i + 1]))
                meeting = None
                if own.start < own.stop:
                    rows_there = torch.arange(own.start - top, own.stop - top, device=places.device)
                    meeting = rows_there, places[own] - left
                yield Block(rows, columns, block, scratch, meeting)


class Values(NamedTuple):
    """Results of the first pass over the blocks."""

    loss: Tensor
    """Sum over the rows (for one direction of softmax: half of each row's loss), in float64."""
    lse: Tensor
    """softmax: [n], of each row; sigmoid: empty."""
    column_lse: Tensor | None = None
    """softmax, where the rows are all samples: [N], of each column. The loss has the other direction then."""


def values(kind: LossKind, similarity: Similarity, *, both: bool = False) -> Values:
    """`both`: the rows are those of all samples, and the loss is that of both directions."""
    rows, columns = similarity.rows, similarity.columns
    loss = torch.zeros((), dtype=torch.float64, device=rows.device)
    of_rows, of_columns = _RunningLogSumExp(len(rows), rows), _RunningLogSumExp(len(columns), rows)
    for block in similarity.blocks():
        if block.positives is not None:
            positives = block.similarities[block.positives].sum(dtype=torch.float64)
            loss -= positives / 2 if kind == "softmax" and not both else positives
        if kind == "sigmoid":
            softplus = torch.logaddexp(block.similarities, rows.new_zeros(()), out=block.scratch)
            loss += softplus.sum(1).sum(dtype=torch.float64)
            continue
        if both:
            of_columns.add(block.columns, block.similarities.T, block.scratch.T)
        of_rows.add(block.rows, block.similarities, block.scratch)
    if kind == "sigmoid":
        return Values(loss, rows.new_empty(0))
    lse, column_lse = of_rows.value(), of_columns.value() if both else None
    for found in (lse, column_lse):
        loss += 0.0 if found is None else found.sum(dtype=torch.float64) / 2
    return Values(loss, lse, column_lse)


class _RunningLogSumExp:
    """Log-sum-exp of each row, updated block by block."""

    def __init__(self, num_rows: int, like: Tensor) -> None:
        self._largest = like.new_full((num_rows,), -torch.inf)
        self._sum = like.new_zeros(num_rows)

    def add(self, part: slice, block: Tensor, scratch: Tensor) -> None:
        before = self._largest[part]
        largest = torch.maximum(before, block.amax(1))
        exponentials = torch.sub(block, largest[:, None], out=scratch).exp_()
        self._sum[part].mul_((before - largest).exp_()).add_(exponentials.sum(1))
        self._largest[part] = largest

    def value(self) -> Tensor:
        return self._sum.log().add_(self._largest)


class Gradients(NamedTuple):
    """Gradients of the loss summed over *all* samples and both directions."""

    rows: Tensor
    """[n, d], complete."""
    columns: Tensor | None
    """[N, d], if asked for: the share of these rows."""
    scale: Tensor
    """The share of these rows, in float64; over all rows of one tower it is the whole."""
    bias: Tensor
    """Likewise."""


def gradients(
    kind: LossKind, similarity: Similarity, lse: Tensor, column_lse: Tensor, *, both: bool = False
) -> Gradients:
    """`lse`, `column_lse`: softmax: [n] of the rows, [N] of the columns. `both`: gradients of the columns too."""
    rows, columns = similarity.rows, similarity.columns
    d_rows = torch.zeros_like(rows)
    d_columns = torch.zeros_like(columns) if both else None
    d_bias = torch.zeros((), dtype=torch.float64, device=rows.device)
    if kind == "softmax":  # Half of each direction's exponentials.
        lse, column_lse = lse + LOG_2, column_lse + LOG_2
    for block in similarity.blocks():
        d_block = block.similarities
        if kind == "sigmoid":
            d_block.sigmoid_()
        else:
            other = torch.sub(d_block, column_lse[block.columns], out=block.scratch).exp_()
            d_block.sub_(lse[block.rows, None]).exp_().add_(other)
        if block.positives is not None:
            d_block[block.positives] -= 1
        d_rows[block.rows].addmm_(d_block, columns[block.columns])
        if d_columns is not None:
            d_columns[block.columns].addmm_(d_block.T, rows[block.rows])
        d_bias += d_block.sum(1).sum(dtype=torch.float64)
    d_scale = (d_rows * rows).sum(1).sum(dtype=torch.float64)
    d_rows.mul_(similarity.scale)
    if d_columns is not None:
        d_columns.mul_(similarity.scale)
    return Gradients(d_rows, d_columns, d_scale, d_bias)


ALONE = ContextParallel(group=None, rank=0, size=1, options=ContextOptions())


LOSSES: tuple[LossKind, ...] = ("softmax", "sigmoid")
SIGLIP_BIAS = -10.0


class ContrastiveLoss(nn.Module):
    """The parameters of a contrastive loss: transformers' `logit_scale` (a logarithm, at most `max_logit_scale`) and,
    for the sigmoid loss, `logit_bias`."""

    def __init__(
        self,
        kind: LossKind,
        logit_scale: float | None = None,
        logit_bias: float | None = None,
        *,
        max_logit_scale: float | None = None,
    ) -> None:
        super().__init__()
        if kind not in LOSSES:
            raise UserError(f"loss: {kind!r} is not known; give one of {', '.join(LOSSES)}")
        if kind == "softmax" and logit_bias is not None:
            raise UserError("logit_bias: the softmax loss does not depend on one; leave it out")
        self.kind, self.max_logit_scale = kind, max_logit_scale
        initial = INITIAL_LOGIT_SCALE[kind] if logit_scale is None else logit_scale
        self.logit_scale = nn.Parameter(torch.tensor(initial))
        self.logit_bias: nn.Parameter | None = None
        if kind == "sigmoid":
            self.logit_bias = nn.Parameter(torch.tensor(SIGLIP_BIAS if logit_bias is None else logit_bias))


class ContrastiveStage(StageBase):
    """The contrastive loss as a stage: the only layer of the module "contrastive".

    Args:
        loss: its kind and parameters.
        pairs: the pairs of towers that are compared.
        width: of features.
    """

    name = CONTRASTIVE
    needs_features = False
    layers = (0, 1)

    def __init__(self, loss: ContrastiveLoss, pairs: Sequence[Pair], width: int) -> None:
        super().__init__()
        self.module, self.pairs = loss, tuple(pairs)
        self.hidden_size = self.output_size = width
        self._cp = ALONE

    @torch.no_grad()
    def after_update(self) -> None:
        """CLIP keeps the scale below 100, so that training stays stable (Radford et al. 2021)."""
        if self.module.max_logit_scale is not None:
            self.module.logit_scale.clamp_(max=self.module.max_logit_scale)

    def enable_context_parallel(self, cp: ContextParallel) -> None:
        """The group that shares the rows."""
        self._cp = cp

    def layers_of(self, local_name: str) -> tuple[int, ...]:
        return (0,)

    def input_shape(self, samples: Sequence[Sample]) -> tuple[int, ...]:
        raise AssertionError("nothing is sent into a contrastive loss")

    output_shape = input_shape

    def forward(self, inputs: StageInput) -> StageOutput:
        """The loss of one contrastive batch (`loss`), of the towers' embeddings that this rank holds."""
        assert inputs.shares is not None
        with torch.autocast(self.module.logit_scale.device.type, enabled=False):
            return StageOutput(loss=self.loss(inputs.incoming, inputs.shares))

    def loss(self, features: Mapping[str, Tensor], shares: Shares) -> Tensor:
        """The sum of the losses of all pairs and samples, alike on all ranks of the group. Collective.

        `features`: for each tower of which this rank holds some: [own samples, width], in the order of its places.
        The backward exchanges nothing."""
        own = {name: nn.functional.normalize(tensor, dim=-1) for name, tensor in features.items()}
        scale, bias = self.module.logit_scale, self.module.logit_bias
        towers = dict.fromkeys(name for pair in self.pairs for name in pair)
        rows = [own.get(name, scale.new_zeros(0, self.hidden_size)) for name in towers]
        share = _Share(self.module.kind, self.pairs, tuple(towers), shares, self._cp)
        with torch.autocast(scale.device.type, enabled=False):
            return _SummedLoss.apply(share, scale.exp(), scale.new_zeros(()) if bias is None else bias, *rows)


class _Compared(NamedTuple):
    """The samples that both towers of a pair have."""

    samples: Ints
    """Ascending."""
    own: Mapping[str, Ints]
    """Indices of this rank's rows of these samples, ascending, by tower of the pair."""

    def has_all(self, tower: str) -> bool:
        return len(self.own[tower]) == len(self.samples)


@dataclass(frozen=True, eq=False)
class _Side:
    """Rows of one tower here against all samples of another one."""

    rows: str
    columns: str
    compared: _Compared
    both: bool
    """Whether this rank has all rows of both towers; one side does the other's work then."""
    counts: bool
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
        """Members that need a tower's features, by tower."""
        self.samples = {name: np.sort(np.concatenate(shares.places[name])) for name in towers}
        """Samples that have an item for each tower."""
        self.compared = {pair: self._compare(pair) for pair in pairs}

    def _compare(self, pair: Pair) -> _Compared:
        samples = np.intersect1d(self.samples[pair[0]], self.samples[pair[1]], assume_unique=True)
        own = {name: np.flatnonzero(np.isin(self.places(name), samples)) for name in pair}
        return _Compared(samples, own)

    def places(self, tower: str) -> Ints:
        return self.shares.places[tower][self.cp.rank]

    def sides(self) -> Iterator[_Side]:
        for (a, b), compared in self.compared.items():
            both = compared.has_all(a) and compared.has_all(b)
            # A frozen tower's rows need no second pass, if only the other side finds scale and bias.
            counted = b if a not in self.shares.with_gradient and b in self.shares.with_gradient else a
            for rows, columns in [(a, b)] if both else [(a, b), (b, a)]:
                if len(compared.own[rows]):
                    yield _Side(rows, columns, compared, both=both, counts=both or rows == counted)

    def gather(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gathers the rows of all samples, for each tower that is opposite to one of which this rank has rows."""
        exchange = RowExchange(self.cp)
        whole = {
            name: exchange.gather(own[name], _places_among(self.samples[name], places), self.receivers[name])
            for name, places in ((name, self.shares.places[name]) for name in self.towers)
        }
        exchange.finish()
        return {name: tensor for name, tensor in whole.items() if tensor is not None}


def _places_among(samples: Ints, places: Sequence[Ints]) -> list[Ints]:
    """Returns the positions among these samples of each member's samples."""
    return [np.searchsorted(samples, own[np.isin(own, samples)]) for own in places]


def _rows_at(rows: Tensor, at: Ints) -> Tensor:
    """`rows[at]`; `at` ascends, and mostly all are meant."""
    return rows if len(at) == len(rows) else rows.index_select(0, to_device(torch.from_numpy(at), rows.device))


def _add_at(total: Tensor, at: Ints, rows: Tensor) -> None:
    if len(at) == len(total):
        total += rows
    else:
        total.index_add_(0, to_device(torch.from_numpy(at), total.device), rows)


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
            whole[to_device(torch.from_numpy(places[rank]), whole.device)] = own
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
            whole[to_device(at, whole.device)] = buffer


class _SummedLoss(torch.autograd.Function):
    """(share, scale, bias, rows of each tower) -> the loss, summed over pairs and samples. Its backward is computed
    from blocks of similarities, which are computed a second time."""

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
        return loss.to(scale.dtype)

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
            _add_at(d_own[side.rows], side.compared.own[side.rows], found.rows)
            if found.columns is not None:
                _add_at(d_own[side.columns], side.compared.own[side.columns], found.columns)
            if side.counts:
                d_scale += found.scale
                d_bias += found.bias
        return (
            None,
            (d_scale * d_loss).to(scale.dtype),
            (d_bias * d_loss).to(bias.dtype),
            *(d_own[name].mul_(d_loss) for name in share.towers),
        )


def _similarity(
    share: _Share, side: _Side, own: Mapping[str, Tensor], whole: Mapping[str, Tensor], scale: Tensor, bias: Tensor
) -> Similarity:
    samples, at = side.compared.samples, side.compared.own[side.rows]
    rows = _rows_at(own[side.rows], at)
    columns = _rows_at(whole[side.columns], np.searchsorted(share.samples[side.columns], samples))
    places = np.searchsorted(samples, share.places(side.rows)[at])
    return Similarity(rows, columns, places, scale, bias if share.kind == "sigmoid" else None)


def _exchange_lse(
    share: _Share, found: Mapping[tuple[str, str], Values], own: Mapping[str, Tensor]
) -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
    """For each side: the log-sum-exps of its own rows, and of the other direction's, of all samples compared."""
    exchange = RowExchange(share.cp)
    whole = {}
    for (a, b), compared in share.compared.items():
        for rows, columns in ((a, b), (b, a)):
            lse = found[rows, columns].lse if (rows, columns) in found else own[rows].new_empty(0)
            # Members with rows of the other tower need them.
            receivers = [m for m, places in enumerate(share.shares.places[columns]) if len(places)]
            places = _places_among(compared.samples, share.shares.places[rows])
            whole[rows, columns] = exchange.gather(lse, places, receivers)
    exchange.finish()
    return {side: (here.lse, other) for side, here in found.items() if (other := whole[side[::-1]]) is not None}
