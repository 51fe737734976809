"""What training asks preprocessing for, and what it may get instead of a sample. Pure: no torch.

A ticket names samples by their positions in the data set, and the module whose tensors are wanted; without a module it
asks for metadata. The answer is a function of the ticket and the data alone. It does not depend on epoch, step, seed,
batch size, plan or number of ranks: these stay with training (`motet.data.loader` is the one definition of the order),
so a server has no state to lose, any server may answer any ticket, and a run under another plan asks the same servers.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from motet.assignment.sample import Sample, Segment

Split = Literal["train", "held_out"]


@dataclass(frozen=True, slots=True)
class Ticket:
    split: Split
    indices: tuple[int, ...]
    """Positions in the data set."""
    module: str | None = None
    """Whose tensors; None: the samples' metadata."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Ticket":
        """Raises `ValueError` for what is no ticket: tickets come from the network."""
        values = json.loads(text)
        if not isinstance(values, dict) or values.keys() != {"split", "indices", "module"}:
            raise ValueError("a ticket has split, indices and module")
        split, indices, module = values["split"], values["indices"], values["module"]
        if split not in get_args(Split) or not (module is None or isinstance(module, str)):
            raise ValueError("a ticket is of train or held_out, and of one module or none")
        if not isinstance(indices, list) or any(type(i) is not int or i < 0 for i in indices):
            raise ValueError("a ticket's indices are whole numbers from 0 on")
        return cls(split, tuple(indices), module)


@dataclass(frozen=True, slots=True)
class Corrupt:
    """A sample that cannot be prepared."""

    index: int
    message: str
    """Names its file."""


def samples_to_json(samples: Sequence[Sample | Corrupt]) -> str:
    return json.dumps([asdict(s) if isinstance(s, Corrupt) else _sample_to_json(s) for s in samples])


def samples_from_json(text: str | bytes) -> list[Sample | Corrupt]:
    return [Corrupt(**values) if "message" in values else _sample_from_json(values) for values in json.loads(text)]


def _sample_to_json(sample: Sample) -> dict[str, Any]:
    return {
        "id": sample.id,
        "layouts": {
            module: [[s.num_tokens, s.source, s.item, s.num_outputs, list(s.grid)] for s in segments]
            for module, segments in sample.layouts.items()
        },
        "num_loss_tokens": dict(sample.num_loss_tokens),
    }


def _sample_from_json(values: dict[str, Any]) -> Sample:
    return Sample(
        id=values["id"],
        layouts={
            module: tuple(
                Segment(num_tokens, source, item, num_outputs, tuple(grid))
                for num_tokens, source, item, num_outputs, grid in segments
            )
            for module, segments in values["layouts"].items()
        },
        num_loss_tokens=values["num_loss_tokens"],
    )
