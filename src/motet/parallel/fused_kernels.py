"""Triton kernels of the package liger-kernel for what modules compute operation by operation.

`use_fused_kernels` gives modules of a stage another `forward`, each by itself; parameters, names, hooks and the classes
stay as they are. Nothing is known of model families. A module is changed if, on random numbers, it computes what the
kernel computes:

* root-mean-square norms, with `weight` or `1 + weight` as factor, and multiplied in float32 or not;
* gated MLPs, `down(activation(gate(x)) * up(x))` with SiLU or the tanh form of GELU, also if one linear makes gate and
  up. Their linears stay modules, so they may be cut by tensor parallelism or have adapters;
* attentions whose forward calls a function `apply_rotary_pos_emb` of its own file that rotates halves. They get a copy
  of the forward that sees the kernel under this name. A call that is not what the kernel computes, as of a part of each
  head, runs the model's own function.

Everything else computes as before: LayerNorms, rotations of vision towers, the loss.

Limits: the kernels compute in float32 inside. Rotations overwrite queries and keys as they are before, and gated MLPs
overwrite gate and up by their gradients, so a backward runs once.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from inspect import signature
from itertools import product
from types import FunctionType, MethodType
from typing import Any, Literal, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from motet.attention.kernels.backends import interpreting
from motet.errors import UserError

ROTATE = "apply_rotary_pos_emb"
"""Name of the function, in each of transformers' files, that rotates queries and keys."""
GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of the linears of gated MLPs."""
GATED_TOGETHER = ("gate_up_proj", "down_proj")
"""Names of the linears where one makes gate and up."""

HALVES_DIFFER = (
    "train.kernels: liger does not know rotary positions whose halves differ in some batches; leave kernels out"
)

Casting = Literal["llama", "gemma"]
Activation = Literal["silu", "gelu_tanh"]


def check_fused_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Raises `UserError` if the kernels cannot compute in this dtype on this device."""
    if find_spec("liger_kernel") is None:
        raise UserError(
            "train.kernels: liger needs the package liger-kernel; install it with pip install 'motet[liger]', or leave "
            "kernels out"
        )
    if device.type == "cpu" and not interpreting():
        raise UserError("train.kernels: liger needs a GPU; leave it out where cluster.device is cpu")
    if device.type == "cpu" and dtype == torch.bfloat16:
        raise UserError("train.kernels: Triton's interpreter does not compute in bfloat16; give train.dtype float32")


def use_fused_kernels(stage: nn.Module) -> Counter[str]:
    """From now on the stage's modules compute by fused kernels where these compute the same. Before anything else
    replaces a `forward`. Returns the numbers of `norms`, `mlps` and `rotations` that were changed."""
    found: Counter[str] = Counter()
    rotate = _Rotation()
    for module in stage.modules():
        if "forward" in vars(module):
            continue
        if norm := norm_of(module):
            module.forward = MethodType(_norm_forward(norm), module)
            found["norms"] += 1
        elif mlp := gated_mlp_of(module):
            module.forward = MethodType(_mlp_forward(mlp), module)
            found["mlps"] += 1
        elif forward := rotate.forward_of(module):
            module.forward = MethodType(forward, module)
            found["rotations"] += 1
    return found


# Norms.


class Norm(NamedTuple):
    eps: float
    offset: float
    """What is added to the weight."""
    casting: Casting
    """Whether the weight is multiplied in float32 (`gemma`)."""


def norm_of(module: nn.Module) -> Norm | None:
    """What a root-mean-square norm computes; None for other modules."""
    parameters = dict(module.named_parameters())
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    is_norm = set(parameters) == {"weight"} and parameters["weight"].dim() == 1
    # torch's own norm is one kernel.
    if not is_norm or not isinstance(eps, float) or isinstance(module, nn.RMSNorm) or _num_inputs(module) != 1:
        return None
    castings: tuple[Casting, ...] = ("llama", "gemma")
    for offset, casting in product((0.0, 1.0), castings):
        norm = Norm(eps, offset, casting)
        if _computes(module, norm, parameters["weight"].shape[0]):
            return norm
    return None


