"""What backends of attention refuse before anything is trained."""

import pytest
import torch

from motet.attention.kernels.backends import BackendName, check_backend
from motet.errors import UserError

CUDA = torch.device("cuda")


@pytest.mark.parametrize(("block_size", "head_dim"), [(128, 128), (64, 256), (256, 64), (128, 80), (16, 24)])
def test_sizes_of_kernels(block_size: int, head_dim: int) -> None:
    check_backend(CUDA, "triton", block_size=block_size, head_dim=head_dim)


@pytest.mark.parametrize(
    ("backend", "block_size", "head_dim", "message"),
    [
        ("triton", 96, 64, "context.block_size is 96; kernels need a power of two of at least 16"),
        ("triton", 8, 64, "context.block_size is 8; kernels need a power of two of at least 16"),
        ("auto", 128, 512, r"heads of 512 are too wide for kernels \(at most 256\); give context.backend: dense"),
        ("auto", 128, 256, "context.block_size is 128, too many tokens for kernels with heads of 256; give 64"),
        ("triton", 512, 80, "context.block_size is 512, too many tokens for kernels with heads of 80; give 128"),
    ],
)
def test_sizes_that_kernels_cannot_do(backend: BackendName, block_size: int, head_dim: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_backend(CUDA, backend, block_size=block_size, head_dim=head_dim)
    check_backend(CUDA, "dense", block_size=block_size, head_dim=head_dim)
