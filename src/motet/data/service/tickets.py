"""What training asks preprocessing for, and what it may get instead of a sample. Pure: no torch.

A ticket names samples by their positions in the data set, and the module whose tensors are wanted; without a module it
asks for metadata. The answer is a function of the ticket and the data alone. It does not depend on epoch, step, seed,
batch size, plan or number of ranks: these stay with training (`motet.data.loader` is the one definition of the order),
so a server has no state to lose, any server may answer any ticket, and a run under another plan asks the same servers.
"""

import hmac
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from motet.assignment.sample import Sample, Segment
from motet.config import PartConfig, RunConfig
from motet.errors import UserError
from motet.plan import DECODER, LANGUAGE_MODEL

# Who may ask a data server: the token, and where one is found. Pure: no torch.
#
# The token comes from an environment variable or a file, never from the command line, which every user of a machine
# can read. It travels in the clear unless the connection is TLS.


TOKEN_VARIABLE = "MOTET_DATA_TOKEN"
SHORTEST_TOKEN = 16
"""Characters."""


def read_token(token_file: str | None) -> str:
    """Of the file if one is named, else of the environment. Raises `UserError`: there is no access without a token."""
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
            token = Path(token_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{where}: cannot be read ({error}); give a file that holds the token") from None
    if len(token) < SHORTEST_TOKEN or not token.isascii() or any(c.isspace() for c in token):
        raise UserError(
            f"{where}: holds no token; give at least {SHORTEST_TOKEN} letters and digits, such as "
            "`openssl rand -hex 32` prints"
        )
    return token


def authorization(token: str) -> str:
    """The header's value."""
    return f"Bearer {token}"


def is_authorized(given: str, token: str) -> bool:
    """In a time that tells nothing of the token."""
    return hmac.compare_digest(given.encode(), authorization(token).encode())


# What servers and training have to agree on: all of the run file that decides what a sample becomes. Pure: no torch.
#
# Not in it: where samples are prepared and how far ahead, seed and batch size, layout, learning rates. Paths are, as
# they are written; what the files hold, only servers know, and they are compared with one another.


HOW_IT_IS_DONE = {
    "workers",
    "batches_ahead",
    "servers",
    "server_timeout_s",
    "token_file",
    "tls_roots",
}
"""Keys of `data` that change no sample."""

OF_TRAINING = {"seed", "learning_rate", "projector_learning_rate", "train", "projector", "loss_weight"}
"""Keys of a part of the model that change no sample."""


def data_facts(config: RunConfig) -> dict[str, Any]:
    """All keys that decide what a sample becomes, as JSON has them."""
    model = config.model
    parts: dict[str, PartConfig] = {**model.encoders, **model.towers}
    if model.language_model is not None:
        parts[LANGUAGE_MODEL] = model.language_model
    if model.decoder is not None:
        parts[DECODER] = model.decoder
    return {
        "data": config.data.model_dump(mode="json", exclude=HOW_IT_IS_DONE),
        "model": {name: part.model_dump(mode="json", exclude=OF_TRAINING) for name, part in parts.items()},
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
