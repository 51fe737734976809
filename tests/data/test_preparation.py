"""Samples and their tensors fit each other, for every family and every way in which encoders enter the sequence."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conversation_files import CONVERSATIONS, words, write_conversations, write_media
from feeding import FAMILIES, SOUND, encoder_input
from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer

from motet.assignment.sample import IGNORED_LABEL, Segment
from motet.data.chat import CHAT_TEMPLATE, word_level_tokenizer
from motet.data.example import Example, Message
from motet.data.formats.conversations import ConversationExamples
from motet.data.formats.records import RecordReader
from motet.data.layouts import ConversationLayout, ModuleLayout
from motet.data.preparation import EncoderInput, Preparation
from motet.errors import UserError
from motet.plan import LANGUAGE_MODEL

TOKENIZER = word_level_tokenizer(words())
IMAGES, CLIPS = ("vision", "audio")
VISION_FAMILIES = [family for family in FAMILIES if encoder_input(family).modality == "image"]
AUDIO_FAMILIES = [family for family in FAMILIES if encoder_input(family).modality == "audio"]


def conversation_layouts(
    tokenizer: Any, encoders: Mapping[str, EncoderInput], merge: str = "placeholder"
) -> dict[str, ModuleLayout]:
    return {**encoders, LANGUAGE_MODEL: ConversationLayout(tokenizer, encoders, merge)}


def prepare(tokenizer: Any, encoders: Mapping[str, EncoderInput], merge: str = "placeholder") -> Preparation:
    return Preparation(conversation_layouts(tokenizer, encoders, merge))


@pytest.fixture
def examples(tmp_path: Path) -> ConversationExamples:
    write_media(tmp_path)
    file = write_conversations(tmp_path / "data.jsonl", [r for r in CONVERSATIONS if r["id"] != "long"])
    return ConversationExamples(RecordReader(file, {"image": tmp_path, "audio": tmp_path}, ("image", "audio")))


def preparation(vision: str = "siglip", audio: str = "whisper", merge: str = "placeholder") -> Preparation:
    return Preparation(
        conversation_layouts(TOKENIZER, {"vision": encoder_input(vision), "audio": encoder_input(audio)}, merge)
    )


@pytest.mark.parametrize("merge", ["placeholder", "prepend", "cross_attention"])
@pytest.mark.parametrize(
    ("vision", "audio"),
    [(v, "whisper") for v in VISION_FAMILIES] + [("siglip", a) for a in AUDIO_FAMILIES[1:]],
)
def test_layouts_fit_tensors(examples: ConversationExamples, vision: str, audio: str, merge: str) -> None:
    prepared = preparation(vision, audio, merge)
    for example in (examples[i] for i in range(len(examples))):
        sample = prepared.sample(example)
        text = prepared.features(example, "language_model")
        assert text["input_ids"].shape == text["labels"].shape == (sample.num_tokens("language_model"),)
        spoken = text["labels"] != IGNORED_LABEL
        assert (text["labels"][spoken] == text["input_ids"][spoken]).all()
        assert sample.num_loss_tokens["language_model"] == spoken[1:].sum() > 0
        entering = {s for s in sample.layouts["language_model"] if s.source}
        for name, modality in (("vision", "image"), ("audio", "audio")):
            assert sample.has(name) == bool(example.media[modality])
            own = {(s.item, s.num_tokens) for s in entering if s.source == name}
            expected = {(s.item, s.outputs) for s in sample.layouts.get(name, ())}
            assert own == (set() if merge == "cross_attention" else expected)
            if sample.has(name) and prepared.tools[name] is SOUND:
                assert len(prepared.features(example, name)["input_features"]) == len(sample.layouts[name])


def test_outputs_stand_at_their_placeholders(examples: ConversationExamples) -> None:
    prepared, example = preparation(), examples[1]
    layout = prepared.sample(example).layouts["language_model"]
    assert [(s.source, s.item) for s in layout if s.source] == [
        ("vision", 0),
        ("audio", 0),
        ("vision", 1),
        ("audio", 1),
    ]
    ids = prepared.features(example, "language_model")["input_ids"].tolist()
    start = 0
    for segment in layout:
        tokens = set(TOKENIZER.convert_ids_to_tokens(ids[start : start + segment.num_tokens]))
        expected = {"vision": {"<image>"}, "audio": {"<audio>"}}
        assert tokens == expected[segment.source] if segment.source else not tokens & {"<image>", "<audio>"}
        start += segment.num_tokens


def test_prepended_outputs_come_encoder_after_encoder(examples: ConversationExamples) -> None:
    layout = preparation(merge="prepend").sample(examples[1]).layouts["language_model"]
    assert [(s.source, s.item) for s in layout[:4]] == [("vision", 0), ("vision", 1), ("audio", 0), ("audio", 1)]
    assert {s.source for s in layout[4:]} == {None}


@pytest.mark.parametrize("merge", ["prepend", "cross_attention"])
def test_placeholders_vanish_from_the_text(examples: ConversationExamples, merge: str) -> None:
    prepared = preparation(merge=merge)
    sample = prepared.sample(examples[1])
    own = [s for s in sample.layouts["language_model"] if s.source is None]
    ids = prepared.features(examples[1], "language_model")["input_ids"].tolist()[-sum(s.num_tokens for s in own) :]
    assert not set(TOKENIZER.convert_ids_to_tokens(ids)) & {"<image>", "<audio>"}


@pytest.mark.parametrize("merge", ["placeholder", "prepend", "cross_attention"])
def test_the_prompt_is_the_sequence_up_to_the_last_answer(examples: ConversationExamples, merge: str) -> None:
    prepared = preparation(merge=merge)
    for example in (examples[i] for i in range(len(examples))):
        prompt = prepared.prompt(example)
        text = prepared.features(example, "language_model")
        assert (text["input_ids"][: len(prompt)] == prompt).all()
        answer = text["labels"][len(prompt) :]
        assert TOKENIZER.decode(answer).replace(" .", ".") == example.messages[-1].content + " <|end|>"


def test_the_tokenizers_own_placeholder_takes_the_conversations_place(examples: ConversationExamples) -> None:
    tokenizer = word_level_tokenizer(words())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image_pad|>"]})
    vision = replace(encoder_input("siglip"), placeholder="<|image_pad|>")
    prepared = prepare(tokenizer, {"vision": vision, "audio": encoder_input("whisper")})
    ids = prepared.features(examples[0], "language_model")["input_ids"].tolist()
    assert ids.count(prepared.conversation.placeholder_ids["vision"]) == 144
    assert tokenizer.convert_tokens_to_ids("<image>") not in ids


def test_text_alone_has_one_segment(examples: ConversationExamples) -> None:
    sample = preparation().sample(examples[2])
    assert [type(s) for s in sample.layouts["language_model"]] == [Segment]
    assert not sample.has("vision")


def test_a_placeholder_that_the_tokenizer_does_not_know_is_refused() -> None:
    unknown = replace(encoder_input("siglip"), placeholder="<|picture|>")
    with pytest.raises(UserError, match=r"model\.placeholder_tokens\.vision: .*'<\|picture\|>' as one token"):
        prepare(TOKENIZER, {"vision": unknown})


def test_media_without_an_encoder_are_refused(examples: ConversationExamples) -> None:
    with pytest.raises(UserError, match=r"data\.jsonl:2: audio: no encoder of the model takes it; add one"):
        prepare(TOKENIZER, {"vision": encoder_input("siglip")}).sample(examples[1])


def test_placeholders_must_be_as_many_as_files(examples: ConversationExamples) -> None:
    example = examples[0]
    twice = Example("x", (Message("user", "<image><image>"), Message("assistant", "A")), example.media)
    with pytest.raises(UserError, match="x: has 2 <image> for 1 image files"):
        preparation().sample(twice)


def test_a_placeholder_token_in_the_text_is_refused() -> None:
    tokenizer = word_level_tokenizer(words())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|pad|>"]})
    prepared = Preparation(
        conversation_layouts(tokenizer, {"vision": replace(encoder_input("siglip"), placeholder="<|pad|>")})
    )
    example = Example("x", (Message("user", "<|pad|>"), Message("assistant", "A")))
    with pytest.raises(UserError, match=r"x: its text holds '<\|pad\|>'"):
        prepared.sample(example)


def test_a_template_that_drops_placeholders_is_refused(examples: ConversationExamples) -> None:
    tokenizer = word_level_tokenizer(words())
    tokenizer.chat_template = CHAT_TEMPLATE.replace("message['content']", "message['content'].replace('<image>', '')")
    prepared = Preparation(
        conversation_layouts(tokenizer, {"vision": encoder_input("siglip"), "audio": encoder_input("whisper")})
    )
    with pytest.raises(UserError, match="leaves out a placeholder"):
        prepared.sample(examples[0])


def test_saved_processors_load_from_their_folders(tmp_path: Path) -> None:
    prepared = preparation()
    prepared.save(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == TOKENIZER.get_vocab()
    assert AutoImageProcessor.from_pretrained(tmp_path / "vision").size == {"height": 96, "width": 96}
    assert AutoFeatureExtractor.from_pretrained(tmp_path / "audio").nb_max_frames == 100
