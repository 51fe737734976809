"""Stages of causal models: embed | n blocks | head (docs/architecture.md).

The whole model's own forward runs, with stand-ins for the layers of other stages (`motet.models.stages.stand_ins`).
What a language model (`motet.models.stages.language_model`) and a caption decoder
(`motet.models.stages.caption_decoder`) give it besides token ids is their own.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils.rnn import pad_sequence

from motet.assignment.sample import IGNORED_LABEL, Sample, places_in_sample
from motet.devices import to_device
from motet.families.discovery.language_model_parts import causal_paths, num_causal_layers
from motet.families.known_masks import KnownMasks
from motet.families.language_models import is_tied
from motet.families.rotary import SequenceRotary
from motet.families.stored_weights import stored_buffers
from motet.models.stages.head import HeadWatch
from motet.models.stages.stage import StageBase
from motet.models.stages.stand_ins import Handover, LeftForward, put_stand_ins
from motet.parallel.tensor.vocab_parallel import cross_entropy_sum, vocabulary_group
from motet.plan import LayerRange

_NO_LABEL = np.array([IGNORED_LABEL])


@dataclass(frozen=True)
class SequenceLayout:
    """The places of a microbatch's sequences in the tensor [rows, columns]: padded on the right to [B, T_max], or
    packed into one row [1, sum of T].

    Merging by placeholder and prepending differ only in the layouts. Encoder outputs arrive in the order (sample,
    item); a layout may have the items in any order, and an item in several segments."""

    lengths: tuple[int, ...]
    """Number of tokens of each sample."""
    packed: bool

    @property
    def shape(self) -> tuple[int, int]:
        return (1, sum(self.lengths)) if self.packed else (len(self.lengths), max(self.lengths))

    @property
    def is_full(self) -> bool:
        """Whether a token stands everywhere."""
        return self.packed or min(self.lengths) == max(self.lengths)

    def starts(self) -> list[int]:
        """Index of each sample's first token in the flattened [rows * columns]."""
        if not self.packed:
            return [b * self.shape[1] for b in range(len(self.lengths))]
        return [sum(self.lengths[:b]) for b in range(len(self.lengths))]

    def places_of_tokens(self) -> Tensor | None:
        """As `places`; None if a token stands everywhere."""
        return None if self.is_full else self.places()

    def places(self) -> Tensor:
        """Index of every token in the flattened [rows * columns], sample after sample."""
        if self.is_full:
            return torch.arange(sum(self.lengths))
        runs = zip(self.starts(), self.lengths, strict=True)
        return torch.cat([torch.arange(start, start + length) for start, length in runs])

    def position_ids(self) -> Tensor:
        """[rows, columns], beginning at 0 in each sample; where nothing stands, as if the sample went on."""
        if self.packed:
            return torch.cat([torch.arange(length) for length in self.lengths])[None]
        return torch.arange(self.shape[1])[None].expand(self.shape)

    def attention_mask(self) -> Tensor | None:
        """[rows, columns], 1 where a token stands; None if one stands everywhere."""
        if self.is_full:
            return None
        return torch.from_numpy((np.arange(self.shape[1]) < np.array(self.lengths)[:, None]).astype(np.int64))

    def length_of_token(self) -> Tensor:
        """[rows, columns]: tokens of the sample that stands there."""
        lengths = torch.tensor(self.lengths)
        if self.packed:
            return torch.repeat_interleave(lengths, lengths)[None]
        return lengths[:, None].expand(self.shape)

    def sample_of_token(self) -> Tensor:
        """[rows, columns]: which sample of the microbatch stands there; -1 where nothing does."""
        owner = torch.full((self.shape[0] * self.shape[1],), -1)
        owner[self.places()] = torch.repeat_interleave(torch.tensor(self.lengths))
        return owner.view(self.shape)

    def place_of_token(self) -> Tensor:
        """[rows, columns]: the place in its sample of the token that stands there; 0 where nothing does."""
        place = torch.zeros(self.shape[0] * self.shape[1], dtype=torch.long)
        place[self.places()] = torch.cat([torch.arange(length) for length in self.lengths])
        return place.view(self.shape)


def layout_of(samples: Sequence[Sample], module: str, *, packed: bool) -> SequenceLayout:
    return SequenceLayout(tuple(sample.num_tokens(module) for sample in samples), packed)


def places_of_outputs(samples: Sequence[Sample], module: str, source: str, sequences: SequenceLayout) -> Tensor:
    """Returns the index in the flattened [rows * columns] of each output token of `source`, in the order (sample,
    item)."""
    places: list[int] = []
    for sample, start in zip(samples, sequences.starts(), strict=True):
        places += places_in_sample(sample, module, source, start)
    return torch.tensor(places, dtype=torch.long)


