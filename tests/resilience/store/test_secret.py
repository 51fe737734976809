"""The secret of a run, as users give it."""

import os

import pytest

from motet.errors import UserError
from motet.resilience.store.store import SECRET_VARIABLE, read_secret


def test_a_secret_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, " a secret of this run\n")
    assert read_secret(None) == b"a secret of this run"


@pytest.mark.parametrize(
    ("given", "told"), [(b"\xff" * 20, "is no text"), (b"short", "fewer than 16 characters"), (b" ", "is not set")]
)
def test_what_is_no_secret_is_refused(given: bytes, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environb, SECRET_VARIABLE.encode(), given)
    with pytest.raises(UserError, match=told):
        read_secret(None)
