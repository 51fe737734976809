"""Conversations from files of several kinds, told apart by their suffix. Pure: no torch.

`.tar`: WebDataset shards. `.parquet`: Parquet as HF `datasets` writes it. Others: JSON lines or one JSON list.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from glob import glob, has_magic
from itertools import accumulate
from pathlib import Path
from typing import Protocol

from motet.data.conversation.example import Example, Modality
from motet.data.formats.conversations import ConversationExamples
from motet.data.formats.parquet import ParquetExamples
from motet.data.formats.webdataset import ShardExamples
from motet.errors import UserError


class Source(Protocol):
    """Examples by index; each access gives the same example again."""

    @property
    def fingerprint(self) -> str:
        """Differs, if what the files hold differs, as far as can be seen without reading all of them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...


def open_conversations(files: Sequence[str], folders: Mapping[Modality, Path]) -> Source:
    """`files`: paths, or patterns such as `shards/*.tar`, whose matches are taken by name. `folders`: what the paths of
    media in JSON files are relative to. Raises `UserError` naming the file that is wrong."""
    parts = [_open(Path(path), folders) for file in files for path in _matches(file)]
    if not sum(len(part) for part in parts):
        raise UserError(f"{', '.join(files)}: no conversation in it; give at least one")
    return parts[0] if len(parts) == 1 else JoinedExamples(parts)


def _matches(file: str) -> list[str]:
    if not has_magic(file) or Path(file).exists():
        return [file]
    matches = sorted(glob(file))
    if not matches:
        raise UserError(f"{file}: no file is of this pattern; give paths, or another pattern")
    return matches


def _open(file: Path, folders: Mapping[Modality, Path]) -> Source:
    if file.suffix == ".tar":
        return ShardExamples(file)
    if file.suffix == ".parquet":
        return ParquetExamples(file)
    return ConversationExamples(file, folders)


class JoinedExamples:
    """Several sources, one after the other."""

    def __init__(self, parts: Sequence[Source]) -> None:
        self._parts = parts
        self._firsts = [0, *accumulate(len(part) for part in parts)]
        self.fingerprint = "-".join(part.fingerprint for part in parts)

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, index: int) -> Example:
        part = bisect_right(self._firsts, index) - 1
        return self._parts[part][index - self._firsts[part]]
