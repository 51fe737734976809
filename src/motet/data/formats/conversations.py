"""Conversations in JSON lines, or one JSON list, with media in files beside them. Imports no torch.

Every record and the presence of its media files are checked when the file is opened; media files are read when they are
first needed. Limits: the records are held in memory, on every rank.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from motet.config import FileLimits
from motet.data.example import Example
from motet.data.formats.records import RecordReader, check_ids
from motet.errors import UserError


class ConversationExamples:
    """The records of a file, in their order."""

    def __init__(self, reader: RecordReader) -> None:
        """Raises `UserError` naming file and line."""
        self._examples = [reader.example(record, where) for where, record in read_records(reader.file, reader.limits)]
        check_ids(((example.id, example.where) for example in self._examples), reader.limits)
        self.fingerprint = hashlib.sha256(reader.file.read_bytes()).hexdigest()[:16]
        self.notes = reader.notes

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]


def read_records(file: Path, limits: FileLimits) -> Iterator[tuple[str, Any]]:
    """Yields (file and line, or file and index in the list; record). Raises `UserError`."""
    if file.exists() and not file.is_file():
        raise UserError(f"{file}: is not a regular file; give a file of JSON lines")
    try:
        if file.stat().st_size > limits.records_bytes:
            raise UserError(
                f"{file}: has {file.stat().st_size} bytes; split it into several files, or raise "
                f"data.limits.records_bytes ({limits.records_bytes})"
            )
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
