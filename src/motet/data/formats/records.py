"""Records of conversations, in the forms in which data sets come, as examples. Imports no torch.

| form | turns | media |
|---|---|---|
| LLaVA | `conversations`: `{"from", "value"}` | `image`, `audio`, `video`: one or a list, at `<image>`, ... |
| LLaVA-Video | the same | `video`; without images and `<video>`, `<image>` marks its place |
| ShareGPT | the same, and `system` | `images`, `audios`, `videos`: lists |
| messages | `messages`: `{"role", "content"}` | the same, or in the parts of a content that is a list |

Parts are `{"type": "text", "text": ...}` and `{"type": "image", "image": ...}`, as transformers' chat templates have
them, or `{"type": "image_url", "image_url": {"url": ...}}`, as OpenAI has them; likewise for sounds and videos. A part
that names no file stands for the next one of the record's list. A file is a path, bytes, `{"bytes", "path"}` as HF
`datasets` writes it, or a `data:` URL.

`generate` names images that a generator is to make, in questions or answers, at `<generate>`; `generate_audio` sounds,
at `<generate_audio>`.

A conversation may begin with a system turn; then user and assistant alternate, and the last one is the assistant's.
Nothing is downloaded.
"""

import base64
import binascii
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from motet.config import USUAL_LIMITS, FileLimits
from motet.data.example import GENERATED, PLACEHOLDERS, Example, Media, Message, Modality, placeholders_in
from motet.data.formats.media import MEDIA_KINDS, InMemory
from motet.errors import UserError

TURNS = ("conversations", "messages")
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
SPEAKER_KEYS, TEXT_KEYS = ("from", "role"), ("value", "content")
PART_KEYS = ("url", "path")
"""Keys of a part that may hold its file, beside its modality and its type."""


@dataclass
class RecordReader:
    """Reads the records of one file, and notes the keys that it does not read."""

    file: Path
    folders: Mapping[Modality, Path]
    """Folders to which the paths of media are relative."""
    modalities: Collection[Modality]
    """Modalities that the model's modules take."""
    limits: FileLimits = USUAL_LIMITS
    unread: dict[str, str] = field(default_factory=dict)
    """Keys that are not read, and where the first one of each stands."""

    @property
    def notes(self) -> tuple[str, ...]:
        if not self.unread:
            return ()
        first = next(iter(self.unread.values()))
        return (f"{self.file}: keys that are not read: {', '.join(self.unread)} (first at {first})",)

    def example(
        self,
        record: Any,
        where: str,
        *,
        stored: Mapping[Modality, tuple[Media, ...]] | None = None,
        name: str | None = None,
    ) -> Example:
        """Reads one record. Raises `UserError` beginning with `where`.

        Args:
            stored: the media, where they do not stand in the record; keys of media are then not read.
            name: the example's id, where the record has none."""
        try:
            if not isinstance(record, Mapping):
                raise UserError(f"is not a mapping; give one with the keys id, {' or '.join(TURNS)}, image, ...")
            conversation = _Conversation(self, record, where, stored)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        return Example(
            id=example_id(record.get("id"), name or where, where),
            messages=conversation.messages,
            media=conversation.media,
            where=where,
        )

    def skip(self, where: str, keys: Collection[str], known: Collection[str], prefix: str = "") -> None:
        for key in keys:
            if key not in known:
                self.unread.setdefault(prefix + str(key), where)

    def open(self, modality: Modality, given: Any, key: str, where: str) -> Media:
        """A file of media that a record names. Raises `UserError` beginning with `key`."""
        if isinstance(given, Mapping) and given.keys() <= {"bytes", "path", "url", "data", "format"}:
            given = next((given[k] for k in ("bytes", "path", "url", "data") if given.get(k) is not None), None)
        kind = MEDIA_KINDS[modality]
        if isinstance(given, bytes):
            return kind.open(InMemory(f"{where}, {key}", given), self.limits)
        if not isinstance(given, str):
            raise UserError(f"{key}: is {_short(given)}; give a path or a list of paths")
        if given.startswith("data:"):
            try:
                content = base64.b64decode(given.partition(",")[2], validate=True)
                return kind.open(InMemory(f"{where}, {key}", content), self.limits)
            except binascii.Error:
                raise UserError(f"{key}: {_short(given)} is not base64; give a path") from None
        path = given.removeprefix("file://")
        if "://" in path:
            raise UserError(f"{key}: {path}: nothing is downloaded; give the path of a file")
        folder = self.folders.get(modality, Path())
        if not os.path.isfile(folder / path):  # Unlike `Path.is_file`, it accepts any path.
            raise UserError(f"{key}: {folder / path}: there is no such file")
        if not self.limits.outside_folders and not _is_inside(folder, path):
            raise UserError(
                f"{key}: {path} leaves {modality}_folder {folder}; give the folder that holds it, or "
                "data.limits.outside_folders: true"
            )
        return kind.open(folder / path, self.limits)


