"""Tokenizers and chat templates: from a conversation to token ids, with the positions of the assistant's answers.

Answers are found by rendering the conversation up to each of them: what the template writes before an answer (the
generation prompt) carries no loss; the answer and the token that ends its turn do.

`PlainTokenizer` is read by the `tokenizers` library and jinja2 and imports no torch. It replaces the tokenizer of
transformers where only the number of tokens matters; training uses that of transformers. A test compares the two.
`word_level_tokenizer` makes a small tokenizer for tasks that need no download, for tests and for random weights.

Limits: tokenizers must be fast (tokenizer.json, for offsets) and have a chat template; of several templates the one
called "default" is used. A template that changes earlier turns when more turns follow is refused, except that it may
drop what it writes between the generation prompt and an answer.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

from motet.data.example import PLACEHOLDERS, Message
from motet.errors import UserError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FindFile = Callable[[str], Path | None]
"""From a file's name to its path; None if there is no such file."""

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SEVERAL_SPECIAL = ("additional_special_tokens", "extra_special_tokens")

PAD, UNKNOWN, USER, ASSISTANT, SYSTEM, END = "<pad>", "<unk>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"
SPECIAL_TOKENS = {"pad_token": PAD, "unk_token": UNKNOWN, "eos_token": END}
OTHER_SPECIAL_TOKENS = [USER, ASSISTANT, SYSTEM, PLACEHOLDERS["image"], PLACEHOLDERS["audio"]]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class PlainTokenizer:
    """A fast tokenizer with a chat template, without transformers.

    `special_tokens`: by their names in a tokenizer_config.json. `others`: special tokens without a name."""

    is_fast = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat_template: str | None,
        special_tokens: Mapping[str, str],
        others: Sequence[str] = (),
    ) -> None:
        self._tokenizer, self.chat_template, self._special = tokenizer, chat_template, special_tokens
        tokenizer.no_padding()
        tokenizer.no_truncation()
        # The tokenizer splits special tokens unless they are added tokens, too.
        added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        tokens = dict.fromkeys([*special_tokens.values(), *others])
        tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in tokens if token not in added])
        self.all_special_ids = [tokenizer.token_to_id(token) for token in tokens]
        ids = {name: tokenizer.token_to_id(token) for name, token in special_tokens.items()}
        self.unk_token_id, self.bos_token_id = ids.get("unk_token"), ids.get("bos_token")
        self.eos_token_id, self.sep_token_id = ids.get("eos_token"), ids.get("sep_token")
        self.cls_token_id = ids.get("cls_token")

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def __call__(self, text: str, **options: Any) -> dict[str, Any]:
        encoded = self._tokenizer.encode(text, add_special_tokens=options.get("add_special_tokens", True))
        return {"input_ids": encoded.ids, "offset_mapping": encoded.offsets}

    def apply_chat_template(self, turns: Sequence[Mapping[str, str]], **options: Any) -> str:
        """The conversation as text."""
        return self._template.render(
            messages=turns,
            tools=None,
            documents=None,
            add_generation_prompt=options.get("add_generation_prompt", False),
            **self._special,
        )

    @cached_property
    def _template(self) -> Any:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(), "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form))
        return environment.from_string(self.chat_template or "")


def read_tokenizer(find: FindFile) -> PlainTokenizer | None:
    """Reads a tokenizer from its files; returns None if it is of a kind that only transformers can read."""
    tokens, settings = find("tokenizer.json"), find("tokenizer_config.json")
    if tokens is None or settings is None:
        return None
    values = json.loads(settings.read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(tokens))
    added = sorted((int(i), token) for i, token in (values.get("added_tokens_decoder") or {}).items())
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_tokens([_added(token) for _, token in added if token["content"] not in known])
    others = [_content(token) for key in SEVERAL_SPECIAL for token in _entries(values.get(key))]
    return PlainTokenizer(
        tokenizer,
        chat_template=_read_template(find, values),
        special_tokens={name: _content(values[name]) for name in SPECIAL if values.get(name)},
        others=others,
    )


def _added(token: Mapping[str, Any]) -> AddedToken:
    flags = {key: token[key] for key in ("single_word", "lstrip", "rstrip", "normalized", "special") if key in token}
    return AddedToken(token["content"], **flags)


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, Mapping) else str(token)


def _entries(tokens: Any) -> Sequence[Any]:
    return list(tokens.values()) if isinstance(tokens, Mapping) else tokens or ()


