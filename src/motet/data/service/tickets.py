"""Requests for prepared samples (tickets), the interface of those who answer them, and access to data servers.

A ticket names samples by their positions in the data set, and the module whose tensors are requested; without a module
it requests metadata. The answer is a function of the ticket and the data alone, not of epoch, step, seed, batch size,
plan or number of ranks: `motet.data.loader` alone defines the order. So a server has no state to lose, any server can
answer any ticket, and a run under another plan can use the same servers.

The token that grants access to a data server comes from an environment variable or a file, never from the command line,
which every user of a machine can read. It is sent unencrypted unless the connection uses TLS. Torch is not imported.
"""

import hmac
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from motet.assignment.sample import Sample, Segment
from motet.config import PartConfig, RunConfig
from motet.errors import UserError
from motet.named_files import read_text
from motet.plan import DECODER, LANGUAGE_MODEL

if TYPE_CHECKING:
    from torch import Tensor

    from motet.data.preparation import Dataset

TOKEN_VARIABLE = "MOTET_DATA_TOKEN"
SHORTEST_TOKEN = 16
"""Characters."""


def read_token(token_file: str | None) -> str:
    """Reads the token from the file, or from the environment if no file is given. Raises `UserError`."""
    if token_file is None:
        token, where = os.environ.get(TOKEN_VARIABLE, "").strip(), TOKEN_VARIABLE
        if not token:
            raise UserError(
                f"data.token_file: is not given and {TOKEN_VARIABLE} is not set; servers and training share a secret "
                "token, such as `openssl rand -hex 32` prints"
            )
    else:
        where = f"data.token_file: {token_file}"
        try:
            token = read_text(token_file).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{where}: cannot be read ({error}); give a file that holds the token") from None
    if len(token) < SHORTEST_TOKEN or not token.isascii() or any(c.isspace() for c in token):
        raise UserError(
            f"{where}: holds no token; give at least {SHORTEST_TOKEN} letters and digits, such as "
            "`openssl rand -hex 32` prints"
        )
    return token


def authorization(token: str) -> str:
    """The value of the `authorization` header."""
    return f"Bearer {token}"


def is_authorized(given: str, token: str) -> bool:
    """Compares in constant time."""
    return hmac.compare_digest(given.encode(), authorization(token).encode())


DATA_KEYS_OF_PREPARATION = {
    "workers",
    "batches_ahead",
    "servers",
    "server_timeout_s",
    "token_file",
    "tls_roots",
}
"""Keys of `data` that decide where and when samples are prepared, not what they become."""

MODEL_KEYS_OF_TRAINING = {
    "seed",
    "learning_rate",
    "projector_learning_rate",
    "queries_learning_rate",
    "train",
    "projector",
    "loss_weight",
    "objective",
    "null_condition",
}
"""Keys of a part of the model that do not change samples."""


def data_facts(config: RunConfig) -> dict[str, Any]:
    """All keys of the run file that decide what a sample becomes; servers and training must have the same ones.

    Paths are compared as they are written; servers compare the contents of the files with one another."""
    model = config.model
    parts: dict[str, PartConfig] = {**model.encoders, **model.towers, **model.generators}
    if model.language_model is not None:
        parts[LANGUAGE_MODEL] = model.language_model
    if model.decoder is not None:
        parts[DECODER] = model.decoder
    return {
        "data": config.data.model_dump(mode="json", exclude=DATA_KEYS_OF_PREPARATION),
        "model": {name: part.model_dump(mode="json", exclude=MODEL_KEYS_OF_TRAINING) for name, part in parts.items()},
        "merge": model.merge,
        "placeholder_tokens": dict(model.placeholder_tokens),
    }


Split = Literal["train", "held_out"]


@dataclass(frozen=True, slots=True)
class Ticket:
    split: Split
    indices: tuple[int, ...]
    """Positions in the data set."""
    module: str | None = None
    """The module whose tensors are requested; None: metadata."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Ticket":
        """Parses a ticket, which may come from the network. Raises `ValueError`."""
        values = json.loads(text)
        if not isinstance(values, dict) or values.keys() != {"split", "indices", "module"}:
            raise ValueError("a ticket has split, indices and module")
        split, indices, module = values["split"], values["indices"], values["module"]
        if split not in get_args(Split) or not (module is None or isinstance(module, str)):
            raise ValueError("a ticket's split is train or held_out, and its module a name or null")
        if not isinstance(indices, list) or any(type(i) is not int or i < 0 for i in indices):
            raise ValueError("a ticket's indices are whole numbers of at least 0")
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
            module: [[s.num_tokens, s.source, s.item, s.num_outputs, list(s.grid), s.num_frames] for s in segments]
            for module, segments in sample.layouts.items()
        },
        "num_loss_tokens": dict(sample.num_loss_tokens),
    }


def _sample_from_json(values: dict[str, Any]) -> Sample:
    return Sample(
        id=values["id"],
        layouts={
            module: tuple(
                Segment(num_tokens, source, item, num_outputs, tuple(grid), num_frames)
                for num_tokens, source, item, num_outputs, grid, num_frames in segments
            )
            for module, segments in values["layouts"].items()
        },
        num_loss_tokens=values["num_loss_tokens"],
    )


METADATA = "metadata"
"""Key of metadata, beside modules' names, in counts of bytes."""


class Producer(Protocol):
    """Prepares samples of one data set. Called from several threads at a time."""

    @property
    def received_bytes(self) -> Mapping[str, int]:
        """Bytes received from other processes so far, by module and of metadata."""

    may_skip: bool
    """Whether samples that cannot be prepared are returned as `Corrupt`; otherwise they stop the run."""

    @property
    def fingerprint(self) -> str:
        """Differs between different data or preparations, as far as is known without reading all data."""

    def __len__(self) -> int: ...

    def samples(self, indices: Sequence[int]) -> list[Sample | Corrupt]:
        """The metadata of samples. Raises `UserError` for one that cannot be prepared, unless `may_skip`."""

    def features(self, module: str, indices: Sequence[int]) -> "list[dict[str, Tensor]]":
        """The samples' tensors for one module; not to be written to. Raises `UserError` naming a corrupt file."""

    def close(self) -> None: ...


def stop_at_corrupt(samples: Sequence[Sample | Corrupt]) -> None:
    """Raises `UserError` for the first sample that could not be prepared."""
    for sample in samples:
        if isinstance(sample, Corrupt):
            raise UserError(sample.message)


class InProcess:
    """Prepares samples in the calling thread."""

    may_skip = False

    def __init__(self, dataset: "Dataset") -> None:
        self._dataset = dataset
        self.received_bytes: dict[str, int] = {}

    @property
    def fingerprint(self) -> str:
        return self._dataset.fingerprint

    def __len__(self) -> int:
        return len(self._dataset)

    def samples(self, indices: Sequence[int]) -> list[Sample | Corrupt]:
        return [self._dataset.sample(i) for i in indices]

    def features(self, module: str, indices: Sequence[int]) -> "list[dict[str, Tensor]]":
        return [self._dataset.features(i, module) for i in indices]

    def close(self) -> None:
        pass
