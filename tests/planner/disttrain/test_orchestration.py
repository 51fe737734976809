"""DistTrain's orchestration against exhaustive search, in plain loops over the formulas of the docstring."""

from itertools import product
from math import ceil, inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling import examples

from motet.planner.disttrain.orchestration import (
    OrchestrationProblem,
    Unit,
    UnitDegrees,
    _Rows,
    evaluate_degrees,
    orchestrate,
)
from motet.planner.layouts.partition import partition, stage_costs


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
                allowed &= unit.max_devices is None or tp * pp * dp <= unit.max_devices
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
    fills, slowest, longest_reduction = {}, 0.0, 0.0
    for name, unit in problem.units.items():
        d = degrees[name]
        num_layers = len(unit.layer_costs)
        if d.vpp > 1 and (d.pp == 1 or d.pp * d.vpp > min(num_layers, unit.max_stages or num_layers)):
            return None
        if unit.equal_stages and num_layers % (d.pp * d.vpp):
            return None
        samples = ceil(problem.global_batch_size * unit.items_per_sample / d.dp / count) / unit.items_per_sample
        whole_s = unit.seconds[d.tp] * samples + unit.microbatch_s.get(d.tp, 0.0)
        per_stage = num_layers // d.pp
        cut = [(s * per_stage, (s + 1) * per_stage) for s in range(d.pp)]
        if not unit.equal_stages:
            cut = partition(unit.layer_costs, d.pp)
        share = max(stage_costs(unit.layer_costs, cut)) / sum(unit.layer_costs)
        slowest = max(slowest, whole_s * share)
        of_layers = ceil(num_layers / d.pp) / num_layers
        longest_reduction = max(longest_reduction, unit.reduce_s * of_layers / d.tp * 2 * (d.dp - 1) / d.dp)
        fills.setdefault(unit.role, []).append(whole_s / d.vpp + d.pp * unit.boundary_s.get(d.tp, 0.0) * samples)
        after = {"encoder": degrees[backbone].pp + behind, "language_model": behind, "generator": 0}[unit.role]
        in_flight = min(count, d.pp + after + ((d.pp - 1) / d.vpp if d.vpp > 1 else 0))
        optimizer = unit.optimizer_bytes / (d.dp if problem.zero1 else 1)
        needed = of_layers / d.tp * (unit.state_bytes + optimizer)
        needed += of_layers * in_flight * samples * unit.activation_bytes.get(d.tp, 0.0)
        if needed > problem.device_bytes * (1 + 1e-9):
            return None
    return sum(max(times) for times in fills.values()) + (count - 1) * slowest + longest_reduction


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
        microbatch_s=draw(st.sampled_from(({}, {1: 0.25, 2: 0.5}))),
        items_per_sample=1 if role == "language_model" else draw(st.sampled_from((1, 1, 3))),
        state_bytes=draw(st.integers(0, 40)),
        optimizer_bytes=draw(st.integers(0, 80)),
        activation_bytes={1: draw(st.integers(0, 10)), 2: draw(st.integers(0, 8))},
        boundary_s=draw(st.sampled_from(({}, {1: 0.1, 2: 0.05}))),
        reduce_s=draw(st.sampled_from((0.0, 0.3))),
        max_stages=draw(st.sampled_from((None, 2))),
        equal_stages=draw(st.booleans()),
        max_devices=draw(st.sampled_from((None, None, 3))),
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
        num_devices=draw(st.integers(len(roles), 12 if len(roles) < 3 else 7)),
        global_batch_size=batch,
        num_microbatches=draw(st.sampled_from((None, None, 1, 2, 3))),
        device_bytes=draw(st.sampled_from((inf, inf, 60, 25))),
        zero1=draw(st.booleans()),
    )


@examples(150)
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


def large_problem(num_devices, global_batch_size):
    """A model of about 72B: the shape of DistTrain's Table 2."""
    flops_per_s = 0.6 * 312e12

    def unit(role, num_layers, flops, parameters, activation_bytes, efficiency, items=1):
        return Unit(
            role=role,
            layer_costs=(1.0,) * num_layers,
            seconds={tp: flops / flops_per_s / tp / efficiency ** (tp - 1) for tp in (1, 2, 4, 8)},
            items_per_sample=items,
            state_bytes=4 * parameters,
            optimizer_bytes=12 * parameters,
            activation_bytes={tp: activation_bytes / tp for tp in (1, 2, 4, 8)},
            boundary_s={tp: 0.01 / tp for tp in (1, 2, 4, 8)},
            reduce_s=2 * parameters / 12e9,
        )

    return OrchestrationProblem(
        units={
            "vision": unit("encoder", 32, 3e13, 0.63e9, 11e9, 0.9, items=8),
            "language_model": unit("language_model", 80, 3.4e15, 70e9, 180e9, 0.98),
            "image": unit("generator", 25, 1e14, 1e9, 16e9, 0.9, items=8),
        },
        num_devices=num_devices,
        global_batch_size=global_batch_size,
        device_bytes=72e9,
    )


def test_prunes_large_clusters(monkeypatch):
    """1296 devices: of all numbers of microbatches few are looked at closely, of all layouts a small share."""
    combined = []
    beside = _Rows.beside
    monkeypatch.setattr(_Rows, "beside", lambda a, b: combined.append(len(a) * len(b)) or beside(a, b))
    found = orchestrate(large_problem(1296, 1920))
    assert found.num_devices <= 1296
    assert len(combined) <= 20
    assert sum(combined) <= 2e5
    # No layout does all the work in less than what all devices together need for it.
    work = sum(min(tp * s for tp, s in unit.seconds.items()) for unit in large_problem(1296, 1920).units.values())
    assert 1920 * work / 1296 <= found.iteration_s <= 1.5 * 1920 * work / 1296


def test_a_generator_counts_for_the_memory_of_all_before_it():
    """Memory for the activations of two microbatches: two stages fit, with a generator behind it is three."""
    backbone = Unit(role="language_model", layer_costs=(1.0, 1.0), seconds={1: 1.0}, activation_bytes={1: 10.0})
    generator = Unit(role="generator", layer_costs=(1.0,), seconds={1: 1.0})
    degrees = {"language_model": UnitDegrees(1, 2, 1), "generator": UnitDegrees(1, 1, 1)}

    def problem(**units):
        return OrchestrationProblem(units=units, num_devices=3, global_batch_size=4, device_bytes=12.0)

    alone = evaluate_degrees(problem(language_model=backbone), {"language_model": degrees["language_model"]})
    assert alone.iteration_s == 1 + 3 * 0.5
    with pytest.raises(ValueError, match="does not fit into devices and memory"):
        evaluate_degrees(problem(language_model=backbone, generator=generator), degrees)


def test_exactly_one_language_model():
    with pytest.raises(ValueError, match="exactly one language model"):
        OrchestrationProblem(units={}, num_devices=1, global_batch_size=1)
