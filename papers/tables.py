"""A published table beside our numbers: what `python -m papers NAME` prints.

Every row says on what our number was calibrated, and whether the published value was held out of that calibration. Only
held-out rows count in a table's error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One number of a paper and ours for it, in the same unit."""

    what: str
    published: float | None
    """The published number; None if the paper gives none."""
    ours: float
    calibrated_on: str
    """Description of what was fitted to which published numbers; "nothing" if nothing was."""
    held_out: bool
    """Whether `published` had no part in the calibration."""
    assumptions: str

    @property
    def ratio(self) -> float | None:
        """Ours over the published one."""
        return self.ours / self.published if self.published else None


@dataclass(frozen=True)
class Table:
    table: str
    """The table's name in the paper, and what it shows."""
    rows: tuple[Row, ...]
    notes: str = ""
    """Notes on what the paper leaves out or contradicts, and on which of its trends hold."""

    @property
    def max_rel_err(self) -> float | None:
        """The largest |ours / published - 1| among held-out rows; None if there are none."""
        errors = [abs(row.ratio - 1) for row in self.rows if row.held_out and row.ratio is not None]
        return max(errors, default=None)


def as_json(paper: str, tables: Sequence[Table]) -> dict[str, Any]:
    return {
        "paper": paper,
        "tables": [
            {
                "table": table.table,
                "rows": [{**asdict(row), "ratio": row.ratio} for row in table.rows],
                "max_rel_err": table.max_rel_err,
                "notes": table.notes,
            }
            for table in tables
        ],
    }


def as_text(values: Mapping[str, Any]) -> str:
    """Formats the result of `as_json` as text."""
    lines = [str(values["paper"])]
    for table in values["tables"]:
        lines += ["", table["table"], *_aligned(table["rows"])]
        error = table["max_rel_err"]
        lines.append("no held-out row" if error is None else f"largest error of a held-out row: {error:.1%}")
        lines += [f"note: {table['notes']}"] if table["notes"] else []
    return "\n".join(lines)


def _aligned(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = [("", "published", "ours", "ours/published", "held out", "calibrated on", "assumptions")]
    for row in rows:
        published, ratio = ("-" if row[key] is None else f"{row[key]:.4g}" for key in ("published", "ratio"))
        held_out = "yes" if row["held_out"] else "no"
        cells.append(
            (row["what"], published, f"{row['ours']:.4g}", ratio, held_out, row["calibrated_on"], row["assumptions"])
        )
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
