"""One line of progress on stderr: live on a terminal, now and then in a log file."""

import sys
import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

LOG_INTERVAL_S = 10.0


class Progress:
    def __init__(self, num_steps: int, finished_steps: int, *, visible: bool) -> None:
        self._visible, self._num_steps = visible, num_steps
        self._live: RichProgress | None = None
        self._logged_s = -LOG_INTERVAL_S
        if visible and sys.stderr.isatty():
            self._live = RichProgress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._live.add_task("", total=num_steps, completed=finished_steps)
            self._live.start()

    def advance(self, finished_steps: int, values: Mapping[str, float]) -> None:
        if not self._visible:
            return
        text = f"loss {values['loss']:.4f}  {values['samples_per_s']:.1f} samples/s"
        if self._live is not None:
            self._live.update(self._task, completed=finished_steps, description=text)
        elif time.monotonic() - self._logged_s >= LOG_INTERVAL_S or finished_steps == self._num_steps:
            self._logged_s = time.monotonic()
            print(f"step {finished_steps}/{self._num_steps}  {text}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text)
        elif self._visible:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
