"""A generator of sounds as codes: a connector, and an unmodified causal model of transformers that attends to it.

The model reads the codes of one sound (`motet.shapes.codes`) and, by cross-attention, the sound's conditions: the
language model's hidden states at its query tokens, or all of the prompt, behind the connector. Its loss is the
cross-entropy of each next code. Sounds with equally many conditions are computed together, padded on the right, which a
causal model does not see.

Limits: one stage; no tensor parallelism.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from motet.assignment.sample import IGNORED_LABEL, Sample
from motet.devices import to_device
from motet.errors import UserError
from motet.models.draws import has_null_condition
from motet.models.stages.generator import Connector, num_conditions
from motet.models.stages.stage import StageBase, StageInput, StageOutput
from motet.plan import LayerRange
from motet.shapes.codes import EDGE
from motet.shapes.module_shape import ModuleWorkload


@dataclass(frozen=True, kw_only=True)
class CodeLoss:
    per: Literal["image", "place"] = "image"
    """Each sound counts once, or as often as it has tokens."""
    null_condition: float = 0.0
    """Probability with which a sound of the training is not given its conditions."""


class _Sound(NamedTuple):
    """A sound of a microbatch."""

    sample: Sample
    item: int
    num_conditions: int
    tokens: Tensor
    """[codes], without the token at their edges."""


class CodeStage(StageBase):
    """All layers of a generator of codes.

    Args:
        name: the module whose layouts are read.
        reads: the language model.
        model: a causal model of transformers with cross-attention.
        workload: its shape, as `motet.shapes.codes` makes it.
        incoming_size: width of the language model's hidden states.
    """

    needs_features = True

    def __init__(
        self,
        name: str,
        reads: str,
        model: nn.Module,
        connector: Connector,
        layers: LayerRange,
        *,
        workload: ModuleWorkload,
        loss: CodeLoss,
        incoming_size: int,
    ) -> None:
        super().__init__()
        if layers != (0, workload.num_layers):
            raise UserError(f"plan: modules.{name}: a decoder of codes is one stage; give pp 1")
        self.name, self.reads, self.layers, self.loss = name, reads, layers, loss
        self.hidden_size, self.output_size = workload.hidden_size, workload.output_size
        self._incoming_size, self._num_layers = incoming_size, workload.num_layers
        self.module, self.projector = model, connector

    @property
    def model_class(self) -> str:
        """In transformers."""
        return type(self.module).__name__

    @property
    def running_blocks(self) -> dict[int, nn.Module]:
        model: Any = self.module
        return dict(enumerate(model.transformer.h))

    def layers_of(self, local_name: str) -> tuple[int, ...]:
        where, _, path = local_name.partition(".")
        if where == "projector":
            return (0,)
        if path.startswith("transformer.h."):
            return (2 + int(path.split(".")[2]),)
        return (1,) if path.startswith(("transformer.wte.", "transformer.wpe.")) else (self._num_layers - 1,)

    def incoming_size(self, source: str) -> int:
        return self._incoming_size

    def input_shape(self, samples: Sequence[Sample]) -> tuple[int, ...]:
        raise AssertionError("it has no stage before it")

    def output_shape(self, samples: Sequence[Sample]) -> tuple[int, ...]:
        raise AssertionError("nothing reads it")

    def forward(self, inputs: StageInput) -> StageOutput:
        """The sum of the sounds' losses."""

        def is_null(sound: _Sound) -> bool:
            return has_null_condition(inputs.draw_key, self.name, sound.sample.id, sound.item, self.loss.null_condition)

        sounds = self._sounds(inputs)
        states = self.projector(inputs.incoming[self.reads])
        conditions = states.split([sound.num_conditions for sound in sounds])
        by_length: dict[int, list[int]] = {}
        for index, sound in enumerate(sounds):
            by_length.setdefault(sound.num_conditions, []).append(index)
        total = states.new_zeros(())
        for alike in by_length.values():
            read = torch.stack([self.projector.replaced(conditions[i], is_null(sounds[i])) for i in alike])
            total = total + self._loss_sum([sounds[i].tokens for i in alike], read)
        return StageOutput(None, total)

    def _sounds(self, inputs: StageInput) -> list[_Sound]:
        found = []
        for sample, features in zip(inputs.samples, inputs.features, strict=True):
            counts = num_conditions(sample, self.reads, self.name)
            own = sample.layouts[self.name]
            sizes, codes = [segment.num_tokens - 1 for segment in own], features["codes"]
            if sum(sizes) != len(codes):
                raise UserError(
                    f"features: codes of sample {sample.id!r} are {len(codes)}, but {self.name}'s layout needs "
                    f"{sum(sizes)}"
                )
            for segment, tokens in zip(own, codes.split(sizes), strict=True):
                found.append(_Sound(sample, segment.item, counts[segment.item], tokens))
        return found

    def _loss_sum(self, sounds: Sequence[Tensor], conditions: Tensor) -> Tensor:
        """`sounds`: codes of each; `conditions`: [sounds, conditions, width]."""
        edge = sounds[0].new_full((1,), EDGE)
        read = pad_sequence([torch.cat([edge, own]) for own in sounds], batch_first=True)
        wanted = pad_sequence([torch.cat([own, edge]) for own in sounds], batch_first=True, padding_value=IGNORED_LABEL)
        logits = self.module(input_ids=read, encoder_hidden_states=conditions, use_cache=False).logits
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = functional.cross_entropy(
            wide.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
        ).view(wanted.shape)
        sums = losses.sum(1)
        if self.loss.per == "place":
            return sums.sum()
        lengths = torch.tensor([1 + len(own) for own in sounds], dtype=sums.dtype)
        return (sums / to_device(lengths, sums.device)).sum()
