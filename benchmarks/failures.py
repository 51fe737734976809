"""Compares how much systems train on spot instances. Traces of nodes that come and go, replayed for Oobleck, Varuna and
Bamboo with the models of Oobleck's evaluation (thesis 2.7.3, Figure 2.10).

Traces are CSV files: milliseconds, add or remove, node. The real ones that the thesis used were published with Bamboo.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Sequence
from pathlib import Path

from benchmarks.reporting import Report
from motet.planner.failures.replay import Change, draw_changes, read_trace
from papers.oobleck.published import NUM_NODES, SPOT_PERIODS_S
from papers.oobleck.tables import NUM_AWAY, Evaluation, is_in_order, spot_throughputs

HOURS = 12


def traces(paths: Sequence[Path]) -> dict[str, tuple[list[Change], float]]:
    """The files', and one drawn at each of the published rates."""
    found = {}
    for path in paths:
        changes = read_trace(path)
        found[path.stem] = changes, min(changes[-1].time_s, HOURS * 3600.0)
    for cloud, mean_s in SPOT_PERIODS_S.items():
        end_s = HOURS * 3600.0
        changes = draw_changes(NUM_NODES, mean_s, end_s, back_after_s=NUM_AWAY * mean_s)
        found[f"drawn, a loss every {mean_s / 60:.1f} min ({cloud})"] = changes, end_s
    return found


def main(argv: Sequence[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE.csv")
    arguments = parser.parse_args(argv)
    report = Report("failures", "Training on spot instances")
    replayed = traces(arguments.traces)
    evaluation = Evaluation(regular=False)
    rows, in_order, strictly = [], 0, 0
    for trace, (changes, end_s) in replayed.items():
        for warning_s in (0.0, 30.0, 120.0):
            for model, found in spot_throughputs(evaluation, changes, end_s, warning_s).items():
                in_order += is_in_order(found)
                strictly += list(found.values()) == sorted(found.values(), reverse=True)
                values = [f"{found[kind]:.3g}" if kind in found else "-" for kind in ("Oobleck", "Varuna", "Bamboo")]
                rows.append((trace, f"{warning_s:.0f} s", model, *values, "yes" if is_in_order(found) else "NO"))
    report.add(
        f"{evaluation.assumptions}. Samples per second; in the published order in {in_order} of {len(rows)} cases, "
        f"where equal to 2% counts; strictly in {strictly}."
    )
    report.table(("trace", "warning", "model", "Oobleck", "Varuna", "Bamboo", "in order"), rows)
    return report


if __name__ == "__main__":
    main().write()
