"""Policies that cut a global batch, by name: the values of `parallel.assignment`. A new one is a function, an entry in
`ASSIGNMENTS` and a test.

Policies are functions of plan, metadata and costs alone, so every rank derives the same cut. Costs are computed only
for those that balance work. Every policy keeps the same set of samples and therefore the same sum of gradients: only
where and when a sample is computed changes.

Baselines: `random` is what a DistributedSampler and a loader that groups neighbours make of a batch. `dip` follows the
thesis' description (section 4.2.3): microbatches are random, and an encoder's are cut into sub-microbatches that stay
within their own. That cut is an assumption: samples in order, a new piece where the old one would exceed the mean work
of a microbatch divided by `pieces`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np

from motet.assignment.batch_assignment import (
    BatchAssignment,
    Microbatch,
    assignment_of_shares,
    contiguous_assignment,
    cut_evenly,
    packed_sequences,
)
from motet.assignment.sample import Sample
from motet.balancing.disttrain import reordered_assignment
from motet.balancing.entrain import Deferral, balance, defer, deferring_assignment, plan_deferrals
from motet.balancing.post_balancing import post_balanced_assignment
from motet.balancing.sample_work import SampleWork, sample_work
from motet.costs.cost_model import CostTable
from motet.errors import UserError
from motet.plan import DEFAULT_ASSIGNMENT, POST_BALANCED, Plan
from motet.ragged_arrays import Floats
from motet.shapes.module_shape import ModuleWorkload


def random_microbatches(plan: Plan, num_samples: int, seed: int) -> list[tuple[Microbatch, ...]]:
    """Random microbatches of each share, with equal numbers of samples as far as they divide."""
    return cut_evenly(plan, np.random.default_rng(seed).permutation(num_samples).tolist())


def random_assignment(plan: Plan, samples: Sequence[Sample], seed: int) -> BatchAssignment:
    return assignment_of_shares(plan, samples, random_microbatches(plan, len(samples), seed))


def dip_like_assignment(
    plan: Plan, samples: Sequence[Sample], encoder_work: Floats, seed: int, *, pieces: int = 2
) -> BatchAssignment:
    """`encoder_work`: of each sample."""
    shares = random_microbatches(plan, len(samples), seed)
    limit = float(encoder_work.sum()) / sum(map(len, shares)) / pieces
    cut = [[piece for microbatch in each for piece in _cut_by_work(microbatch, encoder_work, limit)] for each in shares]
    return assignment_of_shares(plan, samples, shares, encoder_pieces=cut)


def _cut_by_work(microbatch: Microbatch, work: Floats, limit: float) -> list[Microbatch]:
    pieces: list[Microbatch] = []
    load = 0.0
    for i in microbatch:
        if pieces and load + work[i] <= limit:
            pieces[-1] += (i,)
            load += float(work[i])
        else:
            pieces.append((i,))
            load = float(work[i])
    return pieces


Works = Callable[[], Mapping[str, SampleWork]]
"""Seconds of each sample on each stage, by module that is no copy; computed when it is asked for."""

Policy = Callable[[Plan, Sequence[Sample], Works], BatchAssignment]

SEED = 0
"""Seed of random order. Loaders shuffle, so batches differ all the same."""


def _contiguous(plan: Plan, samples: Sequence[Sample], works: Works) -> BatchAssignment:
    return contiguous_assignment(plan, samples)


def _random(plan: Plan, samples: Sequence[Sample], works: Works) -> BatchAssignment:
    return random_assignment(plan, samples, SEED)


def _disttrain(plan: Plan, samples: Sequence[Sample], works: Works) -> BatchAssignment:
    forward = {name: work.forward_s for name, work in works().items()}
    backward = {name: work.backward_s for name, work in works().items()}
    return reordered_assignment(plan, samples, forward, backward)


def _dip(plan: Plan, samples: Sequence[Sample], works: Works) -> BatchAssignment:
    encoders = [work.total_s for name, work in works().items() if plan.modules[name].kind == "encoder"]
    if not encoders:
        return random_assignment(plan, samples, SEED)
    return dip_like_assignment(plan, samples, sum(encoders[1:], encoders[0]), SEED)


def _balanced(
    plan: Plan,
    samples: Sequence[Sample],
    works: Works,
    *,
    rule: Callable[[Sequence[int], Floats, Floats, int], Deferral],
) -> BatchAssignment:
    totals = {name: work.total_s for name, work in works().items()}
    return deferring_assignment(plan, samples, plan_deferrals(plan, totals, rule=rule), totals)


def _post_balanced(plan: Plan, samples: Sequence[Sample], works: Works) -> BatchAssignment:
    if plan.replica_microbatches:
        return _balanced(plan, samples, works, rule=balance)
    return post_balanced_assignment(plan, samples, {name: work.total_s for name, work in works().items()})


ASSIGNMENTS: Mapping[str, Policy] = {
    "contiguous": _contiguous,
    "random": _random,
    "disttrain": _disttrain,
    "dip": _dip,
    "balanced": partial(_balanced, rule=balance),
    POST_BALANCED: _post_balanced,
    "entrain": partial(_balanced, rule=defer),
    "entrain_k_eff": partial(_balanced, rule=partial(defer, fewer=True)),
}


def check_assignment(plan: Plan) -> None:
    """Raises `UserError` if the plan's assignment is not known, or not for such plans."""
    if plan.assignment not in ASSIGNMENTS:
        raise UserError(f"plan: assignment {plan.assignment!r} is not known; known are {', '.join(ASSIGNMENTS)}")
    if plan.loss_module is not None and plan.assignment != DEFAULT_ASSIGNMENT:
        raise UserError(
            f"plan: assignment {plan.assignment!r} is not for contrastive towers; give {DEFAULT_ASSIGNMENT!r}"
        )


def assign(
    plan: Plan, samples: Sequence[Sample], *, workloads: Mapping[str, ModuleWorkload], table: CostTable
) -> BatchAssignment:
    """The cut that the plan asks for. `workloads`, `table`: as for `sample_work`.

    Raises `UserError` for a name that is not known and for a sample that is longer than `max_packed_tokens`."""
    check_assignment(plan)
    works = cache(lambda: sample_work(plan, samples, workloads=workloads, table=table))
    assignment = ASSIGNMENTS[plan.assignment](plan, samples, works)
    return assignment if plan.max_packed_tokens is None else _packed(plan, samples, assignment, plan.max_packed_tokens)


def _packed(plan: Plan, samples: Sequence[Sample], assignment: BatchAssignment, max_tokens: int) -> BatchAssignment:
    """Language-model microbatches of more tokens are cut into several: after deferral, which encoders do not notice."""
    cut = dict(assignment.microbatches)
    for name, module in plan.modules.items():
        if module.kind == "language_model":
            num_tokens = [sample.num_tokens(name) for sample in samples]
            longest = max(range(len(samples)), key=num_tokens.__getitem__)
            if num_tokens[longest] > max_tokens:
                raise UserError(
                    f"parallel.max_packed_tokens: is {max_tokens}, but sample {samples[longest].id} has "
                    f"{num_tokens[longest]} tokens; give at least as many"
                )
            cut[name] = tuple(
                tuple(piece for m in replica for piece in _sequences(m, num_tokens, max_tokens))
                for replica in cut[name]
            )
    return replace(assignment, microbatches=cut)


def _sequences(microbatch: Microbatch, num_tokens: Sequence[int], max_tokens: int) -> Sequence[Microbatch]:
    """An empty microbatch stays one: it is a place in the order."""
    return packed_sequences(microbatch, num_tokens, max_tokens) or [microbatch]
