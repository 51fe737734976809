"""What all nodes of a run must know alike: in the store before any node comes, written by whoever starts the run.

A checkpoint is the run's own if it was not in the output folder when the run began: a folder may be used again. Rank 0
writes down which were there (`earlier_checkpoints.json` in the output folder), as who starts the run may not see it.
After a restart the own ones come first, and then what the run file says (`train.resume`).

Limits: files that a run file names (data, costs, a tokenizer) are compared by name, not by what is in them.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from motet.config import RunConfig
from motet.resilience.membership import Store
from motet.runtime.checkpoint.folder import Stamp, stamps, write_atomically

KEY = "run"
EARLIER = "earlier_checkpoints.json"
OWN_KEYS = (
    "train.resume",
    "data.servers",
    "data.server_timeout_s",
    "data.token_file",
    "data.tls_roots",
    "data.workers",
)
"""Of the run file: each node may have its own. `train.resume` is read where the run is started."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    config: dict[str, Any]
    """The run file, as JSON has it."""
    name: str = field(default_factory=lambda: uuid4().hex)
    """Of this run alone, and the same after restarts."""
    restarts: int = 0
    """How often all nodes have been started anew."""

    @property
    def resume(self) -> str | None:
        """`train.resume`."""
        resume: str | None = self.config["train"]["resume"]
        return resume

    def write(self, store: Store) -> None:
        store.set(KEY, json.dumps(asdict(self)))

    @staticmethod
    def read(store: Store) -> "RunRecord":
        """Waits for it as long as the store does."""
        return RunRecord.from_json(store.get(KEY))

    @staticmethod
    def from_json(text: str | bytes) -> "RunRecord":
        return RunRecord(**json.loads(text))


def earlier_checkpoints(output: Path, run: str) -> tuple[Stamp, ...] | None:
    """Those in the output folder that are not the run's own. None: it begins only now, and has none; those that are
    there are written down."""
    path = output / EARLIER
    try:
        known = json.loads(path.read_text())
        if known["run"] == run:
            return tuple((name, written_ns) for name, written_ns in known["checkpoints"])
    except (FileNotFoundError, ValueError):  # Cut short by a crash, it is another run's: this one's nodes see it whole.
        pass
    output.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({"run": run, "checkpoints": stamps(output / "checkpoints")}))
    return None


def as_json(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def first_difference(here: RunConfig, run: RunRecord) -> str | None:
    """Which key of a node's run file is not as in the run's, in words; None if the node may take part."""
    mine, theirs = dict(_leaves(as_json(here))), dict(_leaves(run.config))
    for key in {**mine, **theirs}:
        if key in OWN_KEYS or (key in mine and key in theirs and mine[key] == theirs[key]):
            continue
        return f"{key}: {_told(mine, key)} here and {_told(theirs, key)} there"
    return None


def _leaves(values: object, key: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(values, dict) and values:
        for name, value in values.items():
            yield from _leaves(value, f"{key}.{name}" if key else name)
    else:
        yield key, values


def _told(leaves: dict[str, object], key: str) -> str:
    return f"is {json.dumps(leaves[key])}" if key in leaves else "is not given"
