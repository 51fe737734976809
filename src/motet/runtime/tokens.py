"""Which rows of a module's output belong to which samples: the indices behind a route between modules.

A module's output is [sum of num_outputs, hidden size], samples in the order of its microbatch. The consumer's
microbatch may hold other samples, in another order, from several producers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from motet.assignment.sample import Sample


def rows_of(wanted: Sequence[int], present: Sequence[int], samples: Sequence[Sample], module: str) -> Tensor | None:
    """Where the tokens of the samples `wanted` stand in an output that holds those of `present`, both in their order.

    None if that is the whole output as it stands."""
    if tuple(wanted) == tuple(present):
        return None
    starts, position = {}, 0
    for i in present:
        starts[i] = position
        position += samples[i].num_outputs(module)
    return torch.tensor(
        [row for i in wanted for row in range(starts[i], starts[i] + samples[i].num_outputs(module))],
        dtype=torch.long,
    )


def merge_order(
    parts: Sequence[Sequence[int]], whole: Sequence[int], samples: Sequence[Sample], module: str
) -> Tensor | None:
    """The index that sorts the concatenation of `parts` (samples of each route) into the order of `whole`.

    Samples of `whole` that no part brings have no tokens of the module. None if nothing has to move."""
    present = [i for part in parts for i in part]
    brought = set(present)
    return rows_of([i for i in whole if i in brought], present, samples, module)
