"""The user's own encoders: any torch module, registered with its modality and a typical input.

    @motet.register_encoder(modality="points", example=(1024, 3))
    class PointNet(nn.Module):
        def forward(self, points):  # [items, 1024, 3] -> [items, tokens, width]

The module is called with the items of equal shape together, and returns their tokens; [items, width] is one token for
each item. Everything else is read from the module itself by running a copy of it on the meta device: how many tokens
an item becomes, how wide they are, and which products of matrices it takes. `motet.data.own_encoders` registers.

A run file names the module or a function that makes it (`module: mypackage.encoders:PointNet`); that package is
imported, nothing else is executed. An installed package may also have an entry point in the group `motet.encoders`: it
is imported before a module is looked up, and a run file may name it alone (`module: pointnet`).

Where its blocks form a list that its forward runs through (`motet.families.encoders.own_blocks`), it can be cut into
stages; otherwise it is one stage, and its projector another. Limits: no tensor or context parallelism; the items of one
sample have one shape; batch norms have to be frozen, because they mix the samples of a microbatch.
"""

import copy
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from motet.errors import UserError, one_line
from motet.families.encoders.own_blocks import OwnBlocks, find_own_blocks
from motet.families.encoders.token_counts import TokenCounts, register_counter
from motet.families.entry_points import loaded
from motet.families.shape_reading.shape_trace import Product, trace
from motet.shapes.module_shape import LayerShape, Linear, ModuleWorkload, Part

GROUP = "motet.encoders"
"""Group of entry points, which are imported."""

_ATTRIBUTE = "motet_config"
"""Attribute of a module with its `OwnConfig`; `config` may be an attribute that its forward reads."""

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class OwnEncoder:
    """A registered class of modules."""

    modality: str
    """Modality of the input: "image", "audio", or a key of your own in records, such as "points"."""
    example: Shape
    """The shape of a typical item, for which plans are made."""
    feature: str
    """The tensor of a sample's features that it reads."""
    prepare: Callable[[Any], Any]
    """(motet.data.example.Media) -> the item as a tensor."""


_REGISTERED: dict[type[nn.Module], OwnEncoder] = {}


def register(module_class: type[nn.Module], encoder: OwnEncoder) -> None:
    """Makes a class of torch modules known as encoders. Raises `UserError`."""
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise UserError(f"register_encoder: {module_class!r} is not a class of torch modules; give one")
    if not encoder.modality.isidentifier() or not encoder.example:
        raise UserError(
            f"register_encoder: modality {encoder.modality!r} and example {encoder.example} are not a name and a "
            'shape; give, for example, "points" and (1024, 3)'
        )
    _REGISTERED[module_class] = encoder


@dataclass(eq=False)
class OwnConfig:
    """Stands in the place of a configuration of transformers, of one module."""

    model_type: str
    """The name of its class, with that of its Python module."""
    encoder: OwnEncoder
    hidden_size: int
    """Width inside."""
    output_size: int
    """Width of its output."""
    shape_of: nn.Module = field(repr=False)
    """A copy without weights."""
    source: str | None = None
    """Name of the encoder in the run file."""
    values: Mapping[str, Any] = field(default_factory=dict)
    blocks: OwnBlocks | None = None
    """Blocks between which the module is cut; None: it is not cut."""
    _counts: dict[Shape, tuple[int, int]] = field(default_factory=dict, repr=False)

    @property
    def num_blocks(self) -> int:
        return self.blocks.number if self.blocks else 0

    def num_tokens(self, shape: Shape) -> tuple[int, int]:
        """Returns the numbers of tokens of an item inside and at the output. Raises `UserError` for one that the module
        cannot take."""
        if shape not in self._counts:
            # Its forward may do something else with items of another shape.
            if self.blocks and _find_blocks(self.shape_of, shape) != self.blocks:
                raise UserError(
                    f"encoder: the forward of {self.model_type} does not run through its blocks alone for an item of "
                    f"shape {list(shape)}, as it does for {list(self.encoder.example)}; give items of other shapes"
                )
            inside, output = _sizes(self.shape_of, shape, self.blocks)
            self._counts[shape] = (inside[1], output[1])
        return self._counts[shape]

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": self.model_type, "module": self.source, "values": dict(self.values)}

    def __deepcopy__(self, memo: dict[int, Any]) -> "OwnConfig":
        return self


def own_config(module: nn.Module) -> OwnConfig | None:
    """Returns the `OwnConfig` of a module that was adopted; None for others."""
    return vars(module).get(_ATTRIBUTE)


def encoder_config(module: nn.Module) -> Any:
    """Returns an encoder's `OwnConfig`, or its transformers configuration."""
    return own_config(module) or module.config


