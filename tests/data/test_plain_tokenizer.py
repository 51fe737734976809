"""The tokenizer that is read without transformers counts, writes and marks as transformers' own does."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling import examples
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from motet.data.chat import (
    PlainTokenizer,
    plain_word_level_tokenizer,
    read_tokenizer,
    tokenize_conversation,
    tokenize_prompt,
    word_level_tokenizer,
)
from motet.data.example import Message
from motet.errors import UserError

WORDS = ["What do you see?", "A cat.", "Be brief."]
TEMPLATE = (
    "{{ bos_token }}{{ {'a': '<é>'} | tojson }}{% for message in messages %}\n"
    "    {% if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\n"
    "    {% generation %}\n<|{{ message.role }}|>{{ message.content | trim }}{{ eos_token }}\n    {% endgeneration %}\n"
    "    {% if loop.index > 9 %}{% break %}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

SPOKEN = st.text(alphabet="abé <>|?1\n", min_size=1, max_size=12).filter(lambda text: text.strip())


def byte_level(folder: Path) -> Path:
    """A byte-level BPE with a beginning, an end and a placeholder, saved as transformers saves it."""
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE({**alphabet, "ca": len(alphabet), "cat": len(alphabet) + 1}, [("c", "a"), ("ca", "t")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<image>"],
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    return folder


def finder(folder: Path) -> Any:
    return lambda name: folder / name if (folder / name).is_file() else None


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, PlainTokenizer]:
    folder = byte_level(tmp_path_factory.mktemp("tokenizer"))
    plain = read_tokenizer(finder(folder))
    assert plain is not None
    return AutoTokenizer.from_pretrained(folder), plain


def check_equal(theirs: Any, ours: PlainTokenizer, messages: list[Message]) -> None:
    assert len(ours) == len(theirs)
    assert set(ours.all_special_ids) == set(theirs.all_special_ids)
    assert ours.unk_token_id == theirs.unk_token_id
    assert tokenize_prompt(ours, messages[:1]) == tokenize_prompt(theirs, messages[:1])
    assert tokenize_conversation(ours, messages) == tokenize_conversation(theirs, messages)


@examples(40)
@given(asked=SPOKEN, answered=SPOKEN)
def test_conversations_are_written_alike(pair: Any, asked: str, answered: str) -> None:
    check_equal(*pair, [Message("user", f"<image>{asked}"), Message("assistant", answered.strip())])


def test_the_built_in_tokenizer() -> None:
    messages = [Message("user", "<image>What do you see?"), Message("assistant", "3 1 cat")]
    check_equal(word_level_tokenizer(WORDS), plain_word_level_tokenizer(WORDS), messages)


def test_templates_that_stand_elsewhere(pair: Any, tmp_path: Path) -> None:
    theirs, _ = pair
    for where in ("tokenizer_config.json", "chat_template.json", "list"):
        folder = byte_level(tmp_path / where)
        (folder / "chat_template.jinja").unlink()
        file = folder / ("chat_template.json" if where == "chat_template.json" else "tokenizer_config.json")
        values = json.loads(file.read_text()) if file.exists() else {}
        named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]
        file.write_text(json.dumps({**values, "chat_template": named if where == "list" else TEMPLATE}))
        ours = read_tokenizer(finder(folder))
        assert ours is not None
        check_equal(theirs, ours, [Message("user", "a cat?"), Message("assistant", "cat")])


def test_tokens_that_only_the_settings_name(tmp_path: Path) -> None:
    folder = byte_level(tmp_path)
    settings_file = folder / "tokenizer_config.json"
    values = json.loads(settings_file.read_text())
    decoder = {"300": {"content": "<|late|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}}
    settings_file.write_text(json.dumps({**values, "added_tokens_decoder": decoder}))
    ours = read_tokenizer(finder(folder))
    assert ours is not None
    assert len(ours("a<|late|>b", add_special_tokens=False)["input_ids"]) == 3


def test_a_templates_refusal_is_told(pair: Any) -> None:
    with pytest.raises(UserError, match="the chat template rejects the conversation: no tools"):
        tokenize_prompt(pair[1], [Message("tool", "x")])  # type: ignore[arg-type]


def test_folders_without_a_fast_tokenizer(tmp_path: Path) -> None:
    assert read_tokenizer(finder(tmp_path)) is None
