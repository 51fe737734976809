"""Parts of a model of several modalities as pipeline stages (`motet.families.discovery.composite`).

The model's own functions run: of an encoder, `get_image_features` and the like; of the language model, the model's own
forward with their results given. So tiles, grids, positions, masks of images and further outputs that enter between
blocks are as the model has them. An encoder is one stage.

An encoder outputs rows of `width` for every placeholder, or of several widths side by side if further outputs enter
between the language model's first blocks (deepstack). In a sample's layout its items stand in the order of the
encoder's functions; `Segment.grid` is the number of the function.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from motet.assignment.sample import Sample
from motet.devices import to_device
from motet.families.discovery.composite import Composite, FeatureFunction
from motet.families.known_masks import KnownMasks
from motet.models.host_values import HostValues, on_host, values_known
from motet.models.stages.causal import (
    CausalStage,
    SequenceLayout,
    labelled,
    labels_of,
    layout_of,
    merge,
    token_ids,
)
from motet.models.stages.stage import StageBase, StageInput, StageOutput, keep_frozen_in_eval_mode
from motet.models.stages.stand_ins import StandIn
from motet.plan import LayerRange

Features = Sequence[Mapping[str, Tensor]]
"""Features of each sample."""

PER_TOKEN = "token_type_ids"
"""End of the names of features that have an entry for each token of the sample's text."""
IN_MASKS = ("token_type_ids",)
"""Features that models read inside of masks, under vmap: an ordinary tensor."""


SHOWS_PADDING = "pixel_attention_mask"
"""Input of functions that look at pixels themselves, to find out which of a batch's images are padding."""

POSITIONS = "get_rope_index"
"""Name of the method that finds positions in several axes, from token ids and grids."""


class _AtText(Exception):
    """Not an error: the forward has come to the text model."""

    def __init__(self, embedded: Tensor) -> None:
        self.embedded = embedded


