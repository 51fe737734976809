"""Pages that are generated from the sources: each module here makes one from its present text. `make docs` runs all."""

from collections.abc import Callable, Mapping
from pathlib import Path

from docs.generate import api, costs, families, map, run_file, schedules

ROOT = Path(__file__).parents[2]

PAGES: Mapping[str, Callable[[str], str]] = {
    "map.md": map.describe,
    "api.md": api.describe,
    "run-file.md": run_file.describe,
    "schedules.md": schedules.describe,
    "costs.md": costs.describe,
    "families.md": families.describe,
}
