"""From a conversation to token ids by the tokenizer's own chat template, with the places of the assistant's answers.

The places are found by rendering the conversation up to each answer: whatever the template writes before it (the
generation prompt) carries no loss; the answer does, with the token that ends the turn.

Limits: needs a fast tokenizer (for offsets). A template that writes earlier turns otherwise once more turns follow is
refused, except that it may drop what it writes between the generation prompt and an answer.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from motet.data.conversation.example import Message
from motet.errors import UserError

# A tokenizer read from its files by the `tokenizers` library and jinja2, without transformers' classes. Pure.
#
# It has what `motet.data.conversation.chat` and `motet.data.preparation.sample_layout` ask of a tokenizer, and stands
# in for transformers' where only the *number* of tokens matters: training takes transformers' own. A test compares the
# two.
#
# Limits: only fast tokenizers (tokenizer.json) with a chat template; of several templates the one called "default".


FindFile = Callable[[str], Path | None]
"""From a file's name to the file, if there is one."""

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SEVERAL_SPECIAL = ("additional_special_tokens", "extra_special_tokens")


class PlainTokenizer:
    """`special_tokens`: by their names in a tokenizer_config.json. `others`: special tokens without such a name."""

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
        # A word of the vocabulary is found in the text as a whole only once it is an added token too.
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
    """None if it is not one that can be read so; transformers may know it all the same."""
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
    """Templates may mark answers by `{% generation %}`; what stands inside is written like the rest."""
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


def check_tokenizer(tokenizer: Any) -> None:
    """Raises `UserError` if conversations cannot be written with it."""
    if not getattr(tokenizer, "is_fast", False):
        raise UserError("tokenizer: is a slow one; give a folder with tokenizer.json")
    if tokenizer.chat_template is None:
        raise UserError("tokenizer: has no chat template; give a folder with chat_template.jinja, or another tokenizer")


def render(tokenizer: Any, messages: Sequence[Message], *, generation_prompt: bool = False) -> str:
    """Raises `UserError` with the template's own words if it refuses the conversation."""
    if not messages:
        return ""
    turns = [{"role": message.role, "content": message.content} for message in messages]
    try:
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=generation_prompt)
    except Exception as error:  # Templates are programs: jinja2 passes on whatever they raise.
        raise UserError(f"the chat template refuses the conversation: {' '.join(str(error).split())}") from None


def tokenize_prompt(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Up to where the assistant's next answer begins."""
    text = render(tokenizer, messages, generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def tokenize_conversation(tokenizer: Any, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """Token ids, and for each whether it belongs to an answer. Raises `UserError`."""
    text = render(tokenizer, messages)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    is_answer = [False] * len(ids)
    for first, last in answer_spans(tokenizer, messages, text):
        own = [t for t, (start, end) in enumerate(offsets) if first < end and start < last]
        for t in range(own[0], _end_of_turn(tokenizer, ids, offsets, text, after=own[-1] + 1)):
            is_answer[t] = True
    return ids, is_answer


def answer_spans(tokenizer: Any, messages: Sequence[Message], text: str) -> list[tuple[int, int]]:
    """Of each answer: the characters [first, last) of the rendered conversation, without the end of the turn."""
    spans = []
    for i, message in enumerate(messages):
        if message.role != "assistant":
            continue
        prompt = render(tokenizer, messages[:i], generation_prompt=True)
        until_here = render(tokenizer, messages[: i + 1])
        first, answer = len(prompt), message.content.strip()
        if text.startswith(until_here):
            begin = text.rfind(answer, first, len(until_here))
        else:
            begin = text.find(answer, first, first + len(answer) + 1)
        if begin < 0 or not text.startswith(prompt):
            raise UserError("the chat template writes a turn otherwise once others follow; give another template")
        spans.append((first, begin + len(answer)))
    return spans


def _end_of_turn(tokenizer: Any, ids: Sequence[int], offsets: Sequence[tuple[int, int]], text: str, after: int) -> int:
    """After the special token that follows the answer, if nothing but space lies between; else `after`."""
    special = set(tokenizer.all_special_ids)
    for t in range(after, len(ids)):
        if ids[t] in special:
            return t + 1
        if text[slice(*offsets[t])].strip():
            break
    return after