def merge(embeddings: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    """`embeddings` [rows, columns, H] with `tokens` [n, H] in place of what stood at `places`."""
    rows, columns, width = embeddings.shape
    flat = embeddings.reshape(rows * columns, width)
    # index_copy would keep the tokens for its backward.
    return flat.index_put((to_device(places, flat.device),), tokens.to(flat.dtype)).view(rows, columns, width)


def all_tokens(hidden: Tensor, sequences: SequenceLayout) -> Tensor:
    """[rows, columns, H] -> [sum of lengths, H], sample after sample, without padding."""
    return hidden.flatten(0, 1).index_select(0, to_device(sequences.places(), hidden.device))


class RowObserver(Protocol):
    """Learns which tokens passed a stage."""

    def recording(self) -> AbstractContextManager[None]:
        """Around each forward of the stage, but not around what a backward runs again."""

    def add(self, samples: Sequence[Sample], sample_of_row: Tensor, place_of_row: Tensor, device: torch.device) -> None:
        """After it. On the host, of each of this rank's rows: which of the microbatch's samples stands there, -1 where
        none does, and the token's place in it."""


class CausalStage(StageBase):
    """Layers [first, last) of a causal model. Takes over `model`: layers of other stages lose their weights."""

    features_on_host = True
    """Token ids and labels come on the host, where rows with a label are found without waiting for the device."""

    def __init__(self, name: str, model: Any, layers: LayerRange) -> None:
        super().__init__()
        self.name, self.layers, self.module, self.paths = name, layers, model, causal_paths(model)
        self.num_layers = num_causal_layers(model)
        """Number of layers of the whole model."""
        assert 0 <= layers[0] < layers[1] <= self.num_layers, layers
        self.is_first, self.is_last = layers[0] == 0, layers[1] == self.num_layers
        self.needs_features = self.is_first or self.is_last
        self.is_tied = is_tied(model)
        self.hidden_size = self.output_size = int(model.config.get_text_config().hidden_size)
        self.own_blocks = range(max(layers[0], 1) - 1, min(layers[1], self.num_layers - 1) - 1)
        self.observers: list[RowObserver] = []
        """Called at each forward of mixtures of experts."""
        self._handover: Handover | None = None
        if layers != (0, self.num_layers):
            self._handover = put_stand_ins(
                model, self.paths, self.own_blocks, is_first=self.is_first, is_last=self.is_last
            )
        self._rotary = SequenceRotary(model, self.paths.blocks)
        self._takes = set(inspect.signature(model.forward).parameters)
        if "kwargs" in self._takes:
            self._takes |= set(inspect.signature(model.get_submodule(self.paths.base).forward).parameters)
        self._takes.add("context")  # Read by attention of motet's own.
        self._find_head = attrgetter(self.paths.output)
        self._head_watch = HeadWatch(type(model).__name__, self._find_head(model)) if self.is_last else None

    @property
    def running_blocks(self) -> dict[int, nn.Module]:
        """The stage's blocks, by their numbers in the whole model."""
        return {index: self.module.get_submodule(f"{self.paths.blocks}.{index}") for index in self.own_blocks}

    def canonical_name(self, local_name: str) -> str:
        """The parameter's name in the whole module; of a tied head, the embedding's."""
        if self.is_tied and local_name == f"module.{self.paths.output}.weight":
            return f"module.{self.paths.words}.weight"
        return local_name

    def layers_of(self, local_name: str) -> tuple[int, ...]:
        """The layer that the parameter belongs to, or the two that share it."""
        name = self.canonical_name(local_name)
        blocks = f"module.{self.paths.blocks}."
        if name.startswith(blocks):
            return (1 + int(name.removeprefix(blocks).partition(".")[0]),)
        if self.is_tied and name == f"module.{self.paths.words}.weight":
            return (0, self.num_layers - 1)
        in_embedding = any(name.startswith(f"module.{part}.") for part in self.paths.embed_parts)
        return (0,) if in_embedding else (self.num_layers - 1,)

    def saved_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers of the stage's blocks that belong to the weights (`motet.families.stored_weights`), by name."""
        blocks = f"module.{self.paths.blocks}."
        for name, buffer in stored_buffers(self).items():
            if name.startswith(blocks):
                yield name, buffer

    def width(self, layer: int) -> int:
        """Returns the width of a layer's input: hidden states, and what else blocks read."""
        return self.hidden_size if self._handover is None else self._handover.forms.width(layer - 1)

    def crosses_alone(self, layer: int) -> bool:
        """Whether hidden states are all that crosses the border before a layer."""
        return self._handover is None or not self._handover.forms.crossing(layer - 1)

    @property
    def exchanges_heads(self) -> bool:
        """Whether blocks of one stage read what heads of another's have made: keys and values (Gemma 4)."""
        if self._handover is None:
            return False
        forms, own = self._handover.forms, self.own_blocks
        crossing = {*forms.crossing(own.start), *forms.crossing(own.stop)}
        return any(forms.values[i].origin >= 0 and len(forms.values[i].form.others) > 1 for i in crossing)

    @property
    def reads_lengths(self) -> bool:
        """Whether rotary positions depend on the lengths of the samples."""
        return self._rotary.reads_lengths

    def run_layers(
        self,
        ids: Tensor,
        hidden: Tensor | None,
        *,
        enter: Callable[[Tensor], Tensor] | None = None,
        rows: Tensor | None = None,
        lengths: Tensor | None,
        packed_positions: Tensor | None = None,
        options: Mapping[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the model's forward from the stage's first layer to its last.

        Args:
            ids: [rows, columns]; read by the first stage.
            hidden: the previous stage's output.
            enter: from embedded tokens to what is to stand in their place.
            rows: indices into the flattened [rows * columns], of the logits that are wanted on the last stage; None:
                all.
            lengths: [rows, columns], of each token's sample, which is longer than what stands here where a
                context-parallel group shares it; None unless the model `reads_lengths`.
            packed_positions: [rows, columns] on the host, of packed samples; None: each has a row of its own.
            options: of the model's forward; those that it does not know are left out.

        Returns:
            The hidden states that the next stage reads, or those that enter the last linear, and the logits of
            `rows` [number of rows, vocabulary].
        """
        if self._handover is not None:
            self._handover.begin(hidden)
        self._rotary.begin(lengths)
        module, hook = self.module, None
        if self.is_first and enter is not None:
            words = module.get_submodule(self.paths.words)
            hook = words.register_forward_hook(lambda words, args, embedded: enter(embedded))
        known = {"use_cache": False, **options}
        known = {key: value for key, value in known.items() if key in self._takes}

        def forward() -> Tensor:
            logits: Tensor = module(input_ids=ids, **known).logits
            return logits

        try:
            with KnownMasks(packed_positions):
                if self._head_watch is not None:
                    head, has_hooks = self._find_head(module), self._has_hooks_around_head()
                    return self._head_watch.run(head, forward, ids, rows, to_its_end=has_hooks)
                forward()
        except LeftForward as left:
            return left.packed, None
        finally:
            if self._handover is not None:
                self._handover.begin(None)
            if hook is not None:
                hook.remove()
        raise AssertionError("the forward was not left behind the stage")

    def _has_hooks_around_head(self) -> bool:
        """Whether hooks of the model, of a part of it that holds the head, or of all modules expect a whole forward."""
        names = self.paths.output.split(".")[:-1]
        around = accumulate(names, nn.Module.get_submodule, initial=self.module)
        return _has_any_global_hook() or any(module._forward_hooks for module in around)

    def observed(
        self, samples: Sequence[Sample], sequences: SequenceLayout, held: Tensor | None
    ) -> AbstractContextManager[None]:
        """Around a forward. `held`: on the host, positions in the packed sequence of this rank's rows, -1 for rows that
        hold nothing; None: all of them."""
        return self._observed(samples, sequences, held) if self.observers else nullcontext()

    @contextmanager
    def _observed(self, samples: Sequence[Sample], sequences: SequenceLayout, held: Tensor | None) -> Iterator[None]:
        with ExitStack() as recording:
            for observer in self.observers:
                recording.enter_context(observer.recording())
            yield
        sample_of_row, place_of_row = sequences.sample_of_token().flatten(), sequences.place_of_token().flatten()
        if held is not None:
            nothing = held < 0
            sample_of_row = sample_of_row[held].masked_fill(nothing, -1)
            place_of_row = place_of_row[held]
        for observer in self.observers:
            observer.add(samples, sample_of_row, place_of_row, self.device)

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The sum of the losses of all tokens with a label. `labels`: what each row of `logits` is to predict."""
        return cross_entropy_sum(logits, labels, vocabulary_group(self._find_head(self.module)))


def token_ids(features: Sequence[Mapping[str, Tensor]], sequences: SequenceLayout) -> Tensor:
    """[rows, columns], 0 where nothing stands."""
    ids = [f["input_ids"] for f in features]
    assert tuple(map(len, ids)) == sequences.lengths, (tuple(map(len, ids)), sequences.lengths)
    return torch.cat(ids).view(sequences.shape) if sequences.is_full else pad_sequence(ids, batch_first=True)


def labels_of(features: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """[sum of T], on the host: each token predicts the next of its own sample."""
    parts = [part for f in features for part in (f["labels"].cpu().numpy()[1:], _NO_LABEL)]
    return torch.from_numpy(np.concatenate(parts))


MAX_SHARE_WITHOUT_LABEL = 1 / 32
"""Share of rows without label up to which logits are computed of all rows: choosing some and adding their gradients to
the others' zeros takes longer."""


def labelled(labels: Tensor, places: Tensor | None, device: torch.device) -> tuple[Tensor | None, Tensor]:
    """Returns the indices in the flattened [rows * columns] of the tokens with a label, and the labels; None, and all
    labels, if few tokens have none.

    Computed by numpy: of narrow models torch's calls would take a noticeable part of a microbatch's time.

    Args:
        labels: [T] on the host, what each token is to predict.
        places: [T] on the host, where each token stands; None: one stands everywhere.
        device: of the results.
    """
    of_tokens = labels.numpy()
    counted = np.flatnonzero(of_tokens != IGNORED_LABEL)
    if places is None and len(of_tokens) - len(counted) <= MAX_SHARE_WITHOUT_LABEL * len(of_tokens):
        return None, to_device(labels, device)
    rows = torch.from_numpy(counted if places is None else places.numpy()[counted])
    return to_device(rows, device), to_device(torch.from_numpy(of_tokens[counted]), device)
