"""Entrain's Algorithm 3 against exhaustive search, its iteration time by hand, and its plans in simulation."""

from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling import examples
from small_problem import small_problem, with_memory

from motet.cluster import LINKS
from motet.plan import Edge, Plan, check_plan
from motet.planner.entrain.planner import (
    Component,
    Shape,
    configurations,
    device_seconds,
    entrain,
    iteration_s,
    resharding,
)
from motet.planner.entrain.profiling_size import proportional_allocation
from motet.planner.evaluate import evaluate
from motet.planner.registry import make_plan

EDGES = (Edge(source="vision", target="text"), Edge(source="audio", target="text"))


def test_parallel_encoders_count_once():
    """Vision 2 + 3, audio 4, text 5 + 5: the longest path is vision and text; three more microbatches at 5."""
    stages = {"vision": (2.0, 3.0), "audio": (4.0,), "text": (5.0, 5.0)}
    assert iteration_s(stages, EDGES, 4) == 5 + 10 + 3 * 5


def layers(draw_layers, scale):
    return lambda tp, cp: [scale * x / tp / cp + 0.1 * (tp * cp - 1) for x in draw_layers]


@examples(60)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=3, max_size=3),
    st.lists(st.integers(1, 5), min_size=3, max_size=3),
    st.integers(1, 5),
    st.sampled_from((0.0, 0.5)),
)
def test_is_the_best_of_exhaustive_search(times, devices, num_microbatches, penalty):
    names = ("vision", "audio", "text")
    allocation = dict(zip(names, devices, strict=True))
    components = {
        name: Component(layer_s=layers(each, 1.0), tp_sizes=(1, 2), cp_sizes=(1, 2) if name == "text" else (1,))
        for name, each in zip(names, times, strict=True)
    }
    found = min(
        configurations(
            components,
            EDGES,
            allocation,
            num_microbatches,
            lambda e, shapes: penalty * (shapes[e.source][:2] != shapes[e.target][:2]),
        ),
        key=lambda each: each.iteration_s,
    )

    def options(name):
        for tp, cp in product((1, 2), components[name].cp_sizes):
            costs = components[name].layer_s(tp, cp)
            pp = min(allocation[name] // (tp * cp), len(costs))
            for cuts in combinations(range(1, len(costs)), pp - 1) if pp else ():
                yield (tp, cp), [sum(costs[a:b]) for a, b in pairwise([0, *cuts, len(costs)])]

    best = min(
        max(sum(v), sum(a))
        + sum(t)
        + (num_microbatches - 1) * max(*v, *a, *t)
        + num_microbatches * penalty * ((v_tp != t_tp) + (a_tp != t_tp))
        for (v_tp, v), (a_tp, a), (t_tp, t) in product(*map(options, names))
    )
    assert found.iteration_s == pytest.approx(best)
    for name, shape in found.shapes.items():
        assert shape.tp * shape.cp * shape.pp <= allocation[name]


@examples(8)
@given(
    st.integers(3, 9),
    st.sampled_from(((1,), (1, 2))),
    st.sampled_from(((), ("vision",), ("vision", "audio"))),
)
def test_plans_simulate(num_devices, dp_sizes, frozen):
    problem = small_problem(num_devices=num_devices, dp_sizes=dp_sizes, frozen=frozen)
    plan = make_plan(problem, "entrain")
    check_plan(plan)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.planner == "entrain"
    assert len({len(module.replicas) for module in plan.modules.values()}) == 1
    evaluation = evaluate(problem, plan)
    assert evaluation.fits
    assert evaluation.iteration_time_s >= evaluation.lower_bound_s * (1 - 1e-9)


def test_devices_follow_the_work():
    problem = small_problem(num_devices=8, frozen=())
    plan = entrain(problem)
    work = [device_seconds(problem, name) for name in problem.modules]
    stages = tuple(len(module.replicas[0].stages) for module in plan.modules.values())
    assert stages == proportional_allocation(8, work)


def test_unlike_groups_are_resharded():
    component = Component(layer_s=lambda tp, cp: [4.0 / tp], tp_sizes=(1, 2))
    found = configurations(
        {"vision": component, "text": component},
        EDGES[:1],
        {"vision": 1, "text": 2},
        3,
        lambda edge, shapes: 10.0 * (shapes[edge.source].tp != shapes[edge.target].tp),
    )
    times = {each.shapes["text"]: each.iteration_s for each in found}
    assert times == {Shape(1, 1, 1): 8 + 2 * 4, Shape(2, 1, 1): 6 + 2 * 4 + 3 * 10}


def test_mistakes_are_told():
    with pytest.raises(ValueError, match="entrain gives every module its own ranks"):
        entrain(small_problem(), placement="colocated")
    with pytest.raises(ValueError, match=r"cluster.num_devices: is 2, but vision and audio"):
        entrain(small_problem(num_devices=2))


def test_what_does_not_fit_is_said():
    problem = with_memory(small_problem(num_devices=3, frozen=()), 2**20)
    assert evaluate(problem, entrain(problem)).overflows


def on_slow_nodes(problem):
    """A node for each device."""
    cluster = replace(problem.cluster, devices_per_node=1, between_nodes=LINKS["ethernet10"])
    return replace(problem, cluster=cluster)


def test_sums_of_gradients_decide_on_slow_networks():
    """Replicas of a trained model would sum all gradients over the network."""
    problem = on_slow_nodes(small_problem(num_devices=6, frozen=(), dp_sizes=(1, 2)))
    times = {
        dp: evaluate(problem, entrain(replace(problem, dp_sizes=(dp,)))).iteration_time_s for dp in problem.dp_sizes
    }
    assert times[1] < times[2]
    assert evaluate(problem, entrain(problem)).iteration_time_s == times[1]


def test_the_slowest_sum_of_gradients_counts_once():
    component = Component(layer_s=lambda tp, cp: [2.0, 3.0])
    (found,) = configurations(
        {"vision": component, "text": component},
        EDGES[:1],
        {"vision": 1, "text": 2},
        1,
        reduce_s=lambda name, shapes, stages: 10.0 * len(stages) if name == "text" else 7.0,
    )
    assert found.iteration_s == 5 + 5 + 20


def test_resharding_is_what_the_links_between_the_ranks_take():
    """An encoder on rank 0, groups of two behind it: inside a node and over the network."""
    near = small_problem(num_devices=3, encoders=("vision",), frozen=())
    far = on_slow_nodes(near)
    shapes = {"vision": Shape(1, 1, 1), "language_model": Shape(2, 1, 1)}
    for problem in (near, far):
        tokens = sum(sample.num_outputs("vision") for sample in problem.samples) / problem.num_microbatches
        num_bytes = tokens * 128 * problem.memory.activation_bytes
        link = problem.cluster.link(0, 2)
        # Both receivers at once forth, one sender back.
        expected = 2 * link.latency_s + (2 + 1) * num_bytes / link.bytes_per_s
        assert resharding(problem, 1)(problem.edges[0], shapes) == pytest.approx(expected)
    assert resharding(near, 1)(near.edges[0], {**shapes, "language_model": Shape(1, 1, 2)}) == 0.0
