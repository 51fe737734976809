"""The shape of a module, from its configuration: out of a shape card, or of the walker that makes cards.

Nothing here imports torch. Where this process has imported it, cards are made here; otherwise in one process of their
own for all modules of a run, which takes as long as importing transformers.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from motet.config import PartConfig
from motet.errors import UserError
from motet.families.hf_config import stored_values
from motet.plan import Edge
from motet.shapes.module_shape import ModuleWorkload
from motet.shapes.shape_card import (
    CompositeCard,
    Role,
    ShapeCard,
    ShapeRequest,
    cards_folder,
    read_card,
    write_card,
)
from motet.strict_parsing import parse_strictly

WALKER = "motet.families.shape_reading"
"""Runs as a module: reads requests and prints cards."""
_known: dict[str, ModuleWorkload | str] = {}
"""By digest of the request: the shape, or why there is none."""


def module_workload(config: Any, *, role: Role | None = None, packing: bool = False) -> ModuleWorkload:
    """The shape of a language model or an encoder (without projector).

    `config`: a transformers configuration, or what stands in a config.json. `packing`: a language model's samples stand
    in one row instead of being padded to the longest. Raises `UserError` for what transformers cannot build."""
    stored = config if isinstance(config, Mapping) else config.to_dict()
    try:
        return shape_of(ShapeRequest(role=role, stored=stored), packing=packing)
    except UserError as error:
        raise UserError(f"model{error}") from None


def shape_of(request: ShapeRequest, *, packing: bool = False) -> ModuleWorkload:
    """The shape that is asked for. Raises `UserError`, to whose message belongs the module's key before it."""
    make_shapes([request])
    found = _known[request.digest]
    if isinstance(found, str):
        raise UserError(found)
    return replace(found, arrangement="packed") if packing and found.kind == "language_model" else found


def composite_shapes(part: PartConfig) -> tuple[dict[str, ModuleWorkload], tuple[Edge, ...]]:
    """The shapes of the parts of a model of several modalities, and the edges between them. Raises `UserError`.

    Torch is imported if there is no card yet: the model's processor, which lays out the samples, needs it too."""
    stored = stored_values(part, "model") if part.config is None else {}
    request = ShapeRequest(role="composite", config=part.config, stored=stored, values=part.values)
    card = read_card(request, CompositeCard)
    if card is None:
        from motet.families.shape_reading.composite_shapes import read_composite

        described, workloads = read_composite(part)
        modules = {name: ShapeCard.of(workload) for name, workload in workloads.items()}
        card = CompositeCard(modules=modules, edges=described.edges)
        write_card(request, card)
    return {name: own.workload for name, own in card.modules.items()}, card.edges


def make_shapes(requests: Iterable[ShapeRequest]) -> None:
    """Reads the cards of several modules, and makes those that are missing together."""
    missing = {}
    for request in requests:
        if request.digest not in _known:
            card = read_card(request, ShapeCard)
            if card is None:
                missing[request.digest] = request
            else:
                _known[request.digest] = card.workload
    if not missing:
        return
    made = _walk_here(missing.values()) if "torch" in sys.modules else _walk_elsewhere(missing.values())
    for (digest, request), answer in zip(missing.items(), made, strict=True):
        if isinstance(answer, str):
            _known[digest] = answer
        else:
            _known[digest] = answer.workload
            write_card(request, answer)


def _walk_here(requests: Iterable[ShapeRequest]) -> list[ShapeCard | str]:
    from motet.families.shape_reading.shape_walker import walk

    made: list[ShapeCard | str] = []
    for request in requests:
        try:
            made.append(walk(request))
        except UserError as error:
            made.append(str(error))
    return made


def _walk_elsewhere(requests: Iterable[ShapeRequest]) -> list[ShapeCard | str]:
    lines = "".join(json.dumps(asdict(request), default=str) + "\n" for request in requests)
    result = subprocess.run([sys.executable, "-m", WALKER], input=lines, capture_output=True, text=True)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(
            f": its shape cannot be read ({reason}), and {cards_folder()} has no card of it; plan once where torch and "
            "transformers are installed, and copy the cards"
        )
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    return [
        answer["error"] if "error" in answer else parse_strictly(ShapeCard, answer["card"], what=WALKER)
        for answer in answers
    ]
