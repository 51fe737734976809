"""Conversations in Parquet files, as HF `datasets` writes them. Imports no torch.

A file has a column `conversations`, and columns `image` and `audio` of bytes, of {"bytes", "path"}, or of lists of
these. A row group is read when one of its rows is needed, and a few are kept in memory: small ones (some MB) suit
random order best. Nothing is unpickled.
"""

import hashlib
import io
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from motet.data.example import PLACEHOLDERS, Example, Media, Modality
from motet.data.formats.conversations import make_example
from motet.data.formats.media import media_of
from motet.errors import UserError

ROW_GROUPS_KEPT = 4
"""Row groups of one file that each process keeps in memory."""


@dataclass(frozen=True)
class InMemory:
    """The content of a file, with a name for messages."""

    name: str
    content: bytes

    def __str__(self) -> str:
        return self.name

    def open(self) -> BinaryIO:
        return io.BytesIO(self.content)


class ParquetExamples:
    """The rows of a Parquet file, in their order."""

    def __init__(self, file: Path) -> None:
        """Raises `UserError` if it is no Parquet file of conversations, or pyarrow is not installed."""
        self._file = file
        self._tables: OrderedDict[tuple[int, int], Any] = OrderedDict()
        """Tables by process and row group; forked workers read their own."""
        self._lock = threading.Lock()
        metadata = self._open().metadata
        try:
            columns = metadata.schema.to_arrow_schema().names
        except UnicodeDecodeError as error:
            raise UserError(f"{file}: cannot be read as Parquet ({error})") from None
        if "conversations" not in columns:
            raise UserError(f"{file}: has no column conversations; it has {', '.join(columns)}")
        self._columns = [name for name in ("id", "conversations", "image", "audio") if name in columns]
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        self._first_rows = [0, *accumulate(group.num_rows for group in groups)]
        described = [(group.num_rows, group.total_byte_size) for group in groups]
        self.fingerprint = hashlib.sha256(repr((columns, described)).encode()).hexdigest()[:16]

    def _open(self) -> Any:
        try:
            from pyarrow import ArrowException
            from pyarrow.parquet import ParquetFile
        except ImportError:
            raise UserError(
                f"{self._file}: needs pyarrow, which is not installed; pip install 'motet[data-service]'"
            ) from None
        try:
            return ParquetFile(self._file, pre_buffer=False)
        except (OSError, ArrowException) as error:
            raise UserError(f"{self._file}: cannot be read as Parquet ({str(error).splitlines()[0]})") from None

    def __len__(self) -> int:
        return self._first_rows[-1]

    def __getitem__(self, index: int) -> Example:
        where = f"{self._file}: row {index}"
        row = self._row(index, where)
        return make_example(row, where, lambda _: {m: _row_media(row, m, where) for m in PLACEHOLDERS}, where)

    def _row(self, index: int, where: str) -> dict[str, Any]:
        from pyarrow import ArrowException

        group = bisect_right(self._first_rows, index) - 1
        try:
            return self._table(group).slice(index - self._first_rows[group], 1).to_pylist()[0]
        except (OSError, ArrowException, UnicodeDecodeError, IndexError) as error:
            reason = (str(error).splitlines() or [""])[0]
            raise UserError(f"{where}: cannot be read ({reason}); replace the file") from None

    def _table(self, group: int) -> Any:
        key = (os.getpid(), group)
        table = self._tables.get(key)
        if table is None:
            # Arrow's threads would not survive a fork.
            table = self._open().read_row_group(group, columns=self._columns, use_threads=False)
            with self._lock:
                self._tables[key] = table
                while len(self._tables) > ROW_GROUPS_KEPT:
                    self._tables.popitem(last=False)
        return table


def _row_media(row: Mapping[str, Any], modality: Modality, where: str) -> tuple[Media, ...]:
    given = row.get(modality)
    items = [] if given is None else given if isinstance(given, list) else [given]
    contents = [item.get("bytes") if isinstance(item, dict) else item for item in items]
    files = [InMemory(f"{where}, {modality} {i}", c) for i, c in enumerate(contents) if isinstance(c, bytes)]
    if len(files) < len(contents):
        raise UserError(f"{modality}: holds no bytes; store the files themselves, not their paths")
    return tuple(media_of(modality, file) for file in files)
