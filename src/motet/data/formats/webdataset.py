"""Conversations in WebDataset shards. Imports no torch.

A shard is a tar file in which the members of a sample are adjacent and have the same name up to the first dot: `7.json`
with the record (`motet.data.formats.records`), and its media in the order of their placeholders (`7.0.jpg`, `7.1.jpg`).
Keys and members that are not read are those of the first sample. The offsets of members
are read when the shard is opened, their contents when they are needed. Nothing is unpickled.

Of samples' ids, the names of members are compared when the shard is opened, those in records are not.

Limits: local files only; compressed shards are refused, since they have no offsets.
"""

import hashlib
import io
import json
import os
import tarfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from motet.data.example import Example
from motet.data.formats.media import MEDIA_KINDS
from motet.data.formats.records import RecordReader, check_ids
from motet.errors import UserError


@dataclass(frozen=True)
class Member:
    """A file inside a shard."""

    file: Path
    name: str
    first: int
    """Byte."""
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"

    def open(self) -> BinaryIO:
        """Reads by a new file descriptor, since workers must not share a position. Raises `UserError`."""
        try:
            descriptor = os.open(self.file, os.O_RDONLY)
            try:
                return io.BytesIO(os.pread(descriptor, self.num_bytes, self.first))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise UserError(f"{self}: cannot be read ({error.strerror})") from None


class ShardExamples:
    """The samples of a WebDataset shard, in its order."""

    def __init__(self, reader: RecordReader) -> None:
        """Raises `UserError` if the file is not a shard. Samples are checked when they are accessed."""
        self._reader, file = reader, reader.file
        self._members: list[list[Member]] = []
        last = None
        try:
            with tarfile.open(file, "r:") as tar:
                for member in tar:
                    if member.isfile():
                        key = _key(member.name)
                        if key != last:
                            self._members.append([])
                        last = key
                        self._members[-1].append(Member(file, member.name, member.offset_data, member.size))
        except (OSError, tarfile.TarError) as error:
            raise UserError(
                f"{file}: cannot be read as a tar file ({error}); give a WebDataset shard that is not compressed"
            ) from None
        check_ids(((key, f"{own[0]}") for own in self._members for key in [_key(own[0].name)]), reader.limits)
        digest = hashlib.sha256(repr([(m.name, m.num_bytes) for own in self._members for m in own]).encode())
        self.fingerprint = digest.hexdigest()[:16]

    @property
    def notes(self) -> tuple[str, ...]:
        if self._members:
            with suppress(UserError):  # It is raised when the sample's turn comes.
                _ = self[0]
        return self._reader.notes

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, index: int) -> Example:
        members = self._members[index]
        key = _key(members[0].name)
        where = f"{members[0].file}: {key}"
        texts = [member for member in members if member.name.removeprefix(f"{key}.") == "json"]
        if len(texts) != 1:
            raise UserError(f"{where}: has {len(texts)} members {key}.json; give one with the conversation")
        try:
            record = json.load(texts[0].open())
        except (ValueError, RecursionError) as error:
            raise UserError(f"{texts[0]}: is not JSON: {error}") from None
        media = {
            modality: tuple(
                kind.open(member, self._reader.limits) for member in members if _suffix(member.name) in kind.suffixes
            )
            for modality, kind in MEDIA_KINDS.items()
        }
        for modality, files in media.items():
            if files and modality not in self._reader.modalities:
                raise UserError(f"{where}: {modality}: no module of the model takes it; add one, or leave it out")
        known = {"json", *(suffix for kind in MEDIA_KINDS.values() for suffix in kind.suffixes)}
        self._reader.skip(where, {_suffix(member.name) for member in members}, known, "*.")
        return self._reader.example(record, where, stored=media, name=key)


def _key(name: str) -> str:
    folder, _, base = name.rpartition("/")
    return f"{folder}/{base.partition('.')[0]}".removeprefix("/")


def _suffix(name: str) -> str:
    return name.rpartition(".")[2].lower()
