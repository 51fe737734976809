"""Is planner `auto` ever slower than the best named planner, by how much is it faster, how far from a lower bound?

On the configurations of the papers that `motet reproduce` holds as planning problems, and on run files for up to 16,384
devices, all simulated. The bound is `motet.planner.lower_bound`'s: no plan of the problem takes less, whoever makes it.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from reporting import REPORTS, Report

from motet.cli.typical_batch import read_problem
from motet.config import load_run_config
from motet.planner.auto import Choice, choose
from motet.planner.evaluate import Evaluation
from motet.planner.problem import PlanningProblem
from motet.reproduce import cornstarch_problems, disttrain_problems, entrain_problems, optimus_problems

PAPERS = {
    "Cornstarch": cornstarch_problems,
    "Optimus": optimus_problems,
    "DistTrain": disttrain_problems,
    "Entrain": entrain_problems,
}
WANTED_GAIN, WANTED_DISTANCE = 0.05, 0.03
NUM_FARTHEST = 3
EXAMPLES = Path(__file__).parents[1] / "examples"
LARGE = {
    "64 H100: SigLIP and a language model of 70B": ("plan_64_gpus.yaml", ["parallel.planner=auto"]),
    "1296 A800: docs/layout.md's 72B": ("layout/mllm_72b_1296_a800.yaml", ["parallel.planner=auto"]),
    "16384 H100: the same, global batch 8192": (
        "layout/mllm_72b_1296_a800.yaml",
        [
            "parallel.planner=auto",
            "cluster={device: cuda, num_devices: 16384, num_nodes: 2048, accelerator: h100}",
            "parallel.num_microbatches=32",
            "parallel.limits={}",
            "train.global_batch_size=8192",
        ],
    ),
}
"""Run files, and what is set otherwise."""
COLUMNS = ("configuration", "auto [s]", "schedule", "best named [s]", "faster by", "above bound", "fits", "CPU [s]")


def problems() -> list[tuple[str, PlanningProblem]]:
    return [(f"{paper}: {what}", problem) for paper, module in PAPERS.items() for what, problem in module.problems()]


def large_problems() -> Iterator[tuple[str, PlanningProblem]]:
    for what, (file, overrides) in LARGE.items():
        yield what, read_problem(load_run_config(EXAMPLES / file, overrides))


def main(arguments: Sequence[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only configurations whose name holds one of them")
    words = parser.parse_args(arguments).words
    report = Report("auto", "Planner auto against every named planner")
    choices = [_choose(*each) for each in problems() if _is_wanted(each[0], words)]
    report.table(COLUMNS, [each.row() for each in choices])
    if choices:
        gains, distances = [each.gain for each in choices], [each.distance for each in choices]
        good = sum(g >= WANTED_GAIN or d <= WANTED_DISTANCE for g, d in zip(gains, distances, strict=True))
        report.add(
            f"Slower than the best named planner on {sum(gain < 0 for gain in gains)} of {len(gains)}. Median gain "
            f"{median(gains):.1%}, median distance from the bound {median(distances):.1%}; at least {WANTED_GAIN:.0%} "
            f"faster or within {WANTED_DISTANCE:.0%} of the bound on {good} of {len(gains)}. Farthest from the bound: "
            + "; ".join(f"{each.what} {each.distance:.0%}" for each in sorted(choices, key=_far)[:NUM_FARTHEST])
            + "."
        )
    large = [_choose(*each) for each in large_problems() if _is_wanted(each[0], words)]
    if large:
        report.add("Run files, up to a large cluster. The processor's seconds are those of the search.")
        report.table(COLUMNS, [each.row() for each in large])
    report.add("\n".join(f"* {each.what}: {each.choice.why}." for each in [*choices, *large]))
    return report


@dataclass(frozen=True)
class Chosen:
    what: str
    choice: Choice
    cpu_s: float

    @property
    def best(self) -> Evaluation:
        assert self.choice.best_named is not None
        return self.choice.named[self.choice.best_named]

    @property
    def gain(self) -> float:
        return self.best.iteration_time_s / self.choice.evaluation.iteration_time_s - 1

    @property
    def distance(self) -> float:
        return _distance(self.choice)

    def row(self) -> tuple[str, ...]:
        chosen = self.choice.evaluation
        return (
            self.what,
            f"{chosen.iteration_time_s:.3f}",
            chosen.plan.schedule,
            f"{self.choice.best_named} {self.best.iteration_time_s:.3f}",
            f"{self.gain:.1%}",
            f"{self.distance:.1%}",
            "yes" if chosen.fits else "no",
            f"{self.cpu_s:.1f}",
        )


def _choose(what: str, problem: PlanningProblem) -> Chosen:
    started = time.process_time()
    choice = choose(problem)
    return Chosen(what, choice, time.process_time() - started)


def _far(chosen: Chosen) -> float:
    return -chosen.distance


def _is_wanted(what: str, words: Sequence[str]) -> bool:
    return not words or any(word in what for word in words)


def _distance(choice: Choice) -> float:
    """Above the bound; infinite where there is none for such a plan."""
    if choice.lower_bound_s is None:
        return float("inf")
    return choice.evaluation.iteration_time_s / choice.lower_bound_s - 1


if __name__ == "__main__":
    main().write(REPORTS)
