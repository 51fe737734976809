"""Records what every planner plans, to show that a change of the code leaves plans and predictions as they were.

The configurations are those of `auto.py`, and the run files in examples/ (those without a model of the hub), planned as
they say. One JSON file holds, for each configuration and planner, the simulated iteration and a digest of the layout:

    git stash; python -m benchmarks.planned_results before.json; git stash pop
    python -m benchmarks.planned_results after.json --compare before.json

The file is written after each configuration; started again, the script goes on after those that the file has. The named
planners come first, then `auto`.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hashlib
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.auto import EXAMPLES, problems
from motet.api import read_problem
from motet.config import load_run_config
from motet.errors import UserError
from motet.planner.evaluate import Evaluation, evaluate
from motet.planner.from_run_file import plan_for
from motet.planner.problem import PlanningProblem
from motet.planner.registry import PLANNERS, choose, make_plan

RELATIVE_TOLERANCE = 1e-12
AS_WRITTEN = "run file"
"""In the place of a planner's name: the one that the run file names."""
NUM_CORES = "cluster.num_cores=2"
"""For processes on CPUs, whose prediction would otherwise depend on the machine."""
Result = dict[str, Any]
Results = dict[str, dict[str, Result]]
"""By configuration and planner."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the JSON file; what it has already is not planned again")
    parser.add_argument("--only", metavar="PATTERN", default="", help="configurations in which this pattern is found")
    parser.add_argument("--planners", metavar="NAME,...", help=f"only these, of {', '.join(PLANNERS)}, {AS_WRITTEN!r}")
    parser.add_argument("--compare", metavar="OTHER.json", type=Path, help="list differences; exit 1 if there are any")
    options = parser.parse_args(arguments)
    planners = options.planners.split(",") if options.planners else [*PLANNERS, AS_WRITTEN]
    if unknown := [name for name in planners if name not in (*PLANNERS, AS_WRITTEN)]:
        parser.error(f"--planners: {', '.join(unknown)} are not known; give some of {', '.join(PLANNERS)}")
    results: Results = json.loads(options.out.read_text()) if options.out.exists() else {}
    for what, named in _tasks(options.only, planners):
        missing = {name: plan for name, plan in named.items() if name not in results.get(what, {})}
        if not missing:
            continue
        started = time.process_time()
        for name, plan in missing.items():
            results.setdefault(what, {})[name] = _result(plan)
        _write(options.out, results)
        print(f"{what}: {len(missing)} in {time.process_time() - started:.1f} s", file=sys.stderr, flush=True)
    if options.compare is None:
        return 0
    other: Results = json.loads(options.compare.read_text())
    found = [
        difference
        for what in sorted({*results, *other})
        if re.search(options.only, what)
        for name in planners
        for difference in _differences(
            f"{what}: {name}", results.get(what, {}).get(name), other.get(what, {}).get(name)
        )
    ]
    print("\n".join(found) or "no differences")
    return 1 if found else 0


def _tasks(pattern: str, planners: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Callable[[], Result]]]]:
    """Each configuration with what is to be done: twice, as `auto` takes longer than the others."""
    configurations = [each for each in problems() if re.search(pattern, each[0])]
    named = [name for name in planners if name not in ("auto", AS_WRITTEN)]
    for what, problem in configurations:
        yield what, {name: partial(_named, problem, name) for name in named}
    if AS_WRITTEN in planners:
        for path in sorted(EXAMPLES.rglob("*.yaml")):
            what = f"examples: {path.relative_to(EXAMPLES)}"
            if re.search(pattern, what) and "hub:" not in path.read_text():
                yield what, {AS_WRITTEN: partial(_as_written, path)}
    if "auto" in planners:
        for what, problem in configurations:
            yield what, {"auto": partial(_auto, problem)}


def _result(plan: Callable[[], Result]) -> Result:
    try:
        return plan()
    except UserError as error:
        return {"refused": str(error)}


def _named(problem: PlanningProblem, planner: str) -> Result:
    return _describe(evaluate(problem, make_plan(problem, planner)))


def _auto(problem: PlanningProblem) -> Result:
    choice = choose(problem)
    return {
        **_describe(choice.evaluation),
        "found_by": choice.found_by,
        "problem_lower_bound_s": choice.lower_bound_s,
        "best_named": choice.best_named,
    }


def _as_written(path: Path) -> Result:
    config = load_run_config(path, [])
    if config.cluster.device == "cpu":
        config = load_run_config(path, [NUM_CORES])
    problem = read_problem(config)
    return _describe(evaluate(problem, plan_for(config, problem)))


def _describe(evaluation: Evaluation) -> Result:
    plan, result = evaluation.plan, evaluation.result
    stages = [
        [name, r, s, *stage.layers, list(stage.ranks), stage.tp_size, stage.cp_size]
        for name, r, s, stage in plan.stages()
    ]
    return {
        "planner": plan.planner,
        "iteration_time_s": evaluation.iteration_time_s,
        "bubble_fraction": result.bubble_fraction,
        "peak_memory_bytes": max(result.peak_memory_bytes),
        "lower_bound_s": evaluation.lower_bound_s,
        "fits": evaluation.fits,
        "schedule": plan.schedule,
        "num_microbatches": plan.num_microbatches,
        "num_ranks": plan.num_ranks,
        "num_stages": len(stages),
        "layout": hashlib.sha256(json.dumps(stages).encode()).hexdigest()[:16],
    }


def _write(path: Path, results: Results) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_file = path.with_name(path.name + ".tmp")
    partial_file.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    partial_file.replace(path)


def _differences(where: str, own: Result | None, other: Result | None) -> Iterator[str]:
    """The wording of refusals may differ."""
    if own is None or other is None:
        if own is not other:
            yield f"{where}: only in {'the other file' if own is None else 'this file'}"
        return
    if "refused" in own or "refused" in other:
        if ("refused" in own) != ("refused" in other):
            yield f"{where}: refused only in {'this' if 'refused' in own else 'the other'} file"
        return
    for key in {**own, **other}:
        if not _is_same(own.get(key), other.get(key)):
            yield f"{where}: {key}: {own.get(key)}, in the other file {other.get(key)}"


def _is_same(own: Any, other: Any) -> bool:
    if isinstance(own, float) and isinstance(other, float):
        return math.isclose(own, other, rel_tol=RELATIVE_TOLERANCE, abs_tol=0.0)
    return bool(own == other)


if __name__ == "__main__":
    sys.exit(main())
