"""Layouts of examples for every module of a model's graph: tokens, and where modules' outputs enter others.

Each module has a `ModuleLayout`; `SampleLayouts` asks them in the order of the graph. Torch is not imported, and no
pixels or waveforms are decoded.

Outputs of encoders enter the language model's sequence according to `merge`:

* "placeholder": at their placeholders, each as many tokens as its encoder outputs;
* "prepend": before the sample's own tokens, encoder after encoder; the placeholders are removed from the text;
* "cross_attention": not at all; the placeholders are removed from the text.

Texts are tokenized as the family's own processor does it: a text of CLIP ends with the end-of-text token, where its
features are taken; one of SigLIP is padded to the longest that the encoder takes, because its features are those of
the last position; one of BERT is left as it is. Longer texts are truncated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

from motet.assignment.sample import IGNORED_LABEL, Sample, Segment
from motet.data.chat import check_tokenizer, tokenize_conversation, tokenize_prompt
from motet.data.encoder_layout import EncoderLayout, Layouts
from motet.data.example import PLACEHOLDERS, Example, Message, in_example, placeholders_in
from motet.data.generated import QueryLayout
from motet.errors import UserError
from motet.families.encoders.token_counts import LEGACY_END, Pooling, config_value, pooled
from motet.plan import DECODER, LANGUAGE_MODEL
from motet.schedule.batch_sync import Pair, num_comparisons


class ModuleLayout(Protocol):
    """Layouts of examples for one module."""

    def lay_out(self, example: Example, layouts: Layouts) -> tuple[tuple[Segment, ...], int | None]:
        """The module's layout of an example, () if it has nothing for the module; and the number of tokens that carry
        its loss, None if there is no loss. `layouts`: those of the modules before it in the graph.

        Raises `ValueError` if the module cannot take the example."""


@dataclass
class ConversationText:
    """A conversation as the language model reads it."""

    input_ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    layout: list[Segment] = field(default_factory=list)

    def add_tokens(self, ids: list[int], is_answer: list[bool]) -> None:
        if ids:
            self.input_ids += ids
            self.labels += [i if answer else IGNORED_LABEL for i, answer in zip(ids, is_answer, strict=True)]
            self.layout.append(Segment(len(ids)))

    def add_outputs(
        self,
        source: str,
        segment: Segment,
        placeholder_id: int,
        *,
        target: str | None = None,
        is_answer: bool = False,
    ) -> None:
        """`target`: the generator that reads these places. In an answer the first of them is learned: that something
        is to be generated now."""
        self.input_ids += [placeholder_id] * segment.outputs
        first = placeholder_id if is_answer else IGNORED_LABEL
        self.labels += [first] + [IGNORED_LABEL] * (segment.outputs - 1)
        self.layout.append(Segment(segment.outputs, source=source, item=segment.item, target=target))


@dataclass(frozen=True, eq=False)
class ConversationLayout:
    """A language model that reads conversations with the outputs of encoders.

    Raises `UserError` if the tokenizer has no chat template or does not know a placeholder."""

    tokenizer: Any
    """A fast tokenizer of transformers, or a `motet.data.chat.PlainTokenizer`."""
    encoders: Mapping[str, EncoderLayout | QueryLayout]
    """Encoders by module, one for each modality; query tokens of generators are in the text as encoder outputs are."""
    merge: str = "placeholder"
    placeholder_ids: dict[str, int] = field(default_factory=dict, init=False)
    """By encoder, the token id at the positions of its outputs."""

    def __post_init__(self) -> None:
        check_tokenizer(self.tokenizer)
        for name, encoder in self.encoders.items():
            ids = self.tokenizer(encoder.token, add_special_tokens=False)["input_ids"]
            if len(ids) != 1 or ids[0] == self.tokenizer.unk_token_id:
                raise UserError(
                    f"model.placeholder_tokens.{name}: the tokenizer does not know {encoder.token!r} as one token; "
                    "name a token that it has and that no text holds, or add it to the tokenizer as a special token"
                )
            self.placeholder_ids[name] = ids[0]

    def lay_out(self, example: Example, layouts: Layouts) -> tuple[tuple[Segment, ...], int | None]:
        text = self.write(example, layouts)
        return tuple(text.layout), sum(label != IGNORED_LABEL for label in text.labels[1:])

    def write(self, example: Example, layouts: Layouts, *, without_last_answer: bool = False) -> ConversationText:
        """The token ids and labels of an example. Raises `UserError`."""
        self._check_media(example)
        messages = tuple(self._with_own_placeholders(message) for message in example.messages)
        if without_last_answer:
            ids = tokenize_prompt(self.tokenizer, messages[:-1])
            is_answer = [False] * len(ids)
            layouts = {name: self._before_last_answer(example, name, own) for name, own in layouts.items()}
        else:
            ids, is_answer = self._tokenized(messages)
        return self._merge(ids, is_answer, layouts)

    def _before_last_answer(self, example: Example, name: str, segments: Sequence[Segment]) -> tuple[Segment, ...]:
        """Without the places of what is to be generated in the last answer."""
        if name not in self.encoders:
            return tuple(segments)
        inside = [m for m in placeholders_in(example.messages[-1].content) if m in self.encoders[name].modalities]
        return tuple(segments[: len(segments) - len(inside)])

    @lru_cache(maxsize=1024)  # noqa: B019 (metadata and tensors of a sample are prepared separately)
    def _tokenized(self, messages: tuple[Message, ...]) -> tuple[list[int], list[bool]]:
        return tokenize_conversation(self.tokenizer, messages)

    def _check_media(self, example: Example) -> None:
        read = {modality for encoder in self.encoders.values() for modality in encoder.modalities}
        for modality, media in example.media.items():
            if media and modality not in read:
                raise UserError(f"{modality}: no encoder of the model takes it; add one that does, or leave it out")

    def _with_own_placeholders(self, message: Message) -> Message:
        content = message.content
        for encoder in self.encoders.values():
            for modality in encoder.modalities:
                content = content.replace(PLACEHOLDERS[modality], encoder.token)
        return Message(message.role, content)

    def _merge(self, ids: list[int], is_answer: list[bool], layouts: Layouts) -> ConversationText:
        text = ConversationText()
        remaining = {name: list(layouts.get(name, ())) for name in self.encoders}
        if self.merge == "prepend":
            for name, segments in remaining.items():
                for segment in segments:
                    text.add_outputs(name, segment, self.placeholder_ids[name])
        encoder_of = {token: name for name, token in self.placeholder_ids.items()}
        first = 0
        for at, token in enumerate(ids):
            if token not in encoder_of:
                continue
            text.add_tokens(ids[first:at], is_answer[first:at])
            first, name = at + 1, encoder_of[token]
            reader = self.encoders[name]
            if isinstance(reader, QueryLayout) and reader.num_queries is None:
                if any(segment.target == reader.target for segment in text.layout):
                    raise UserError(
                        f"generate: has several images, but {reader.target} reads the whole prompt of one; give one in "
                        "each sample, or set the generator's queries"
                    )
                text.add_tokens([token], [is_answer[at]])
                text.layout = [replace(segment, target=reader.target) for segment in text.layout]
                continue
            if not remaining[name]:
                raise UserError(f"its text holds {self.encoders[name].token!r}, which stands for encoder outputs")
            segment = remaining[name].pop(0)
            if self.merge == "placeholder":
                text.add_outputs(name, segment, token, target=self.encoders[name].target, is_answer=is_answer[at])
        text.add_tokens(ids[first:], is_answer[first:])
        if any(remaining.values()):
            raise UserError("the chat template leaves out a placeholder; give another template")
        return text


def check_vocabulary(tokenizer: Any, config: Any, key: str) -> None:
    """Raises `UserError` if the tokenizer has more tokens than the model. `key`: the model's, of the run file."""
    own = config_value(config, "vocab_size")
    if len(tokenizer) > own:
        raise UserError(
            f"{key}: its vocabulary has {own} tokens, but the tokenizer has {len(tokenizer)}; set "
            f"vocab_size to {len(tokenizer)} or take the model's own tokenizer"
        )


