"""Samples for contrastive models: JSON lines, or one JSON list, with images and sounds in files. Imports no torch.

    {"id": "7", "image": "cat.jpg", "text": "a cat"}
    {"image": "dog.jpg", "audio": "dog.wav", "text": "a dog"}

A sample has an image, a sound or a text for at least two modules that are compared; a key that is absent or null means
that the sample has no such item. Records are checked when the file is opened, as those of conversations are.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from motet.data.example import Example, Media, Message, Modality
from motet.data.formats.conversations import is_text, read_records
from motet.data.formats.media import ImageFile, SoundFile
from motet.errors import UserError


class PairExamples:
    """The records of some files, in their order."""

    def __init__(
        self, files: Sequence[str | Path], folders: dict[Modality, Path], pairs: Sequence[tuple[str, str]]
    ) -> None:
        """`folders`: folders to which the paths of media are relative. `pairs`: the modalities ("image", "audio",
        "text") that are compared. Raises `UserError` naming file and line."""
        self._examples = [
            _example(record, where, folders, pairs) for file in files for where, record in read_records(Path(file))
        ]
        if not self._examples:
            raise UserError(f"{', '.join(str(file) for file in files)}: no sample in it; give at least one")

        contents = [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files]
        self.fingerprint = hashlib.sha256("".join(contents).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]


def _example(record: Any, where: str, folders: dict[Modality, Path], pairs: Sequence[tuple[str, str]]) -> Example:
    kinds = list(dict.fromkeys(kind for pair in pairs for kind in pair))
    if not isinstance(record, dict):
        raise UserError(f"{where}: is not a mapping; give one with the keys {', '.join(kinds)}")
    given = [kind for kind in kinds if record.get(kind) is not None]
    for kind in given:
        if not isinstance(record[kind], str) or not record[kind].strip():
            raise UserError(f"{where}: {kind}: is {record[kind]!r}; give a {'text' if kind == 'text' else 'path'}")
    if not any(first in given and second in given for first, second in pairs):
        needed = " or ".join(f"{first} and {second}" for first, second in dict.fromkeys(pairs))
        raise UserError(f"{where}: has {' and '.join(given) or 'nothing'} to be compared; give {needed}")
    if "text" in given and not is_text(record["text"]):
        raise UserError(f"{where}: text: holds half of a character (a surrogate by itself); mend the text")
    media: dict[Modality, tuple[Media, ...]] = {}
    for modality, folder in folders.items():
        if modality in given:
            path = folder / record[modality]
            if not os.path.isfile(path):
                raise UserError(f"{where}: {modality}: {path}: there is no such file")
            media[modality] = (ImageFile(path) if modality == "image" else SoundFile(path),)
    messages = (Message("user", record["text"].strip()),) if "text" in given else ()
    return Example(id=str(record.get("id", where)), messages=messages, media=media, where=where)
