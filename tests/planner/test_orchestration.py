"""DistTrain's orchestration against exhaustive search, written out in plain loops from the formulas of the docstring."""

from itertools import product
from math import ceil, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.planner.orchestration import OrchestrationProblem, Unit, UnitDegrees, evaluate_degrees, orchestrate
from motet.planner.partition import partition, stage_costs


def exhaustive(problem):
    """(least time, fewest devices with it), or None."""
    best = None
    for choice in product(*(degrees_of(problem, unit) for unit in problem.units.values())):
        degrees = dict(zip(problem.units, choice, strict=True))
        time_s = iteration_s(problem, degrees)
        if time_s is None:
            continue
        key = (time_s, sum(d.num_devices for d in choice))
        if best is None or key[0] < best[0] * (1 - 1e-12) or (key[0] <= best[0] * (1 + 1e-12) and key[1] < best[1]):
            best = key
    return best


def degrees_of(problem, unit):
    n, num_layers = problem.num_devices, len(unit.layer_costs)
    for tp, vpp in product(unit.seconds, unit.vpp_sizes):
        for pp in range(1, min(unit.max_stages or num_layers, num_layers) + 1):
            for dp in range(1, n // (tp * pp) + 1):
                allowed = unit.dp_sizes is None or dp in unit.dp_sizes
                parts = problem.global_batch_size * (1 if unit.role == "language_model" else unit.items_per_sample)
                if allowed and parts % dp == 0:
                    yield UnitDegrees(tp, pp, dp, vpp)


def iteration_s(problem, degrees):
    if sum(d.tp * d.pp * d.dp for d in degrees.values()) > problem.num_devices:
        return None
    backbone = next(name for name, unit in problem.units.items() if unit.role == "language_model")
    count = problem.num_microbatches
    if count is None:
        count, left = divmod(problem.global_batch_size, problem.microbatch_size * degrees[backbone].dp)
        if left:
            return None
    behind = max((degrees[n].pp for n, u in problem.units.items() if u.role == "generator"), default=0)
    fills, slowest = {}, 0.0
    for name, unit in problem.units.items():
        d = degrees[name]
        num_layers = len(unit.layer_costs)
        if d.vpp > 1 and (d.pp == 1 or d.pp * d.vpp > num_layers or count % d.pp):
            return None
        samples = ceil(problem.global_batch_size * unit.items_per_sample / d.dp / count) / unit.items_per_sample
        whole_s = unit.seconds[d.tp] * samples + unit.microbatch_s
        share = max(stage_costs(unit.layer_costs, partition(unit.layer_costs, d.pp))) / sum(unit.layer_costs)
        slowest = max(slowest, whole_s * share)
        of_layers = ceil(num_layers / d.pp) / num_layers
        reduce_s = unit.reduce_s * of_layers / d.tp * 2 * (d.dp - 1) / d.dp
        fills.setdefault(unit.role, []).append(whole_s / d.vpp + d.pp * unit.boundary_s * samples + reduce_s)
        after = {"encoder": degrees[backbone].pp + behind, "language_model": behind, "generator": 0}[unit.role]
        in_flight = min(count, d.pp + after + ((d.pp - 1) / d.vpp if d.vpp > 1 else 0))
        optimizer = unit.optimizer_bytes / (d.dp if problem.zero1 else 1)
        needed = of_layers / d.tp * (unit.state_bytes + optimizer + in_flight * samples * unit.activation_bytes)
        if needed > problem.device_bytes * (1 + 1e-9):
            return None
    return sum(max(times) for times in fills.values()) + (count - 1) * slowest


@st.composite
def units(draw, role):
    num_layers = draw(st.integers(1, 4))
    seconds = {1: draw(st.integers(1, 40)) / 2}
    if draw(st.booleans()):
        seconds[2] = seconds[1] * draw(st.sampled_from((0.5, 0.55, 0.7)))
    equal = draw(st.booleans())
    return Unit(
        role=role,
        layer_costs=(1.0,) * num_layers if equal else tuple(draw(st.integers(1, 5)) for _ in range(num_layers)),
        seconds=seconds,
        microbatch_s=draw(st.sampled_from((0.0, 0.25))),
        items_per_sample=1 if role == "language_model" else draw(st.sampled_from((1, 1, 3))),
        state_bytes=draw(st.integers(0, 40)),
        optimizer_bytes=draw(st.integers(0, 80)),
        activation_bytes=draw(st.integers(0, 10)),
        boundary_s=draw(st.sampled_from((0.0, 0.1))),
        reduce_s=draw(st.sampled_from((0.0, 0.3))),
        max_stages=draw(st.sampled_from((None, 2))),
        vpp_sizes=draw(st.sampled_from(((1,), (1,), (1, 2)))),
    )


@st.composite
def problems(draw):
    roles = draw(
        st.sampled_from(
            (
                ("encoder", "language_model"),
                ("encoder", "language_model", "generator"),
                ("language_model", "generator"),
                ("encoder", "encoder", "language_model"),
                ("language_model",),
            )
        )
    )
    batch = draw(st.integers(1, 8))
    return OrchestrationProblem(
        units={f"{role}{i}": draw(units(role)) for i, role in enumerate(roles)},
        num_devices=draw(st.integers(len(roles), 8 if len(roles) < 3 else 7)),
        global_batch_size=batch,
        num_microbatches=draw(st.sampled_from((None, None, 1, 2, 3))),
        device_bytes=draw(st.sampled_from((inf, inf, 60, 25))),
        zero1=draw(st.booleans()),
    )


@settings(deadline=None, max_examples=150)
@given(problems())
def test_is_the_best_of_exhaustive_search(problem):
    best = exhaustive(problem)
    if best is None:
        with pytest.raises(ValueError, match="no layout"):
            orchestrate(problem)
        return
    found = orchestrate(problem)
    assert found.iteration_s == pytest.approx(best[0], rel=1e-9)
    assert iteration_s(problem, found.degrees) == pytest.approx(best[0], rel=1e-9)
    assert found.num_devices == best[1]
    assert evaluate_degrees(problem, found.degrees).iteration_s == pytest.approx(best[0], rel=1e-9)