class CompositeEncoderStage(StageBase):
    """An encoder of a model of several modalities, with its projector.

    Takes over `model`: what belongs to other modules loses its weights.

    Args:
        name: the module, of which layouts are read.
        width: of the language model.
    """

    integers_on_host = True

    def __init__(self, name: str, model: Any, composite: Composite) -> None:
        super().__init__()
        self.name, self.module = name, model
        self.part = composite.modules[name]
        self._text = composite.text.base
        self.layers = (0, len(self.part.layers))
        self.needs_features = True
        num_deep = composite.num_deep_features if composite.is_deep(name) else 0
        width = int(model.config.get_text_config().hidden_size)
        self.hidden_size, self.output_size = width, (1 + num_deep) * width
        self.features_on_host = any(SHOWS_PADDING in function.inputs for function in self.part.functions)
        put_stand_ins_for_others(model, composite, name)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        modules = dict(self.module.named_modules())
        keep_frozen_in_eval_mode(*(modules[path] for path in self.part.paths if path in modules))
        return self

    @property
    def running_blocks(self) -> dict[int, nn.Module]:
        """All of its blocks, by number."""
        return dict(enumerate(self.module.get_submodule(self.part.blocks).children()))

    def canonical_name(self, local_name: str) -> str:
        path = local_name.removeprefix("module.")
        return f"{self.part.part_of(path)}.{path}"

    def layers_of(self, local_name: str) -> tuple[int, ...]:
        return (self.part.layer_of(local_name.removeprefix("module.")),)

    def input_shape(self, samples: Sequence[Sample]) -> tuple[int, int]:
        raise AssertionError(f"{self.name} is one stage")

    def output_shape(self, samples: Sequence[Sample]) -> tuple[int, int]:
        return sum(sample.num_outputs(self.name) for sample in samples), self.output_size

    def forward(self, inputs: StageInput) -> StageOutput:
        by_function: dict[int, list[Tensor]] = {}
        counts = [counts_of(sample, self.name, len(self.part.functions)) for sample in inputs.samples]
        for index, function in enumerate(self.part.functions):
            given = [features for features in inputs.features if function.raw in features]
            if given:
                tensors = on_device(collate(given, function.inputs), self.device, keeps_all=self.features_on_host)
                with values_known(self.device), KnownMasks():
                    rows = (
                        self._encode(function, tensors)
                        if function.name
                        else self._run_to_text(function, given, tensors)
                    )
                by_function[index] = list(rows.split([count[index] for count in counts if count[index]]))
        ordered = [by_function[index].pop(0) for count in counts for index, n in enumerate(count) if n]
        return StageOutput(torch.cat(ordered))

    def _encode(self, function: FeatureFunction, inputs: Mapping[str, Tensor]) -> Tensor:
        """[number of placeholders, output_size]"""
        owner = owner_of(self.module, function)
        made = getattr(owner, function.name)(**inputs, return_dict=True)
        first = getattr(made, "pooler_output", None)
        outputs = [made.last_hidden_state if first is None else first]
        outputs += getattr(made, "deepstack_features", None) or ()
        width = self.hidden_size
        flat = [
            torch.cat([piece.reshape(-1, width) for piece in (o if isinstance(o, list | tuple) else [o])])
            for o in outputs
        ]
        return torch.cat(flat, dim=-1)

    def _run_to_text(self, function: FeatureFunction, given: Features, inputs: Mapping[str, Tensor]) -> Tensor:
        """Runs the forward of a model without a function up to its text model; returns what it puts at placeholders."""
        sequences = SequenceLayout(tuple(len(own["input_ids"]) for own in given), packed=False)
        ids = HostValues.of(token_ids(given, sequences), self.device)

        def leave(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            raise _AtText(kwargs["inputs_embeds"])

        hook = self.module.get_submodule(self._text).register_forward_pre_hook(leave, with_kwargs=True)
        try:
            self.module(input_ids=ids, attention_mask=HostValues.of(present(sequences), self.device), **inputs)
        except _AtText as reached:
            return reached.embedded[ids == function.token_id]
        finally:
            hook.remove()
        raise AssertionError(f"{type(self.module).__name__} did not call its text model")


class CompositeLanguageModelStage(CausalStage):
    """Layers [first, last) of the language model of a model of several modalities. Samples stand in rows of their own.

    Takes over `model`: what belongs to other stages and modules loses its weights."""

    features_on_host = False
    """The model's own functions read pixels and sounds."""
    integers_on_host = True

    def __init__(self, name: str, model: Any, composite: Composite, layers: LayerRange) -> None:
        super().__init__(name, model, layers)
        self.needs_features = True
        self.is_tied = composite.is_tied
        self.composite = composite
        put_stand_ins_for_others(model, composite, name)
        for module in model.modules():
            if hasattr(module, POSITIONS):
                setattr(module, POSITIONS, on_host(getattr(module, POSITIONS)))

    def incoming_size(self, source: str) -> int:
        """Width of the rows of an encoder's output."""
        num_deep = self.composite.num_deep_features if self.composite.is_deep(source) else 0
        return self.hidden_size * (1 + num_deep)

    def input_shape(self, samples: Sequence[Sample]) -> tuple[int, ...]:
        return (*layout_of(samples, self.name, packed=False).shape, self.width(self.layers[0]))

    def output_shape(self, samples: Sequence[Sample]) -> tuple[int, ...]:
        return (*layout_of(samples, self.name, packed=False).shape, self.width(self.layers[1]))

    def forward(self, inputs: StageInput) -> StageOutput:
        features, samples = inputs.features, inputs.samples
        sequences = layout_of(samples, self.name, packed=False)
        options: dict[str, Any] = self._options(features, sequences)
        mask = present(sequences)
        is_in_vmap = any(key in options for key in IN_MASKS)
        options["attention_mask"] = (to_device if is_in_vmap else HostValues.of)(mask, self.device)
        outputs = self._encoder_outputs(inputs)
        rows, labels = (None, None)
        if self.is_last:
            rows, labels = labelled(labels_of(features), sequences.places_of_tokens(), self.device)
        ids = HostValues.of(token_ids(features, sequences), self.device)
        with self._giving(outputs) as given, self.observed(samples, sequences, None), values_known(self.device):
            states, logits = self.run_layers(
                ids,
                inputs.hidden,
                rows=rows,
                enter=lambda words: put_in(words, ids, outputs),
                lengths=sequences.length_of_token() if self.reads_lengths else None,
                options={**options, **given},
            )
        unread = [function.modality for function, made in outputs.items() if function.name and not made.was_read]
        assert not unread, f"{type(self.module).__name__} did not read what was made of {', '.join(unread)}"
        if logits is None or labels is None:
            return StageOutput(states)
        return StageOutput(None, self.loss_sum(logits, labels))

    @contextmanager
    def _giving(self, outputs: "Mapping[FeatureFunction, GivenOutputs]") -> Iterator[dict[str, Any]]:
        """Makes the model's forward read the results: by an argument where it has one, which transformers uses for
        images and videos only; else the function returns them."""
        replaced = []
        given: dict[str, Any] = {}
        for function, made in outputs.items():
            if not function.name:
                continue
            if function.modality != "audio" and "mm_encoder_outputs" in self._takes:
                given.setdefault("mm_encoder_outputs", {})[function.modality] = made
                continue
            # The forward calls the function if it is given something to call it with.
            given[function.raw] = torch.zeros(1, 0, device=made.rows.device)
            for owner in {self.module, owner_of(self.module, function)}:
                owner.__dict__[function.name] = lambda *args, made=made, **kwargs: made
                replaced.append((owner, function.name))
        try:
            yield given
        finally:
            for owner, name in replaced:
                del owner.__dict__[name]

    def _options(self, features: Features, sequences: SequenceLayout) -> dict[str, Tensor]:
        """Returns the arguments of the model's forward besides token ids and pixels: grids, sizes, kinds of tokens."""
        keys = {key for own in features for key in own if key in self._takes} - {"input_ids", "labels"}
        keys -= {key for function in self.composite.functions if not function.name for key in function.inputs}
        options = {}
        for key in sorted(keys):
            if key.endswith(PER_TOKEN):
                values = torch.cat([own[key] for own in features])
                whole = values.new_zeros(sequences.shape[0] * sequences.shape[1])
                whole[sequences.places()] = values
                options[key] = whole.view(sequences.shape)
            else:
                options |= collate([own for own in features if key in own], (key,))
        return on_device(options, self.device)

    def _encoder_outputs(self, inputs: StageInput) -> "dict[FeatureFunction, GivenOutputs]":
        """Returns each function's result for the microbatch. Stages that no outputs enter get zeros: earlier stages
        have read the outputs."""
        found = {}
        for name, part in self.composite.encoders.items():
            counts = [counts_of(sample, name, len(part.functions)) for sample in inputs.samples]
            total = sum(map(sum, counts))
            if not total:
                continue
            rows = inputs.incoming.get(name)
            if rows is None:
                rows = torch.zeros(
                    total, self.incoming_size(name), device=self.device, dtype=next(self.parameters()).dtype
                )
            pieces = iter(rows.split([n for count in counts for n in count if n]))
            by_function: dict[int, list[Tensor]] = {}
            for count in counts:
                for index, n in enumerate(count):
                    if n:
                        by_function.setdefault(index, []).append(next(pieces))
            for index, own in by_function.items():
                found[part.functions[index]] = GivenOutputs(torch.cat(own), self.hidden_size)
        return found


class GivenOutputs:
    """Result of a function of the model, made from the rows of an encoder's output."""

    def __init__(self, rows: Tensor, width: int) -> None:
        self.rows = rows
        self.was_read = False
        first, *further = rows.split(width, dim=-1)
        self._fields = {
            "pooler_output": EncoderRows([first]),
            "last_hidden_state": first,
            "deepstack_features": [EncoderRows([own]) for own in further],
        }

    def __getattr__(self, name: str) -> Any:
        if name not in self.__dict__.get("_fields", ()):
            raise AttributeError(name)
        self.was_read = True
        return self._fields[name]


class EncoderRows(list[Tensor]):
    """The rows of an encoder's output, in both forms in which models read them: a list of tensors, or one tensor."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self[0], name)


def present(sequences: SequenceLayout) -> Tensor:
    """[rows, columns], 1 where a token stands."""
    mask = torch.zeros(sequences.shape, dtype=torch.long)
    mask.view(-1)[sequences.places()] = 1
    return mask


def put_in(words: Tensor, ids: Tensor, outputs: "Mapping[FeatureFunction, GivenOutputs]") -> Tensor:
    """Embedded tokens, with the rows of encoders without a function in the place of placeholders."""
    for function, made in outputs.items():
        if not function.name:
            at = (ids == function.token_id).flatten().nonzero()[:, 0]
            words = merge(words, made.last_hidden_state, at)
    return words


def owner_of(model: Any, function: FeatureFunction) -> Any:
    """The module that defines the function."""
    return model.base_model if hasattr(model.base_model, function.name) else model


def counts_of(sample: Sample, module: str, num_functions: int) -> list[int]:
    """The rows that a sample takes from each function of an encoder."""
    counts = [0] * num_functions
    for segment in sample.layouts.get(module, ()):
        counts[segment.grid[0]] += segment.outputs
    return counts


def put_stand_ins_for_others(model: Any, composite: Composite, name: str) -> None:
    """Leaves a model the weights of one part."""
    modules = dict(model.named_modules())
    for other in composite.modules.values():
        for path in other.paths if other.name != name else ():
            owner, _, key = path.rpartition(".")
            if path in modules:
                model.set_submodule(path, StandIn(modules[path]))
            else:
                modules[owner].register_parameter(key, None)
    for module in list(modules.values()):
        # Models ask their parts for the device of their first parameter.
        if isinstance(module, PreTrainedModel) and next(module.parameters(), None) is None:
            _say_where(module, model)


def _say_where(part: PreTrainedModel, model: Any) -> None:
    """Makes a part without parameters tell the device and the dtype of the whole."""
    told = {
        "device": property(lambda self: model.device),
        "dtype": property(lambda self: model.dtype),
        "__module__": type(part).__module__,
    }
    part.__class__ = type(type(part).__name__, (type(part),), told)


def on_device(inputs: Mapping[str, Tensor], device: torch.device, *, keeps_all: bool = False) -> dict[str, Tensor]:
    """Inputs of a model, of whose integers the host keeps the values. `keeps_all`: of all numbers."""
    return {
        key: to_device(tensor, device)
        if (tensor.is_floating_point() and not keeps_all) or key in IN_MASKS
        else HostValues.of(tensor, device)
        for key, tensor in inputs.items()
    }


def collate(features: Features, keys: Sequence[str]) -> dict[str, Tensor]:
    """The samples' tensors one after the other. Where they are of different sizes, zeros are added at the end, as
    processors do it."""
    collated = {}
    for key in keys:
        tensors = [own[key] for own in features if key in own]
        if not tensors:
            continue
        shape = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
        padded = []
        for tensor in tensors:
            missing = [side for n, most in zip(tensor.shape[:0:-1], shape[::-1], strict=True) for side in (0, most - n)]
            padded.append(nn.functional.pad(tensor, missing) if any(missing) else tensor)
        collated[key] = torch.cat(padded)
    return collated
