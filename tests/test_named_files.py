"""Files that users name: a device without an end is not read to it."""

import errno
from pathlib import Path

import pytest

from motet import named_files
from motet.costs.analytic import Speeds
from motet.costs.cost_model import CostTable
from motet.data.service.tickets import read_token
from motet.errors import UserError
from motet.named_files import read_bytes, read_text
from motet.planner.failures.replay import read_trace
from motet.resilience.store.store import read_secret

READERS = (Speeds.load, CostTable.load, read_token, read_secret, lambda path: read_trace(Path(path)))


def test_a_file_is_read_up_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_files, "MAX_BYTES", 4)
    (tmp_path / "file").write_bytes(b"four")
    assert read_bytes(tmp_path / "file") == b"four"
    assert read_text(tmp_path / "file") == "four"
    (tmp_path / "file").write_bytes(b"five!")
    with pytest.raises(OSError, match="File too large") as refused:
        read_text(tmp_path / "file")
    assert refused.value.errno == errno.EFBIG


@pytest.mark.parametrize("read", READERS)
def test_a_device_without_an_end_is_refused(read: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_files, "MAX_BYTES", 1000)
    with pytest.raises(UserError, match="File too large"):
        read("/dev/zero")  # type: ignore[operator]
