"""The interface of stores in which the nodes of a run agree, and the secret that its clients must know.

Two stores have it: `embedded`, a process beside the one that starts the run, and etcd. A store holds texts by key, each
written once, and the numbers of nodes that give signs of life. Clients keep a copy of it, which `sync` brings up to
date, so a round of an agent costs one exchange, and reads cost nothing.
"""

import os
import secrets
from collections.abc import Mapping
from typing import Protocol

from motet.errors import UserError
from motet.named_files import read_text

SECRET_VARIABLE = "MOTET_RUN_SECRET"
SHORTEST_SECRET = 16


class StoreLostError(RuntimeError):
    """The store has lost what it held, or does not answer any more."""


class StoreAwayError(RuntimeError):
    """The store does not answer now. What it holds is safe, so it is asked again later."""


class Store(Protocol):
    """A client of a store. Methods raise `StoreLostError`, or `StoreAwayError` where waiting helps."""

    values: Mapping[str, str]
    """The contents as of the last `sync`. The key `alive/n` is there as long as node n gives signs of life."""
    here: str
    """This machine's address, as the store sees it."""

    def sync(self) -> None:
        """Brings `values` up to date, and gives a sign of life of the node that `keep_alive` has named."""

    def create(self, key: str, value: str) -> str:
        """Writes the value unless there is one, and returns the one that is there; `values` shows it after `sync`."""

    def register(self, node: int | None = None) -> int:
        """Registers a node, which counts as alive for a while, and returns its number: the given one, or one that no
        other node has."""

    def keep_alive(self, node: int) -> None:
        """From now on, `sync` gives signs of life of the node."""

    def time(self) -> float:
        """Returns seconds since the epoch by the clock of the store's machine, which may be cut to whole seconds."""

    def close(self) -> None: ...


def read_secret(secret_file: str | None) -> bytes:
    """Reads the run's secret from the file, or from the environment if no file is given. Raises `UserError`."""
    if secret_file is None:
        text, where = os.environ.get(SECRET_VARIABLE, "").strip(), SECRET_VARIABLE
        if not text:
            raise UserError(
                f"train.failures.secret_file: is not given and {SECRET_VARIABLE} is not set; all machines of a run "
                "share a secret, such as `openssl rand -hex 32` prints"
            )
    else:
        where = f"train.failures.secret_file: {secret_file}"
        try:
            text = read_text(secret_file).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{where}: cannot be read ({error}); give a file that holds the secret") from None
    try:
        secret = text.encode()
    except UnicodeEncodeError:  # Bytes of an environment variable that are no UTF-8.
        raise UserError(f"{where}: is no text; `openssl rand -hex 32` prints a secret") from None
    if len(text) < SHORTEST_SECRET:
        raise UserError(
            f"{where}: holds fewer than {SHORTEST_SECRET} characters; `openssl rand -hex 32` prints a secret"
        )
    return secret


def make_secret() -> bytes:
    """Makes the secret of a run on one machine, which its processes inherit."""
    return secrets.token_bytes(32)
