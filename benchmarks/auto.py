"""Is planner `auto` ever slower than the best named planner, by how much is it faster, how far from a lower bound?

On the configurations of the papers that `python -m papers` holds as planning problems, and on run files for up to
16,384 devices, all simulated. The bound is `motet.planner.lower_bound`'s: no plan of the problem takes
less, whoever makes it.

All of it takes about six minutes of CPU time, and can be ended early (Ctrl-C); `auto.py Optimus:` does one paper.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.reporting import Report
from motet.api import read_problem
from motet.config import load_run_config
from motet.planner.choice import Choice
from motet.planner.evaluate import Evaluation
from motet.planner.problem import PlanningProblem
from motet.planner.registry import choose
from papers.cornstarch import problems as cornstarch_problems
from papers.distmm import systems as distmm_problems
from papers.disttrain import problems as disttrain_problems
from papers.entrain import problems as entrain_problems
from papers.oobleck import problems as oobleck_problems
from papers.optimus import problems as optimus_problems

PAPERS = {
    "Cornstarch": cornstarch_problems,
    "Optimus": optimus_problems,
    "Entrain": entrain_problems,
    "Oobleck": oobleck_problems,
    "DistMM": distmm_problems,
    "DistTrain": disttrain_problems,
}
LEFT_OUT = """What `python -m papers` has beside these is no question of a layout, or cannot be asked:

* Cornstarch's Tables 2 and 3 print the seconds of a stage, not of a layer, so that nothing but their own stages can be
  planned from them; the models, batches and devices are those above. Table 4 and the thesis' Tables 3.3 and 3.4 divide
  one attention layer's tokens.
* Optimus' Tables 1 and 7 look into the bubbles of a configuration that is above. Tables 4 and 10 are appendix C's.
* DistTrain's Figures 15 and 16 also have runs on fewer GPUs, whose numbers are not printed; Figure 18 reorders samples,
  and Figure 22 hides the communication within an action.
* Entrain prints its four data sets as pictures only. What its tables of trials imply for them (8 of 16 devices for the
  encoder with Llama3-3b) no size of image gives with computed costs (5.4 at most, whatever the texts), so they are not
  told apart: samples are drawn as `entrain_problems` says. Its 64 GPUs are four such replicas, in turn.
* Oobleck's Tables 2.2 to 2.4, Figures 2.10 and 2.11 are about failures; its models are planned on all of its 30 nodes.
* DistMM's Megatron-LM and its own published layouts stand in `python -m papers distmm`, whose clock sums gradients
  after the last backward. Here `distmm` is the only named planner that lays out towers, and there is no bound for
  them."""
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
COLUMNS = (
    "configuration",
    "auto [s]",
    "schedule",
    "best named [s]",
    "faster by",
    "above bound",
    "fits",
    "CPU [s]",
    "first [s]",
)


def problems() -> list[tuple[str, PlanningProblem]]:
    return [(f"{paper}: {what}", problem) for paper, module in PAPERS.items() for what, problem in module.problems()]


def _wanted(report: Report, words: Sequence[str], named: Iterable[tuple[str, PlanningProblem]]) -> list["Chosen"]:
    """Plans the problems whose name contains one of the words; when interrupted, returns those that are done."""
    wanted: list[tuple[str, PlanningProblem]] = []
    choices: list[Chosen] = []
    try:
        wanted += [each for each in named if not words or any(word in each[0] for word in words)]
        for each in wanted:
            choices.append(_choose(*each))
    except KeyboardInterrupt:
        report.add(f"Ended by hand after {len(choices)} of {len(wanted)} configurations.")
    return choices


def large_problems() -> Iterator[tuple[str, PlanningProblem]]:
    for what, (file, overrides) in LARGE.items():
        yield what, read_problem(load_run_config(EXAMPLES / file, overrides))


def main(arguments: Sequence[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only configurations whose name holds one of them")
    words = parser.parse_args(arguments).words
    report = Report("auto", "Planner auto against every named planner")
    choices = _wanted(report, words, problems())
    if choices:
        report.add(_summary(choices))
    for paper in PAPERS:
        if own := [each for each in choices if each.what.startswith(f"{paper}:")]:
            report.add(f"{paper}. {_counts(own)}")
            report.table(COLUMNS, [each.row() for each in own])
    report.add(LEFT_OUT)
    large = _wanted(report, words, large_problems())
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
    first_s: float
    """Seconds of the processor until the first plan that fits."""

    @property
    def best(self) -> Evaluation:
        assert self.choice.best_named is not None
        return self.choice.named[self.choice.best_named]

    @property
    def gain(self) -> float:
        return self.best.iteration_time_s / self.choice.evaluation.iteration_time_s - 1

    @property
    def distance(self) -> float | None:
        """Above the bound; None for towers."""
        bound_s = self.choice.lower_bound_s
        return None if bound_s is None else self.choice.evaluation.iteration_time_s / bound_s - 1

    @property
    def is_good(self) -> bool:
        return self.gain >= WANTED_GAIN or (self.distance is not None and self.distance <= WANTED_DISTANCE)

    def row(self) -> tuple[str, ...]:
        chosen = self.choice.evaluation
        return (
            self.what,
            f"{chosen.iteration_time_s:.3f}",
            chosen.plan.schedule,
            f"{self.choice.best_named} {self.best.iteration_time_s:.3f}",
            f"{self.gain:.1%}",
            "" if self.distance is None else f"{self.distance:.1%}",
            "yes" if chosen.fits else "no",
            f"{self.cpu_s:.1f}",
            f"{self.first_s:.1f}",
        )


def _choose(what: str, problem: PlanningProblem) -> Chosen:
    started, first_s = time.process_time(), []

    def progress(line: str) -> None:
        if " ms" in line and "does not fit" not in line:
            first_s.append(time.process_time() - started)

    choice = choose(problem, progress=progress)
    cpu_s = time.process_time() - started
    chosen = Chosen(what, choice, cpu_s, first_s[0] if first_s else cpu_s)
    print(" | ".join(chosen.row()), file=sys.stderr, flush=True)
    return chosen


def _summary(choices: Sequence[Chosen]) -> str:
    farthest = sorted((each for each in choices if each.distance is not None), key=_far)[:NUM_FARTHEST]
    return f"{_counts(choices)} Farthest from the bound: " + (
        "; ".join(f"{each.what} {each.distance:.0%}" for each in farthest) + "."
    )


def _counts(choices: Sequence[Chosen]) -> str:
    distances = [each.distance for each in choices if each.distance is not None]
    bounded = f", median distance from the bound {median(distances):.1%}" if distances else ""
    gains = [each.gain for each in choices]
    return (
        f"Slower than the best named planner on {sum(gain < 0 for gain in gains)} of {len(gains)}. Median gain "
        f"{median(gains):.1%}{bounded}; at least {WANTED_GAIN:.0%} faster or within {WANTED_DISTANCE:.0%} of the bound "
        f"on {sum(each.is_good for each in choices)}."
    )


def _far(chosen: Chosen) -> float:
    return -(chosen.distance or 0.0)


if __name__ == "__main__":
    main().write()
