"""Contrastive losses of a share of the rows, block by block, so that nobody holds the whole similarity matrix.

With s_ij = scale x_i . y_j + bias for the features x and y of two towers, of N samples each:

* softmax (CLIP, Radford et al. 2021): loss_i = ((lse_j s_ij - s_ii) + (lse_j s_ji - s_ii)) / 2
* sigmoid (SigLIP, Zhai et al. 2023): loss_i = sum_j softplus(s_ij) - s_ii

so that ds_ij = (e^(s_ij - lse_i) + e^(s_ij - lse'_j)) / 2 - [i = j], or sigmoid(s_ij) - [i = j]. Who has some rows x
needs, beside all y, the log-sum-exps lse' of the other direction, and then has their whole gradient: none of it has to
be summed over ranks (DistMM section 5.3.2 leaves these numbers out). Gradients compute s once more instead of keeping
it. Where one process has all rows of both towers, each block serves both directions.

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
"""Of the block of similarities that is held at a time."""


class Similarity(NamedTuple):
    """Of own rows to all samples of the opposite tower."""

    rows: Tensor
    """[n, d]"""
    columns: Tensor
    """[N, d]"""
    places: Tensor
    """[n]: which sample each row belongs to."""
    scale: float
    bias: float

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """(rows, their similarities [rows, N]), which may be overwritten until the next one is asked for."""
        num_rows, num_columns = len(self.rows), len(self.columns)
        size = max(1, BLOCK_BYTES // max(1, num_columns * self.rows.element_size()))
        buffer = self.rows.new_empty(min(size, num_rows), num_columns)
        scaled = self.rows * self.scale
        for first in range(0, num_rows, size):
            part = slice(first, min(first + size, num_rows))
            block = buffer[: part.stop - first]
            torch.mm(scaled[part], self.columns.T, out=block)
            yield part, block.add_(self.bias) if self.bias else block

    def positives(self, part: slice, block: Tensor) -> Tensor:
        return block.gather(1, self.places[part, None])[:, 0]


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
    rows = similarity.rows
    loss = torch.zeros((), dtype=torch.float64, device=rows.device)
    if kind == "sigmoid":
        for part, block in similarity.blocks():
            loss -= similarity.positives(part, block).sum(dtype=torch.float64)
            loss += torch.nn.functional.softplus(block).sum(dtype=torch.float64)
        return Values(loss, rows.new_empty(0))
    lse = rows.new_empty(len(rows))
    columns = _RunningLogSumExp(similarity) if both else None
    for part, block in similarity.blocks():
        positives = similarity.positives(part, block)
        if columns is not None:
            columns.add(block)
        largest = block.amax(1)
        lse[part] = block.sub_(largest[:, None]).exp_().sum(1).log_().add_(largest)
        loss += (lse[part] - positives).sum(dtype=torch.float64) / 2
        if columns is not None:
            loss -= positives.sum(dtype=torch.float64) / 2
    if columns is None:
        return Values(loss, lse)
    column_lse = columns.value()
    return Values(loss + column_lse.sum(dtype=torch.float64) / 2, lse, column_lse)


class _RunningLogSumExp:
    """Of each column, while blocks of rows come in."""

    def __init__(self, similarity: Similarity) -> None:
        num_columns = len(similarity.columns)
        self._largest = similarity.rows.new_full((num_columns,), -torch.inf)
        self._sum = similarity.rows.new_zeros(num_columns)

    def add(self, block: Tensor) -> None:
        largest = torch.maximum(self._largest, block.amax(0))
        self._sum.mul_((self._largest - largest).exp_()).add_((block - largest).exp_().sum(0))
        self._largest = largest

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
    d_rows = torch.empty_like(similarity.rows)
    d_columns = torch.zeros_like(similarity.columns) if both else None
    d_bias = torch.zeros((), dtype=torch.float64, device=d_rows.device)
    if kind == "softmax":  # Half of each direction's exponentials.
        lse, column_lse = lse + LOG_2, column_lse + LOG_2
    for part, block in similarity.blocks():
        if kind == "sigmoid":
            block.sigmoid_()
        else:
            other = (block - column_lse).exp_()
            block.sub_(lse[part, None]).exp_().add_(other)
        own = similarity.places[part, None]
        block.scatter_add_(1, own, -block.new_ones(own.shape))
        torch.mm(block, similarity.columns, out=d_rows[part])
        if d_columns is not None:
            d_columns.addmm_(block.T, similarity.rows[part])
        d_bias += block.sum(dtype=torch.float64)
    d_scale = (d_rows * similarity.rows).sum(dtype=torch.float64)
    d_rows.mul_(similarity.scale)
    if d_columns is not None:
        d_columns.mul_(similarity.scale)
    return Gradients(d_rows, d_columns, d_scale, d_bias)
