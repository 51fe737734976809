"""How long do the planners' searches take? One core, no torch in what is timed, on clusters of the papers' sizes.

A search is an entry in `SEARCHES`: what is searched, the time that it may take, and a function that prepares it and
returns what is timed.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import numpy as np

from benchmarks.reporting import Report
from motet.planner.distmm.planner import assignments
from motet.planner.disttrain.orchestration import orchestrate
from motet.planner.disttrain.planner import orchestrated_plan, orchestration_problem
from motet.planner.evaluate import evaluate
from motet.planner.layouts.partition import partition
from motet.planner.registry import make_plan
from papers.distmm.models import problem as distmm_problem
from papers.disttrain.models import mllm
from papers.disttrain.problems import problem as disttrain_problem
from papers.optimus.model import fit_bubble_width, fit_constants, optimus, optimus_llm, strong_scaling
from papers.optimus.problems import problems


@dataclass(frozen=True)
class Search:
    what: str
    limit_s: float | None
    """Limit that it should not exceed; None if there is none."""
    prepare: Callable[[], Callable[[], object]]
    published: str = ""
    """The paper's statement about its own planner."""


_layers = np.random.default_rng(0)


def _partition() -> Callable[[], object]:
    """Partitions different layers each time, because results for equal layers are cached."""
    costs = _layers.uniform(0.5, 2.0, 512).tolist()
    return lambda: partition(costs, 64)


def _orchestration(num_devices: int, global_batch_size: int) -> Callable[[], object]:
    return partial(orchestrate, mllm("72B", num_devices, global_batch_size))


def _bubbles(num_microbatches: int) -> Callable[[], object]:
    """The language model's timeline and all encoder layouts that fit (Optimus, Algorithm 1)."""
    constants, case = fit_constants(), strong_scaling(num_microbatches)
    width_s = fit_bubble_width(constants)
    return lambda: optimus(case, constants, optimus_llm(case, constants, reduction_s=width_s))


def _plan(planner: str) -> Callable[[], object]:
    """With all that a plan takes: costs of layers, candidates, their simulation."""
    problem = disttrain_problem("72B", 64, 64, 32, dp_sizes=(1, 2, 4, 8))
    return partial(make_plan, problem, planner)


def _balancer(num_devices: int) -> Callable[[], object]:
    """DistMM's partitions, batch sizes and devices of both towers, apart; without simulation."""
    clip = distmm_problem("760M", "350M", 512)
    larger = replace(clip, cluster=replace(clip.cluster, num_devices=num_devices))
    larger = replace(larger, samples=clip.samples * (num_devices // 64))
    return lambda: list(assignments(replace(larger), placement="parallel"))


def _optimus_plan() -> Callable[[], object]:
    return partial(make_plan, dict(problems())[MODEL_A], "optimus")


MODEL_A = "ViT-11B + LLAMA-70B, 64 H100 (Model A)"

SEARCHES: Mapping[str, Search] = {
    "partition": Search("512 layers into 64 stages", 0.020, _partition),
    **{
        f"disttrain-{devices}": Search(
            f"DistTrain's orchestration, MLLM-72B, {devices} GPUs, global batch {batch}",
            limit_s,
            partial(_orchestration, devices, batch),
            published,
        )
        for devices, batch, limit_s, published in (
            (112, 240, None, "133 ms"),
            (324, 480, None, "441 ms"),
            (648, 960, None, "641 ms"),
            (1296, 1920, 0.1, "922 ms"),
            (16384, 16384, 2.0, ""),
        )
    },
    **{
        planner: Search(f"planner {planner}, MLLM-72B on 64 GPUs, simulations included", 2.0, partial(_plan, planner))
        for planner in ("disttrain", "entrain")
    },
    **{
        f"distmm-{devices}": Search(
            f"DistMM's load balancer, CLIP(760M, 350M), {devices} GPUs, batch {8 * devices}",
            limit_s,
            partial(_balancer, devices),
        )
        for devices, limit_s in ((64, 0.1), (4096, 5.0))
    },
    "optimus": Search(f"planner optimus, {MODEL_A}, simulations included", 2.0, _optimus_plan),
    **{
        f"optimus-{devices}": Search(
            f"Optimus' search, ViT-22B + GPT-175B, {devices} GPUs, {num_microbatches} microbatches",
            limit_s,
            partial(_bubbles, num_microbatches),
            published,
        )
        for devices, num_microbatches, limit_s, published in (
            (1536, 32, 3.0, "322 s"),
            (2048, 24, 1.0, "90 s"),
            (3072, 16, 0.5, "15 s"),
        )
    },
}


SIMULATED = ((112, 240, 80, (1, 3, 6, 12)), (1296, 1920, 128, (1, 3, 5, 15, 30, 60)))
"""Devices, global batch, microbatches, data-parallel sizes: where a closed form is held against the simulator."""


def _closed_form_rows() -> Iterator[tuple[object, ...]]:
    for num_devices, batch, num_microbatches, dp_sizes in SIMULATED:
        problem = disttrain_problem("72B", num_devices, batch, num_microbatches, dp_sizes=dp_sizes)
        found = orchestrate(orchestration_problem(problem))
        started = time.perf_counter()
        simulated_s = evaluate(problem, orchestrated_plan(problem, found)).iteration_time_s
        seconds = time.perf_counter() - started
        off = f"{found.iteration_s / simulated_s - 1:+.1%}"
        what = f"MLLM-72B on {found.num_devices} of {num_devices} GPUs"
        yield what, f"{found.iteration_s:.2f}", f"{simulated_s:.2f}", off, f"{seconds:.2f}"


def main(arguments: Sequence[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("searches", nargs="*", default=list(SEARCHES), help=f"of {', '.join(SEARCHES)}; all")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--no-simulation", dest="simulate", action="store_false", help="time searches only")
    options = parser.parse_args(arguments)
    report = Report("planners", "How long do the planners' searches take?")
    rows = []
    for name in options.searches:
        search = SEARCHES[name]
        times = []
        for _ in range(options.repetitions):
            run = search.prepare()
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
        limit = "" if search.limit_s is None else f"{search.limit_s * 1e3:g} ms"
        rows.append((search.what, f"{median(times) * 1e3:.1f}", f"{min(times) * 1e3:.1f}", limit, search.published))
    report.table(("search", "median [ms]", "least [ms]", "goal", "paper"), rows)
    if options.simulate:
        report.add(
            "DistTrain's closed form against the simulator, which knows messages, reductions and unequal replicas "
            "(motet's analytic costs, everything recomputed):"
        )
        columns = ("plan", "closed form [s]", "simulated [s]", "off", "simulation takes [s]")
        report.table(columns, list(_closed_form_rows()))
    return report


if __name__ == "__main__":
    main().write()