@dataclass(frozen=True)
class TextLayout:
    """An encoder of texts."""

    tokenizer: Any
    """A tokenizer of transformers, or a `motet.data.chat.PlainTokenizer`."""
    config: Any
    """The encoder's configuration: its complete values, or the transformers object."""
    key: str
    """Key of the run file, for messages."""
    pooling: Pooling = "alone"

    def __post_init__(self) -> None:
        check_vocabulary(self.tokenizer, self.config, self.key)

    def lay_out(self, example: Example, layouts: Layouts) -> tuple[tuple[Segment, ...], int | None]:
        return (self.segment(example.text),) if example.messages else (), None

    def ids(self, text: str) -> list[int]:
        """The token ids of a text."""
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
        ids = self.ids(text)
        grid: tuple[int, ...] = (len(ids),)
        if config_value(self.config, "model_type") == "clip_text_model":
            end = config_value(self.config, "eos_token_id")
            grid = (len(ids), ids.index(max(ids) if end == LEGACY_END else end))
        return pooled(Segment(len(ids), grid=grid), self.pooling)


@dataclass(frozen=True)
class CaptionLayout:
    """A decoder of captions: it reads a text between a token that begins it and one that ends it."""

    tokenizer: Any
    """A tokenizer of transformers, or a `motet.data.chat.PlainTokenizer`."""
    config: Any
    """The decoder's configuration."""
    reads: str
    """The module to whose features the decoder attends."""

    def __post_init__(self) -> None:
        check_vocabulary(self.tokenizer, self.config, f"model.{DECODER}")

    def lay_out(self, example: Example, layouts: Layouts) -> tuple[tuple[Segment, ...], int | None]:
        if self.reads not in layouts or not example.messages:
            return (), None
        num_tokens = len(self.ids(example.text))
        return (Segment(num_tokens),), num_tokens - 1

    def ids(self, text: str) -> list[int]:
        """The token ids; all but the first are predicted."""
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


