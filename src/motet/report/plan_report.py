"""Reports of a plan: the JSON of `motet plan` and `motet simulate` (`report`) and its text (`report_text`)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from motet.assignment.next_batch import stages_ahead
from motet.cluster.pipelines_on_nodes import nodes_of_pipelines
from motet.costs.communication import communicator_bytes
from motet.errors import UserError
from motet.plan import Plan
from motet.planner.choice import Choice
from motet.planner.evaluate import Evaluation, evaluate, memory_suggestions
from motet.planner.problem import PlanningProblem
from motet.schedule.action import Compute, Kind
from motet.schedule.communicators import communicators
from motet.timeline import Timeline

MOST_GROUPS = 64
"""Maximum number of groups of ranks whose memory is reported."""
MOST_ROWS = 16
"""Most of them in a text."""


def report(
    plan: Plan, problem: PlanningProblem, *, planning_time_s: float = 0.0, dtype: str = "float32"
) -> dict[str, Any]:
    """Simulates the plan's iteration on the problem's typical batch and reports it (`report_evaluation`)."""
    return report_evaluation(evaluate(problem, plan), planning_time_s=planning_time_s, dtype=dtype)


def report_evaluation(
    evaluation: Evaluation, *, planning_time_s: float = 0.0, dtype: str = "float32", is_disturbed: bool = False
) -> dict[str, Any]:
    """The JSON of `motet plan` and `motet simulate`. `is_disturbed`: the evaluation is not that of the plan alone."""
    plan, problem = evaluation.plan, evaluation.problem
    return {
        "planner": plan.planner,
        "fits": evaluation.fits,
        "overflows": [str(overflow) for overflow in evaluation.overflows],
        "remedies": memory_suggestions(evaluation) if evaluation.overflows else [],
        "iteration_time_s": evaluation.iteration_time_s,
        "throughput_samples_per_s": len(problem.samples) / evaluation.iteration_time_s,
        "bubble_fraction": evaluation.result.bubble_fraction,
        "time_shares_s": evaluation.result.time_shares.means_s(),
        "mfu": evaluation.mfu(dtype),
        "hfu": evaluation.hfu(dtype),
        "peak_memory_bytes": list(evaluation.result.peak_memory_bytes),
        "memory_by_kind": memory_by_kind(evaluation),
        "num_devices": plan.num_ranks,
        "schedule": plan.schedule,
        "assignment": plan.assignment,
        "num_microbatches": plan.num_microbatches,
        "run_ahead": _run_ahead(evaluation, is_disturbed=is_disturbed) if plan.run_ahead else None,
        "stages": list(_stages(evaluation)),
        "lower_bound_s": evaluation.lower_bound_s,
        "planning_time_s": planning_time_s,
        "costs": {"source": problem.table.source, "hardware": problem.table.hardware, "date": problem.table.date},
        "cost_comparison": compare_costs(problem, plan),
        "communicators": _communicators(evaluation),
        "sharing": {
            name: {"replicas": module.sharded_replicas, "after_a_failure": _after_a_failure(plan, problem)}
            for name, module in plan.modules.items()
            if module.fully_sharded
        },
    }


def _after_a_failure(plan: Plan, problem: PlanningProblem) -> str:
    """The consequence of losing a rank, and with it its node, that holds a share of the parameters."""
    try:
        num_holders = len(nodes_of_pipelines(plan, problem.cluster.devices_per_node))
    except UserError:  # A node's loss may take several of them along.
        num_holders = 1
    if problem.survives_losses and problem.memory.num_keepers(num_holders) > 1:
        return "training goes on with the shares that other replicas hold"
    return "training restarts from the checkpoint"


def _run_ahead(evaluation: Evaluation, *, is_disturbed: bool) -> dict[str, Any]:
    """The first layers of each encoder that run ahead, and seconds of an iteration without it."""
    plan = evaluation.plan
    layers = {
        name: max(plan.modules[name].replicas[r].stages[number - 1].layers[1] for r, number in replicas.items())
        for name, replicas in _by_module(stages_ahead(plan)).items()
    }
    without = None if is_disturbed else evaluate(evaluation.problem, replace(plan, run_ahead=False))
    return {"layers": layers, "without_s": None if without is None else without.iteration_time_s}


def _by_module(values: Mapping[tuple[str, int], int]) -> dict[str, dict[int, int]]:
    result: dict[str, dict[int, int]] = {}
    for (name, r), value in values.items():
        result.setdefault(name, {})[r] = value
    return result


def _sharing_text(num_replicas: int) -> str:
    if num_replicas > 1:
        return f"{num_replicas} replicas share parameters by rows"
    return "the ranks of each stage share parameters, each whole on one rank"


def _run_ahead_text(values: Mapping[str, Any]) -> str:
    text = "run ahead: the next batch's forwards of " + ", ".join(
        f"{name} [0, {last})" for name, last in values["run_ahead"]["layers"].items()
    )
    without_s = values["run_ahead"]["without_s"]
    if without_s is None:
        return text
    gain = without_s / values["iteration_time_s"] - 1
    return f"{text}; without, an iteration takes {_ms(without_s)} ({gain:+.1%})"


def _communicators(evaluation: Evaluation) -> dict[str, list[int]]:
    """By rank, the number of communicators and the bytes that they take on a device. gloo, which serves CPUs, sends all
    messages in the group of all ranks, and keeps nothing on a device."""
    needed, num_ranks = communicators(evaluation.plan), evaluation.plan.num_ranks
    groups = needed.groups_by_rank(num_ranks)
    if evaluation.problem.cluster.device.name == "cpu":
        return {"number": groups, "bytes": [0] * num_ranks}
    links = [sum(of_rank) for of_rank in needed.links_by_rank(num_ranks)]
    return {
        "number": [a + b for a, b in zip(groups, links, strict=True)],
        "bytes": communicator_bytes(needed, num_ranks),
    }


def memory_by_kind(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Bytes by kind when a rank holds most, for each group of ranks that compute the same at the same time, at most
    `MOST_GROUPS`: those of its first rank."""
    groups = evaluation.result.alike_ranks[:MOST_GROUPS]
    found = evaluation.result.peak_memory_by_kind([ranks[0] for ranks in groups])
    return [
        {"ranks": list(ranks), "bytes": {kind: size for kind, size in found[ranks[0]].items() if size}}
        for ranks in groups
    ]


