"""The report of `motet plan --report`: the plans that were compared, and where the time and memory of the best one go.

`expert_report` returns a JSON object; `motet.report.plan_page` writes the same as a page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from motet.config import RunConfig
from motet.costs.accuracy import ACCURACY, accuracy_text
from motet.costs.memory import usable_bytes
from motet.plan import LANGUAGE_MODEL, Plan
from motet.planner.choice import Choice
from motet.planner.evaluate import Evaluation
from motet.planner.sensitivity import Sensitivity, sensitivities
from motet.recomputation import BLOCKS, of_module
from motet.report.time_of_ranks import times_of_ranks

MOST_RANKS = 64
"""Most groups of ranks that are described."""
NUM_SENSITIVE = 3
"""Number of plans whose sensitivity is computed, the best ones."""
MIN_SHARE = 0.002
"""Least share of the iteration for a difference to be told."""
CAUSES = {
    "compute": "computation",
    "optimizer": "the optimizer's step",
    "warm_up": "the pipeline's warm-up",
    "cool_down": "the pipeline's cool-down",
    "imbalance": "waiting for other stages",
    "tensor_parallel": "exchanges within computation",
    "reduction": "sums of gradients",
    "gather": "gathers of parameters",
}


def expert_report(
    config: RunConfig, evaluation: Evaluation, choice: Choice | None, *, planning_time_s: float = 0.0
) -> dict[str, Any]:
    """The report on the plan of `evaluation`. `choice`: the comparison of planner `auto`."""
    problem, plan = evaluation.problem, evaluation.plan
    best = [evaluation]
    if choice is not None:
        best += [each for each in choice.best if plan_features(each.plan) != plan_features(plan)][:9]
    sensitive = list(sensitivities(config, problem, [each.plan for each in best[:NUM_SENSITIVE]]))
    points = [] if choice is None else choice.points
    return {
        "planner": plan.planner,
        "devices": {"used": plan.num_ranks, "given": problem.num_devices, "name": problem.cluster.device.name},
        "samples": len(problem.samples),
        "num_microbatches": plan.num_microbatches,
        "usable_memory_bytes": int(usable_bytes(problem.cluster)),
        "planning_time_s": planning_time_s,
        "lower_bound_s": None if choice is None else choice.lower_bound_s,
        "why": why_this_plan(best, choice, sensitive),
        "plans": [_plan_row(each, evaluation, config) for each in best],
        "points": [each._asdict() for each in points] or [_point(evaluation)],
        "ranks": [
            {
                "ranks": list(each.ranks),
                "holds": each.holds,
                "seconds": each.seconds,
                "links": {link: asdict(seconds) for link, seconds in each.links.items()},
                "memory_bytes": each.memory,
            }
            for each in times_of_ranks(evaluation, MOST_RANKS)
        ],
        "num_rank_groups": len(evaluation.result.alike_ranks),
        "gpu_hours": {
            "steps": config.train.steps,
            "used": plan.num_ranks * evaluation.iteration_time_s * config.train.steps / 3600,
            "reserved": problem.num_devices * evaluation.iteration_time_s * config.train.steps / 3600,
        },
        "sensitivity": [asdict(each) for each in sensitive],
        "accuracy": {**ACCURACY, "text_of_it": accuracy_text(problem.table.source, problem.table.hardware)},
        "costs": {"source": problem.table.source, "hardware": problem.table.hardware, "date": problem.table.date},
    }


def plan_features(plan: Plan) -> dict[str, str]:
    """Features that tell plans apart, in words by name."""
    features = {}
    for name, module in plan.modules.items():
        if module.kind == "loss" or module.copy_of is not None:
            continue
        stages = module.replicas[0].stages
        tp = sorted(module.tp_sizes)
        groups = len({stage.ranks for stage in stages})
        parts = [f"{groups} group{'s' if groups > 1 else ''}"]
        parts += [f"{len(stages)} stages"] if len(stages) > groups else []
        parts.append("tp " + " and ".join(map(str, tp)))
        parts += [f"cp {stages[0].cp_size}"] if stages[0].cp_size > 1 else []
        parts += [f"ep {module.ep}"] if module.ep > 1 else []
        parts.append(f"{len(module.replicas)} replicas")
        parts += ["sequence parallel"] if module.sequence_parallel else []
        parts += [f"sharded over {module.sharded_replicas * stages[0].cp_size}"] if module.fully_sharded else []
        parts += ["parameters whole in a step"] if module.whole_parameters else []
        num_copies = sum(other.copy_of == name for other in plan.modules.values())
        parts += [f"{num_copies} copies on other ranks"] if num_copies else []
        kind = BLOCKS if name in plan.recompute_features else of_module(plan.recompute, name)
        parts += [f"recomputed ({kind})" if kind != BLOCKS else "recomputed"] if kind is not None else []
        features[name] = ", ".join(parts)
    together = [
        f"{name} with {other}"
        for i, name in enumerate(features)
        for other in list(features)[i + 1 :]
        if _ranks(plan, name) & _ranks(plan, other)
    ]
    features["on the same ranks"] = ", ".join(together) or "no modules"
    features["schedule"] = plan.schedule
    features["microbatches"] = str(plan.num_microbatches)
    features["assignment"] = plan.assignment
    features["devices"] = str(plan.num_ranks)
    return features


def _ranks(plan: Plan, name: str) -> set[int]:
    return {rank for stage in plan.modules[name].replicas[0].stages for rank in stage.ranks}


def _plan_row(each: Evaluation, chosen: Evaluation, config: RunConfig) -> dict[str, Any]:
    own, others = plan_features(each.plan), plan_features(chosen.plan)
    tokens = sum(sample.num_tokens(LANGUAGE_MODEL) for sample in each.problem.samples)
    differences = {key: value for key, value in own.items() if value != others.get(key)}
    return {
        "planner": each.plan.planner,
        "features": own,
        "differences": {} if each is chosen else differences,
        "iteration_time_s": each.iteration_time_s,
        "slower_by": each.iteration_time_s / chosen.iteration_time_s - 1,
        "fits": each.fits,
        "peak_memory_bytes": max(each.result.peak_memory_bytes),
        "bubble_fraction": each.result.bubble_fraction,
        "samples_per_s": len(each.problem.samples) / each.iteration_time_s,
        "tokens_per_s_per_device": tokens / each.iteration_time_s / each.plan.num_ranks,
        "mfu": each.mfu(config.train.dtype),
        "hfu": each.hfu(config.train.dtype),
        "time_shares_s": each.result.time_shares.means_s(),
    }


def _point(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "iteration_time_s": evaluation.iteration_time_s,
        "peak_memory_bytes": max(evaluation.result.peak_memory_bytes),
        "fits": evaluation.fits,
        "planner": evaluation.plan.planner,
    }


def why_this_plan(
    best: Sequence[Evaluation], choice: Choice | None, sensitive: Sequence[Sensitivity] = ()
) -> list[str]:
    """Sentences on the choice. `best`: the chosen plan, then the others, best first."""
    chosen, *others = best
    sentences = []
    if choice is None:
        sentences.append(
            f"The run file asks for planner {chosen.plan.planner}, so no other plans were compared; planner auto "
            "compares."
        )
    else:
        sentences.append(f"{len(choice.points)} plans were simulated. Chosen: {choice.why}.")
    if not chosen.fits:
        sentences.append(f"It does not fit: {chosen.overflows[0]}.")
    fitting = [each for each in others if each.fits]
    if fitting and chosen.fits:
        sentences.append(_against(chosen, fitting[0]))
    faster = [point for point in (choice.points if choice else ()) if point.iteration_time_s < chosen.iteration_time_s]
    if faster and chosen.fits:
        fastest = min(faster, key=lambda point: point.iteration_time_s)
        missing = fastest.peak_memory_bytes - usable_bytes(chosen.problem.cluster)
        sentences.append(
            f"{len(faster)} simulated plans are faster but do not fit; the fastest of them, by "
            f"{chosen.iteration_time_s / fastest.iteration_time_s - 1:.1%}, lacks {missing / 2**30:.2f} GiB."
        )
    sentences += _of_sensitivity(chosen, others, sensitive)
    return sentences


def _against(chosen: Evaluation, other: Evaluation) -> str:
    """The differences of the next plan, and where it loses time."""
    features = plan_features(chosen.plan)
    differing = "; ".join(
        f"{name} {value} instead of {features.get(name, 'none')}"
        for name, value in plan_features(other.plan).items()
        if value != features.get(name)
    )
    own, others = chosen.result.time_shares.means_s(), other.result.time_shares.means_s()
    more = {cause: others[cause] - own[cause] for cause in own}
    told = sorted(more, key=lambda cause: -abs(more[cause]))[:3]
    causes = ", ".join(
        f"{more[cause] * 1e3:+.2f} ms of {CAUSES[cause]}"
        for cause in told
        if abs(more[cause]) > MIN_SHARE * chosen.iteration_time_s
    )
    slower = other.iteration_time_s / chosen.iteration_time_s - 1
    text = f"The next plan that fits takes {slower:.1%} longer: {differing or 'other groups of ranks'}."
    return f"{text} By a mean rank's time it has {causes}." if causes else text


def _of_sensitivity(chosen: Evaluation, others: Sequence[Evaluation], sensitive: Sequence[Sensitivity]) -> list[str]:
    if not sensitive:
        return []
    faster = [each for each in sensitive if each.change > 0]
    told = ", ".join(
        f"{each.knob} {1 - each.iteration_times_s[0] / chosen.iteration_time_s:.1%}"
        for each in sorted(faster, key=lambda each: each.iteration_times_s[0])
    )
    sentences = [f"A tenth more speed would shorten its step by: {told}."]
    fits = [chosen.fits, *(each.fits for each in others)]
    overtaken = [
        f"{each.knob} {'faster' if each.change > 0 else 'slower'}"
        for each in sensitive
        if any(
            seconds < each.iteration_times_s[0]
            for seconds, other_fits in zip(each.iteration_times_s[1:], fits[1:], strict=False)
            if other_fits or not chosen.fits
        )
    ]
    if len(sensitive[0].iteration_times_s) > 1:
        sentences.append(
            f"One of the next plans would be faster with {' or '.join(overtaken)} by a tenth."
            if overtaken
            else "No such change by a tenth makes one of the next two plans faster than it."
        )
    return sentences


def report_values_of_link(rank: Mapping[str, Any]) -> str:
    """The communication of one entry of `ranks`, in words."""
    parts = [
        f"{link}: {seconds['exposed_s'] * 1e3:.1f} ms exposed, {seconds['hidden_s'] * 1e3:.1f} ms hidden"
        for link, seconds in rank["links"].items()
    ]
    return "; ".join(parts) or "none"
