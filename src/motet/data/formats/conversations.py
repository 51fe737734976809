"""Conversations in the LLaVA form: JSON lines, or one JSON list, with images and sounds in files. Imports no torch.

    {"id": "7", "image": "cat.jpg", "conversations": [
        {"from": "human", "value": "<image>\\nWhat is this?"}, {"from": "gpt", "value": "A cat."}]}

`image` and `audio` are a path or a list of paths; `<image>` and `<audio>` in the text mark their positions in order.
A conversation may begin with a "system" turn; then "human" and "gpt" alternate, and the last one is "gpt".

Every record and the presence of its media files are checked when the file is opened; media files are read when they are
first needed. Limits: the records are held in memory, on every rank.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from motet.data.example import PLACEHOLDERS, Example, Media, Message, Modality
from motet.data.formats.media import media_of
from motet.errors import UserError

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}

KEYS = ("id", "image", "audio", "conversations")
"""Keys that are read; others are ignored."""


class ConversationExamples:
    """The records of a file, in their order."""

    def __init__(self, file: Path, folders: Mapping[Modality, Path]) -> None:
        """`folders`: what the media's paths are relative to. Raises `UserError` naming file and line."""
        self._examples = [parse_record(record, where, folders) for where, record in read_records(file)]
        self.fingerprint = hashlib.sha256(file.read_bytes()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]


def read_records(file: Path) -> Iterator[tuple[str, Any]]:
    """Yields (file and line, or file and index in the list; record). Raises `UserError`."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); give a file of conversations") from None
    except UnicodeDecodeError:
        raise UserError(f"{file}: is not UTF-8 text; give a file of JSON lines") from None
    if text.lstrip().startswith("["):
        try:
            records = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file}: is not JSON: {error}") from None
        yield from ((f"{file}: record {i}", record) for i, record in enumerate(records))
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{file}:{number}: is not JSON: {error}") from None
            yield f"{file}:{number}", record


def parse_record(record: Any, where: str, folders: Mapping[Modality, Path]) -> Example:
    """Reads a conversation with its media in files. Raises `UserError` beginning with `where`."""
    return make_example(
        record, where, lambda own: {modality: _files(own, modality, folders[modality]) for modality in PLACEHOLDERS}
    )


def make_example(
    record: Any,
    where: str,
    media_of: Callable[[Mapping[str, Any]], Mapping[Modality, tuple[Media, ...]]],
    name: str | None = None,
) -> Example:
    """Reads a conversation. `name`: its default id. Raises `UserError` beginning with `where`."""
    try:
        if not isinstance(record, dict):
            raise UserError(f"is not a mapping; give one with the keys {', '.join(KEYS)}")
        messages = _messages(record.get("conversations"))
        media = media_of(record)
        for modality, placeholder in PLACEHOLDERS.items():
            num_placeholders = sum(message.content.count(placeholder) for message in messages)
            if num_placeholders != len(media[modality]):
                raise UserError(
                    f"conversations: hold {num_placeholders} {placeholder}, but {modality} names "
                    f"{len(media[modality])} files; give one placeholder for each file"
                )
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    given = record.get("id")
    return Example(id=str(given if given is not None else name or where), messages=messages, media=media, where=where)


def _messages(turns: Any) -> tuple[Message, ...]:
    if not isinstance(turns, list) or not turns:
        raise UserError('conversations: is missing or empty; give a list of turns {"from": ..., "value": ...}')
    messages = tuple(_message(i, turn) for i, turn in enumerate(turns))
    spoken = [message.role for message in messages if message.role != "system"]
    if any(message.role == "system" for message in messages[1:]):
        raise UserError("conversations: has a system turn that is not the first; put it first")
    if not spoken or spoken[-1] != "assistant":
        raise UserError("conversations: has no answer at its end; the last turn must be from gpt")
    for i, role in enumerate(spoken):
        if role != ("user", "assistant")[i % 2]:
            raise UserError(
                f"conversations: turn {i + len(messages) - len(spoken)} must be from {('human', 'gpt')[i % 2]}"
            )
    return messages


def _message(i: int, turn: Any) -> Message:
    if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
        raise UserError(f'conversations[{i}]: has no text; give {{"from": ..., "value": ...}}')
    role = ROLES.get(str(turn.get("from")))
    if role is None:
        raise UserError(f"conversations[{i}].from: is {turn.get('from')!r}; give one of {', '.join(ROLES)}")
    content = turn["value"].strip()
    if not is_text(content):
        raise UserError(f"conversations[{i}].value: holds half of a character (a surrogate by itself); mend the text")
    if role == "assistant" and not content:
        raise UserError(f"conversations[{i}].value: is an empty answer; give its text, or leave the turn out")
    if role == "assistant" and any(placeholder in content for placeholder in PLACEHOLDERS.values()):
        raise UserError(f"conversations[{i}].value: an answer cannot hold images or clips; put them into a question")
    return Message(role, content)  # type: ignore[arg-type]


def is_text(content: str) -> bool:
    """Whether a text has no single surrogates, which JSON can hold but no tokenizer reads."""
    try:
        content.encode()
    except UnicodeEncodeError:
        return False
    return True


def _files(record: Mapping[str, Any], modality: Modality, folder: Path) -> tuple[Media, ...]:
    given = record.get(modality)
    paths = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise UserError(f"{modality}: is {given!r}; give a path or a list of paths")
    for path in paths:
        if not os.path.isfile(folder / path):  # Unlike `Path.is_file`, it accepts any path.
            raise UserError(f"{modality}: {folder / path}: there is no such file")
    return tuple(media_of(modality, folder / path) for path in paths)
