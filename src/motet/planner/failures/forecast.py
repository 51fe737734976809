"""Forecasts how much a run trains while nodes fail (`motet simulate --failures`), under three policies.

Layer times and sizes come from the planning problem, the cluster from the run file. Assumed where the user says
nothing: `Times` (starting all processes takes 30 s); storage of `storage_bytes_per_s` for all nodes together;
checkpoints at the cheapest interval (Young, "A first order approximation to the optimum checkpoint interval", 1974) for
policies that need them; and, for redundancy, one more forward of each stage. The memory of redundancy is not counted.
"""

from collections.abc import Sequence
from dataclasses import asdict
from math import sqrt
from typing import Any

from motet.errors import UserError
from motet.planner.failures.replay import (
    Change,
    Policy,
    RedundancyPolicy,
    RestartPolicy,
    TemplatePolicy,
    Times,
    best_grid,
    max_concurrent_nodes,
    replay,
)
from motet.planner.problem import PlanningProblem
from motet.planner.templates.pipelines import best_combinations
from motet.planner.templates.planner import (
    MAX_SIMULATED,
    larger_templates,
    make_templates,
    plan_with_sizes,
    total_microbatches,
)

STORAGE_BYTES_PER_S = 2e9


def forecast(
    problem: PlanningProblem,
    changes: Sequence[Change],
    end_s: float,
    *,
    checkpoint_every: int = 0,
    stops_below_guarantee: bool = False,
    warning_s: float = 0.0,
    storage_bytes_per_s: float = STORAGE_BYTES_PER_S,
    start_s: float = Times.start_s,
) -> dict[str, Any]:
    """Returns the JSON of `motet simulate --failures`: by policy, useful samples per second and where the time goes.
    `checkpoint_every` is in iterations; 0: the cheapest interval. `stops_below_guarantee`: as
    `train.failures.stop_below_guarantee`.

    Raises `UserError` if the cluster cannot hold f + 1 pipelines, or the trace never has enough nodes for them."""
    templates = make_templates(problem)
    if (most := max_concurrent_nodes(changes)) < templates.min_total_nodes:
        raise UserError(
            f"--failures: there are never more than {most} nodes, but {templates.min_total_nodes} are needed "
            f"({templates.failures + 1} pipelines of {templates.min_nodes}, to survive {templates.failures} "
            "failures); give a trace of more nodes, or fewer failures to survive"
        )
    total, num_nodes = total_microbatches(problem), problem.cluster.num_nodes
    checkpoint_s = _checkpoint_bytes(problem) / storage_bytes_per_s
    by_nodes = larger_templates(problem, templates)
    interval_s = _cheapest_interval_s(checkpoint_s, changes, end_s, templates.min_nodes)
    every = checkpoint_every or max(1, round(interval_s / best_grid(by_nodes, num_nodes, total).iteration_s))
    times = Times(start_s=start_s, load_s=checkpoint_s, bytes_per_s=problem.cluster.network_bytes_per_s)

    def combine(n: int) -> Sequence[int]:
        return best_combinations(templates.by_nodes, n, templates.failures, total, most=MAX_SIMULATED)[0]

    templates_policy = TemplatePolicy(
        plan_with_sizes(problem, templates, tuple(combine(num_nodes))),
        templates,
        combine,
        total,
        times,
        num_nodes,
        stops_below_guarantee=stops_below_guarantee,
        checkpoint_every=every,
    )
    policies: dict[str, Policy] = {
        "templates": templates_policy,
        "restart": RestartPolicy(by_nodes, total, times, num_nodes, every, checkpoint_s),
        "redundant": RedundancyPolicy(
            by_nodes, total, times, num_nodes, every, 0.0, slowdown=1 + _forward_share(problem)
        ),
    }
    usages = {name: replay(changes, end_s, policy, warning_s=warning_s) for name, policy in policies.items()}
    batch = len(problem.samples)
    return {
        "duration_s": end_s - changes[0].time_s,
        "num_changes": sum(change.time_s < end_s for change in changes),
        "failures": templates.failures,
        "template_nodes": sorted(templates.by_nodes),
        "least_nodes": templates.min_total_nodes,
        "assumptions": {
            **asdict(times),
            "storage_bytes_per_s": storage_bytes_per_s,
            "checkpoint_every": every,
            "checkpoint_s": checkpoint_s,
            "warning_s": warning_s,
            "redundancy_slowdown": 1 + _forward_share(problem),
        },
        "policies": {
            name: {
                "samples_per_s": usage.iterations * batch / usage.total_s,
                "iterations": usage.iterations,
                "seconds": dict(usage.seconds),
                "idle_node_share": usage.idle_node_s / usage.node_s if usage.node_s else 0.0,
                "num_restarts": usage.num_restarts,
            }
            for name, usage in usages.items()
        },
        "steps": templates_policy.steps,
    }


