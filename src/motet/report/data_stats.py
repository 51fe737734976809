"""Statistics of a run's data under a model and plan, from metadata alone (`motet data-stats`).

These are the sizes and work of each module, sample by sample (thesis Figure 4.3); the ratios of work, in single samples
(Figure 4.4) and in batches of growing size, with b_min (Figure 4.5, `motet.planner.entrain.profiling_size`); and the
plan's predicted iteration and bubble under each assignment (`ASSIGNMENTS`).

Work is in device-seconds, forward and backward, of each sample by itself (`motet.balancing.sample_work`), under the
plan: frozen layers cost less. Limits: b_min assumes that every module has devices of its own, as in Entrain's layouts.
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
"""Number of random batches of each size."""


@dataclass(frozen=True, eq=False)
class ModuleStats:
    """Statistics of one module over all samples."""

    tokens: Floats
    """[samples]; 0 where a sample lacks the modality; the whole sequence for a language model."""
    own_tokens: Floats
    """[samples]; without the tokens that encoders insert into the sequence."""
    work_s: Floats
    """[samples] device-seconds."""
    video_frames: Floats
    """[videos] frames that are read."""
    video_tokens: Floats
    """Output tokens of each video."""

    @property
    def share_of_samples(self) -> float:
        return float((self.tokens > 0).mean())


@dataclass(frozen=True, eq=False)
class RatioStats:
    """Ratios of an encoder's work to the language model's."""

    whole: float
    """The ratio over all samples."""
    by_sample: Floats
    """[samples]."""
    by_batch_size: Mapping[int, Floats]
    """Number of samples -> the ratios in batches drawn at random, with replacement."""


@dataclass(frozen=True)
class AssignmentStats:
    """The plan under one assignment; means over the batches."""

    iteration_time_s: float
    bubble_fraction: float
    """The fraction of all ranks' time without computation."""


@dataclass(frozen=True, eq=False)
class DataStats:
    plan: Plan
    global_batch_size: int
    num_batches: int
    """Number of batches whose iterations were predicted."""
    modules: Mapping[str, ModuleStats]
    ratios: Mapping[str, RatioStats]
    """Ratios by encoder."""
    profiling_size: ProfilingSize | None
    """b_min; its allocation is in the order of `modules`."""
    why_no_profiling_size: str | None
    assignments: Mapping[str, AssignmentStats]
    """Statistics of assignments by name, the plan's own first."""


def data_stats(
    problem: PlanningProblem, plan: Plan, samples: Sequence[Sample], *, num_batches: int, seed: int = 0
) -> DataStats:
    """Statistics of `samples`, at least a global batch of them, in the order of training. `num_batches`: the maximum
    number of global batches whose iterations are predicted.

    Raises `UserError` if the plan belongs to another model."""
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
    def own_tokens(sample: Sample, name: str) -> int:
        return sum(segment.num_tokens for segment in sample.layouts.get(name, ()) if segment.source is None)

    workloads = {name: module.workload for name, module in problem.all_modules.items()}
    stats = {}
    for name, work in sample_work(plan, samples, workloads=workloads, table=problem.table).items():
        # Query tokens are a few rows on the language model's ranks.
        if plan.modules[name].kind == "loss" or name in problem.query_tokens:
            continue
        stages = plan.modules[name].replicas[0].stages
        devices = np.array([stage.tp_size for stage in stages], float)
        videos = [segment for sample in samples for segment in sample.layouts.get(name, ()) if segment.num_frames]
        stats[name] = ModuleStats(
            tokens=np.array([sample.num_tokens(name) for sample in samples], float),
            own_tokens=np.array([own_tokens(sample, name) for sample in samples], float),
            work_s=(work.forward_s + work.backward_s) @ devices,
            video_frames=np.array([segment.num_frames for segment in videos], float),
            video_tokens=np.array([segment.outputs for segment in videos], float),
        )
    return stats


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
    """b_min, or the reason why there is none."""
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
    problems = [replace(problem, samples=tuple(batch)) for batch in batches]
    names = [plan.assignment, *(name for name in ASSIGNMENTS if name != plan.assignment)]
    return {
        name: AssignmentStats(fmean(e.iteration_time_s for e in each), fmean(e.result.bubble_fraction for e in each))
        for name in names
        if not contrasts or name == DEFAULT_ASSIGNMENT
        for each in [[evaluate(of_batch, replace(plan, assignment=name)) for of_batch in problems]]
    }
