"""What would make a plan fit that does not: changes that were tried, by simulation, on the same layout."""

from collections.abc import Iterator
from dataclasses import replace

from motet.planner.evaluate import Evaluation, evaluate

MAX_FACTOR = 8
"""Of the number of microbatches."""


def remedies(evaluation: Evaluation) -> list[str]:
    """One line each, those that suffice, the least intrusive first; else one that says what does not."""
    found = [f"{what} fits: {_gib(peak)} at most" for what, changed in _changes(evaluation) if (peak := _peak(changed))]
    if found:
        return found
    worst = evaluation.overflows[0]
    factor = -(-worst.needed_bytes // max(1, worst.limit_bytes))
    return [
        "zero1, recompute and smaller microbatches do not suffice; "
        f"spread the layers of rank {worst.rank} over about {factor} times as many devices (more stages, or larger tp)"
    ]


def _peak(changed: Evaluation) -> int:
    """0 if it does not fit."""
    return max(changed.result.peak_memory_bytes) if changed.fits else 0


def _changes(evaluation: Evaluation) -> Iterator[tuple[str, Evaluation]]:
    """Single changes; all of them together only if none of those suffices."""
    problem, plan = evaluation.problem, evaluation.plan
    sharded = replace(problem, memory=replace(problem.memory, zero1=True))
    recompute = tuple(name for name, module in plan.modules.items() if module.kind != "loss")
    owners = tuple(name for name in problem.modules if name != problem.loss_module)
    recomputing = replace(problem, recompute=owners)
    tried = []
    if not problem.memory.zero1 and any(len(module.replicas) > 1 for module in plan.modules.values()):
        tried.append(("parallel.zero1: true", evaluate(sharded, plan)))
    if set(plan.recompute) != set(recompute):
        names = ", ".join(owners)
        tried.append((f"parallel.recompute: [{names}]", evaluate(recomputing, replace(plan, recompute=recompute))))
    if plan.loss_module is not None:
        tried += _recomputed_features(evaluation)
    for number in _more_microbatches(evaluation):
        smaller = evaluate(replace(problem, num_microbatches=number), replace(plan, num_microbatches=number))
        tried.append((f"parallel.num_microbatches: {number}", smaller))
        if smaller.fits:
            break
    yield from tried
    if any(changed.fits for _, changed in tried):
        return
    both = replace(recomputing, memory=replace(problem.memory, zero1=True))
    what = "parallel.zero1: true with parallel.recompute of all modules"
    together = evaluate(both, replace(plan, recompute=recompute))
    yield what, together
    for number in _more_microbatches(evaluation):
        if together.fits:
            return
        changed = replace(plan, recompute=recompute, num_microbatches=number)
        together = evaluate(replace(both, num_microbatches=number), changed)
        yield f"{what} and parallel.num_microbatches: {number}", together


def _more_microbatches(evaluation: Evaluation) -> Iterator[int]:
    """Numbers of them for which there are samples enough. For towers, which hold all of a contrastive batch, none."""
    problem, plan = evaluation.problem, evaluation.plan
    replicas = max(len(module.replicas) for module in plan.modules.values())
    factor = 2
    while plan.loss_module is None and factor <= MAX_FACTOR:
        if factor * plan.num_microbatches * replicas > len(problem.samples):
            return
        yield factor * plan.num_microbatches
        factor *= 2


def _recomputed_features(evaluation: Evaluation) -> Iterator[tuple[str, Evaluation]]:
    """All microbatches between two batch-syncs are held, so smaller ones help only if features are made again."""
    problem, plan = evaluation.problem, evaluation.plan
    towers = tuple(name for name in problem.towers if plan.modules[name].trainable)
    if set(towers) <= set(plan.recompute_features):
        return
    for factor in (1, 2, 4, 8):
        cut = {
            name: replace(plan.modules[name], num_microbatches=factor * plan.num_microbatches_of(name))
            for name in towers
        }
        changed = evaluate(problem, replace(plan, modules={**plan.modules, **cut}, recompute_features=towers))
        more = f" with {factor} times as many microbatches" if factor > 1 else ""
        yield f"parallel.recompute_features: [{', '.join(towers)}]{more}", changed
        if changed.fits:
            return


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
