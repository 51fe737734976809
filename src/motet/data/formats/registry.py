"""The registries of data: kinds of data (`data.kind` of the run file) and formats of conversation files (by suffix).

A new file format of conversations is a file in this folder with a class like `ParquetExamples`, an entry in
`FILE_FORMATS` and a test. A new kind of data is a section in `motet.config.data_section`, a file with a function from
that section to examples, an entry in `DATA_KINDS` and a test. Torch is not imported.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from glob import glob, has_magic
from itertools import accumulate
from pathlib import Path
from typing import Any

from motet.config import (
    USUAL_LIMITS,
    ConversationsConfig,
    DialADigitConfig,
    FileLimits,
    FilesConfig,
    GeneratorConfig,
    PairsConfig,
    PreparedDataConfig,
    SameDigitsConfig,
)
from motet.data.example import PLACEHOLDERS, TO_GENERATE, TO_GENERATE_AUDIO, Example, ExampleSource, Modality
from motet.data.formats.conversations import ConversationExamples
from motet.data.formats.pairs import PairExamples
from motet.data.formats.parquet import ParquetExamples
from motet.data.formats.records import RecordReader
from motet.data.formats.webdataset import ShardExamples
from motet.data.generated import generated_modality
from motet.data.tasks.dial_a_digit import QUESTIONS, REQUESTS, DialADigit, DialADigitExamples, TaskExamples
from motet.data.tasks.same_digits import NAMES, SameDigits, SameDigitsExamples
from motet.errors import UserError
from motet.families.configured_graph import ConfiguredGraph
from motet.families.encoders.token_counts import modalities_of, modality_of, reads_text

FILE_FORMATS: Mapping[str, Callable[[RecordReader], ExampleSource]] = {
    ".tar": ShardExamples,
    ".parquet": ParquetExamples,
}
"""Formats of files of conversations by suffix; files of other suffixes are JSON lines or one JSON list."""


@dataclass(frozen=True)
class Examples:
    train: ExampleSource
    held_out: ExampleSource | None


@dataclass(frozen=True)
class DataKind:
    open: Callable[[Any, ConfiguredGraph], Examples]
    """Opens the examples of a section `data`. Raises `UserError` naming the key or file that is wrong."""
    words: Callable[[Any], tuple[str, ...]] = lambda data: ()
    """From a section to all text of a task, for which tokenizer and processors are made. (): they are stored."""


def _open_task(task_class: Any, examples_class: type[TaskExamples]) -> Callable[[Any, ConfiguredGraph], Examples]:
    """`task_class`: a dataclass whose fields are keys of the section."""

    def open_task(data: DialADigitConfig | SameDigitsConfig, graph: ConfiguredGraph) -> Examples:
        task = task_class(**{field.name: getattr(data, field.name) for field in fields(task_class)})
        return Examples(
            examples_class(task, "train", data.num_train), examples_class(task, "held_out", data.num_held_out)
        )

    return open_task


def _words_of_dialling(data: DialADigitConfig) -> tuple[str, ...]:
    drawing = (*(text.format("", "") for text in REQUESTS.values()), PLACEHOLDERS[TO_GENERATE])
    return (*QUESTIONS.values(), *(drawing if data.drawings else ()))


def _open_conversations(data: ConversationsConfig, graph: ConfiguredGraph) -> Examples:
    folders = _folders(data)
    taken = [m for node in graph.of_kind("encoder").values() for m in modalities_of(node.workload.config)]
    parts = [node.part for node in graph.of_kind("generator").values()]
    taken += [generated_modality(part) for part in parts if isinstance(part, GeneratorConfig)]

    def opened(files: Sequence[str]) -> ExampleSource:
        return open_conversations(files, folders, taken, data.limits)

    return Examples(opened(data.files), opened(data.eval_files) if data.eval_files else None)


def _open_pairs(data: PairsConfig, graph: ConfiguredGraph) -> Examples:
    kinds = {
        name: "text" if reads_text(workload.config) else modality_of(workload.config)
        for name, workload in graph.workloads.items()
        if workload.kind == "tower"
    }
    pairs = [(kinds[first], kinds[second]) for first, second in graph.compared]

    def opened(files: Sequence[str]) -> ExampleSource:
        return PairExamples(files, _folders(data), pairs, data.limits)

    return Examples(opened(data.files), opened(data.eval_files) if data.eval_files else None)


def _folders(data: FilesConfig) -> dict[Modality, Path]:
    """Returns the folder to which the paths of media are relative, by modality."""
    own = getattr(data, "media_folder", ".")
    folders = {modality: Path(getattr(data, f"{modality}_folder", own)) for modality in PLACEHOLDERS}
    return {**folders, TO_GENERATE: folders["image"], TO_GENERATE_AUDIO: folders["audio"]}


DATA_KINDS: Mapping[type[PreparedDataConfig], DataKind] = {
    DialADigitConfig: DataKind(_open_task(DialADigit, DialADigitExamples), words=_words_of_dialling),
    SameDigitsConfig: DataKind(_open_task(SameDigits, SameDigitsExamples), words=lambda data: (" ".join(NAMES),)),
    ConversationsConfig: DataKind(_open_conversations),
    PairsConfig: DataKind(_open_pairs),
}
"""By section of the run file, the kinds of data that can be trained on."""


def open_conversations(
    files: Sequence[str],
    folders: Mapping[Modality, Path],
    modalities: Collection[Modality] = tuple(PLACEHOLDERS),
    limits: FileLimits = USUAL_LIMITS,
) -> ExampleSource:
    """Opens files of conversations. Raises `UserError` naming the file that is wrong.

    Args:
        files: paths, or patterns such as `shards/*.tar`, whose matches are sorted by name.
        folders: by modality, what the paths of media are relative to.
        modalities: what the model's modules take; media of others are errors.
        limits: of files, and what else is refused."""
    parts = [
        FILE_FORMATS.get(Path(path).suffix, ConversationExamples)(RecordReader(Path(path), folders, modalities, limits))
        for file in files
        for path in _matches(file)
    ]
    if not sum(len(part) for part in parts):
        raise UserError(f"{', '.join(files)}: no conversation in it; give at least one")
    return parts[0] if len(parts) == 1 else JoinedExamples(parts)


def _matches(file: str) -> list[str]:
    if not has_magic(file) or Path(file).exists():
        return [file]
    matches = sorted(glob(file))
    if not matches:
        raise UserError(f"{file}: no file matches this pattern; give paths, or another pattern")
    return matches


class JoinedExamples:
    """The concatenation of several sources."""

    def __init__(self, parts: Sequence[ExampleSource]) -> None:
        self._parts = parts
        self._firsts = [0, *accumulate(len(part) for part in parts)]
        self.fingerprint = "-".join(part.fingerprint for part in parts)
        self.notes = tuple(note for part in parts for note in part.notes)

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, index: int) -> Example:
        part = bisect_right(self._firsts, index) - 1
        return self._parts[part][index - self._firsts[part]]
