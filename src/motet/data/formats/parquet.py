"""Conversations in Parquet files, as HF `datasets` writes them. Imports no torch.

A row is a record (`motet.data.formats.records`) whose media are bytes, `{"bytes", "path"}`, or lists of these. A row
group is read when one of its rows is needed, and a few are kept in memory: small ones (some MB) suit
random order best. Nothing is unpickled.
"""

import hashlib
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from typing import Any

from motet.data.example import PLACEHOLDERS, Example
from motet.data.formats.records import TURNS, RecordReader, check_ids
from motet.errors import UserError

COLUMNS = ("id", "system", *TURNS, *(f"{modality}{s}" for modality in PLACEHOLDERS for s in ("", "s")))
"""Columns that are read."""

ROW_GROUPS_KEPT = 4
"""Row groups of one file that each process keeps in memory."""


class ParquetExamples:
    """The rows of a Parquet file, in their order."""

    def __init__(self, reader: RecordReader) -> None:
        """Raises `UserError` if it is no Parquet file of conversations, or pyarrow is not installed."""
        self._reader, self._file = reader, reader.file
        self._tables: OrderedDict[tuple[int, int], Any] = OrderedDict()
        """Tables by process and row group; forked workers read their own."""
        self._lock = threading.Lock()
        metadata = self._open().metadata
        try:
            columns = metadata.schema.to_arrow_schema().names
        except UnicodeDecodeError as error:
            raise UserError(f"{self._file}: cannot be read as Parquet ({error})") from None
        if not any(name in columns for name in TURNS):
            raise UserError(f"{self._file}: has no column {' or '.join(TURNS)}; it has {', '.join(columns)}")
        self._columns = [name for name in columns if name in COLUMNS]
        reader.skip("its header", columns, COLUMNS)
        if "id" in columns and not reader.limits.repeated_ids:
            check_ids(((own, f"{self._file}: row {row}") for row, own in enumerate(self._ids()) if own), reader.limits)
        self.notes = reader.notes
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

    def _ids(self) -> list[str | None]:
        """The ids of all rows; those of row groups that cannot be read are None, and told when their turn comes."""
        from pyarrow import ArrowException

        ids: list[str | None] = []
        file = self._open()
        for group in range(file.metadata.num_row_groups):
            try:
                column = file.read_row_group(group, columns=["id"], use_threads=False).column("id")
                ids += [None if own is None else str(own) for own in column.to_pylist()]
            except (OSError, ArrowException, UnicodeDecodeError):
                ids += [None] * file.metadata.row_group(group).num_rows
        return ids

    def __len__(self) -> int:
        return self._first_rows[-1]

    def __getitem__(self, index: int) -> Example:
        where = f"{self._file}: row {index}"
        return self._reader.example(self._row(index, where), where)

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
