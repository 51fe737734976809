"""The dynamic programs against trying every cut and every group."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling import examples
from small_problem import small_problem

from motet.planner.registry import PLANNERS, Planner, make_plan
from papers.optimus.alpa import NUM_LIMITS, StageCounts, alpa, assign_stages


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """The planner as an entry of the registry, like any planner from outside of the package."""
    monkeypatch.setitem(PLANNERS, "alpa", Planner(plan=alpa))


def run_table(layer_seconds, efficiency):
    """[first, last] like the planner's; group of size s computes s * efficiency ** (s > 1) as fast as one device."""
    prefix = np.concatenate([[0.0], np.cumsum(layer_seconds)])
    tables = {}
    for size in (1, 2):
        runs = (prefix[None, :] - prefix[:, None]) / (size * (efficiency if size > 1 else 1.0))
        runs[np.tril_indices(len(prefix))] = np.inf
        tables[size] = runs
    return tables


def every_assignment(num_layers, num_devices, sizes):
    for num_stages in range(1, num_layers + 1):
        for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
            ends = [*inner, num_layers]
            for groups in itertools.product(sizes, repeat=num_stages):
                if sum(groups) == num_devices:
                    yield list(zip(ends, groups, strict=True))


def iteration_s(tables, stages, num_microbatches):
    starts = [0, *(end for end, _ in stages)]
    times = [tables[size][first, last] for first, (last, size) in zip(starts, stages, strict=False)]
    return sum(times) + (num_microbatches - 1) * max(times)


@examples(60)
@given(
    st.lists(st.floats(0.1, 10), min_size=1, max_size=5),
    st.integers(1, 5),
    st.integers(1, 12),
    st.floats(0.5, 1.0),
)
def test_near_the_best_of_all_and_never_better(layer_seconds, num_devices, num_microbatches, efficiency):
    tables = run_table(layer_seconds, efficiency)
    times = [
        iteration_s(tables, stages, num_microbatches)
        for stages in every_assignment(len(layer_seconds), num_devices, tables)
    ]
    found = assign_stages(tables, num_devices, num_microbatches)
    if not times:
        assert found is None
        return
    assert found is not None
    assert sum(size for _, size in found) == num_devices
    assert found[-1][0] == len(layer_seconds)
    ours = iteration_s(tables, found, num_microbatches)
    # The grid of slowest stages is at most a ratio apart.
    ratio = max(2.0, sum(layer_seconds) / max(layer_seconds) * 5) ** (1 / (NUM_LIMITS - 1))
    assert min(times) - 1e-9 <= ours <= min(times) * ratio * 1.01


def test_groups_of_unequal_size_where_that_is_allowed():
    problem = small_problem(num_devices=3, num_microbatches=8)
    modules = {name: replace(module, tp_sizes=(1, 2)) for name, module in problem.modules.items()}
    plan = make_plan(replace(problem, modules=modules), "alpa")
    assert plan.num_ranks == 3
    with pytest.raises(ValueError, match="placement"):
        make_plan(problem, "alpa", placement="colocated")


@examples(60)
@given(
    st.lists(
        st.tuples(st.lists(st.floats(0.1, 10), min_size=1, max_size=3), st.sampled_from([1, 2, None])), max_size=3
    ),
    st.integers(1, 5),
    st.integers(1, 8),
)
def test_no_module_has_more_stages_than_it_may(modules, num_devices, num_microbatches):
    modules = [([1.0, 2.0], 1), *modules]
    module_of = [m for m, (layers, _) in enumerate(modules) for _ in layers]
    tables = run_table([seconds for layers, _ in modules for seconds in layers], 0.9)

    def keeps(stages):
        starts = [0, *(end for end, _ in stages)]
        held = [{module_of[i] for i in range(a, b)} for a, (b, _) in zip(starts, stages, strict=False)]
        return all(most is None or sum(m in stage for stage in held) <= most for m, (_, most) in enumerate(modules))

    every = [each for each in every_assignment(len(module_of), num_devices, tables) if keeps(each)]
    counts = StageCounts.of([(len(layers), most) for layers, most in modules])
    found = assign_stages(tables, num_devices, num_microbatches, counts)
    assert (found is None) == (not every)
    if found is not None:
        assert keeps(found)
        best_s = min(iteration_s(tables, stages, num_microbatches) for stages in every)
        seconds = [s for layers, _ in modules for s in layers]
        ratio = max(2.0, sum(seconds) / max(seconds) * 5) ** (1 / (NUM_LIMITS - 1))  # As above.
        assert best_s * (1 - 1e-9) <= iteration_s(tables, found, num_microbatches) <= best_s * ratio * 1.01


def test_a_limit_on_stages_is_kept_to():
    problem = small_problem(num_devices=4)
    modules = {name: replace(module, max_stages=2, tp_sizes=(1, 2)) for name, module in problem.modules.items()}
    free, limited = make_plan(problem, "alpa"), make_plan(replace(problem, modules=modules), "alpa")
    stages = {name: len(module.replicas[0].stages) for name, module in limited.modules.items()}
    assert max(stages.values()) == 2 < max(len(module.replicas[0].stages) for module in free.modules.values())
    assert limited.num_ranks == 4
