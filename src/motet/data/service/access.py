"""Who may ask a data server: the token, and where one is found. Pure: no torch.

The token comes from an environment variable or a file, never from the command line, which every user of a machine can
read. It travels in the clear unless the connection is TLS.
"""

import hmac
import os
from pathlib import Path

from motet.errors import UserError

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
