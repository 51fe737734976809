"""Registers encoders of the user's own (`motet.families.encoders.own_encoders`), and feeds samples to them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from motet.assignment.sample import Segment
from motet.data.example import Media, Modality
from motet.data.formats.media import StoredFile, register_modality
from motet.data.preparation import EncoderInput
from motet.errors import UserError, one_line
from motet.families.encoders.own_encoders import OwnEncoder, register
from motet.families.encoders.token_counts import encoder_segment


def register_encoder(
    module_class: Any = None,
    *,
    modality: str,
    example: Sequence[int],
    feature: str | None = None,
    load: Callable[[Any], Any] | None = None,
    prepare: Callable[[Any], Any] | None = None,
    suffixes: Sequence[str] = (),
) -> Any:
    """Registers a class of torch modules as encoders. Without `module_class`, returns a decorator for the class.

    Args:
        module_class: its forward takes [items, *shape of an item] and returns [items, tokens, width] or [items, width].
        modality: "image", "audio", or a name of your own: the key of records, and `<name>` in their text.
        example: the shape of a typical item, for which plans are made.
        feature: key of its items in a batch; None: the modality's name.
        load: for your own modality: (path or binary file) -> array or tensor; None: reads .npy files.
        prepare: (media) -> the item as a tensor; `motet.data.example.Media` describes `media.load()` and
            `media.size()` of each modality. None: returns `media.load()` unchanged.
        suffixes: for your own modality: suffixes of its members in WebDataset shards.
    """
    if module_class is None:
        return lambda given: register_encoder(
            given,
            modality=modality,
            example=example,
            feature=feature,
            load=load,
            prepare=prepare,
            suffixes=suffixes,
        )
    encoder = OwnEncoder(
        modality=modality,
        example=tuple(example),
        feature=feature or modality,
        prepare=prepare or methodcaller("load"),
    )
    register(module_class, encoder)
    if modality not in ("image", "audio"):
        reader = load or partial(np.load, allow_pickle=False)
        register_modality(modality, lambda path: ArrayFile(path, reader), tuple(suffixes) or ("npy",))
    return module_class


@dataclass(frozen=True)
class ArrayFile:
    """An item of a modality of the user's own."""

    path: Path | StoredFile
    reader: Callable[[Any], Any]

    def size(self) -> tuple[int, ...]:
        """The shape. The file is read for it."""
        return tuple(self.load().shape)

    def load(self) -> Any:
        """Raises `UserError` if the reader refuses it."""
        try:
            return self.reader(self.path if isinstance(self.path, Path) else self.path.open())
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path}: cannot be read ({one_line(error)}); replace the file") from None


@dataclass(frozen=True)
class OwnEncoderInput(EncoderInput):
    """An encoder of the user's own, which has no processor."""

    def __post_init__(self) -> None:
        """Its items have any shape that the module takes."""

    @cached_property
    def modalities(self) -> tuple[Modality, ...]:
        return (self.modality,)

    def segment(self, item: int, media: Media, modality: Modality | None = None) -> Segment:
        return encoder_segment(self.config, item=item, grid=tuple(self._item(media).shape))

    def features(self, items: Sequence[tuple[Modality, Media]]) -> dict[str, Tensor]:
        prepared = [self._item(media) for _, media in items]
        if len({item.shape for item in prepared}) > 1:
            raise UserError(f"{self.name}: the items of one sample have different shapes; give them one")
        return {self.config.encoder.feature: torch.stack(prepared)}

    def _item(self, media: Media) -> Tensor:
        item = torch.as_tensor(self.config.encoder.prepare(media))
        return item.float() if item.is_floating_point() else item