def compare_costs(problem: PlanningProblem, plan: Plan) -> list[dict[str, Any]]:
    """Compares measured costs with computed ones: for each module, seconds of the plan's mean microbatch, forward and
    backward, and the ratios computed / measured (None where nothing is measured).

    Compares the layers alone, without a measured stage's cost beside its layers. Empty if the problem's costs are
    computed."""
    if problem.computed is None:
        return []
    computed_problem = replace(problem, table=problem.computed)
    rows = []
    for name, module in plan.modules.items():
        if module.copy_of is not None or name in problem.query_tokens:
            continue
        tp_size = module.replicas[0].stages[0].tp_size
        row: dict[str, Any] = {"module": name, "tp_size": tp_size}
        for part in ("forward_s", "backward_s"):
            measured, computed = (
                sum(getattr(time, part) for time in source.estimator.layer_times(name, tp_size, len(module.replicas)))
                for source in (problem, computed_problem)
            )
            row |= {f"measured_{part}": measured, f"computed_{part}": computed}
            row[f"{part.removesuffix('_s')}_ratio"] = computed / measured if measured else None
        rows.append(row)
    return rows


def report_measured(measured: Mapping[str, Any], timeline: Timeline, predicted: Mapping[str, Any]) -> dict[str, Any]:
    """The report of a measured iteration, with the keys of the predicted one; values of the plan alone are taken from
    there. A stage's seconds are means over the spans of all its ranks. The plan fits, since it ran."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for span in timeline.spans:
        stage = span.name.rpartition(span.kind)[0]
        seconds.setdefault((stage, span.kind), []).append(span.end - span.start)
    stages, index = [], 0
    for before, stage in zip([None, *predicted["stages"]], predicted["stages"], strict=False):
        is_next = before is not None and (before["module"], before["replica"]) == (stage["module"], stage["replica"])
        index = index + 1 if is_next else 0
        own = f"{stage['module']}[{stage['replica']}].{index}"
        backward_s = sum(_mean(seconds.get((own, kind.value), ())) for kind in Kind if kind is not Kind.FORWARD)
        forward_s = _mean(seconds.get((own, Kind.FORWARD.value), ()))
        stages.append({**stage, "forward_s": forward_s, "backward_s": backward_s})
    of_plan = ("planner", "schedule", "assignment", "num_microbatches", "lower_bound_s", "planning_time_s")
    return {**{key: predicted[key] for key in of_plan}, "fits": True, **measured, "stages": stages}


def report_choice(choice: Choice) -> dict[str, Any]:
    """`choice` in the JSON of `motet plan`: how planner `auto` chose its plan."""
    return {
        "found_by": choice.found_by,
        "why": choice.why,
        "problem_lower_bound_s": choice.lower_bound_s,
        "named": {
            name: {"iteration_time_s": evaluation.iteration_time_s, "fits": evaluation.fits}
            for name, evaluation in choice.named.items()
        },
        "too_slow": {name: {"at_least_s": seconds} for name, seconds in choice.too_slow.items()},
        "refused": dict(choice.refused),
        "assignments_s": dict(choice.assignments_s),
        "ended_early": choice.ended_early,
    }


def choice_text(values: Mapping[str, Any]) -> str:
    """The text of `report_choice`: a line and a table, fastest planner first."""
    named = sorted(values["named"].items(), key=lambda item: (not item[1]["fits"], item[1]["iteration_time_s"]))
    slower = sorted(values["too_slow"].items(), key=lambda item: item[1]["at_least_s"])
    width = max((len(name) for name, _ in [*named, *slower]), default=0)
    lines = [f"auto: {values['why']}"]
    lines += [
        f"  {name.ljust(width)}  {_ms(value['iteration_time_s'])}{'' if value['fits'] else '  does not fit'}"
        for name, value in named
    ]
    lines += [f"  {name.ljust(width)}  lower bound {_ms(value['at_least_s'])}" for name, value in slower]
    return "\n".join(lines)


def _stages(evaluation: Evaluation) -> Iterator[dict[str, Any]]:
    """Each stage with the mean seconds of its microbatches."""
    routes, costs = evaluation.program.dependencies.routes, evaluation.costs
    folding = evaluation.result.folding
    seconds: dict[tuple[str, int, int], tuple[float, float]] = {}
    for stage_cells in routes.stages:
        cells = [cell for cell in routes.cells[stage_cells.first : stage_cells.last] if cell not in routes.ran_before]
        forward_s = [costs.compute_s(Compute(Kind.FORWARD, cell)) for cell in cells]
        backward_s = [
            costs.compute_s(Compute(Kind.BACKWARD, cell)) if cell in routes.with_backward else 0.0 for cell in cells
        ]
        seconds[stage_cells[:3]] = _mean(forward_s), _mean(backward_s)
    for name, r, s, stage in evaluation.plan.stages():
        replica = (name, r) if folding is None else folding.replica_of[name, r]
        forward, backward = seconds.get((*replica, s), (0.0, 0.0))
        yield {
            "module": name,
            "replica": r,
            "layers": list(stage.layers),
            "ranks": list(stage.ranks),
            "forward_s": forward,
            "backward_s": backward,
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def report_text(values: Mapping[str, Any]) -> str:
    """The text of `report`: a few lines and a table."""
    peak = max(values["peak_memory_bytes"])
    lines = [
        f"planner {values['planner']}, {values['num_devices']} devices, schedule {values['schedule']}, "
        f"{values['num_microbatches']} microbatches, assignment {values['assignment']}",
        f"iteration {_ms(values['iteration_time_s'])} (lower bound for this plan {_ms(values['lower_bound_s'])}), "
        f"{values['throughput_samples_per_s']:.1f} samples/s, "
        f"bubble {values['bubble_fraction']:.1%}, peak memory {peak / 2**20:.0f} MiB",
        _time_shares_text(values["time_shares_s"]),
        f"costs: {values['costs']['source']} on {values['costs']['hardware']}, {values['costs']['date']}",
    ]
    if values["mfu"] is not None:
        lines.append(f"model FLOPs utilization {values['mfu']:.1%}, with recomputation {values['hfu']:.1%}")
    if values["run_ahead"] is not None:
        lines.append(_run_ahead_text(values))
    opened = values["communicators"]
    if any(opened["bytes"]):
        lines.append(
            f"communicators: up to {max(opened['number'])} a rank, which take about {max(opened['bytes']) / 2**20:.0f} "
            "MiB of a device beside the peak above (computed from NCCL's usual buffers)"
        )
    lines += [
        f"{name}: {_sharing_text(module['replicas'])}; after a failure {module['after_a_failure']}"
        for name, module in values["sharing"].items()
    ]
    rows: list[tuple[str, ...]] = [("module", "layers", "ranks", "forward", "backward")]
    for stage, num_replicas in _distinct_stages(values["stages"]):
        first, last = stage["layers"]
        ranks = ",".join(str(rank) for rank in stage["ranks"])
        ranks += f" (1 of {num_replicas} replicas)" if num_replicas > 1 else ""
        rows.append((stage["module"], f"{first}-{last - 1}", ranks, _ms(stage["forward_s"]), _ms(stage["backward_s"])))
    lines += _table(rows)
    lines += _table(_memory_rows(values["memory_by_kind"]))
    if values["cost_comparison"]:
        lines += _table(_comparison_rows(values["cost_comparison"]))
    if values["overflows"]:
        worst, *others = values["overflows"]
        lines.append(f"does not fit: {worst}" + (f" (and {len(others)} more ranks)" if others else ""))
        lines += [f"  {remedy}" for remedy in values["remedies"]]
    return "\n".join(lines)


def _memory_rows(groups: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    kinds = list(dict.fromkeys(kind for group in groups for kind in group["bytes"]))
    rows: list[tuple[str, ...]] = [("memory in MiB, ranks", *kinds, "peak")]
    for group in groups[:MOST_ROWS]:
        first, *others = group["ranks"]
        ranks = str(first) if not others else f"{first} and {len(others)} more"
        sizes = [group["bytes"].get(kind, 0) for kind in kinds]
        rows.append((ranks, *(f"{size / 2**20:.1f}" for size in [*sizes, sum(sizes)])))
    if len(groups) > MOST_ROWS:
        rows.append((f"({len(groups) - MOST_ROWS} more groups)", *("" for _ in kinds), ""))
    return rows


def _distinct_stages(stages: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], int]]:
    """The stages of one replica of each distinct partition, and the number of replicas that have it."""
    replicas: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for stage in stages:
        replicas.setdefault((stage["module"], stage["replica"]), []).append(stage)
    alike: dict[tuple[str, tuple[tuple[int, ...], ...]], list[list[Mapping[str, Any]]]] = {}
    for (module, _), chain in replicas.items():
        alike.setdefault((module, tuple(tuple(stage["layers"]) for stage in chain)), []).append(chain)
    return [(stage, len(chains)) for chains in alike.values() for stage in chains[0]]


def _comparison_rows(comparison: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("measured against computed", "forward", "computed", "", "backward", "computed", "")]
    for module in comparison:
        cells = [module["module"]]
        for part in ("forward", "backward"):
            ratio = module[f"{part}_ratio"]
            cells += [_ms(module[f"measured_{part}_s"]), _ms(module[f"computed_{part}_s"])]
            cells.append("" if ratio is None else f"{ratio - 1:+.0%}")
        rows.append(tuple(cells))
    return rows


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _time_shares_text(shares_s: Mapping[str, float]) -> str:
    """Mean shares of the devices' time, without those below a tenth of a percent."""
    total_s = sum(shares_s.values())
    parts = [f"{name.replace('_', ' ')} {s / total_s:.1%}" for name, s in shares_s.items() if s >= 1e-3 * total_s > 0]
    return f"share of time: {', '.join(parts)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