def _cheapest_interval_s(checkpoint_s: float, changes: Sequence[Change], end_s: float, min_nodes: int) -> float:
    """Returns the seconds of training between checkpoints, by the rate of losses while there are enough nodes for a
    pipeline; without losses, all of the time."""
    num_nodes, num_losses, there_s = 0, 0, 0.0
    times = [change.time_s for change in changes[1:]]
    for change, until_s in zip(changes, [*times, end_s], strict=True):
        if change.time_s >= end_s:
            break
        num_losses += bool(change.lost) and num_nodes >= min_nodes
        num_nodes += len(change.joined) - len(change.lost)
        if num_nodes >= min_nodes:
            there_s += min(until_s, end_s) - change.time_s
    return sqrt(2 * checkpoint_s * there_s / num_losses) if num_losses else there_s


def _checkpoint_bytes(problem: PlanningProblem) -> int:
    """Bytes of all parameters, frozen ones included, and of the optimizer states."""
    memory = problem.memory
    return sum(
        layer.num_parameters_per_rank(1) * memory.parameter_bytes
        + layer.num_trained_per_rank(1) * memory.state_bytes * module.is_trainable(i)
        for module in problem.modules.values()
        for i, layer in enumerate(module.workload.layers)
    )


def _forward_share(problem: PlanningProblem) -> float:
    """The forward's share of forward and backward, over all modules."""
    times = [time for name in problem.modules for time in problem.estimator.layer_times(name, 1, problem.failures + 1)]
    return sum(time.forward_s for time in times) / sum(time.total_s for time in times)


def forecast_text(values: dict[str, Any]) -> str:
    """Formats the forecast as a table."""
    hours, assumed = values["duration_s"] / 3600, values["assumptions"]
    lines = [
        f"{values['num_changes']} changes in {hours:.2f} h, templates of {values['template_nodes'][0]} to "
        f"{values['template_nodes'][-1]} nodes; {values['least_nodes']} are needed for {values['failures']} failures",
        f"assumed: all processes start in {assumed['start_s']:.4g} s; a checkpoint every {assumed['checkpoint_every']} "
        f"iterations, saved and loaded in {assumed['checkpoint_s']:.4g} s each; lost nodes say so "
        f"{assumed['warning_s']:.4g} s before",
        f"{'':10} {'samples/s':>10} {'training':>9} {'redone':>8} {'saving':>8} {'recovery':>9} {'waiting':>8} "
        f"{'idle nodes':>11} {'restarts':>9}",
    ]
    for name, policy in values["policies"].items():
        shares = [policy["seconds"][kind] / values["duration_s"] for kind in policy["seconds"]]
        lines.append(
            f"{name:10} {policy['samples_per_s']:10.4g} {shares[0]:9.1%} {shares[1]:8.1%} {shares[2]:8.1%} "
            f"{shares[3]:9.1%} {shares[4]:8.1%} {policy['idle_node_share']:11.1%} {policy['num_restarts']:9}"
        )
    steps = ", ".join(f"{kind} {count}" for kind, count in sorted(values["steps"].items()))
    return "\n".join([*lines, f"reconfigurations: {steps or 'none'}"])
