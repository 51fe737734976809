"""Post-balancing: every module's samples are dealt out over its replicas by that module's own work (OrchMLLM, Zheng et
al. 2025: "Batch Post-Balancing").

A sample that is heavy for an encoder is often light for the language model, so one cut of the batch over replicas
cannot be even for both. Here the batch is cut into steps that are even on both kinds of work; in each step, each module
deals its samples to all of its replicas by itself, and what an encoder makes travels to the replica of the language
model that has the sample. All that a microbatch needs is in microbatches of the same number.

Deviations: OrchMLLM rearranges each step's batch by an all-to-all between whole phases of a step. Here the outputs
travel as other messages of the pipeline do.

Limits: replicas of unequal shares (`replica_microbatches`) are cut by `balanced`, as nothing crosses between them.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from motet.assignment.batch_assignment import BatchAssignment, deal
from motet.assignment.sample import Sample
from motet.balancing.entrain import evenly_on_both
from motet.plan import Plan
from motet.ragged_arrays import Floats


def post_balanced_assignment(plan: Plan, samples: Sequence[Sample], work: Mapping[str, Floats]) -> BatchAssignment:
    """`work`: of each module that is no copy, the seconds of each sample."""
    totals = {True: np.zeros(len(samples)), False: np.zeros(len(samples))}
    for name, seconds in work.items():
        totals[plan.modules[name].kind == "encoder"] += seconds
    steps = evenly_on_both(totals[True], totals[False], plan.num_microbatches)
    lightest_first = sorted(steps, key=lambda step: float((totals[True] + totals[False])[step].sum()))
    order = [sorted(step) for step in (*lightest_first[::2], *reversed(lightest_first[1::2]))]
    cut = {}
    for name, module in plan.modules.items():
        data_module = module.data_module(name)
        able = [tuple(i for i in step if samples[i].has(data_module)) for step in order]
        cut[name] = tuple(deal(able, work[data_module].tolist(), len(module.replicas)))
    return BatchAssignment(cut)
