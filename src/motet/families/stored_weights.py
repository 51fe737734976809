"""The tensors of a model that are stored: its parameters, and the buffers that belong to its weights.

Such buffers are no parameters, since no gradient reaches them, but results depend on them: corrections of routers'
scores (DeepSeek-V3, GLM-4.5), scales of layers (Gemma 4). transformers keeps the corrections in float32 whatever the
dtype of the model.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

CORRECTION = "e_score_correction_bias"
"""transformers' name of what a router adds to its scores when it chooses experts, and only then."""


def is_within(name: str, paths: Iterable[str]) -> bool:
    """Whether a parameter or module is one of these paths, or lies inside one of them."""
    return any(name == path or name.startswith(f"{path}.") for path in paths)


def stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns the floating-point buffers of a model that are stored beside its parameters, by name."""
    stored = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in stored and buffer.is_floating_point()}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters of a model, tied ones once, and its stored buffers, by name."""
    return {**dict(model.named_parameters()), **stored_buffers(model)}


def keep_corrections_wide(model: nn.Module) -> None:
    """Brings the corrections of routers' scores to float32 at least, as `from_pretrained` does."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name == CORRECTION:
                module._buffers[name] = buffer.to(torch.promote_types(buffer.dtype, torch.float32))
