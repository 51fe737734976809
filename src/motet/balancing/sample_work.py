"""Seconds of each sample on each stage, from metadata alone: the quantity that assignments balance.

A sample is taken by itself: what a call costs however many samples it computes is left out, and so are gathers of rows
that came in shares. Works add up to a microbatch's exactly where samples stand apart ("separate"); padding and dense
attention over packed samples come on top.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from motet.assignment.sample import Sample
from motet.costs.cells import gradients_of_plan
from motet.costs.cost_model import CostTable, Quadratic, sample_loads
from motet.costs.recomputed import recomputed_share
from motet.plan import Plan
from motet.ragged_arrays import Floats
from motet.recomputation import of_module
from motet.shapes.module_shape import ModuleWorkload


@dataclass(frozen=True, eq=False)
class SampleWork:
    """Seconds [sample, stage] of one module; 0 where a sample lacks the modality."""

    forward_s: Floats
    backward_s: Floats

    @property
    def total_s(self) -> Floats:
        """[sample]"""
        total: Floats = (self.forward_s + self.backward_s).sum(axis=1)
        return total


def sample_work(
    plan: Plan,
    samples: Sequence[Sample],
    *,
    workloads: Mapping[str, ModuleWorkload],
    table: CostTable,
) -> dict[str, SampleWork]:
    """Work of each module that is no copy, by the stages of its first replica, with gradients as if all modalities
    were there.

    Raises `ValueError` if the table has no costs at the plan's tensor-parallel size."""
    gradients = gradients_of_plan(plan)
    result = {}
    for name, module in plan.modules.items():
        if module.copy_of is not None:
            continue
        workload = workloads[name].treated(of_module(plan.recompute, name))
        sources = tuple({plan.modules[e.source].data_module(e.source): None for e in plan.edges if e.target == name})
        loads = sample_loads(workload, name, samples, sources)
        forward, backward = [], []
        for stage in module.replicas[0].stages:
            costs = table.of(name, stage.tp_size, sequence_parallel=module.sequence_parallel).layers
            sums = np.zeros((2, len(Quadratic._fields)))
            for layer in range(*stage.layers):
                needs = gradients[name][layer]
                again = recomputed_share(workload.layers[layer])
                passes = costs[layer].passes(needs.input_gradient, needs.weight_gradient, recomputed=again)
                sums += [passes.forward, passes.backward]
            forward.append(loads @ sums[0, 1:])
            backward.append(loads @ sums[1, 1:])
        result[name] = SampleWork(np.stack(forward, axis=1), np.stack(backward, axis=1))
    return result