def _computes(module: nn.Module, norm: Norm, width: int) -> bool:
    """In float32 and, to the bit, in bfloat16; on numbers that are small enough for `eps` to show."""
    generator = torch.Generator().manual_seed(0)
    device = next(module.parameters()).device
    weight = 0.5 + torch.rand(width, generator=generator, dtype=torch.float32)
    scale = torch.tensor([3.0, norm.eps**0.5, 0.1 * norm.eps**0.5])[:, None]
    values = scale * torch.randn(3, width, generator=generator, dtype=torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        given, factor = values.to(device, dtype), weight.to(device, dtype)
        found = _call(partial(functional_call, module, {"weight": factor}, (given,)))
        if found is None or found.dtype != dtype:
            return False
        expected = plain_norm(given, factor, norm)
        same = torch.equal(found, expected) if dtype == torch.bfloat16 else _near(found, expected)
        if not same:
            return False
    return True


def plain_norm(values: Tensor, weight: Tensor, norm: Norm) -> Tensor:
    """What the kernel computes, operation by operation."""
    wide = values.float()
    normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    if norm.casting == "gemma":
        return (normalized * (norm.offset + weight.float())).to(values.dtype)
    return normalized.to(values.dtype) * (norm.offset + weight)


def _norm_forward(norm: Norm) -> Callable[[Any, Tensor], Tensor]:
    from liger_kernel.ops import LigerRMSNormFunction

    def forward(self: Any, values: Tensor) -> Tensor:
        # Not in place: a residual may share the gradient.
        return LigerRMSNormFunction.apply(values, self.weight, norm.eps, norm.offset, norm.casting, False, None)

    return forward


# Gated MLPs.


class GatedMlp(NamedTuple):
    linears: tuple[str, ...]
    activation: Activation


PLAIN_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda values: functional.gelu(values, approximate="tanh"),
}


class _Given(nn.Module):
    """A linear that returns these values, or its input."""

    def __init__(self, values: Tensor | None = None) -> None:
        super().__init__()
        self.values = values

    def forward(self, values: Tensor) -> Tensor:
        return values if self.values is None else self.values


def gated_mlp_of(module: nn.Module) -> GatedMlp | None:
    """What a gated MLP computes; None for other modules."""
    children = dict(module.named_children())
    for names in (*GATED, GATED_TOGETHER):
        others = [child for name, child in children.items() if name not in names]
        is_mlp = set(names) <= set(children) and all(isinstance(children[name], nn.Linear) for name in names)
        if not is_mlp or _num_inputs(module) != 1 or any(isinstance(child, nn.Dropout) for child in others):
            continue
        for activation in PLAIN_ACTIVATIONS:
            if _multiplies(module, names, activation):
                return GatedMlp(names, activation)
    return None


def _multiplies(module: nn.Module, names: tuple[str, ...], activation: Activation) -> bool:
    """Whether the module's last linear reads activation(gate) * up, while stand-ins are in the place of its linears.

    In training mode, so that a module with dropout is none."""
    generator = torch.Generator().manual_seed(0)
    gate, up = 4 * torch.randn(2, 2, 3, 8, generator=generator, dtype=torch.float32)
    given = [gate, up] if len(names) == 3 else [torch.cat((gate, up), -1)]
    own, was_training = {name: getattr(module, name) for name in names}, module.training
    try:
        module.training = True
        for name, values in zip(names, [*given, None], strict=True):
            setattr(module, name, _Given(values))
        found = _call(lambda: module(torch.zeros(2, 3, 8)))
    finally:
        for name, linear in own.items():
            setattr(module, name, linear)
        module.training = was_training
    return found is not None and _near(found, PLAIN_ACTIVATIONS[activation](gate) * up)


def _mlp_forward(mlp: GatedMlp) -> Callable[[Any, Tensor], Tensor]:
    from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction, LigerGELUMulFunction, LigerSiLUMulFunction

    multiply = {"silu": LigerSiLUMulFunction, "gelu_tanh": LigerGELUMulFunction}[mlp.activation].apply
    if len(mlp.linears) == 3:
        gate, up, down = mlp.linears

        def forward(self: Any, values: Tensor) -> Tensor:
            return getattr(self, down)(multiply(getattr(self, gate)(values), getattr(self, up)(values)))

        return forward
    together, down = mlp.linears

    def forward_together(self: Any, values: Tensor) -> Tensor:
        both = getattr(self, together)(values)
        if mlp.activation == "silu":
            # Its gradient has the rows of all dimensions in one.
            rows = LigerFusedGateUpSiLUMulFunction.apply(both.flatten(0, -2))
            return getattr(self, down)(rows.unflatten(0, both.shape[:-1]))
        return getattr(self, down)(multiply(*both.chunk(2, -1)))

    return forward_together


