"""How long does it take to plan pipeline templates? Table 2.3's grid, encoders with a language model, and memory that
decides; which counts of microbatches are faster, eq. 2.6's or those of the shortest iteration; and how far what a
template says of an iteration is from its simulation.

Each figure is the median of the runs' CPU seconds on one core. The published seconds are those of Table 2.3.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import time
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from statistics import median

import numpy as np

from benchmarks.reporting import Report
from motet.assignment.sample import Sample, Segment
from motet.cluster import Link, cpu_cluster
from motet.costs.analytic import analytic_table
from motet.families.shape_reading.module_shapes import module_workload
from motet.plan import Edge
from motet.planner.evaluate import evaluate
from motet.planner.problem import ModuleProblem, PlanningProblem
from motet.planner.templates.pipelines import (
    Template,
    best_combination,
    iteration_s,
    min_max_counts,
    num_combinations,
    template_sizes,
)
from motet.planner.templates.planner import make_templates, plan_with_sizes
from motet.planner.templates.stage_mapping import ChainCosts, CutCosts, MappingProblem, map_stages
from motet.shapes.module_shape import with_projector
from papers.oobleck.microbatch_variance import least_variance_counts
from papers.oobleck.published import PLANNED_LAYERS, PLANNING_S
from papers.oobleck.replay_model import planning_problem

SIZES = (1, 2, 4, 8)


def seconds(problem: MappingProblem, num_nodes: int, num_runs: int) -> float:
    """Median seconds of CPU time."""
    times = []
    for _ in range(num_runs):
        begin = time.process_time()
        assert map_stages(problem, num_nodes) is not None
        times.append(time.process_time() - begin)
    return median(times)


def drawn_chain(num_layers: int, weight: float, seed: int, *, memory: bool = False, cp: int = 1) -> ChainCosts:
    """Layers that all differ."""
    random = Random(seed)
    base = [weight * random.uniform(0.5, 1.5) for _ in range(num_layers)]
    gain = {size: 1 / size + (0.03 * (1 + size**0.5 / 4) if size > 1 else 0.0) for size in SIZES}
    exchange = 0.02 * (1 - 1 / cp)
    sizes = [size for size in SIZES if size >= cp]
    return ChainCosts(
        seconds={size: [t * (gain[size // cp] / cp + exchange) for t in base] for size in sizes},
        static_bytes={size: [cp / size] * num_layers for size in sizes} if memory else None,
        saved_bytes={size: [0.05 / size] * num_layers for size in sizes} if memory else None,
        cut_s=dict.fromkeys(sizes, CutCosts([0.01] * num_layers + [0.0], [0.04] * num_layers + [0.0])),
        cp_size=cp,
    )


def with_context(num_layers: int, weight: float, seed: int, *, memory: bool = False) -> ChainCosts:
    """The same where stages choose among ten groups: tensor x context parallelism on up to 8 devices."""
    one, *others = (drawn_chain(num_layers, weight, seed, memory=memory, cp=cp) for cp in SIZES)
    return replace(one, others=tuple(others))


def grid(report: Report, num_runs: int) -> None:
    rows = []
    for (num_nodes, size), published in PLANNING_S.items():
        cells = []
        for num_layers, theirs in zip(PLANNED_LAYERS, published, strict=True):
            ours = seconds(planning_problem(num_layers, size), num_nodes, num_runs)
            goal = max(0.02, theirs / 300)
            cells.append(
                f"{ours * 1e3:.1f} of {goal * 1e3:.0f}{'' if ours <= goal else ' MISSED'} ({theirs / ours:,.0f}x)"
            )
        rows.append((num_nodes, size, *cells))
    report.add(
        "Table 2.3's grid, equal layers, four microbatches for each stage as there: milliseconds of the goal (the "
        "larger of 20 ms and a 300th of the published time), and how many times faster than published."
    )
    report.table(("nodes", "GPUs of each", *(f"{n} layers" for n in PLANNED_LAYERS)), rows)


def others(report: Report, num_runs: int) -> None:
    def chain(num_layers: int, **values: object) -> MappingProblem:
        return MappingProblem(
            modules={"llm": drawn_chain(num_layers, 1.0, 1, memory=bool(values))},
            devices_per_node=8,
            num_microbatches=96,
            **values,  # type: ignore[arg-type]
        )

    def with_encoders(num_layers: int) -> MappingProblem:
        modules = {
            "vision": drawn_chain(27, 0.2, 2),
            "audio": drawn_chain(32, 0.1, 3),
            "llm": drawn_chain(num_layers, 1, 4),
        }
        return MappingProblem(modules=modules, devices_per_node=8, num_microbatches=96)

    def with_choice(problem: MappingProblem, seed: int) -> MappingProblem:
        llm = problem.modules["llm"]
        chain = with_context(len(llm.layers), 1.0, seed, memory=llm.static_bytes is not None)
        return replace(problem, modules={**problem.modules, "llm": chain})

    def with_choice_everywhere(num_layers: int) -> MappingProblem:
        modules = {
            "vision": with_context(27, 0.2, 2),
            "audio": with_context(32, 0.1, 3),
            "llm": with_context(num_layers, 1.0, 4),
        }
        return MappingProblem(modules=modules, devices_per_node=8, num_microbatches=96)

    cases = [
        ("chain of 96 unequal layers, 24 x 8", chain(96), 24, 3.0),
        ("the same where memory decides what fits", chain(96, device_bytes=1.5), 24, None),
        ("chain of 32 unequal layers, 4 x 8, memory decides", chain(32, device_bytes=1.6), 4, None),
        ("two encoders and 34 layers, 32 x 8", with_encoders(34), 32, 10.0),
        ("two encoders and 64 layers, 32 x 8", with_encoders(64), 32, 10.0),
        ("two encoders and 96 layers, 32 x 8", with_encoders(96), 32, 10.0),
        ("chain of 96, 24 x 8, each stage with tensor x context parallelism", with_choice(chain(96), 1), 24, 3.0),
        ("the same where memory decides what fits", with_choice(chain(96, device_bytes=1.5), 1), 24, None),
        ("two encoders and 96 layers, 32 x 8, the same choice", with_choice(with_encoders(96), 4), 32, 10.0),
        ("the same, and the encoders' stages choose too", with_choice_everywhere(96), 32, 10.0),
    ]
    rows = []
    for what, problem, num_nodes, goal in cases:
        ours = seconds(problem, num_nodes, num_runs)
        rows.append((what, f"{ours:.2f}", "-" if goal is None else f"{goal:g}"))
    report.add("Layers that all differ, 96 microbatches: seconds.")
    report.table(("problem", "seconds", "goal"), rows)


def drawn_template(random: Random, num_nodes: int) -> Template:
    slowest_s = random.uniform(0.9, 1.2) / num_nodes
    return Template(
        num_nodes=num_nodes,
        replicas={},
        fill_s=slowest_s * num_nodes * random.uniform(0.8, 1.0),
        slowest_s=slowest_s,
    )


def combinations(report: Report) -> None:
    random = Random(1)
    sizes = template_sizes(256, 0, 8)
    templates = {n: drawn_template(random, n) for n in sizes}
    begin = time.process_time()
    count = num_combinations(sizes, 256, 1)
    counted = time.process_time() - begin
    begin = time.process_time()
    found = best_combination(templates, 256, 0, 1024)
    assert found is not None
    report.add(
        f"256 nodes, n0 = 8: {count:,} combinations (counted in {counted:.2f} s); the best of all, {len(found)} "
        f"pipelines for 1024 microbatches, found in {time.process_time() - begin:.2f} s."
    )


def counts(report: Report, num_problems: int) -> None:
    random = Random(2)
    rows = []
    for per_pipeline in (2, 4, 8, 16):
        ratios = []
        for _ in range(num_problems):
            chosen = [drawn_template(random, random.randint(2, 8)) for _ in range(random.randint(2, 8))]
            total = per_pipeline * len(chosen)
            by_variance = iteration_s(chosen, least_variance_counts(chosen, total))
            ratios.append(by_variance / iteration_s(chosen, min_max_counts(chosen, total)))
        slower = np.array(ratios) > 1 + 1e-9
        rows.append((per_pipeline, f"{slower.mean():.0%}", f"{np.mean(ratios) - 1:.2%}", f"{max(ratios) - 1:.1%}"))
    report.add(
        f"Counts of microbatches, {num_problems} drawn problems each: the iteration with eq. 2.6's integer optimum "
        "against the shortest one, which minimises the slowest pipeline's time."
    )
    report.table(("microbatches for each pipeline", "eq. 2.6 is slower in", "on average by", "at most by"), rows)


VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 6,
    "intermediate_size": 1024,
    "image_size": 64,
    "patch_size": 8,
}
TEXT = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_hidden_layers": 8,
    "intermediate_size": 1024,
    "vocab_size": 2048,
}


def drawn_problem(random: Random) -> PlanningProblem:
    """An encoder and a language model for one pipeline on some nodes, whose links are slow or fast."""
    workloads = {
        "vision": with_projector(module_workload(VISION), "mlp", TEXT["hidden_size"]),
        "language_model": module_workload(TEXT),
    }
    size, num_nodes, num_microbatches = random.choice([1, 2, 4]), random.randint(2, 5), random.choice([8, 16])
    within = Link(name="within", latency_s=1e-6, bytes_per_s=random.choice([1e9, 1e10]))
    between = Link(name="between", latency_s=1e-5, bytes_per_s=random.choice([1e8, 3e8, 1e9]))
    cluster = replace(cpu_cluster(size * num_nodes), devices_per_node=size, within_node=within, between_nodes=between)
    image, words = Segment(64, grid=(8, 8)), random.choice([20, 200])
    layouts = {"vision": (image,), "language_model": (Segment(64, source="vision"), Segment(words))}
    return PlanningProblem(
        modules={
            name: ModuleProblem(
                workload=workload,
                trainable=((0, workload.num_layers),),
                loss_weight=float(name == "language_model"),
            )
            for name, workload in workloads.items()
        },
        edges=(Edge(source="vision", target="language_model"),),
        cluster=cluster,
        table=analytic_table(workloads, cluster),
        samples=tuple(Sample(str(i), layouts, {"language_model": words}) for i in range(num_microbatches)),
        num_microbatches=num_microbatches,
    )


def messages(report: Report, num_problems: int) -> None:
    """One pipeline each, so that nothing is reduced."""
    random = Random(3)
    free = Link(name="free", latency_s=0.0, bytes_per_s=1e18)
    errors: dict[str, list[float]] = {"counted": [], "free": []}
    for _ in range(num_problems):
        problem = drawn_problem(random)
        without = replace(problem, cluster=replace(problem.cluster, within_node=free, between_nodes=free))
        for what, planned in (("counted", problem), ("free", without)):
            templates = make_templates(planned)
            for num_nodes, template in templates.by_nodes.items():
                smaller = problem.with_num_devices(num_nodes * problem.cluster.devices_per_node)
                evaluation = evaluate(smaller, plan_with_sizes(smaller, templates, (num_nodes,)))
                simulated_s = evaluation.iteration_time_s - evaluation.costs.fixed_s
                errors[what].append(template.iteration_s(problem.num_microbatches) / simulated_s - 1)
    report.add(
        f"What a template says an iteration takes, against the simulation of its 1F1B on {num_problems} drawn problems "
        "(an encoder and a language model, links of 0.1 to 10 GB/s): where templates count messages, and where they "
        "are planned as if messages were free."
    )
    rows = []
    for what, of_kind in errors.items():
        low, middle, high = np.quantile(of_kind, [0.1, 0.5, 0.9])
        rows.append(
            (what, len(of_kind), f"{np.mean(np.abs(of_kind)):.1%}", f"{low:+.1%}", f"{middle:+.1%}", f"{high:+.1%}")
        )
    report.table(("messages", "templates", "off by, on average", "10% of them", "median", "90% of them"), rows)


def main(argv: Sequence[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--problems", type=int, default=300, help="for the counts of microbatches; a fifth for messages"
    )
    arguments = parser.parse_args(argv)
    report = Report("templates", "Planning pipeline templates")
    grid(report, arguments.runs)
    others(report, arguments.runs)
    combinations(report)
    counts(report, arguments.problems)
    messages(report, max(1, arguments.problems // 5))
    return report


if __name__ == "__main__":
    main().write()