@dataclass(frozen=True)
class ComparisonLayout:
    """A contrastive loss: it has no tokens of its own and counts the pairs of modules that it compares."""

    pairs: Sequence[Pair]

    def lay_out(self, example: Example, layouts: Layouts) -> tuple[tuple[Segment, ...], int | None]:
        return (), num_comparisons(self.pairs, layouts)


@dataclass(frozen=True, eq=False)
class SampleLayouts:
    """Makes the metadata of samples from examples."""

    modules: Mapping[str, ModuleLayout]
    """Layouts by module, in the order of the graph: sources before the modules that they enter."""

    def sample(self, example: Example) -> Sample:
        """The metadata of an example. Raises `UserError` naming its file and line."""
        layouts: dict[str, tuple[Segment, ...]] = {}
        num_loss_tokens: dict[str, int] = {}
        with in_example(example):
            for name, module in self.modules.items():
                segments, num_tokens = module.lay_out(example, layouts)
                if segments:
                    layouts[name] = segments
                if num_tokens is not None:
                    num_loss_tokens[name] = num_tokens
        return Sample(id=example.id, layouts=layouts, num_loss_tokens=num_loss_tokens)

    @property
    def placeholder_ids(self) -> dict[str, int]:
        """By encoder, the token id at the positions of its outputs; {} where layouts do not depend on them."""
        layout = self.modules.get(LANGUAGE_MODEL)
        return layout.placeholder_ids if isinstance(layout, ConversationLayout) else {}

    @property
    def conversation(self) -> ConversationLayout:
        """The layout of the language model."""
        layout = self.modules[LANGUAGE_MODEL]
        assert isinstance(layout, ConversationLayout)
        return layout


class SampleSource(Protocol):
    """The metadata of samples, by index."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user, such as which keys of a file are not read."""

    def __len__(self) -> int: ...

    def sample(self, index: int) -> Sample: ...
