"""What a run's data look like to its model and plan, from metadata alone (`motet data-stats`).

Sizes and work of each module, sample by sample (thesis Figure 4.3); how they relate, in single samples (Figure 4.4) and
in batches of growing size, with b_min (Figure 4.5, `motet.planner.entrain.profiling_size`); and what the plan's
iteration would take, and how long ranks would idle, under each way to cut the global batch
(`motet.balancing.policies`).

Work is in device-seconds, forward and backward, of each sample by itself (`motet.balancing.sample_work`), under the
plan: what is frozen costs less. Limits: b_min takes every module to have devices of its own, as Entrain's layouts do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from motet.assignment.batch_assignment import num_shares
from motet.assignment.sample import Sample
from motet.balancing.policies import ASSIGNMENTS
from motet.balancing.sample_work import sample_work
from motet.errors import UserError
from motet.plan import DEFAULT_ASSIGNMENT, Plan
from motet.planner.entrain.profiling_size import ProfilingSize, drawing_from, stable_profiling_size
from motet.planner.evaluate import check_same_model, evaluate
from motet.planner.problem import PlanningProblem
from motet.ragged_arrays import Floats

BATCHES_DRAWN = 400
"""Of each size, to see how far ratios spread."""


@dataclass(frozen=True, eq=False)
class ModuleStats:
    """Of one module, over all samples that were looked at."""

    tokens: Floats
    """[samples]; 0 where a sample lacks the modality. Of a language model: the whole sequence."""
    own_tokens: Floats
    """[samples]: without what encoders put into the sequence."""
    work_s: Floats
    """[samples]: device-seconds."""

    @property
    def share_of_samples(self) -> float:
        return float((self.tokens > 0).mean())


@dataclass(frozen=True, eq=False)
class RatioStats:
    """Work of an encoder over that of the language model."""

    whole: float
    """Of all samples together."""
    by_sample: Floats
    """[samples]."""
    by_batch_size: Mapping[int, Floats]
    """Number of samples -> the ratio in batches drawn at random, with replacement."""


@dataclass(frozen=True)
class AssignmentStats:
    """The plan under one way to cut batches; means over the batches that were looked at."""

    iteration_time_s: float
    bubble_fraction: float
    """The part of all ranks' time in which they do not compute."""


@dataclass(frozen=True, eq=False)
class DataStats:
    plan: Plan
    global_batch_size: int
    num_batches: int
    """That iterations were predicted for."""
    modules: Mapping[str, ModuleStats]
    ratios: Mapping[str, RatioStats]
    """By encoder."""
    profiling_size: ProfilingSize | None
    """b_min; its allocation is in the order of `modules`."""
    why_no_profiling_size: str | None
    assignments: Mapping[str, AssignmentStats]
    """By name, the plan's own first."""


def data_stats(
    problem: PlanningProblem, plan: Plan, samples: Sequence[Sample], *, num_batches: int, seed: int = 0
) -> DataStats:
    """`samples`: in the order of training, at least a global batch of as many as `problem` has. `num_batches`: that
    iterations are predicted for, at most as many as there are.

    Raises `UserError` if the plan is not one of this problem's model."""
    check_same_model(problem, plan)
    size = len(problem.samples)
    modules = _modules(problem, plan, samples)
    language_models = [name for name in modules if plan.modules[name].kind == "language_model"]
    random = np.random.default_rng(seed)
    ratios = {
        name: _ratio(stats.work_s, modules[language_models[0]].work_s, random)
        for name, stats in modules.items()
        if plan.modules[name].kind == "encoder" and language_models
    }
    found, why_not = _profiling_size(problem, plan, modules, random)
    batches = [samples[first : first + size] for first in range(0, len(samples) - size + 1, size)][:num_batches]
    return DataStats(plan, size, len(batches), modules, ratios, found, why_not, _assignments(problem, plan, batches))


def _modules(problem: PlanningProblem, plan: Plan, samples: Sequence[Sample]) -> dict[str, ModuleStats]:
    workloads = {name: module.workload for name, module in problem.modules.items()}
    stats = {}
    for name, work in sample_work(plan, samples, workloads=workloads, table=problem.table).items():
        if plan.modules[name].kind == "loss":
            continue
        stages = plan.modules[name].replicas[0].stages
        devices = np.array([stage.tp_size for stage in stages], float)
        stats[name] = ModuleStats(
            tokens=np.array([sample.num_tokens(name) for sample in samples], float),
            own_tokens=np.array([_own_tokens(sample, name) for sample in samples], float),
            work_s=(work.forward_s + work.backward_s) @ devices,
        )
    return stats


def _own_tokens(sample: Sample, name: str) -> int:
    return sum(segment.num_tokens for segment in sample.layouts.get(name, ()) if segment.source is None)


def _ratio(encoder_s: Floats, language_model_s: Floats, random: np.random.Generator) -> RatioStats:
    by_size: dict[int, Floats] = {}
    size = 1
    while size <= len(encoder_s):
        drawn = random.integers(len(encoder_s), size=(BATCHES_DRAWN, size))
        by_size[size] = encoder_s[drawn].sum(axis=1) / language_model_s[drawn].sum(axis=1)
        size *= 2
    return RatioStats(float(encoder_s.sum() / language_model_s.sum()), encoder_s / language_model_s, by_size)


def _profiling_size(
    problem: PlanningProblem, plan: Plan, modules: Mapping[str, ModuleStats], random: np.random.Generator
) -> tuple[ProfilingSize | None, str | None]:
    """Or why there is none."""
    if len(modules) < 2:
        return None, "one module takes all devices"
    work = np.stack([stats.work_s for stats in modules.values()], axis=1)
    try:
        return stable_profiling_size(drawing_from(work, plan.num_ranks // num_shares(plan), random)), None
    except UserError as error:
        return None, str(error)


def _assignments(
    problem: PlanningProblem, plan: Plan, batches: Sequence[Sequence[Sample]]
) -> dict[str, AssignmentStats]:
    contrasts = plan.loss_module is not None
    names = [plan.assignment, *(name for name in ASSIGNMENTS if name != plan.assignment)]
    return {
        name: _predicted(problem, replace(plan, assignment=name), batches)
        for name in names
        if not contrasts or name == DEFAULT_ASSIGNMENT
    }


def _predicted(problem: PlanningProblem, plan: Plan, batches: Sequence[Sequence[Sample]]) -> AssignmentStats:
    evaluations = [evaluate(replace(problem, samples=tuple(batch)), plan) for batch in batches]
    return AssignmentStats(
        fmean(evaluation.iteration_time_s for evaluation in evaluations),
        fmean(evaluation.result.bubble_fraction for evaluation in evaluations),
    )
