"""How texts are fed to text encoders and caption decoders. Imports no torch.

Texts are tokenized as the family's own processor does it: a text of CLIP ends with the end-of-text token, where its
features are taken; one of SigLIP is padded to the longest that the encoder takes, because its features are those of
the last position; one of BERT is left as it is. Longer texts are truncated.
"""

from dataclasses import dataclass
from typing import Any

from motet.assignment.sample import Segment
from motet.errors import UserError
from motet.families.token_counts import config_value
from motet.plan import DECODER

LEGACY_END = 2
"""The `eos_token_id` of CLIP configurations that take the features at the token with the highest id."""


def check_tokenizer(tokenizer: Any, config: Any, name: str) -> None:
    """Raises `UserError` if the tokenizer has more tokens than the vocabulary of the model. `name`: for messages."""
    own = config_value(config, "vocab_size")
    if len(tokenizer) > own:
        raise UserError(
            f"{name}: its vocabulary has {own} tokens, but the tokenizer has {len(tokenizer)}; set "
            f"vocab_size to {len(tokenizer)} or take the model's own tokenizer"
        )


@dataclass(frozen=True)
class TextLayout:
    """How a text encoder is fed: token ids and layout of a text."""

    tokenizer: Any
    """A tokenizer of transformers, or a `motet.data.tokenizer.PlainTokenizer`."""
    config: Any
    """The encoder's configuration: its complete values, or the transformers object."""
    name: str
    """The key of the run file, for messages."""

    def __post_init__(self) -> None:
        check_tokenizer(self.tokenizer, self.config, self.name)

    def ids(self, text: str) -> list[int]:
        """The token ids, as many as `segment` has tokens."""
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
        """The text's entry in the encoder's layout."""
        ids = self.ids(text)
        grid: tuple[int, ...] = (len(ids),)
        if config_value(self.config, "model_type") == "clip_text_model":
            end = config_value(self.config, "eos_token_id")
            grid = (len(ids), ids.index(max(ids) if end == LEGACY_END else end))
        return Segment(len(ids), num_outputs=1, grid=grid)


@dataclass(frozen=True)
class CaptionLayout:
    """How a caption decoder is fed: a text between a token that begins it and one that ends it."""

    tokenizer: Any
    """As that of `TextLayout`."""
    config: Any
    """The decoder's configuration."""
    reads: str
    """The module to whose features the decoder attends."""

    def __post_init__(self) -> None:
        check_tokenizer(self.tokenizer, self.config, f"model.{DECODER}")

    def ids(self, text: str) -> list[int]:
        """The token ids; all but the first are predicted. Texts that are too long are truncated."""
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
        """The id of the first of these special tokens that the tokenizer has."""
        found = (getattr(self.tokenizer, name, None) for name in names)
        return next((token for token in found if token is not None), None)