def _read_template(find: FindFile, values: Mapping[str, Any]) -> str | None:
    file = find("chat_template.jinja")
    if file is not None:
        return file.read_text(encoding="utf-8")
    file = find("chat_template.json")
    template = json.loads(file.read_text(encoding="utf-8")) if file else values
    template = template.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _generation_tag() -> Any:
    """The jinja2 extension for templates that mark answers by `{% generation %}`; the mark changes nothing."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 (jinja2's interface)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return Generation


def word_level_tokenizer(texts: Iterable[str]) -> "PreTrainedTokenizerFast":
    """A tokenizer of digits and the words and signs of `texts`, with placeholders and a chat template.

    Every digit is a token of its own; unknown words become `<unk>`. A text that is a placeholder is one token."""
    from transformers import PreTrainedTokenizerFast

    placeholders, words = _separated(texts)
    return PreTrainedTokenizerFast(
        tokenizer_object=_word_level(placeholders, words),
        **SPECIAL_TOKENS,
        additional_special_tokens=[*OTHER_SPECIAL_TOKENS, *placeholders],
        chat_template=CHAT_TEMPLATE,
        padding_side="right",
    )


def plain_word_level_tokenizer(texts: Iterable[str]) -> PlainTokenizer:
    """The same tokenizer as `word_level_tokenizer`, without transformers."""
    placeholders, words = _separated(texts)
    return PlainTokenizer(
        _word_level(placeholders, words),
        chat_template=CHAT_TEMPLATE,
        special_tokens=SPECIAL_TOKENS,
        others=[*OTHER_SPECIAL_TOKENS, *placeholders],
    )


def _separated(texts: Iterable[str]) -> tuple[list[str], list[str]]:
    """Returns the placeholders among the texts, beside those of images and sounds, and the others."""
    texts = list(texts)
    placeholders = [text for text in texts if text in PLACEHOLDERS.values() and text not in OTHER_SPECIAL_TOKENS]
    return placeholders, [text for text in texts if text not in PLACEHOLDERS.values()]


def _word_level(placeholders: Sequence[str], texts: Iterable[str]) -> Tokenizer:
    special = [PAD, UNKNOWN, USER, ASSISTANT, SYSTEM, END, PLACEHOLDERS["image"], PLACEHOLDERS["audio"], *placeholders]
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


def check_tokenizer(tokenizer: Any) -> None:
    """Raises `UserError` if the tokenizer cannot tokenize conversations."""
    if not getattr(tokenizer, "is_fast", False):
        raise UserError("tokenizer: is a slow tokenizer; give a folder with tokenizer.json")
    if tokenizer.chat_template is None:
        raise UserError("tokenizer: has no chat template; give a folder with chat_template.jinja, or another tokenizer")


def render(tokenizer: Any, messages: Sequence[Message], *, generation_prompt: bool = False) -> str:
    """The conversation as text. Raises `UserError` with the template's message if the template refuses it."""
    if not messages:
        return ""
    turns = [{"role": message.role, "content": message.content} for message in messages]
    try:
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=generation_prompt)
    except Exception as error:  # Templates are programs: jinja2 passes on whatever they raise.
        raise UserError(f"the chat template rejects the conversation: {one_line(error)}") from None


def tokenize_prompt(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """The token ids of a conversation up to the beginning of the assistant's next answer."""
    text = render(tokenizer, messages, generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def tokenize_conversation(tokenizer: Any, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """The token ids of a conversation, and for each whether it belongs to an answer. Raises `UserError`."""
    text = render(tokenizer, messages)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    is_answer = [False] * len(ids)
    for first, last in answer_spans(tokenizer, messages, text):
        own = [t for t, (start, end) in enumerate(offsets) if first < end and start < last]
        for t in range(own[0], end_of_turn(tokenizer, ids, offsets, text, after=own[-1] + 1)):
            is_answer[t] = True
    return ids, is_answer


def answer_spans(tokenizer: Any, messages: Sequence[Message], text: str) -> list[tuple[int, int]]:
    """The characters [first, last) of each answer in the rendered conversation, without the end of the turn."""
    spans = []
    for i, message in enumerate(messages):
        if message.role != "assistant":
            continue
        prompt = render(tokenizer, messages[:i], generation_prompt=True)
        until_here = text if i + 1 == len(messages) else render(tokenizer, messages[: i + 1])
        first, answer = len(prompt), message.content.strip()
        if text.startswith(until_here):
            begin = text.rfind(answer, first, len(until_here))
        else:
            begin = text.find(answer, first, first + len(answer) + 1)
        if begin < 0 or not text.startswith(prompt):
            raise UserError("the chat template changes a turn when others follow; give another template")
        spans.append((first, begin + len(answer)))
    return spans


def end_of_turn(tokenizer: Any, ids: Sequence[int], offsets: Sequence[tuple[int, int]], text: str, after: int) -> int:
    """The position after the special token that ends the turn; `after` if text comes before such a token."""
    special = set(tokenizer.all_special_ids)
    for t in range(after, len(ids)):
        if ids[t] in special:
            return t + 1
        if text[slice(*offsets[t])].strip():
            break
    return after
