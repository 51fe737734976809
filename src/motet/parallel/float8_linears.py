"""Linear layers of transformer blocks that multiply numbers of 8 bits (float8), by the package torchao.

torchao puts another module in the place of a linear layer, with the same parameters under the same names. Of the
products of a forward, and of the gradient of its input, both factors are rounded to `float8_e4m3fn`: activations and
gradients with a scale for each token, the weight with one for each of its rows (in the backward: one for all). The
gradient of the weight is a product in the model's own dtype. Scales are powers of two and follow from the numbers at
hand. This is torchao's recipe `rowwise_with_gw_hp`. It alone makes a token's numbers depend on that token and on the
weight only. So they do not depend on how a batch is cut into microbatches, padded or packed, nor on the ranks that hold
its other tokens, and microbatches may have any number of tokens.

Linear layers that are not trained stay as they are: torchao's module computes and keeps what the gradient of the weight
needs, trained or not. So do those whose widths are no multiples of 16, which the hardware's products ask for, and what
is outside of blocks: embeddings, projectors, heads.

On CPUs torchao rounds as on a GPU and multiplies the rounded numbers in float32.
"""

from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import nn

from motet.errors import UserError

RECIPE = "rowwise_with_gw_hp"
ALIGNMENT = 16
"""The hardware multiplies matrices whose widths are multiples of this."""
CAPABILITY = (9, 0)
"""Of the first GPUs whose products take a scale for each row."""


def check_float8(device: torch.device, dtype: torch.dtype) -> None:
    """Raises `UserError` if linear layers cannot compute so on this device."""
    if find_spec("torchao") is None:
        raise UserError(
            "train.linears: float8 needs the package torchao; install it with pip install 'motet[float8]', or leave "
            "linears out"
        )
    if device.type == "cpu":
        return
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY:
        raise UserError(
            "train.linears: float8 needs an NVIDIA GPU of compute capability 9.0 (H100) or later, or a CPU, which "
            "emulates it; leave linears out"
        )
    if dtype != torch.bfloat16:
        raise UserError("train.linears: float8 on a GPU gives results in bfloat16; give train.dtype bfloat16")


def use_float8_linears(blocks: Iterable[nn.Module], device: torch.device) -> None:
    """From now on the trained linear layers of these blocks compute in float8. After everything that looks for linear
    layers, before compilation and recomputation. `device`: where they will run."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(RECIPE), emulate=device.type == "cpu")
    for block in blocks:
        convert_to_float8_training(block, module_filter_fn=lambda module, path: _fits(module), config=config)


def num_float8_linears(modules: Iterable[nn.Module]) -> int:
    """Number of linear layers in these modules that compute in float8."""
    from torchao.float8.float8_linear import Float8Linear

    return sum(isinstance(module, Float8Linear) for each in modules for module in each.modules())


def _fits(module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear
        and module.weight.requires_grad
        and all(width % ALIGNMENT == 0 for width in module.weight.shape)
    )