def example_id(given: Any, otherwise: str, where: str) -> str:
    """The id that a record gives, if it does. Raises `UserError` beginning with `where`."""
    if given is None:
        return otherwise
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise UserError(f"{where}: id: is {_short(given)}; give a text or a whole number")
    return str(given)


def _is_inside(folder: Path, path: str) -> bool:
    """Whether a path is relative and leads to a file in the folder, also after links."""
    if os.path.isabs(path) or ".." in Path(path).parts:
        return False
    return Path(os.path.realpath(folder / path)).is_relative_to(os.path.realpath(folder))


def check_ids(ids: Iterable[tuple[str, str]], limits: FileLimits) -> None:
    """Raises `UserError` for a second sample of an id, unless the limits allow it. `ids`: ids of samples of one file,
    each with its place."""
    if limits.repeated_ids:
        return
    places: dict[str, str] = {}
    for own, where in ids:
        if own in places:
            raise UserError(
                f"{where}: id {_short(own)} stands at {places[own]} too; give each sample its own, or "
                "data.limits.repeated_ids: true"
            )
        places[own] = where


class _Conversation:
    """One record: its messages, and the media at their placeholders."""

    def __init__(
        self,
        reader: RecordReader,
        record: Mapping[str, Any],
        where: str,
        stored: Mapping[Modality, tuple[Media, ...]] | None,
    ) -> None:
        self._reader, self._where = reader, where
        known = {"id", "system", *TURNS}
        self._listed: dict[Modality, list[Media]] = {}
        """Keys of the record besides its turns."""
        self._keys: dict[Modality, str] = {}
        for modality in PLACEHOLDERS:
            key, media = self._read_list(record, modality) if stored is None else (modality, stored.get(modality, ()))
            self._keys[modality], self._listed[modality] = key, list(media)
            known |= {modality, f"{modality}s"} if stored is None else set()
        reader.skip(where, [key for key, value in record.items() if value is not None], known)
        self._placed: list[tuple[Modality, Media | None]] = []
        """In the order of the text; None: the next one that is listed."""
        self.messages = self._read_turns(record)
        self.media = self._assign()

    def _read_list(self, record: Mapping[str, Any], modality: Modality) -> tuple[str, list[Media]]:
        keys = [key for key in (modality, f"{modality}s") if record.get(key) is not None]
        if len(keys) > 1:
            raise UserError(f"{keys[1]}: {keys[0]} is given, too; give one of them")
        if not keys:
            return modality, []
        given = record[keys[0]]
        items = given if isinstance(given, list) else [given]
        if items and modality not in self._reader.modalities:
            raise UserError(f"{keys[0]}: no module of the model takes it; add one that does, or leave the key out")
        numbered = [keys[0]] if len(items) == 1 else [f"{keys[0]}[{i}]" for i in range(len(items))]
        opened = [
            self._reader.open(modality, item, key, self._where) for item, key in zip(items, numbered, strict=True)
        ]
        return keys[0], opened

    def _read_turns(self, record: Mapping[str, Any]) -> tuple[Message, ...]:
        given = [key for key in TURNS if record.get(key) is not None]
        if len(given) > 1:
            raise UserError("messages: conversations are given, too; give one of them")
        key = given[0] if given else TURNS[0]
        turns = record.get(key)
        if not isinstance(turns, list) or not turns:
            raise UserError(f'{key}: is missing or empty; give a list of turns {{"from": ..., "value": ...}}')
        if record.get("system"):
            turns = [{"from": "system", "value": record["system"]}, *turns]
        messages = tuple(self._read_turn(f"{key}[{i}]", turn) for i, turn in enumerate(turns))
        self._check_order(key, messages)
        return messages

    def _read_turn(self, key: str, turn: Any) -> Message:
        if not isinstance(turn, Mapping):
            raise UserError(f'{key}: is not a turn; give {{"from": ..., "value": ...}}')
        speaker, text_key = (next((k for k in keys if k in turn), keys[0]) for keys in (SPEAKER_KEYS, TEXT_KEYS))
        role = ROLES.get(str(turn.get(speaker)))
        if role is None:
            raise UserError(f"{key}.{speaker}: is {turn.get(speaker)!r}; give one of {', '.join(ROLES)}")
        num_placed = len(self._placed)
        content = self._read_content(f"{key}.{text_key}", turn.get(text_key)).strip()
        if role == "assistant" and not content:
            raise UserError(f"{key}.{text_key}: is an empty answer; give its text, or leave the turn out")
        if role == "assistant" and any(modality not in GENERATED for modality, _ in self._placed[num_placed:]):
            raise UserError(f"{key}.{text_key}: an answer cannot hold images or clips; put them into a question")
        unset = {k for k, value in turn.items() if value is None}
        self._reader.skip(self._where, turn, {speaker, text_key, *unset}, f"{key.partition('[')[0]}[].")
        return Message(role, content)  # type: ignore[arg-type]

    def _read_content(self, key: str, content: Any) -> str:
        if isinstance(content, str):
            return self._read_text(key, content)
        if not isinstance(content, list):
            raise UserError(f"{key}: is {_short(content)}; give a text, or a list of parts")
        return "".join(self._read_part(f"{key}[{i}]", part) for i, part in enumerate(content))

    def _read_text(self, key: str, text: Any) -> str:
        """Notes the placeholders of a text."""
        if not isinstance(text, str):
            raise UserError(f"{key}: is {_short(text)}; give a text")
        if not is_text(text):
            raise UserError(f"{key}: contains an unpaired surrogate, which is not a character; correct the text")
        if self._listed["video"] and not self._listed["image"]:
            text = text.replace(PLACEHOLDERS["image"], PLACEHOLDERS["video"])
        for modality in placeholders_in(text):
            # Without such media, and no module for them, it is a text about HTML.
            if self._listed[modality] or modality in self._reader.modalities:
                self._placed.append((modality, None))
        return text

    def _read_part(self, key: str, part: Any) -> str:
        if isinstance(part, str):
            return self._read_text(key, part)
        kind = str(part.get("type")) if isinstance(part, Mapping) else ""
        if kind in ("text", "input_text", "output_text"):
            self._skip_keys_of(part, {"text"})
            return self._read_text(f"{key}.text", part.get("text"))
        modality = kind.removeprefix("input_").removesuffix("_url")
        if modality not in PLACEHOLDERS:
            raise UserError(f"{key}.type: is {kind!r}; give one of text, {', '.join(PLACEHOLDERS)}")
        if modality not in self._reader.modalities:
            raise UserError(f"{key}: no module of the model takes {modality}; add one that does, or leave the part out")
        found = [k for k in (kind, modality, *PART_KEYS) if part.get(k) is not None]
        self._skip_keys_of(part, {kind, modality, *PART_KEYS})
        media = self._reader.open(modality, part[found[0]], f"{key}.{found[0]}", self._where) if found else None
        self._placed.append((modality, media))
        return PLACEHOLDERS[modality]

    def _skip_keys_of(self, part: Mapping[str, Any], known: set[str]) -> None:
        unset = {key for key, value in part.items() if value is None}
        self._reader.skip(self._where, part, {"type", *known, *unset}, "content[].")

    def _check_order(self, key: str, messages: tuple[Message, ...]) -> None:
        spoken = [message.role for message in messages if message.role != "system"]
        names = ("human", "gpt") if key == "conversations" else ("user", "assistant")
        if any(message.role == "system" for message in messages[1:]):
            raise UserError(f"{key}: has a system turn that is not the first; put it first")
        if not spoken or spoken[-1] != "assistant":
            raise UserError(f"{key}: has no answer at its end; the last turn must be from {names[1]}")
        for i, role in enumerate(spoken):
            if role != ("user", "assistant")[i % 2]:
                raise UserError(f"{key}: turn {i + len(messages) - len(spoken)} must be from {names[i % 2]}")

    def _assign(self) -> dict[Modality, tuple[Media, ...]]:
        media: dict[Modality, tuple[Media, ...]] = {}
        for modality, listed in self._listed.items():
            own = [item for placed, item in self._placed if placed == modality]
            if own.count(None) != len(listed):
                raise UserError(
                    f"{self._keys[modality]}: names {len(listed)} files, but the turns hold {own.count(None)} "
                    f"{PLACEHOLDERS[modality]}; give one placeholder for each file"
                )
            rest = iter(listed)
            media[modality] = tuple(cast(Media, next(rest) if item is None else item) for item in own)
        return media


def is_text(content: str) -> bool:
    """Whether a text has no single surrogates, which JSON can hold but no tokenizer reads."""
    try:
        content.encode()
    except UnicodeEncodeError:
        return False
    return True


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
