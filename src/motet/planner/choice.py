"""The result of a search by planner `auto`: the chosen plan, the reasons in words, and what else was simulated."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from motet.plan import Plan
from motet.planner.evaluate import Evaluation
from motet.planner.layouts.own_layouts import PLANNER
from motet.planner.selection import rank
from motet.recomputation import split_entry

NUM_BEST = 10
"""Number of plans that a choice keeps to be compared."""


class Point(NamedTuple):
    """A simulated plan."""

    iteration_time_s: float
    peak_memory_bytes: int
    fits: bool
    planner: str


@dataclass(frozen=True)
class Choice:
    evaluation: Evaluation
    """Evaluation of the chosen plan, whose `planner` is auto."""
    found_by: str
    """The named planner whose plan was chosen, or auto."""
    named: Mapping[str, Evaluation]
    """The plan of each named planner."""
    too_slow: Mapping[str, float]
    """Planners without a plan as fast as the best of `named`: lower bound of the seconds that theirs take, if they
    fit."""
    refused: Mapping[str, str]
    """Why a planner has no plan."""
    lower_bound_s: float | None
    """Lower bound over all plans of the problem; None for towers, which the bound does not cover."""
    repaired_s: float | None = None
    """Seconds of the chosen plan's iteration under the options that make it fit, if no plan fits as the problem is."""
    best: tuple[Evaluation, ...] = ()
    """The best of all simulated plans, best first, at most `NUM_BEST`."""
    points: tuple[Point, ...] = ()
    """Time and memory of all simulated plans."""
    assignments_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the chosen layout under the assignments that were compared, where the user leaves that open."""
    ended_early: str | None = None
    """Why the search ended before all was tried."""

    @property
    def best_named(self) -> str | None:
        return min(self.named, key=lambda name: rank(self.named[name]), default=None)

    @property
    def why(self) -> str:
        """The reasons for the choice, as short text."""
        plan, seconds = self.evaluation.plan, self.evaluation.iteration_time_s
        parts = [f"{_shape(plan)} under {plan.schedule}"]
        num_devices = self.evaluation.problem.num_devices
        parts[0] += f", {plan.num_microbatches} microbatches"
        by_kind: dict[str, list[str]] = {}
        for name, kind in map(split_entry, plan.recompute):
            by_kind.setdefault(kind, []).append(name)
        parts += [f"{kind} of {' and '.join(names)} recomputed" for kind, names in by_kind.items()]
        parts += ["optimizer's state sharded"] if plan.zero1 else []
        parts += ["encoders run ahead"] if plan.run_ahead else []
        if plan.num_ranks < num_devices:
            parts.append(f"{num_devices - plan.num_ranks} of {num_devices} devices unused")
        if self.repaired_s is not None:
            parts.append(f"no plan fits as it is; this one takes {self.repaired_s * 1e3:.2f} ms with what makes it fit")
        elif self.found_by != PLANNER:
            parts.append(f"the plan of {self.found_by}")
        elif self.best_named is not None:
            best = self.named[self.best_named]
            if not self.evaluation.fits:
                parts.append("no plan fits, with recomputation and a sharded optimizer's state neither")
            elif best.fits:
                gain = best.iteration_time_s / seconds - 1
                parts.append(f"{gain:.1%} faster than the best named planner, {self.best_named}")
            else:
                parts.append(f"it fits; the best named planner's, {self.best_named}, does not")
        elif self.too_slow:
            name = min(self.too_slow, key=lambda name: self.too_slow[name])
            gain = self.too_slow[name] / seconds - 1
            parts.append(f"every named planner that fits is at least {gain:.1%} slower")
        if len(self.assignments_s) > 1:
            parts.append(_deferral_text(self.assignments_s))
        if self.ended_early is not None:
            parts.append(self.ended_early)
        if self.repaired_s is None and self.lower_bound_s is not None and self.lower_bound_s < inf:
            # Rounding may put the bound just above the plan that it equals.
            parts.append(f"{max(0.0, seconds / self.lower_bound_s - 1):.1%} above the lower bound")
        return "; ".join(parts)


def _deferral_text(assignments_s: Mapping[str, float]) -> str:
    """Whether balancing pays, and deferral beside it."""
    given = next(iter(assignments_s))
    balanced_s = assignments_s.get("balanced", assignments_s[given])
    gain = assignments_s[given] / balanced_s - 1
    text = f"balanced microbatches are {abs(gain):.1%} {'faster' if gain >= 0 else 'slower'} than {given} ones"
    if "entrain" in assignments_s:
        pays = balanced_s / assignments_s["entrain"] - 1
        text += f", and deferral {'pays' if pays > 0 else 'costs'} {abs(pays):.1%} beside"
    return text


def _shape(plan: Plan) -> str:
    """Like `vision 2 stages x 4 replicas, language_model 6 stages x 4 replicas`."""
    parts = []
    for name, module in plan.modules.items():
        if module.copy_of is None and module.kind != "loss":
            stages = module.replicas[0].stages
            tp_sizes = sorted(module.tp_sizes)
            groups = f" x tp {' and '.join(map(str, tp_sizes))}" if tp_sizes != [1] else ""
            groups += " with sequence parallelism" if module.sequence_parallel else ""
            groups += f" x ep {module.ep}" if module.ep > 1 else ""
            groups += f" x cp {stages[0].cp_size}" if stages[0].cp_size > 1 else ""
            parts.append(f"{name} {len(stages)} stages{groups} x {len(module.replicas)} replicas")
    return ", ".join(parts)


def best_of(evaluations: Iterable[Evaluation]) -> tuple[Evaluation, ...]:
    """The best plans, best first, without those that another planner found too."""
    found: list[Evaluation] = []
    contents: list[Plan] = []
    for evaluation in sorted(evaluations, key=rank):
        # What a plan's planner is called makes no other plan.
        content = replace(evaluation.plan, planner=PLANNER)
        if len(found) < NUM_BEST and content not in contents:
            found.append(evaluation)
            contents.append(content)
    return tuple(found)


def points_of(evaluations: Iterable[Evaluation]) -> tuple[Point, ...]:
    return tuple(
        Point(e.iteration_time_s, max(e.result.peak_memory_bytes), e.fits, e.plan.planner) for e in evaluations
    )
