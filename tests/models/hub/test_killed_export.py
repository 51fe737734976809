"""A process that is killed while it exports: the earlier export or the new one is whole."""

import os
import sys
from pathlib import Path
from typing import Any

from motet.models.hub.export import write_folder

KILLED = 9
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def export(folder: Path, version: str) -> None:
    def write(partial: Path) -> None:
        (partial / "weights").mkdir()
        (partial / "weights/1").write_text(version)
        (partial / "manifest").write_text(version)

    write_folder(folder, write, marker="manifest")


def version_of(folder: Path) -> str:
    texts = {path.read_text() for path in (folder / "manifest", folder / "weights/1")}
    assert len(texts) == 1
    return texts.pop()


def export_until(change: int, folder: Path) -> bool:
    """In a process that is killed before that change of the file system. Returns whether it was."""
    child = os.fork()
    if child == 0:
        left = [change]

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            if event in CHANGES:
                left[0] -= 1
                if left[0] < 0:
                    os._exit(KILLED)

        sys.addaudithook(count)
        export(folder, "new")
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED


def test_at_every_change_of_the_file_system(tmp_path: Path) -> None:
    seen, change = [], 0
    while True:
        folder = tmp_path / str(change) / "export"
        export(folder, "old")
        was_killed = export_until(change, folder)
        seen.append(version_of(folder if folder.exists() else folder.with_name("export.replaced.tmp")))
        export(folder, "newer")
        assert version_of(folder) == "newer"
        assert [path.name for path in folder.parent.iterdir()] == ["export"]
        if not was_killed:
            break
        change += 1
    assert seen == sorted(seen, reverse=True), "the old one until the new one is whole"
    assert {*seen} == {"old", "new"}
    assert len(seen) > 8
