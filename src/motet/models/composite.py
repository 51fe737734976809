"""The nodes of a model of several modalities: its encoders and its language model, each with its own weights."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from motet.assignment.sample import Segment
from motet.families.discovery.composite import Composite, CompositeModule
from motet.families.stored_weights import is_within, weights_of
from motet.models.graph import TYPICAL_TEXT_TOKENS, Layouts, ModuleNode
from motet.models.stages.composite import CompositeEncoderStage, CompositeLanguageModelStage
from motet.plan import LayerRange
from motet.shapes.module_shape import ModuleWorkload


@dataclass(frozen=True, kw_only=True, eq=False)
class CompositeNode(ModuleNode):
    """A part of `model`, which other nodes may share."""

    model: Any
    composite: Composite
    shape: ModuleWorkload

    @property
    def part(self) -> CompositeModule:
        return self.composite.modules[self.name]

    @property
    def parts(self) -> dict[str, nn.Module]:
        """Views of the model: modules with the names and the parameters of this part, and a language model's stored
        buffers."""
        own: dict[str, list[str]] = {}
        parameters = dict(self.model.named_parameters())
        for name in parameters if self.part.functions else weights_of(self.model):
            if is_within(name, self.part.paths):
                own.setdefault(self.part.part_of(name), []).append(name)
        return {part: view_of(self.model, names) for part, names in own.items()}

    @property
    def num_layers(self) -> int:
        return len(self.part.layers)

    @property
    def num_typical_loss_tokens(self) -> int:
        return 0 if self.part.functions else TYPICAL_TEXT_TOKENS // 2

    @property
    def family(self) -> str | None:
        return self.shape.family

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def make_stage(self, layers: LayerRange, *, packing: bool = False) -> nn.Module:
        assert not packing
        if not self.part.functions:
            return CompositeLanguageModelStage(self.name, self.model, self.composite, layers)
        assert layers == (0, self.num_layers), f"{self.name} is one stage"
        return CompositeEncoderStage(self.name, self.model, self.composite)

    def workload(self, *, packing: bool = False) -> ModuleWorkload:
        return self.shape

    def typical_layout(self, sources: Layouts) -> tuple[Segment, ...]:
        if self.part.functions:
            return (Segment(256, num_outputs=64, grid=(0,)),)
        merged = [Segment(segments[0].outputs, source=name) for name, segments in sources.items()]
        return (*merged, Segment(TYPICAL_TEXT_TOKENS))

    def double(self) -> None:
        self.model.double()


def view_of(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """A module with these parameters and buffers of a model, under the same names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    root = nn.Module()
    for name in names:
        owner, *path = root, *name.split(".")
        for key in path[:-1]:
            if key not in owner._modules:
                owner.add_module(key, nn.Module())
            owner = owner.get_submodule(key)
        if name in parameters:
            owner.register_parameter(path[-1], parameters[name])
        else:
            owner.register_buffer(path[-1], model.get_buffer(name))
    return root
