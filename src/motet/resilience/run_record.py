"""What all nodes of a run must know alike: in the store before any node comes, written by whoever starts the run.

A checkpoint is the run's own if it was not in the output folder when the run began: a folder may be used again. After
a restart the own ones come first, and then what the run file says (`train.resume`).

Limits: files that a run file names (data, costs, a tokenizer) are compared by name, not by what is in them.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from motet.config import RunConfig
from motet.resilience.membership import Store
from motet.runtime.checkpoint_folder import Stamp

KEY = "run"
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
    earlier_checkpoints: tuple[Stamp, ...] = ()
    """Those of other runs."""
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
        values = json.loads(store.get(KEY))
        earlier = tuple((name, written_ns) for name, written_ns in values.pop("earlier_checkpoints"))
        return RunRecord(earlier_checkpoints=earlier, **values)


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
