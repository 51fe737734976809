"""What every mistake has in common."""

import re
from collections.abc import Sequence

import pytest

from motet.cli.main import main


def expect_mistake(
    capsys: pytest.CaptureFixture[str], arguments: Sequence[object], message: str, *, says_more: bool = False
) -> None:
    """Exit code 2, nothing on stdout, one line on stderr that matches `message`, a regular expression.

    `says_more`: progress may stand before the line.
    """
    assert main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    line = err.splitlines()[-1] + "\n" if says_more else err
    assert re.fullmatch(f"motet: error: .*{message}.*\n", line), err
