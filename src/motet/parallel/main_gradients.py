"""Gradients of bfloat16 parameters, which add up in float32 (main gradients).

Each backward computes in bfloat16; autograd adds what it brings to a `.grad` in float32 (`Tensor.grad_dtype`), so that
small gradients of later microbatches are not lost. (Micikevicius et al. 2018, "Mixed Precision Training"; Megatron-LM's
`accumulate_allreduce_grads_in_fp32`.)
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

HALF_DTYPES = (torch.bfloat16, torch.float16)


def keep_main_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Makes gradients of parameters in half precision float32."""
    for parameter in parameters:
        if parameter.dtype in HALF_DTYPES:
            parameter.grad_dtype = torch.float32


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of a parameter's gradient."""
    return parameter.grad_dtype or parameter.dtype


def zero_gradient(parameter: Tensor) -> Tensor:
    """Zeros in the shape and dtype of a parameter's gradient."""
    return torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
