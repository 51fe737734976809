"""Which degrees of parallelism a planner may choose from: the user's limits, as far as they divide the model."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from motet.errors import UserError
from motet.plan import Plan
from motet.planner.bound_and_simulate import best_layout
from motet.planner.explicit import Placement, check_degrees
from motet.planner.layout import Chunk, Layout
from motet.planner.problem import Degrees, PlanningProblem


def tp_sizes(problem: PlanningProblem, name: str) -> list[int]:
    """Of those allowed, the ones that divide the module's heads."""
    fitting = []
    for size in problem.modules[name].tp_sizes:
        try:
            check_degrees(problem, name, Degrees(tp=size))
        except UserError:
            continue
        fitting.append(size)
    return fitting


def cp_sizes(problem: PlanningProblem, name: str, dp: int = 1) -> list[int]:
    """Of those allowed, the ones for which a replica's microbatches are long enough; of modules that enter others 1."""
    return _fitting_cp_sizes(problem, name, dp) if problem.modules[name].workload.kind == "language_model" else [1]


def template_cp_sizes(problem: PlanningProblem, name: str) -> list[int]:
    """As `cp_sizes`, for templates, whose encoders may share tokens too."""
    return _fitting_cp_sizes(problem, name, problem.failures + 1)


def _fitting_cp_sizes(problem: PlanningProblem, name: str, dp: int) -> list[int]:
    fitting = []
    for size in problem.modules[name].cp_sizes:
        try:
            check_degrees(problem, name, Degrees(cp=size, dp=dp, context=problem.modules[name].context))
        except UserError:
            continue
        fitting.append(size)
    return fitting


def check_may_share_none(problem: PlanningProblem, planner: str) -> None:
    """Raises `UserError` if the user's limits leave a planner no plan without context parallelism."""
    for name, module in problem.modules.items():
        if 1 not in module.cp_sizes:
            is_last = module.workload.kind == "language_model"
            raise UserError(
                f"parallel.limits.{'cp' if is_last else f'modules.{name}.cp'}: is {list(module.cp_sizes)}, but planner "
                f"{planner} chooses no context parallelism; allow 1 too, or take planner "
                f"{'auto' if is_last else 'oobleck'}"
            )


def check_limits(problem: PlanningProblem) -> None:
    """Raises `UserError` if the limits leave a module no tensor-parallel size at all, or no planner enough devices or
    samples."""
    for name, module in problem.modules.items():
        fitting = tp_sizes(problem, name)
        if not fitting:
            allowed = " or ".join(map(str, module.tp_sizes))
            raise UserError(f"parallel.limits: tp is {allowed}, which {name} cannot be cut into; allow 1")
        dp, tp = min(problem.dp_sizes), min(fitting)
        if dp * tp > problem.num_devices:
            raise UserError(
                f"parallel.limits: dp {dp} and tp {tp}, the least that {name} may have, need {dp * tp} devices, but "
                f"cluster.num_devices is {problem.num_devices}; allow smaller sizes, or give more devices"
            )
    if min(problem.dp_sizes) > len(problem.samples):
        raise UserError(
            f"parallel.limits.dp: is at least {min(problem.dp_sizes)}, but train.global_batch_size is "
            f"{len(problem.samples)}, which leaves replicas without a sample; allow fewer"
        )


def check_may_be_whole(problem: PlanningProblem, planner: str, names: Iterable[str]) -> None:
    """Raises `UserError` if the limits leave one of these modules only groups that cut it."""
    for name in names:
        if 1 not in problem.modules[name].tp_sizes:
            allowed = " or ".join(map(str, problem.modules[name].tp_sizes))
            raise UserError(
                f"parallel.limits: tp of {name} is {allowed}, but planner {planner} does not cut it; allow 1, or give "
                "another planner"
            )


FINDS_REPLICAS_ITSELF = ("oobleck",)
"""Planners for which the number of replicas is what they look for: no limit is set on it, as none is on towers'."""
FILLS_REPLICAS = ("optimus", "megatron_extra_stages", "auto")
"""Planners that give a replica of the language model several of an encoder (auto takes their plans): its own number is
what is limited."""


