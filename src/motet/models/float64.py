"""float64 to the end: transformers' norms and rotary positions compute in float32 whatever the model's dtype.

Within `float64_throughout` a cast to float32 gives float64, so that a comparison in float64 shows differences of 1e-12
and not the rounding of a norm. It replaces names of torch for the whole process, because a mode of torch's would not
reach what is recomputed in a backward pass. It is for verification only, and both sides of a comparison run in it.
Files know their dtypes by torch's names, so what reads one stands in `dtypes_by_name`.
"""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

FLOAT32 = torch.float32


@contextmanager
def dtypes_by_name() -> Iterator[None]:
    """Inside `float64_throughout`, a stretch in which torch's names mean what they say."""
    with patch.object(torch, "float32", FLOAT32), patch.object(torch, "float", FLOAT32):
        yield


@contextmanager
def float64_throughout() -> Iterator[None]:
    # When torch first pickles a tensor it makes tables of the dtypes by these names, and keeps them.
    pickle.loads(pickle.dumps(torch.empty(0)))
    with (
        patch.object(torch.Tensor, "float", torch.Tensor.double),
        patch.object(torch, "float32", torch.float64),
        patch.object(torch, "float", torch.float64),
    ):
        yield
