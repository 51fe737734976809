"""From examples to the metadata of samples for contrastive towers: an image, sound or text of each. Pure: no torch.

Texts are tokenized as the family's own processor would: CLIP's ends with its end-of-text token, where its features are
taken; SigLIP's is padded to the longest that its tower takes, because its features are those of the last place; BERT's
stands as it is. Longer texts are cut. A caption decoder beside the towers is fed the same text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from motet.assignment.sample import Sample, Segment
from motet.data.conversation.example import Example
from motet.data.preparation.encoder_layout import EncoderLayout
from motet.errors import UserError
from motet.families.token_counts import LEGACY_END, config_value
from motet.plan import CONTRASTIVE, DECODER
from motet.schedule.batch_sync import num_comparisons


def check_tokenizer(tokenizer: Any, config: Any, name: str) -> None:
    """Raises `UserError` if it has more tokens than the model called `name`."""
    own = config_value(config, "vocab_size")
    if len(tokenizer) > own:
        raise UserError(
            f"{name}: its vocabulary has {own} tokens, but the tokenizer has {len(tokenizer)}; set "
            f"vocab_size to {len(tokenizer)} or take the model's own tokenizer"
        )


@dataclass(frozen=True)
class TextLayout:
    """How a text tower is fed."""

    tokenizer: Any
    """A tokenizer of transformers, or a `motet.data.conversation.chat.PlainTokenizer`."""
    config: Any
    """The tower's configuration: its complete values, or the transformers object."""
    name: str
    """Of the tower in the run file, for messages."""

    def __post_init__(self) -> None:
        check_tokenizer(self.tokenizer, self.config, self.name)

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


@dataclass(frozen=True)
class CaptionLayout:
    """How a caption decoder is fed: the text between a token that begins it and one that ends it."""

    tokenizer: Any
    """As a text tower's."""
    config: Any
    """The decoder's configuration."""
    reads: str
    """The tower to whose features it attends."""

    def __post_init__(self) -> None:
        check_tokenizer(self.tokenizer, self.config, f"model.{DECODER}")

    def ids(self, text: str) -> list[int]:
        """Token ids, all of which but the first are to be predicted. What is too long is cut."""
        ids: list[int] = list(self.tokenizer(text)["input_ids"])
        begin = self._special("bos_token_id", "cls_token_id", "eos_token_id")
        end = self._special("eos_token_id", "sep_token_id")
        if begin is not None and ids[:1] != [begin]:
            ids = [begin, *ids]
        if end is not None and (len(ids) == 1 or ids[-1] != end):
            ids = [*ids, end]
        if not ids:
            raise UserError("its text has no tokens; give it some")
        return ids[: config_value(self.config, "max_position_embeddings")]

    def _special(self, *names: str) -> int | None:
        """The first of these special tokens that the tokenizer has."""
        found = (getattr(self.tokenizer, name, None) for name in names)
        return next((token for token in found if token is not None), None)


@dataclass(frozen=True, eq=False)
class TowerLayouts:
    """Of samples that have items for some of the towers."""

    towers: Mapping[str, EncoderLayout | TextLayout]
    pairs: Sequence[tuple[str, str]]
    """Of towers that are compared."""
    captions: CaptionLayout | None = None
    """How the caption decoder is fed, if there is one."""

    def sample(self, example: Example) -> Sample:
        """The metadata. No pixels or waveforms are decoded. Raises `UserError` naming the example's file and line."""
        try:
            layouts = {name: (self._segment(name, example),) for name in self.towers if self._has(name, example)}
            num_loss_tokens = {CONTRASTIVE: num_comparisons(self.pairs, layouts)}
            if self.captions is not None and self.captions.reads in layouts:
                (seen,) = layouts[self.captions.reads]
                layouts[self.captions.reads] = (replace(seen, num_outputs=1 + seen.num_tokens),)
                if example.messages:
                    num_tokens = len(self.captions.ids(text_of(example)))
                    layouts[DECODER] = (Segment(num_tokens),)
                    num_loss_tokens[DECODER] = num_tokens - 1
        except ValueError as error:
            raise UserError(f"{example.where or example.id}: {error}") from None
        return Sample(id=example.id, layouts=layouts, num_loss_tokens=num_loss_tokens)

    def _has(self, name: str, example: Example) -> bool:
        fed = self.towers[name]
        return bool(example.messages) if isinstance(fed, TextLayout) else bool(example.media.get(fed.modality))

    def _segment(self, name: str, example: Example) -> Segment:
        fed = self.towers[name]
        if isinstance(fed, TextLayout):
            return fed.segment(text_of(example))
        segment = fed.segment(0, example.media[fed.modality][0])
        return Segment(segment.num_tokens, num_outputs=1, grid=segment.grid)


def text_of(example: Example) -> str:
    return example.messages[0].content
