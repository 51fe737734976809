"""Is planner `auto` ever slower than the best named planner, by how much is it faster, how far from a lower bound?

On the configurations of the papers that `motet reproduce` holds as planning problems, all simulated. The bound is
`motet.planner.lower_bound`'s: no plan of the problem takes less, whoever makes it.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import time
from collections.abc import Sequence
from statistics import median

from reporting import REPORTS, Report

from motet.planner.auto import Choice, choose
from motet.planner.problem import PlanningProblem
from motet.reproduce import cornstarch_problems, disttrain_problems, optimus_problems

PAPERS = {"Cornstarch": cornstarch_problems, "Optimus": optimus_problems, "DistTrain": disttrain_problems}
WANTED_GAIN, WANTED_DISTANCE = 0.05, 0.03


def problems() -> list[tuple[str, PlanningProblem]]:
    return [(f"{paper}: {what}", problem) for paper, module in PAPERS.items() for what, problem in module.problems()]


def main(arguments: Sequence[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only configurations whose name holds one of them")
    words = parser.parse_args(arguments).words
    report = Report("auto", "Planner auto against every named planner")
    rows, gains, distances, reasons = [], [], [], []
    for what, problem in problems():
        if words and not any(word in what for word in words):
            continue
        started = time.process_time()
        choice = choose(problem)
        seconds = time.process_time() - started
        assert choice.best_named is not None
        best = choice.named[choice.best_named]
        gains.append(gain := best.iteration_time_s / choice.evaluation.iteration_time_s - 1)
        distances.append(distance := _distance(choice))
        rows.append(
            (
                what,
                f"{choice.evaluation.iteration_time_s:.3f}",
                choice.evaluation.plan.schedule,
                f"{choice.best_named} {best.iteration_time_s:.3f}",
                f"{gain:.1%}",
                f"{distance:.1%}",
                "yes" if choice.evaluation.fits else "no",
                f"{seconds:.1f}",
            )
        )
        reasons.append(f"* {what}: {choice.why}.")
    columns = ("configuration", "auto [s]", "schedule", "best named [s]", "faster by", "above bound", "fits", "CPU [s]")
    report.table(columns, rows)
    good = sum(g >= WANTED_GAIN or d <= WANTED_DISTANCE for g, d in zip(gains, distances, strict=True))
    report.add(
        f"Slower than the best named planner on {sum(gain < 0 for gain in gains)} of {len(gains)}. Median gain "
        f"{median(gains):.1%}, median distance from the bound {median(distances):.1%}; at least {WANTED_GAIN:.0%} "
        f"faster or within {WANTED_DISTANCE:.0%} of the bound on {good} of {len(gains)}."
    )
    report.add("\n".join(reasons))
    return report


def _distance(choice: Choice) -> float:
    """Above the bound; infinite where there is none for such a plan."""
    if choice.lower_bound_s is None:
        return float("inf")
    return choice.evaluation.iteration_time_s / choice.lower_bound_s - 1


if __name__ == "__main__":
    main().write(REPORTS)
