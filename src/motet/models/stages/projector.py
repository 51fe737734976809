"""Projectors: modules that bring an encoder's features to the width of the module that reads them.

"linear" is one linear layer (as in Qwen2-Audio), "mlp" two with a GELU between them (as in LLaVA 1.5), "projection" a
matrix (as in CLIP). Their parameters have the names that transformers gives them in these models. A module of the
user's own takes [num_tokens, in_features] and returns [num_outputs, out_features].
"""

import torch
from torch import Tensor, nn

from motet.errors import UserError


class LinearProjector(nn.Module):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, features: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]"""
        return self.linear(features)


class Projection(nn.Linear):
    """A matrix alone, as CLIP has it: [num_tokens, in_features] -> [num_tokens, out_features]."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)


class MlpProjector(nn.Module):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(in_features, out_features)
        self.act = nn.GELU()
        self.linear_2 = nn.Linear(out_features, out_features)

    def forward(self, features: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]"""
        return self.linear_2(self.act(self.linear_1(features)))


PROJECTORS: dict[str, type[nn.Module]] = {
    "linear": LinearProjector,
    "mlp": MlpProjector,
    "projection": Projection,
}


def build_projector(projector: str | nn.Module, in_features: int, out_features: int, *, seed: int = 0) -> nn.Module:
    """A projector by name, or the user's own as it is.

    Weights depend on `seed` and the sizes alone, and no other random numbers are used up, so every process that builds
    it gets the same. Raises `ValueError` for a name that is not known.
    """
    if isinstance(projector, nn.Module):
        return projector
    if projector not in PROJECTORS:
        raise UserError(f"projector: {projector!r} is not known; give one of {', '.join(PROJECTORS)} or a torch module")
    with torch.random.fork_rng(devices=[]):
        built = PROJECTORS[projector](in_features, out_features)
    initialize_projector(built, seed=seed)
    return built


@torch.no_grad()
def initialize_projector(projector: nn.Module, *, seed: int) -> None:
    """Draws the weights of every linear layer in it anew, in place, from the distribution that `nn.Linear` uses."""
    generator = torch.Generator().manual_seed(seed)
    for layer in projector.modules():
        if isinstance(layer, nn.Linear):
            bound = layer.in_features**-0.5
            for parameter in layer.parameters(recurse=False):
                # Drawn on the CPU: the same numbers wherever the parameter lives.
                drawn = torch.empty(parameter.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
                parameter.copy_(drawn)


def projected_size(projector: nn.Module) -> int:
    """The width of what a projector returns.

    A module of the user's own says it by an attribute `out_features`; without one, its last linear layer does. Raises
    `ValueError` if it has neither.
    """
    out_features = getattr(projector, "out_features", None)
    if out_features is None:
        linears = [layer for layer in projector.modules() if isinstance(layer, nn.Linear)]
        if not linears:
            raise UserError(
                f"projector: {type(projector).__name__} has no linear layer; give it an attribute out_features"
            )
        out_features = linears[-1].out_features
    return out_features
