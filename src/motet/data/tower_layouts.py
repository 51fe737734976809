"""From examples to the metadata of samples for contrastive towers: one image, sound or text of each. Pure: no torch.

Texts are tokenized as the family's own processor would: CLIP's ends with its end-of-text token, where its features are
taken; SigLIP's is padded to the longest that its tower takes, because its features are those of the last place; BERT's
stands as it is. Longer texts are cut.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from motet.data.encoder_layout import EncoderLayout
from motet.data.example import Example
from motet.data.sample import Sample, Segment
from motet.errors import UserError
from motet.models.token_counts import config_value
from motet.plan import CONTRASTIVE

LEGACY_END = 2
"""CLIP configurations with this `eos_token_id` take the features at the token with the highest number."""


@dataclass(frozen=True)
class TextLayout:
    """How a text tower is fed."""

    tokenizer: Any
    """A tokenizer of transformers, or a `motet.data.plain_tokenizer.PlainTokenizer`."""
    config: Any
    """The tower's configuration: its complete values, or the transformers object."""
    name: str
    """Of the tower in the run file, for messages."""

    def __post_init__(self) -> None:
        own = config_value(self.config, "vocab_size")
        if len(self.tokenizer) > own:
            raise UserError(
                f"{self.name}: its vocabulary has {own} tokens, but the tokenizer has {len(self.tokenizer)}; set "
                f"vocab_size to {len(self.tokenizer)} or take the model's own tokenizer"
            )

    def ids(self, text: str) -> list[int]:
        """Token ids, as many as the layout says."""
        family, most = config_value(self.config, "model_type"), config_value(self.config, "max_position_embeddings")
        ids: list[int] = list(self.tokenizer(text)["input_ids"])
        if family == "clip_text_model":
            end = config_value(self.config, "eos_token_id")
            if end != LEGACY_END and end not in ids[:most]:
                ids = [*ids[: most - 1], end]
        if family == "siglip_text_model":
            ids += [config_value(self.config, "pad_token_id")] * (most - len(ids))
        if not ids:
            raise UserError("its text has no tokens; give it some")
        return ids[:most]

    def segment(self, text: str) -> Segment:
        """The text's entry in the tower's layout."""
        ids = self.ids(text)
        grid: tuple[int, ...] = (len(ids),)
        if config_value(self.config, "model_type") == "clip_text_model":
            end = config_value(self.config, "eos_token_id")
            grid = (len(ids), ids.index(max(ids) if end == LEGACY_END else end))
        return Segment(len(ids), num_outputs=1, grid=grid)


@dataclass(frozen=True, eq=False)
class TowerLayouts:
    """Of samples that have an item for every tower."""

    towers: Mapping[str, EncoderLayout | TextLayout]

    def sample(self, example: Example) -> Sample:
        """The metadata. No pixels or waveforms are decoded. Raises `UserError` naming the example's file and line."""
        try:
            layouts = {name: (self._segment(name, example),) for name in self.towers}
        except ValueError as error:
            raise UserError(f"{example.where or example.id}: {error}") from None
        return Sample(id=example.id, layouts=layouts, num_loss_tokens={CONTRASTIVE: 1})

    def _segment(self, name: str, example: Example) -> Segment:
        fed = self.towers[name]
        if isinstance(fed, TextLayout):
            return fed.segment(text_of(example))
        segment = fed.segment(0, example.media[fed.modality][0])
        return Segment(segment.num_tokens, num_outputs=1, grid=segment.grid)


def text_of(example: Example) -> str:
    return example.messages[0].content
