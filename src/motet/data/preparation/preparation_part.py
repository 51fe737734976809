"""From examples to tensors: the tokens of a sample's layout, and what HuggingFace's processors make of its media."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from motet.data.conversation.example import Example
from motet.data.preparation.preparation import EncoderInput
from motet.data.preparation.sample_layout import SampleLayouts
from motet.errors import UserError
from motet.plan import LANGUAGE_MODEL


@dataclass(frozen=True, eq=False)
class Preparation(SampleLayouts):
    """`tokenizer`: a fast tokenizer of transformers."""

    encoders: Mapping[str, EncoderInput]
    merge: str = "placeholder"

    def features(self, example: Example, module: str) -> dict[str, Tensor]:
        """The tensors of one module. Raises `UserError` naming the file that cannot be decoded."""
        if module == LANGUAGE_MODEL:
            _, text = self.lay_out(example)
            return {"input_ids": torch.tensor(text.input_ids), "labels": torch.tensor(text.labels)}
        encoder = self.encoders[module]
        try:
            return encoder.features(example.media[encoder.modality])
        except ValueError as error:
            raise UserError(f"{example.where or example.id}: {error}") from None

    def prompt(self, example: Example) -> Tensor:
        """For generation: token ids up to where the last answer begins, as long as the layout says; int64 [tokens]."""
        _, text = self.lay_out(example, without_last_answer=True)
        return torch.tensor(text.input_ids)

    @property
    def tools(self) -> dict[str, Any]:
        """By module: the tokenizer and the processors."""
        return {LANGUAGE_MODEL: self.tokenizer, **{name: encoder.processor for name, encoder in self.encoders.items()}}

    def save(self, folder: Path) -> None:
        """For `from_pretrained`: the tokenizer in the folder itself, each encoder's processor in one of its name."""
        self.tokenizer.save_pretrained(folder)
        for name, encoder in self.encoders.items():
            encoder.processor.save_pretrained(folder / name)
