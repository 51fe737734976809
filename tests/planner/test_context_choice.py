"""Context parallelism as a degree that `auto` chooses, and what layouts with it cost."""

import json
from dataclasses import replace

import pytest
import torch
from small_problem import TEXT, sample, small_problem

from motet.api import read_samples
from motet.attention.kernels.backends import check_backend
from motet.cluster import cluster_from_dict
from motet.config import RunConfig
from motet.costs.analytic import analytic_table
from motet.costs.memory import MemoryOptions
from motet.costs.stage_seconds import HEAD_GROUPS
from motet.errors import UserError
from motet.families.shape_reading.module_shapes import module_workload
from motet.parallel.context.context_attention import ContextParallel
from motet.plan import ContextOptions
from motet.planner.evaluate import evaluate
from motet.planner.from_run_file import planning_problem
from motet.planner.layouts.context_methods import context_variants
from motet.planner.layouts.degrees import cp_sizes
from motet.planner.layouts.layout import Chunk, Layout, layout_plan
from motet.planner.layouts.layout_costs import LayoutCosts
from motet.planner.layouts.own_layouts import own_layouts
from motet.planner.lower_bound import problem_lower_bound_s
from motet.planner.registry import PLANNERS, choose, make_plan
from motet.schedule.action import Compute, Kind
from motet.schedule.generators import GENERATORS
from motet.strict_parsing import parse_strictly

LM = "language_model"


def text_problem(*, words, num_samples, allowed=(1, 2, 4, 8), num_devices=8, tp_sizes=(1, 2, 4, 8), **options):
    """A language model alone on the GPUs of one node."""
    problem = small_problem(num_devices=num_devices, encoders=(), frozen=())
    cluster = cluster_from_dict({"num_devices": num_devices, "device": "h100", "devices_per_node": num_devices})
    modules = {name: replace(module, tp_sizes=tp_sizes, cp_sizes=allowed) for name, module in problem.modules.items()}
    workloads = {name: module.workload for name, module in modules.items()}
    table = analytic_table(workloads, cluster, dtype="bfloat16", dtype_bytes=2, tp_sizes=tp_sizes)
    samples = tuple(sample(i, image=False, sound=False, words=words) for i in range(num_samples))
    memory = MemoryOptions(activation_bytes=2)
    given = {"num_microbatches": 1, "dp_sizes": (1, 2, 4, 8), "memory": memory, **options}
    return replace(problem, modules=modules, cluster=cluster, table=table, samples=samples, **given)


def chosen_cp(choice):
    return choice.evaluation.plan.modules[LM].replicas[0].stages[0].cp_size


def test_it_is_chosen_where_one_long_sequence_is_all_there_is():
    problem = text_problem(words=131072, num_samples=1, tp_sizes=(1, 2))
    choice = choose(problem)
    assert chosen_cp(choice) > 1
    assert choice.found_by == "auto"
    assert f"x cp {chosen_cp(choice)}" in choice.why
    without = choose(text_problem(words=131072, num_samples=1, tp_sizes=(1, 2), allowed=(1,)))
    assert choice.evaluation.iteration_time_s < 0.7 * without.evaluation.iteration_time_s
    assert choice.lower_bound_s <= choice.evaluation.iteration_time_s


@pytest.mark.parametrize(
    ("num_key_value_heads", "bytes_per_s", "method"),
    [(4, 5e9, "ulysses"), (2, 5e9, "hybrid"), (1, 5e9, "ring"), (4, 3e11, "ring")],
)
def test_the_exchange_of_keys_is_the_one_that_is_waited_for_least(num_key_value_heads, bytes_per_s, method):
    """A group of four. Over a slow link trades for heads send least, among as many as there are heads of keys; over a
    fast one attention hides the hops of a ring."""
    problem = text_problem(words=65536, num_samples=1, tp_sizes=(1,), allowed=(4,), num_devices=4)
    link = replace(problem.cluster.within_node, bytes_per_s=bytes_per_s)
    cluster = replace(problem.cluster, within_node=link)
    workload = module_workload({**TEXT, "num_key_value_heads": num_key_value_heads})
    module = replace(problem.modules[LM], workload=workload)
    table = analytic_table({LM: workload}, cluster, dtype="bfloat16", dtype_bytes=2, tp_sizes=(1,))
    problem = replace(problem, modules={LM: module}, table=table, cluster=cluster)
    plan = choose(problem).evaluation.plan
    context = plan.modules[LM].context
    assert context.method == method
    assert context.ulysses_size == 2
    gathered = replace(plan, modules={LM: replace(plan.modules[LM], context=ContextOptions())})
    seconds = {
        variant.modules[LM].context.method: evaluate(problem, variant).iteration_time_s
        for variant in (gathered, *context_variants(problem, gathered))
    }
    assert min(seconds, key=seconds.__getitem__) == method


def test_costs_know_the_portions_in_which_keys_are_gathered():
    assert ContextParallel.head_groups == HEAD_GROUPS


def test_traders_are_as_many_as_heads_allow():
    """Two heads of keys, on a node of four."""
    problem = text_problem(words=65536, num_samples=1, tp_sizes=(1,), allowed=(4,), num_devices=4)
    plan = layout_plan(problem, next(iter(own_layouts(problem, ("1f1b",)))))
    contexts = [variant.modules[LM].context for variant in context_variants(problem, plan)]
    assert [(context.method, context.ulysses_size) for context in contexts] == [("hybrid", 2), ("ring", 2)]


