"""From examples to the tensors that contrastive towers read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from motet.data.conversation.example import Example
from motet.data.preparation.preparation import EncoderInput
from motet.data.preparation.tower_layouts import TextLayout, TowerLayouts, text_of
from motet.errors import UserError
from motet.plan import DECODER


@dataclass(frozen=True, eq=False)
class TowerPreparation(TowerLayouts):
    towers: Mapping[str, EncoderInput | TextLayout]

    def features(self, example: Example, module: str) -> dict[str, Tensor]:
        """The tensors of a tower or of the decoder. Raises `UserError` naming the file that cannot be decoded."""
        if module == DECODER:
            assert self.captions is not None
            ids = torch.tensor(self.captions.ids(text_of(example)))
            return {"input_ids": ids, "labels": ids}
        fed = self.towers[module]
        if isinstance(fed, TextLayout):
            return {"input_ids": torch.tensor([fed.ids(text_of(example))])}
        try:
            return fed.features(example.media[fed.modality])
        except ValueError as error:
            raise UserError(f"{example.where or example.id}: {error}") from None

    @property
    def tools(self) -> dict[str, Any]:
        """By tower, and of the caption decoder: its tokenizer or processor."""
        towers = {
            name: fed.tokenizer if isinstance(fed, TextLayout) else fed.processor for name, fed in self.towers.items()
        }
        return towers if self.captions is None else {**towers, DECODER: self.captions.tokenizer}
