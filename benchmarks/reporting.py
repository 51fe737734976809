"""Writes a dated report: what was measured, on what, at which commit, by which command."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch

REPORTS = Path(os.environ.get("MOTET_REPORTS", Path(__file__).parent / "reports"))
"""The folder of reports; tests set `MOTET_REPORTS` to another one."""


class Report:
    """Collects paragraphs and tables; `write` puts the circumstances before them."""

    def __init__(self, name: str, title: str) -> None:
        self.name, self.title = name, title
        self._load_at_start = os.getloadavg()[0]
        self._parts: list[str] = []

    def add(self, text: str) -> None:
        self._parts.append(text)

    def goal(self, what: str, is_reached: bool, measured: str = "") -> None:
        """`measured`: the figure that decides, where it does not stand before."""
        self.add(f"Goal: {what}. {'Reached' if is_reached else 'Missed'}{measured and ': '}{measured}.")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        lines = [columns, ["---"] * len(columns), *rows]
        self._parts.append("\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines))

    def text(self) -> str:
        return "\n\n".join([f"# {self.title}", _circumstances(self._load_at_start), *self._parts]) + "\n"

    def write(self, folder: Path = REPORTS) -> Path:
        text = self.text()
        path = folder / f"{date.today().isoformat()}-{self.name}.md"
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(text)
        print(f"written to {path.name}", file=sys.stderr)
        return path


def _circumstances(load_at_start: float) -> str:
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU used"
    command = shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    lines = [
        ("Date", date.today().isoformat()),
        ("Hardware", f"{_processor()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, {gpu}"),
        ("Software", f"Python {platform.python_version()}, torch {torch.__version__}, gloo, 1 thread a process"),
        ("Commit", _commit()),
        ("Command", f"`OMP_NUM_THREADS=1 {command}`"),
        ("Load (1 minute)", f"{load_at_start:.2f} before, {os.getloadavg()[0]:.2f} after"),
    ]
    return "\n".join(f"* {key}: {value}" for key, value in lines)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str:
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=False).stdout.strip()

    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "../src", ".", ":!reports")
    return f"{commit}, with uncommitted changes" if changed else commit
