"""The shape card: what planning needs of a module, as a JSON file that is read without torch.

Cards are made once for a configuration, by `motet.families.shape_reading.shape_walker`, and kept in the user's cache
folder. Their names are digests of what was asked and of the versions of what answered, so that a card is never out of
date. Nothing in a card is executed.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, TypeVar

from motet.errors import UserError
from motet.plan import Edge
from motet.shapes.module_shape import ModuleWorkload
from motet.strict_parsing import parse_strictly
from motet.user_cache import cache_folder, digest_of_files, write_cached

Role = Literal["language_model", "encoder", "tower", "decoder"]


@dataclass(frozen=True, kw_only=True)
class ShapeRequest:
    """A request for the shape of a module."""

    role: Role | Literal["composite"] | None
    """Role of the module; None: a language model or an encoder, by its family. `composite`: a model of several
    modalities, whose answer is a `CompositeCard`."""
    config: str | None = None
    """Name of a configuration class of transformers."""
    stored: Mapping[str, Any] = field(default_factory=dict)
    """Instead of it: what stands in a config.json, of this module or of one with several parts."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the class, or values that replace stored ones of this part."""

    @cached_property
    def digest(self) -> str:
        asked = {
            **asdict(self),
            "format": ShapeCard.format,
            "versions": [_version(name) for name in ("transformers", "torch")],
        }
        text = json.dumps([asked, digest_of_files(walker_files())], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, kw_only=True)
class ShapeCard:
    """A `ModuleWorkload`, with each distinct layer written once."""

    format: Literal[1] = 1
    distinct: ModuleWorkload
    """The module with its distinct layers alone."""
    order: tuple[int, ...]
    """For each layer of the module, the index of its shape."""

    @staticmethod
    def of(workload: ModuleWorkload) -> "ShapeCard":
        shapes = tuple(dict.fromkeys(workload.layers))
        index = {shape: i for i, shape in enumerate(shapes)}
        config = json.loads(json.dumps(dict(workload.config), default=str))
        return ShapeCard(
            distinct=replace(workload, layers=shapes, config=config),
            order=tuple(index[layer] for layer in workload.layers),
        )

    @property
    def workload(self) -> ModuleWorkload:
        return replace(self.distinct, layers=tuple(self.distinct.layers[i] for i in self.order))


@dataclass(frozen=True, kw_only=True)
class CompositeCard:
    """The parts of a model of several modalities."""

    format: Literal[1] = 1
    modules: dict[str, ShapeCard]
    edges: tuple[Edge, ...]


Card = TypeVar("Card", ShapeCard, CompositeCard)


def cards_folder() -> Path:
    return cache_folder("shapes")


def read_card(request: ShapeRequest, kind: type[Card]) -> Card | None:
    """The card that answers the request; None if there is none that can be read."""
    path = cards_folder() / f"{request.digest}.json"
    try:
        return parse_strictly(kind, path.read_text(), what=str(path))
    except (OSError, UnicodeDecodeError, UserError):
        return None


def write_card(request: ShapeRequest, card: ShapeCard | CompositeCard) -> None:
    write_cached(cards_folder() / f"{request.digest}.json", json.dumps(asdict(card)))


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def walker_files() -> tuple[Path, ...]:
    """Source files that make cards: an edit invalidates cards."""
    rooms = Path(__file__).parent.parent
    cuts = rooms / "parallel" / "tensor" / "tensor_cuts.py"
    return tuple(sorted([*(rooms / "families").rglob("*.py"), *(rooms / "shapes").glob("*.py"), cuts]))
