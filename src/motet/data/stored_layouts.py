"""Layouts that the processor of a model of several modalities made before, in the user's cache folder.

Only transformers can run such a processor, and to import it takes longer than to plan. Whoever needs metadata alone
reads the layouts of the examples that were laid out before, and loads the processor only for others. The file's name is
a digest of the processor's files, of the options and of the versions, so that no layout is out of date. Imports no
torch.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from motet.assignment.sample import Segment
from motet.config import PartConfig, VideoConfig
from motet.data.encoder_layout import Layouts
from motet.data.example import Example, Message
from motet.errors import UserError
from motet.families.hf_config import config_file
from motet.plan import LANGUAGE_MODEL
from motet.strict_parsing import parse_strictly
from motet.user_cache import append_cached, cache_folder, digest_of_files

KINDS = (".json", ".jinja", ".model", ".txt")
"""Kinds of the files in a model's folder on which its processor depends."""
SOURCES = (Path(__file__).parent, Path(__file__).parents[1] / "families" / "discovery")
"""Folders of the code that makes layouts: an edit invalidates those that are stored."""


@dataclass(frozen=True)
class ExampleKey:
    """All that an example's layouts depend on."""

    messages: tuple[Message, ...]
    sizes: tuple[tuple[str, tuple[object, ...]], ...]
    """By modality, the size of each of its media."""

    @staticmethod
    def of(example: Example) -> "ExampleKey":
        media = example.media.items()
        return ExampleKey(
            example.messages, tuple((kind, tuple(item.size() for item in items)) for kind, items in media if items)
        )

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class LaidOut:
    """The layouts of one example."""

    layouts: dict[str, tuple[Segment, ...]]
    num_loss_tokens: int


class StoredLayouts:
    """Layouts by example. `make` loads what lays out an example of which there are none yet."""

    def __init__(self, file: Path, make: Callable[[], Callable[[ExampleKey], LaidOut]]) -> None:
        self._file, self._make = file, make

    @lru_cache(maxsize=8)  # noqa: B019 (the modules of a sample are asked for one after the other)
    def lay_out(self, key: ExampleKey) -> LaidOut:
        line = self._lines.get(key.digest)
        if line is not None:
            try:
                return parse_strictly(LaidOut, line, what=str(self._file))
            except UserError:  # Another process was ended while it wrote the line.
                pass
        made = self._processor(key)
        self._lines[key.digest] = text = json.dumps(asdict(made))
        append_cached(self._file, f"{key.digest} {text}\n")
        return made

    @cached_property
    def _processor(self) -> Callable[[ExampleKey], LaidOut]:
        return self._make()

    @cached_property
    def _lines(self) -> dict[str, str]:
        try:
            lines = self._file.read_text().splitlines()
        except (OSError, UnicodeDecodeError):
            return {}
        return {digest: text for digest, _, text in (line.partition(" ") for line in lines)}


class LayoutMaker(Protocol):
    """Lays out examples, all parts of the model at once."""

    def lay_out(self, key: ExampleKey) -> LaidOut: ...


@dataclass(frozen=True, eq=False)
class PartLayout:
    """Layouts of examples for one part of the model."""

    name: str
    whole: LayoutMaker

    def lay_out(self, example: Example, layouts: Layouts) -> tuple[tuple[Segment, ...], int | None]:
        found = self.whole.lay_out(ExampleKey.of(example))
        return found.layouts.get(self.name, ()), found.num_loss_tokens if self.name == LANGUAGE_MODEL else None


def layouts_file(part: PartConfig, tokenizer: str | None, video: VideoConfig) -> Path | None:
    """The file of the layouts that a model's processor makes; None for a processor whose files are not known.

    `tokenizer`: `data.tokenizer`, the folder or hub id of another processor. Raises `UserError` if there is no such
    model."""
    folders = [Path(folder) for folder in (tokenizer, part.path) if folder is not None]
    if tokenizer is not None and not folders[0].is_dir():
        return None
    if part.hub is not None:
        folders.append(config_file(part, "model").parent)
    described = [
        part.model_dump(),
        [_contents(folder, is_on_hub=part.hub is not None and folder is folders[-1]) for folder in folders],
        video.model_dump(),
        [version(name) for name in ("transformers", "tokenizers")],
        digest_of_files(tuple(sorted(path for own in SOURCES for path in own.rglob("*.py")))),
    ]
    text = json.dumps(described, sort_keys=True, default=str)
    return cache_folder("layouts") / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.jsonl"


def _contents(folder: Path, *, is_on_hub: bool) -> object:
    if is_on_hub:  # The folder is named after the commit, and files are added to it when they are first needed.
        return folder.name
    files = sorted(file for file in folder.iterdir() if file.suffix in KINDS)
    return [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]
