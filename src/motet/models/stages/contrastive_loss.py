"""Contrastive losses of a share of the rows, block by block, so that nobody holds the whole similarity matrix.

With s_ij = scale x_i . y_j + bias for the features x and y of two towers, of N samples each:

* softmax (CLIP, Radford et al. 2021): loss_i = ((lse_j s_ij - s_ii) + (lse_j s_ji - s_ii)) / 2
* sigmoid (SigLIP, Zhai et al. 2023): loss_i = sum_j softplus(s_ij) - s_ii

so that ds_ij = (e^(s_ij - lse_i) + e^(s_ij - lse'_j)) / 2 - [i = j], or sigmoid(s_ij) - [i = j]. Who has some rows x
needs, beside all y, the log-sum-exps lse' of the other direction, and then has their whole gradient: none of it has to
be summed over ranks (DistMM section 5.3.2 leaves these numbers out). Gradients compute s once more instead of keeping
it. Where one process has all rows of both towers, each block serves both directions. Sums are in float32 along a block
and in float64 over blocks.

Legend: n own rows, N samples, d the width of features.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

LossKind = Literal["softmax", "sigmoid"]

LOG_2 = math.log(2.0)

BLOCK_BYTES = 4 * 2**20
"""Of the block of similarities that is held at a time, and again of what is computed from it. Blocks are square: long
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
    """Of own rows to all samples of the opposite tower."""

    rows: Tensor
    """[n, d]"""
    columns: Tensor
    """[N, d]"""
    places: Tensor
    """[n]: which sample each row belongs to, ascending."""
    scale: float
    bias: float

    def blocks(self) -> Iterator[Block]:
        (num_rows, _), (num_columns, _) = self.rows.shape, self.columns.shape
        capacity = max(1, BLOCK_BYTES // self.rows.element_size())
        width = max(1, min(num_columns, math.isqrt(capacity)))
        height = max(1, min(num_rows, capacity // width))
        buffers = [self.rows.new_empty(height * width) for _ in range(2)]
        starts = range(0, num_columns, width)
        # Which rows' own samples stand at or after the beginning of each run of columns.
        firsts = torch.searchsorted(self.places, self.places.new_tensor([*starts, num_columns])).tolist()
        for top in range(0, num_rows, height):
            rows = slice(top, min(top + height, num_rows))
            for i, left in enumerate(starts):
                columns = slice(left, min(left + width, num_columns))
                shape = (rows.stop - top, columns.stop - left)
                block, scratch = (buffer[: shape[0] * shape[1]].view(shape) for buffer in buffers)
                # With beta = 0 what the block holds is not read.
                torch.addmm(block, self.rows[rows], self.columns[columns].T, beta=0, alpha=self.scale, out=block)
                if self.bias:
                    block.add_(self.bias)
                own = slice(max(top, firsts[i]), min(rows.stop, firsts[i + 1]))
                yield Block(rows, columns, block, scratch, self._meeting(own, top, left))

    def _meeting(self, own: slice, top: int, left: int) -> tuple[Tensor, Tensor] | None:
        if own.start >= own.stop:
            return None
        return torch.arange(own.start - top, own.stop - top, device=self.places.device), self.places[own] - left


class Values(NamedTuple):
    """What the first pass over the blocks finds."""

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
    """Of each row, while blocks of it come in."""

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
    """Of the loss summed over *all* samples and both directions."""

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