def check_within_limits(problem: PlanningProblem, plan: Plan) -> None:
    """Raises `UserError` if a planner's plan is outside the user's limits: it has no way to keep to them."""
    for name, planned in plan.modules.items():
        if planned.kind == "loss":
            continue
        owner = planned.data_module(name)
        module = problem.modules[owner]
        stages = [stage for replica in planned.replicas for stage in replica.stages]
        num_stages = max(len(replica.stages) for replica in planned.replicas)
        _check_limit(plan, owner, "max_pp", num_stages, range(1, (module.max_stages or num_stages) + 1))
        for stage in stages:
            _check_limit(plan, owner, "tp", stage.tp_size, module.tp_sizes)
            _check_limit(plan, owner, "cp", stage.cp_size, module.cp_sizes)
        may_be_filled = plan.planner in FILLS_REPLICAS and module.workload.kind != "language_model"
        finds_replicas = plan.planner in FINDS_REPLICAS_ITSELF or plan.loss_module is not None
        if not finds_replicas and not may_be_filled:
            _check_limit(plan, owner, "dp", len(planned.replicas), problem.dp_sizes)


def _check_limit(plan: Plan, name: str, limit: str, size: int, allowed: Sequence[int]) -> None:
    if size not in allowed:
        least = f"at most {max(allowed)}" if limit == "max_pp" else " or ".join(map(str, allowed))
        raise UserError(
            f"parallel.limits: {limit} of {name} is {least}, but planner {plan.planner} needs {size}; allow {size}, or "
            "give another planner"
        )


def dp_sizes(problem: PlanningProblem, num_devices: int | None = None) -> list[int]:
    """Of those allowed, the ones that divide the devices (None: all of them) and leave no replica without a sample."""
    total = problem.num_devices if num_devices is None else num_devices
    return [dp for dp in problem.dp_sizes if total % dp == 0 and dp <= len(problem.samples)]


def most_stages(problem: PlanningProblem, name: str) -> int:
    num_layers = problem.modules[name].workload.num_layers
    return min(num_layers, problem.modules[name].max_stages or num_layers)


def has_few_stages(problem: PlanningProblem, chunks: Sequence[Chunk]) -> bool:
    """Whether no module has more runs of layers than the user allows."""
    counts = Counter(chunk.module for chunk in chunks)
    return all(counts[name] <= most_stages(problem, name) for name in problem.modules)


def uniform_degrees(problem: PlanningProblem, modules: tuple[str, ...] | None = None) -> Iterator[tuple[int, int, int]]:
    """(dp, tp, groups) with one tensor-parallel size for these modules (None: all); groups are those of one replica."""
    for dp, tp in product(problem.dp_sizes, _common_tp_sizes(problem, modules)):
        if problem.num_devices % (dp * tp) == 0 and dp <= len(problem.samples):
            yield dp, tp, problem.num_devices // (dp * tp)


def _common_tp_sizes(problem: PlanningProblem, modules: tuple[str, ...] | None) -> list[int]:
    names = tuple(problem.modules) if modules is None else modules
    return sorted(set.intersection(*(set(tp_sizes(problem, name)) for name in names)))


def no_layout(problem: PlanningProblem, planner: str) -> UserError:
    return UserError(
        f"parallel.planner: {planner} finds no layout of {' and '.join(problem.modules)} on {problem.num_devices} "
        "devices within the limits on degrees; allow other tp or dp sizes or more stages, or give another number of "
        "devices"
    )


def best_plan(
    problem: PlanningProblem,
    layouts: Iterable[Layout],
    planner: str,
    placement: Placement | None,
) -> Plan:
    """The layout with the shortest simulated iteration; of those that fit, if any does.

    Raises `UserError` if there is none, or if the user wants the encoders elsewhere than this planner puts them."""
    if placement is not None:
        raise UserError(f"parallel.placement: planner {planner} places encoders in its own way; leave placement out")
    evaluations = best_layout(problem, layouts)
    if not evaluations:
        raise no_layout(problem, planner)
    return evaluations[0].plan
