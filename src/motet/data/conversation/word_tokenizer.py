"""A small word-level tokenizer, built locally: for *dial a digit*, for tests and for models with random weights.

It is a real `PreTrainedTokenizerFast` with special tokens, placeholders and a chat template, and is saved to and loaded
from a folder like any other; `plain_word_level_tokenizer` is the same one without torch. Every digit is a token of its
own.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

from motet.data.conversation.chat import PlainTokenizer
from motet.data.conversation.example import PLACEHOLDERS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, UNKNOWN, USER, ASSISTANT, SYSTEM, END = "<pad>", "<unk>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"
SPECIAL_TOKENS = {"pad_token": PAD, "unk_token": UNKNOWN, "eos_token": END}
OTHER_SPECIAL_TOKENS = [USER, ASSISTANT, SYSTEM, *PLACEHOLDERS.values()]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def word_level_tokenizer(texts: Iterable[str]) -> "PreTrainedTokenizerFast":
    """A tokenizer that knows the digits and the words and signs of `texts`; anything else becomes `<unk>`."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=_word_level(texts),
        **SPECIAL_TOKENS,
        additional_special_tokens=OTHER_SPECIAL_TOKENS,
        chat_template=CHAT_TEMPLATE,
        padding_side="right",
    )


def plain_word_level_tokenizer(texts: Iterable[str]) -> PlainTokenizer:
    return PlainTokenizer(
        _word_level(texts),
        chat_template=CHAT_TEMPLATE,
        special_tokens=SPECIAL_TOKENS,
        others=OTHER_SPECIAL_TOKENS,
    )


def _word_level(texts: Iterable[str]) -> Tokenizer:
    special = [PAD, UNKNOWN, USER, ASSISTANT, SYSTEM, END, *PLACEHOLDERS.values()]
    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Split(Regex(r"\d|[^\w\s]"), behavior="isolated"),
        ]
    )
    words = {word for text in texts for word, _ in splitter.pre_tokenize_str(text)} - set("0123456789")
    vocabulary = [*special, *"0123456789", *sorted(words)]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = splitter
    return tokenizer
