"""Samples for contrastive models: JSON lines, or one JSON list, with images and sounds in files. Imports no torch.

    {"id": "7", "image": "cat.jpg", "text": "a cat"}
    {"image": "dog.jpg", "audio": "dog.wav", "text": "a dog"}

A sample has an image, a sound or a text for at least two modules that are compared; a key that is absent or null means
that the sample has no such item. Records are checked when the file is opened, as those of conversations are.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from motet.config import USUAL_LIMITS, FileLimits
from motet.data.example import PLACEHOLDERS, Example, Message, Modality
from motet.data.formats.conversations import read_records
from motet.data.formats.records import RecordReader, check_ids, example_id, is_text
from motet.errors import UserError


class PairExamples:
    """The records of some files, in their order."""

    def __init__(
        self,
        files: Sequence[str | Path],
        folders: Mapping[Modality, Path],
        pairs: Sequence[tuple[str, str]],
        limits: FileLimits = USUAL_LIMITS,
    ) -> None:
        """`folders`: folders to which the paths of media are relative. `pairs`: the modalities ("image", "audio",
        "text") that are compared. Raises `UserError` naming file and line."""
        kinds = list(dict.fromkeys(kind for pair in pairs for kind in pair))
        modalities = [kind for kind in kinds if kind != "text"]
        readers = [RecordReader(Path(file), folders, modalities, limits) for file in files]
        self._examples: list[Example] = []
        for reader in readers:
            own = [_example(record, where, reader, kinds, pairs) for where, record in read_records(reader.file, limits)]
            check_ids(((example.id, example.where) for example in own), limits)
            self._examples += own
        if not self._examples:
            raise UserError(f"{', '.join(str(file) for file in files)}: no sample in it; give at least one")
        self.notes = tuple(note for reader in readers for note in reader.notes)
        contents = [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files]
        self.fingerprint = hashlib.sha256("".join(contents).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]


def _example(
    record: Any, where: str, reader: RecordReader, kinds: Sequence[str], pairs: Sequence[tuple[str, str]]
) -> Example:
    if not isinstance(record, dict):
        raise UserError(f"{where}: is not a mapping; give one with the keys {', '.join(kinds)}")
    present = [key for key, value in record.items() if value is not None]
    for key in present:
        if key in PLACEHOLDERS and key not in kinds:
            raise UserError(f"{where}: {key}: no tower of the model takes it; add one that does, or leave the key out")
    reader.skip(where, present, {"id", *kinds})
    given = [kind for kind in kinds if kind in present]
    for kind in given:
        if not isinstance(record[kind], str) or not record[kind].strip():
            raise UserError(f"{where}: {kind}: is {record[kind]!r}; give a {'text' if kind == 'text' else 'path'}")
    if not any(first in given and second in given for first, second in pairs):
        needed = " or ".join(f"{first} and {second}" for first, second in dict.fromkeys(pairs))
        raise UserError(f"{where}: has {' and '.join(given) or 'nothing'} to be compared; give {needed}")
    if "text" in given and not is_text(record["text"]):
        raise UserError(f"{where}: text: contains an unpaired surrogate, which is not a character; correct the text")
    try:
        media = {kind: (reader.open(kind, record[kind], kind, where),) for kind in given if kind != "text"}
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    messages = (Message("user", record["text"].strip()),) if "text" in given else ()
    return Example(id=example_id(record.get("id"), where, where), messages=messages, media=media, where=where)