def emptied(module: nn.Module) -> nn.Module:
    """Makes an empty module that replaces a user's own encoder on a stage that does not hold it."""
    empty = nn.Module()
    empty.__dict__[_ATTRIBUTE] = own_config(module)
    return empty


def adopt(module: nn.Module) -> OwnConfig | None:
    """The configuration of a module of a registered class, which it keeps from then on; None of other modules."""
    found = own_config(module)
    if found is not None:
        return found
    loaded(GROUP)
    encoder = next((_REGISTERED[base] for base in type(module).__mro__ if base in _REGISTERED), None)
    if encoder is None:
        return None
    without_weights = copy.deepcopy(module, {id(p): nn.Parameter(p.to("meta"), False) for p in module.parameters()})
    without_weights.to("meta").eval()
    blocks = _find_blocks(without_weights, encoder.example)
    inside, output = _sizes(without_weights, encoder.example, blocks)
    model_type = f"{type(module).__module__}.{type(module).__qualname__}"
    config = OwnConfig(model_type, encoder, inside[2], output[2], without_weights, blocks=blocks)
    register_counter(model_type, _count, encoder.modality)
    module.__dict__[_ATTRIBUTE] = config
    return config


def build(source: str, values: Mapping[str, Any], key: str) -> nn.Module:
    """The module that a run file names: `package.module:class or function`, called with `values`. `key`: its
    key in the run file, for messages."""
    maker = _maker(source, key)
    try:
        module = maker(**values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{key}.values: {source} cannot be made from them ({one_line(error)})") from None
    if not isinstance(module, nn.Module):
        raise UserError(
            f"{key}.module: {source} makes a {type(module).__name__}, which is not a torch module; give another"
        )
    config = adopt(module)
    if config is None:
        raise UserError(
            f"{key}.module: {type(module).__name__} is not registered; call motet.register_encoder where it is defined"
        )
    config.source, config.values = source, dict(values)
    return module


def _maker(source: str, key: str) -> Any:
    name, _, attribute = source.partition(":")
    packages = loaded(GROUP)
    try:
        if not attribute:
            return packages[name]
        maker: Any = importlib.import_module(name)
        for part in attribute.split("."):
            maker = getattr(maker, part)
        return maker
    except (ImportError, AttributeError, ValueError, KeyError) as error:
        reason = error if attribute else f"there is no entry point of this name in the group {GROUP}"
        raise UserError(
            f"{key}.module: {source} cannot be imported ({reason}); give package.module:name of an installed package"
        ) from None


def build_on_meta(source: str, values: Mapping[str, Any], key: str) -> OwnConfig:
    """The configuration of the module that a run file names, without weights."""
    with torch.device("meta"):
        config = own_config(build(source, values, key))
    assert config is not None
    return config


def run(module: nn.Module, items: Sequence[Tensor]) -> list[Tensor]:
    """The tokens of each item, [tokens, width]. Neighbours of equal shape run together."""
    check_norms(module)
    return [tokens for together in _of_equal_shape(items) for tokens in _tokens(module(torch.stack(together)))]


def check_norms(module: nn.Module) -> None:
    """Raises `UserError` for a batch norm that is trained."""
    for part in module.modules():
        if isinstance(part, _BatchNorm) and part.training:
            raise UserError(
                f"encoder: {type(module).__name__} has a batch norm in training mode, which mixes the samples of a "
                "microbatch; freeze the module, or use a norm over each sample (GroupNorm, LayerNorm)"
            )


def _tokens(output: Any) -> Tensor:
    """[items, tokens, width]"""
    output = output.last_hidden_state if hasattr(output, "last_hidden_state") else output
    if not isinstance(output, Tensor) or output.dim() not in (2, 3):
        what = f"a tensor {list(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise UserError(f"encoder: its forward returns {what}; return [items, tokens, width] or [items, width]")
    return output if output.dim() == 3 else output[:, None]


@torch.no_grad()
def _run_on_meta(module: nn.Module, shape: Shape) -> Tensor:
    try:
        return _tokens(module(_meta_items(module, shape)))
    except UserError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
        raise UserError(
            f"encoder: {type(module).__name__} cannot take an item of shape {list(shape)} ({one_line(error)[:160]})"
        ) from None


def _find_blocks(module: nn.Module, shape: Shape) -> OwnBlocks | None:
    """Finds the list of blocks; None if there is none, or if training and evaluation run different modules."""
    try:
        found = [find_own_blocks(module.train(mode), lambda: _run_on_meta(module, shape)) for mode in (True, False)]
    finally:
        module.eval()
    return found[0] if found[0] == found[1] else None


def _sizes(module: nn.Module, shape: Shape, blocks: OwnBlocks | None) -> tuple[torch.Size, torch.Size]:
    """Returns the sizes [items, tokens, width] of the first block's input and of the output."""
    inside: list[torch.Size] = []
    if blocks is None:
        output = _run_on_meta(module, shape).shape
        return output, output
    first = module.get_submodule(f"{blocks.path}.0")
    hook = first.register_forward_pre_hook(lambda _, args: inside.append(args[0].shape))
    try:
        output = _run_on_meta(module, shape).shape
    finally:
        hook.remove()
    return inside[0], output


def _meta_items(module: nn.Module, shape: Shape) -> Tensor:
    """One item."""
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    return torch.empty((1, *shape), dtype=dtype, device="meta")


def _count(config: Any, grid: tuple[int, ...]) -> TokenCounts:
    inside, number = config.num_tokens(grid or config.encoder.example)
    return TokenCounts(inside, number, number)


def own_workload(config: OwnConfig) -> ModuleWorkload:
    """Its layers; of a module that is not cut, the whole module and a head that does nothing. Products with parameters
    are those of a run on the example; products of activations with each other are not counted."""
    module, example = config.shape_of, config.encoder.example
    first = next(iter(inspect.signature(module.forward).parameters))
    with torch.no_grad():
        blocks: Any = module.get_submodule(config.blocks.path) if config.blocks else nn.ModuleList()
        found = trace(module, blocks, {first: _meta_items(module, example)})
    paths = [*((f"{config.blocks.path}.{i}",) for i in range(config.num_blocks))] if config.blocks else []
    held: list[tuple[str, ...]] = [config.blocks.before if config.blocks else ("",), *paths]
    held.append(config.blocks.after if config.blocks else ())
    layers = []
    for index, (own, events) in enumerate(zip(held, (found.embed, *found.blocks, found.head), strict=True)):
        linears = tuple(
            Linear(
                product.in_features,
                product.out_features,
                rows_per_token=product.rows / config.num_tokens(example)[0],
                kernel_area=product.kernel_area,
                reads_layer_input=product.reads_input,
            )
            for product in events
            if isinstance(product, Product)
        )
        number = sum(p.numel() for path in own for p in module.get_submodule(path).parameters())
        part: Part = "embed" if index == 0 else "head" if index == len(held) - 1 else "block"
        width = config.output_size if part == "head" else config.hidden_size
        other = max(0, number - sum(linear.num_parameters for linear in linears))
        layers.append(LayerShape(part, width, linears, other_parameters=other))
    return ModuleWorkload(
        kind="encoder",
        family=config.model_type,
        config=config,  # type: ignore[arg-type]
        hidden_size=config.hidden_size,
        output_size=config.output_size,
        layers=tuple(layers),
    )


class _ReachedError(Exception):
    """Carries what the first block was given."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


def run_before_blocks(module: nn.Module, items: Sequence[Tensor], blocks: OwnBlocks) -> Tensor:
    """[sum of tokens, width]: what the first block is given."""

    def leave(_: nn.Module, args: tuple[Any, ...]) -> None:
        raise _ReachedError(args[0])

    hook = module.get_submodule(f"{blocks.path}.0").register_forward_pre_hook(leave)
    outputs = []
    try:
        for together in _of_equal_shape(items):
            try:
                module(torch.stack(together))
            except _ReachedError as reached:
                outputs.append(reached.hidden.flatten(0, 1))
    finally:
        hook.remove()
    return torch.cat(outputs)


def run_behind_blocks(module: nn.Module, hidden: Tensor, shapes: Sequence[Shape], blocks: OwnBlocks) -> Tensor:
    """[items, tokens, width] from the last block's output. The forward runs with zeros up to there; nothing reads them,
    as `find_own_blocks` has seen."""
    each = [module.get_submodule(f"{blocks.path}.{i}") for i in range(blocks.number)]
    needs_gradients, first, outputs = torch.is_grad_enabled(), 0, []

    def put_in(rows: Tensor) -> Tensor:
        torch.set_grad_enabled(needs_gradients)
        return rows

    try:
        for shape, equal in groupby(shapes):
            rows = hidden[first : (first := first + len(list(equal)))]
            for block in each:
                block.__dict__["forward"] = _pass_on
            each[-1].__dict__["forward"] = lambda _, rows=rows: put_in(rows)
            torch.set_grad_enabled(False)
            zeros = torch.zeros((len(rows), *shape), dtype=hidden.dtype, device=hidden.device)
            outputs.append(_tokens(module(zeros)))
    finally:
        torch.set_grad_enabled(needs_gradients)
        for block in each:
            block.__dict__.pop("forward", None)
    return torch.cat(outputs)


def _pass_on(hidden: Tensor) -> Tensor:
    return hidden


def _of_equal_shape(items: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    for _, together in groupby(items, key=lambda item: item.shape):
        yield list(together)