def test_hybrid_plans_trade_within_nodes():
    problem = text_problem(words=65536, num_samples=1, tp_sizes=(1,), allowed=(4,), num_devices=4)
    two_nodes = replace(problem, cluster=replace(problem.cluster, devices_per_node=2))
    plan = layout_plan(two_nodes, next(iter(own_layouts(two_nodes, ("1f1b",)))))
    hybrid, ring = context_variants(two_nodes, plan)
    context = hybrid.modules[LM].context
    assert (context.method, context.ulysses_size) == ("hybrid", 2)
    assert evaluate(two_nodes, hybrid).iteration_time_s > 0
    assert (ring.modules[LM].context.method, ring.modules[LM].context.policy) == ("ring", "zigzag")


def test_it_is_not_where_there_are_many_short_ones():
    choice = choose(text_problem(words=1024, num_samples=16, num_microbatches=2))
    assert chosen_cp(choice) == 1


def test_memory_can_demand_it():
    """One sample's activations do not fit on one rank; tensor parallelism is not allowed, nor are stages."""
    problem = text_problem(words=65536, num_samples=4, num_devices=4, tp_sizes=(1,), num_microbatches=4)
    problem = replace(problem, modules={LM: replace(problem.modules[LM], max_stages=1)})
    without = choose(replace(problem, modules={LM: replace(problem.modules[LM], cp_sizes=(1,))}))
    device = replace(problem.cluster.device, memory_bytes=0.7 * max(without.evaluation.result.peak_memory_bytes))
    tight = replace(problem, cluster=replace(problem.cluster, device=device))
    choice = choose(tight)
    assert chosen_cp(choice) > 1
    assert choice.evaluation.fits
    assert all(not evaluation.fits for evaluation in choice.named.values())


def test_the_limits_hold():
    problem = text_problem(words=8192, num_samples=8, allowed=(2, 4))
    choice = choose(problem)
    assert chosen_cp(choice) in (2, 4)
    assert not choice.named
    assert set(choice.refused) == {name for name, entry in PLANNERS.items() if entry.is_tried_by_auto}
    for layout in own_layouts(problem, tuple(GENERATORS)):
        assert layout.cp(LM) in (2, 4)
    with pytest.raises(UserError, match=r"parallel.limits.cp: is \[2, 4\], but planner cornstarch .* allow 1 too"):
        make_plan(problem, "cornstarch")
    with pytest.raises(UserError, match=r"parallel.limits.cp: no layout on 8 devices .* of 16; allow 1 too"):
        choose(text_problem(words=8192, num_samples=8, allowed=(16,)))


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 128), (96, 128), (128, 128), (160, 64), (256, 64)])
def test_blocks_are_such_that_kernels_take_the_heads(head_dim, block_size):
    values = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": head_dim}
    document = {
        "model": {"language_model": {"config": "Gemma3TextConfig", "values": values}},
        "data": {"kind": "described", "text_tokens": 8192, "num_train": 8},
        "parallel": {"planner": "auto", "limits": {"cp": [1, 2]}},
    }
    config = parse_strictly(RunConfig, json.dumps(document), "run")
    context = planning_problem(config, read_samples(config)).modules[LM].context
    assert context.block_size == block_size
    check_backend(torch.device("cuda"), "triton", block_size=block_size, head_dim=head_dim)


def test_a_share_is_at_least_a_block():
    problem = text_problem(words=100, num_samples=16, num_microbatches=4)
    assert cp_sizes(problem, LM) == [1, 2, 4]  # Four samples of 100 tokens: four blocks of 128.
    assert cp_sizes(problem, LM, dp=4) == [1]
    small_blocks = replace(problem.modules[LM], context=ContextOptions(block_size=16))
    assert cp_sizes(replace(problem, modules={LM: small_blocks}), LM, dp=4) == [1, 2, 4]
    assert cp_sizes(small_problem(), "vision") == [1]


@pytest.mark.parametrize(("num_samples", "cp"), [(1, 2), (1, 4), (4, 2)])
def test_layer_times_are_what_the_simulation_takes_but_for_the_exchange(num_samples, cp):
    """Several samples share a row, so that their attention is that of the whole row."""
    problem = text_problem(words=512, num_samples=num_samples, num_devices=cp, dp_sizes=(1,))
    num_layers = problem.modules[LM].workload.num_layers
    layout = Layout(planner="one", chunks=(Chunk(LM, (0, num_layers), 0),), group_sizes=(cp,), shared=((LM, cp),))
    evaluation = evaluate(problem, layout_plan(problem, layout))
    cell = evaluation.costs.routes.cells[0]
    times = problem.estimator.layer_times(LM, cp=cp)
    for kind, seconds in (
        (Kind.FORWARD, sum(time.forward_s for time in times)),
        (Kind.BACKWARD, sum(time.backward_s for time in times)),
    ):
        action = Compute(kind, cell)
        exchange_s = evaluation.costs.group_communication_s(action)
        assert exchange_s > 0
        assert evaluation.costs.compute_s(action) - exchange_s == pytest.approx(seconds, rel=1e-9)
    assert LayoutCosts(problem).bound_s(layout) <= evaluation.iteration_time_s
    assert problem_lower_bound_s(problem) <= evaluation.iteration_time_s
