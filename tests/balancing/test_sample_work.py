from dataclasses import replace

import numpy as np
import pytest

from motet.assignment.batch_assignment import BatchAssignment
from motet.balancing.sample_work import sample_work
from motet.costs.iteration import IterationCosts
from motet.planner.layouts.layout import build_plan
from motet.planner.problem import Degrees
from motet.schedule.action import Compute, Kind
from motet.schedule.routes import Cell, derive_routes
from papers.entrain.problems import problem


@pytest.mark.parametrize("recompute", [(), ("vision",)])
def test_samples_differ_by_what_a_microbatch_of_each_costs(
    recompute: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a call costs beside its samples is the same for each, so differences must agree; messages go whole."""
    monkeypatch.setattr("motet.costs.stage_seconds.row_shares", lambda *_, **__: 1)
    one = problem("1b", num_samples=3)
    plan = build_plan(one, {name: Degrees(tp=2, pp=2) for name in one.modules})
    plan = replace(plan, recompute=recompute)
    workloads = {name: module.workload for name, module in one.modules.items()}
    work = sample_work(plan, one.samples, workloads=workloads, table=one.table)
    alone = BatchAssignment(dict.fromkeys(plan.modules, (((0,), (1,), (2,)),)))
    costs = IterationCosts(
        derive_routes(plan, alone, one.samples),
        one.samples,
        workloads=workloads,
        table=one.table,
        cluster=one.cluster,
    )
    for name, each in work.items():
        for kind, found in ((Kind.FORWARD, each.forward_s), (Kind.BACKWARD, each.backward_s)):
            for stage in range(2):
                seconds = [costs.compute_s(Compute(kind, Cell(name, 0, stage, i))) for i in range(3)]
                assert np.ptp(seconds) > 0
                assert np.diff(found[:, stage]) == pytest.approx(np.diff(seconds))