# Rotary positions.


class _Rotation:
    """The rotations of one stage."""

    def __init__(self) -> None:
        self._fused: dict[Callable[..., Any], Callable[..., Any] | None] = {}
        """By a model's own function."""

    def forward_of(self, module: nn.Module) -> Callable[..., Any] | None:
        """A copy of the module's forward that rotates by the kernel; None if it does not rotate so."""
        forward = type(module).forward
        if not isinstance(forward, FunctionType) or ROTATE not in forward.__code__.co_names:
            return None
        own = forward.__globals__.get(ROTATE)
        if own is None:
            return None
        if own not in self._fused:
            self._fused[own] = fused_rotation(own) if rotates_halves(own) else None
        fused = self._fused[own]
        if fused is None:
            return None
        copied = FunctionType(
            forward.__code__,
            {**forward.__globals__, ROTATE: fused},
            forward.__name__,
            forward.__defaults__,
            forward.__closure__,
        )
        copied.__kwdefaults__, copied.__annotations__ = forward.__kwdefaults__, forward.__annotations__
        return copied


def rotates_halves(rotate: Callable[..., Any]) -> bool:
    """Whether the function turns each pair (i, i + half) of a head by the angle i of its position."""
    generator = torch.Generator().manual_seed(0)
    query, key, angles = (
        torch.randn(shape, generator=generator, dtype=torch.float32)
        for shape in ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 4))
    )
    angles = angles.repeat(1, 1, 2)
    found = _call(lambda: rotate(query, key, angles.cos(), angles.sin()))
    if not isinstance(found, tuple):
        return False

    def turned(values: Tensor) -> Tensor:
        first, second = values.chunk(2, -1)
        return values * angles.cos()[:, None] + torch.cat((-second, first), -1) * angles.sin()[:, None]

    return len(found) == 2 and _near(found[0], turned(query)) and _near(found[1], turned(key))


def fused_rotation(own: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel in the place of a model's own function, which runs where the two may differ."""
    from liger_kernel.ops import LigerRopeFunction

    halves_agree: bool | None = None
    """Whether both halves of `cos` and of `sin` are alike, as the kernel takes for granted; None: not seen yet."""
    compared: ref[Tensor] | None = None
    """The last `cos` whose halves were compared, while it exists: a microbatch has one for all of its layers."""

    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *others: Any, **named: Any) -> Any:
        nonlocal halves_agree, compared
        is_whole = (
            not others
            and not named
            and query.dim() == key.dim() == 4
            and cos.dim() == 3
            and cos.shape[0] in (1, query.shape[0])
            and cos.shape[-1] == query.shape[-1] == key.shape[-1]
            and query.dtype == key.dtype == cos.dtype == sin.dtype
        )
        if is_whole and halves_agree is None and bool(sin.any()):
            # Once in a training, in its first forward: the host waits for the device.
            halves_agree = all(torch.equal(*angle.chunk(2, -1)) for angle in (cos, sin))
        if is_whole and halves_agree:
            if compared is None or compared() is not cos:
                # From then on the device compares, and stops where they differ, as other positions might make them.
                first, second = torch.cat((cos, sin)).chunk(2, -1)
                torch._assert_async((first == second).all(), HALVES_DIFFER)
                compared = ref(cos)
            return LigerRopeFunction.apply(query, key, cos, sin)
        return own(query, key, cos, sin, *others, **named)

    return rotate


# Trials.


def _num_inputs(module: nn.Module) -> int:
    """Number of the inputs that a module's forward takes."""
    return len(signature(module.forward).parameters)


def _call(function: Callable[[], Any]) -> Any:
    """What a trial returns; None if it fails: a module that does not run on such inputs computes something else."""
    try:
        with torch.no_grad():
            return function()
    except Exception:
        return None


def _near(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and torch.allclose(found.float(), expected.float(), rtol=1e-5, atol=1e-6)
