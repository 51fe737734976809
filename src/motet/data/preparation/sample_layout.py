"""From examples to the metadata of samples: chat template, tokens, and where encoder outputs enter. Pure: no torch.

How images and clips enter the language model's sequence (`merge`):

* "placeholder": where their placeholders stand, each as many tokens as its encoder hands on;
* "prepend": before the sample's own tokens, encoder after encoder; the placeholders vanish from the text;
* "cross_attention": not at all; the placeholders vanish from the text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from motet.assignment.sample import IGNORED_LABEL, Sample, Segment
from motet.data.conversation.chat import check_tokenizer, tokenize_conversation, tokenize_prompt
from motet.data.conversation.example import PLACEHOLDERS, Example, Message
from motet.data.preparation.encoder_layout import EncoderLayout
from motet.errors import UserError
from motet.plan import LANGUAGE_MODEL

EncoderLayouts = Mapping[str, tuple[Segment, ...]]
"""By encoder, one segment for each image or clip."""


@dataclass
class LaidOutText:
    """The language model's side of one sample, as it is written."""

    input_ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    layout: list[Segment] = field(default_factory=list)

    def add_tokens(self, ids: list[int], is_answer: list[bool]) -> None:
        if ids:
            self.input_ids += ids
            self.labels += [i if answer else IGNORED_LABEL for i, answer in zip(ids, is_answer, strict=True)]
            self.layout.append(Segment(len(ids)))

    def add_outputs(self, source: str, segment: Segment, placeholder_id: int) -> None:
        self.input_ids += [placeholder_id] * segment.outputs
        self.labels += [IGNORED_LABEL] * segment.outputs
        self.layout.append(Segment(segment.outputs, source=source, item=segment.item))


class SampleSource(Protocol):
    """The metadata of examples, by index."""

    def __len__(self) -> int: ...

    def sample(self, index: int) -> Sample: ...


@dataclass(frozen=True, eq=False)
class SampleLayouts:
    """Raises `UserError` at once for a tokenizer that cannot serve."""

    tokenizer: Any
    """A fast tokenizer of transformers, or a `motet.data.conversation.chat.PlainTokenizer`."""
    encoders: Mapping[str, EncoderLayout]
    """By module name, one for each modality."""
    merge: str = "placeholder"

    _placeholder_ids: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_tokenizer(self.tokenizer)
        self._placeholder_ids.update({name: self._find_placeholder(name) for name in self.encoders})

    def placeholder_id(self, encoder: str) -> int:
        """The token id that stands where the encoder's outputs go."""
        return self._placeholder_ids[encoder]

    def _find_placeholder(self, encoder: str) -> int:
        token = self.encoders[encoder].token
        ids = self.tokenizer(token, add_special_tokens=False)["input_ids"]
        if len(ids) != 1 or ids[0] == self.tokenizer.unk_token_id:
            raise UserError(
                f"model.placeholder_tokens.{encoder}: the tokenizer does not know {token!r} as one token; "
                "name a token that it has and that no text holds, or add it to the tokenizer as a special token"
            )
        return ids[0]

    def sample(self, example: Example) -> Sample:
        """The metadata. No pixels or waveforms are decoded. Raises `UserError` naming the example's file and line."""
        encoder_layouts, text = self.lay_out(example)
        return Sample(
            id=example.id,
            layouts={LANGUAGE_MODEL: tuple(text.layout), **encoder_layouts},
            num_loss_tokens={LANGUAGE_MODEL: sum(label != IGNORED_LABEL for label in text.labels[1:])},
        )

    def lay_out(self, example: Example, *, without_last_answer: bool = False) -> tuple[EncoderLayouts, LaidOutText]:
        """Of each encoder, and of the language model. Raises `UserError` naming the example's file and line."""
        try:
            encoder_layouts = self._encoder_layouts(example)
            self._check_placeholders(example)
            messages = tuple(self._in_tokenizers_words(message) for message in example.messages)
            if without_last_answer:
                ids = tokenize_prompt(self.tokenizer, messages[:-1])
                is_answer = [False] * len(ids)
            else:
                ids, is_answer = self._tokenized(messages)
            return encoder_layouts, self._merge(ids, is_answer, encoder_layouts)
        except ValueError as error:
            raise UserError(f"{example.where or example.id}: {error}") from None

    @lru_cache(maxsize=1024)  # noqa: B019 (metadata and tensors of a sample are asked for apart)
    def _tokenized(self, messages: tuple[Message, ...]) -> tuple[list[int], list[bool]]:
        return tokenize_conversation(self.tokenizer, messages)

    def _encoder_layouts(self, example: Example) -> EncoderLayouts:
        fed = {encoder.modality for encoder in self.encoders.values()}
        for modality, media in example.media.items():
            if media and modality not in fed:
                raise UserError(f"has {modality} files, but the model has no encoder for them")
        return {
            name: tuple(encoder.segment(item, media) for item, media in enumerate(example.media[encoder.modality]))
            for name, encoder in self.encoders.items()
            if example.media.get(encoder.modality)
        }

    def _check_placeholders(self, example: Example) -> None:
        for modality, placeholder in PLACEHOLDERS.items():
            num_files = len(example.media.get(modality, ()))
            num_placeholders = sum(message.content.count(placeholder) for message in example.messages)
            if num_placeholders != num_files:
                raise UserError(
                    f"has {num_placeholders} {placeholder} for {num_files} {modality} files; give one for each"
                )

    def _in_tokenizers_words(self, message: Message) -> Message:
        content = message.content
        for encoder in self.encoders.values():
            content = content.replace(PLACEHOLDERS[encoder.modality], encoder.token)
        return Message(message.role, content)

    def _merge(self, ids: list[int], is_answer: list[bool], encoder_layouts: EncoderLayouts) -> LaidOutText:
        text = LaidOutText()
        if self.merge == "prepend":
            for name, segments in encoder_layouts.items():
                for segment in segments:
                    text.add_outputs(name, segment, self.placeholder_id(name))
        encoder_of = {self.placeholder_id(name): name for name in self.encoders}
        waiting = {name: list(reversed(encoder_layouts.get(name, ()))) for name in self.encoders}
        first = 0
        for at, token in enumerate(ids):
            if token not in encoder_of:
                continue
            text.add_tokens(ids[first:at], is_answer[first:at])
            first, name = at + 1, encoder_of[token]
            if not waiting[name]:
                raise UserError(f"its text holds {self.encoders[name].token!r}, which stands for encoder outputs")
            segment = waiting[name].pop()
            if self.merge == "placeholder":
                text.add_outputs(name, segment, token)
        text.add_tokens(ids[first:], is_answer[first:])
        if any(waiting.values()):
            raise UserError("the chat template leaves out a placeholder; give another template")
        return text
