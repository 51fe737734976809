"""From a conversation to token ids by the tokenizer's own chat template, with the places of the assistant's answers.

The places are found by rendering the conversation up to each answer: whatever the template writes before it (the
generation prompt) carries no loss; the answer does, with the token that ends the turn.

Limits: needs a fast tokenizer (for offsets). A template that writes earlier turns otherwise once more turns follow is
refused, except that it may drop what it writes between the generation prompt and an answer.
"""

from collections.abc import Sequence
from typing import Any

from motet.data.conversation.example import Message
from motet.errors import UserError


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
