"""The bound over all plans against trying them: every cut, every placement, every order of actions."""

import itertools
from dataclasses import replace
from math import inf, prod
from random import Random
from statistics import median

import numpy as np
import pytest
import small_problem as small
from brute_force import best_time_s
from sampling import in_campaigns
from small_problem import small_problem, with_memory

from motet.assignment.sample import Sample, Segment
from motet.balancing.policies import ASSIGNMENTS
from motet.cluster import LINKS
from motet.cluster.rank_placement import replicas_side_by_side
from motet.costs.analytic import analytic_table
from motet.costs.cost_model import LinkCost, Quadratic
from motet.families.shape_reading.module_shapes import module_workload
from motet.plan import ContextOptions, Edge
from motet.planner.auto import _Search
from motet.planner.evaluate import evaluate
from motet.planner.layouts.layout import Chunk, Layout, build_plan, layout_plan
from motet.planner.layouts.own_layouts import chains
from motet.planner.lower_bound import _Crowd, _in_windows, _Layers, problem_lower_bound_s
from motet.planner.problem import Degrees, ModuleProblem, PlanningProblem
from motet.planner.registry import choose, make_plan
from motet.schedule.action import Compute, Kind
from motet.schedule.generators import GENERATORS
from motet.shapes.module_shape import with_projector
from motet.simulator.lower_bound import Job, preemptive_time_s
from papers.cornstarch.problems import problem as cornstarch_problem
from papers.entrain.problems import problem as entrain_problem


def tiny_problem(rng, *, num_devices, num_microbatches, dp_sizes=(1,), shapes=(1, 1)):
    """A vision encoder and a language model of `shapes` blocks, some of their layers frozen."""
    workloads = {
        "vision": with_projector(module_workload(small.VISION | {"num_hidden_layers": shapes[0]}), "linear", 128),
        "language_model": module_workload(small.TEXT | {"num_hidden_layers": shapes[1]}),
    }
    modules = {}
    for name, workload in workloads.items():
        n = workload.num_layers
        trainable = rng.choice([((0, n),), ((n - 1, n),), ((0, n),) if name == "language_model" else ((n - 1, n),)])
        modules[name] = ModuleProblem(
            workload=workload,
            trainable=trainable,
            loss_weight=float(name == "language_model"),
            tp_sizes=(1, 2),
            cp_sizes=(1, 2),
            context=ContextOptions(block_size=4),
        )
    cluster = small.cpu_cluster(num_devices)
    has_image = [rng.random() < 0.7 for _ in range(4)]
    return PlanningProblem(
        modules=modules,
        edges=(Edge(source="vision", target="language_model"),),
        cluster=cluster,
        table=analytic_table(workloads, cluster, tp_sizes=(1, 2)),
        samples=tuple(
            small.sample(i, image=image, sound=False, words=rng.randint(5, 60)) for i, image in enumerate(has_image)
        ),
        num_microbatches=num_microbatches,
        dp_sizes=dp_sizes,
    )


def every_layout(problem):
    """All cuts into runs, each on any group; groups of one rank, or of two that share tensors or tokens."""
    for dp in problem.dp_sizes:
        for size, shared in ((1, ()), (2, ()), (2, (("language_model", 2),))):
            num_groups, left = divmod(problem.num_devices, dp * size)
            if left or not num_groups:
                continue
            for cuts in itertools.product(*(every_cut(m.workload.num_layers, 3) for m in problem.modules.values())):
                runs = [(name, run) for name, cut in zip(problem.modules, cuts, strict=True) for run in cut]
                for groups in itertools.product(range(num_groups), repeat=len(runs)):
                    if set(groups) == set(range(num_groups)):
                        chunks = tuple(Chunk(*run, group) for run, group in zip(runs, groups, strict=True))
                        sizes = (size,) * num_groups
                        yield Layout(planner="all", chunks=chunks, group_sizes=sizes, dp=dp, shared=shared)


def every_cut(num_layers, max_stages):
    for num_stages in range(1, min(max_stages, num_layers) + 1):
        for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
            yield list(zip([0, *inner], [*inner, num_layers], strict=True))


FREE = LinkCost(latency_s=0.0, bytes_per_s=1e18)


@pytest.mark.campaign
def test_the_best_of_all_plans_is_not_faster_and_often_near():
    """Exhaustive: a language model of five layers, every cut, placement, size and schedule."""
    ratios = []
    for seed in range(2):
        problem = tiny_problem(Random(seed), num_devices=2, num_microbatches=2, dp_sizes=(1, 2), shapes=(1, 3))
        problem = replace(
            problem,
            modules={"language_model": problem.modules["language_model"]},
            edges=(),
            samples=tuple(small.sample(i, image=False, sound=False, words=60) for i in range(4)),
            # What is relaxed costs nothing here, so that the rest can be told apart.
            table=replace(problem.table, message=FREE, all_reduce=FREE),
        )
        bound = problem_lower_bound_s(problem)
        best = min(
            evaluate(problem, layout_plan(problem, layout, schedule=schedule)).iteration_time_s
            for layout in every_layout(problem)
            for schedule in GENERATORS
            if applies(problem, layout, schedule)
        )
        assert bound <= best * (1 + 1e-9), f"seed {seed}"
        ratios.append(bound / best)
    assert max(ratios) > 0.9
    assert min(ratios) > 0.7


def applies(problem, layout, schedule):
    try:
        evaluate(problem, layout_plan(problem, layout, schedule=schedule))
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("num_draws", [8, *in_campaigns([60])])
def test_no_drawn_plan_under_any_schedule_is_faster(num_draws):
    num_tried = 0
    for seed in range(num_draws):
        rng = Random(seed)
        problem = tiny_problem(rng, num_devices=4, num_microbatches=rng.choice([1, 2, 4]), dp_sizes=(1, 2))
        # Two nodes, and replicas that gather new parameters.
        cluster = replace(problem.cluster, devices_per_node=2, between_nodes=LINKS["ethernet10"])
        problem = replace(problem, cluster=cluster, memory=replace(problem.memory, zero1=rng.random() < 0.5))
        bound = problem_lower_bound_s(problem)
        for _ in range(2):
            layout = draw_layout(rng, problem)
            for schedule in GENERATORS:
                if applies(problem, layout, schedule):
                    evaluation = evaluate(problem, layout_plan(problem, layout, schedule=schedule))
                    assert bound <= evaluation.iteration_time_s * (1 + 1e-9), f"seed {seed}: {layout} {schedule}"
                    num_tried += 1
    assert num_tried >= 2 * num_draws


def draw_layout(rng, problem):
    dp, size = rng.choice(problem.dp_sizes), rng.choice([1, 2])
    size = min(size, problem.num_devices // dp)
    num_groups = problem.num_devices // (dp * size)
    runs = []
    for name, module in problem.modules.items():
        n = module.workload.num_layers
        inner = sorted(rng.sample(range(1, n), k=rng.randint(0, n - 1)))
        runs += [(name, run) for run in zip([0, *inner], [*inner, n], strict=True)]
    groups = [rng.randrange(num_groups) for _ in runs]
    used = sorted(set(groups))
    chunks = tuple(Chunk(*run, used.index(group)) for run, group in zip(runs, groups, strict=True))
    shared = (("language_model", size),) if size > 1 and rng.random() < 0.5 else ()
    return Layout(planner="drawn", chunks=chunks, group_sizes=(size,) * len(used), dp=dp, shared=shared)


def test_no_drawn_plan_whose_stages_differ_in_tensor_parallelism_is_faster():
    """Groups of one and of two ranks in one module; messages and sums of gradients cost nothing."""
    ratios = []
    for seed in range(12):
        rng = Random(seed)
        problem = tiny_problem(rng, num_devices=4, num_microbatches=rng.choice([1, 2]), dp_sizes=(1,))
        problem = replace(problem, table=replace(problem.table, message=FREE, all_reduce=FREE))
        bound = problem_lower_bound_s(problem, mixed=True)
        assert bound <= problem_lower_bound_s(problem) * (1 + 1e-9)
        for _ in range(3):
            layout = draw_mixed_layout(rng, problem)
            plan = layout_plan(problem, layout)
            assert {stage.tp_size for *_, stage in plan.stages()} == {1, 2}
            for schedule in ("1f1b", "zero_bubble_h1", "bubble_filling"):
                if applies(problem, layout, schedule):
                    evaluation = evaluate(problem, layout_plan(problem, layout, schedule=schedule))
                    assert bound <= evaluation.iteration_time_s * (1 + 1e-9), f"seed {seed}: {layout} {schedule}"
                    ratios.append(bound / evaluation.iteration_time_s)
    assert len(ratios) >= 30
    assert max(ratios) > 0.3


@pytest.mark.parametrize("num_draws", [30, *in_campaigns([120])])
def test_no_drawn_plan_whose_encoder_takes_turns_is_faster(num_draws):
    """Several encoders for one language model, which waits for the first of them; messages cost nothing."""
    num_tried = 0
    for seed in range(num_draws):
        rng = Random(seed)
        problem = tiny_problem(rng, num_devices=4, num_microbatches=rng.choice([1, 2, 4]), dp_sizes=(1,))
        problem = replace(problem, table=replace(problem.table, message=FREE, all_reduce=FREE))
        layout = replace(draw_layout(rng, problem), split=frozenset({"vision"}), shared=())
        if len({layout.group_sizes[chunk.group] for chunk in layout.chunks}) > 1 or layout.group_sizes[0] == 1:
            continue
        numbers = {name: (layout.num_replicas(name),) for name in problem.modules}
        assert numbers["vision"] != numbers["language_model"]
        bound = problem_lower_bound_s(problem, num_replicas=numbers)
        for schedule in ("1f1b", "zero_bubble_h1", "bubble_filling", "critical_path"):
            if applies(problem, layout, schedule):
                evaluation = evaluate(problem, layout_plan(problem, layout, schedule=schedule))
                assert bound <= evaluation.iteration_time_s * (1 + 1e-9), f"seed {seed}: {layout} {schedule}"
                num_tried += 1
    # Most layouts that are drawn have groups of one rank.
    assert num_tried >= num_draws / 2


def test_what_begins_late_bounds_the_iteration_by_itself(monkeypatch):
    """A frozen encoder fills only the time in which the language model cannot begin."""
    problem = small_problem(num_devices=4, frozen=("vision",), encoders=("vision",), num_microbatches=4)
    problem = replace(problem, samples=(small.sample(0, image=True, sound=False),) * 8)
    numbers = {"vision": (1,), "language_model": (1,)}
    bound = problem_lower_bound_s(problem, num_replicas=numbers)
    for term in ("_work_of_some", "_in_windows"):
        monkeypatch.setattr(f"motet.planner.lower_bound.{term}", lambda problem, layers, from_s, to_s: from_s)
    assert bound > 1.01 * problem_lower_bound_s(problem, num_replicas=numbers)


def test_a_projector_on_every_rank_does_not_hide_what_must_follow_the_others(monkeypatch):
    """Each replica of the encoder has a trained projector, which nothing follows, so all ranks could end with one. But
    these are little work; the frozen language model's last backwards leave most ranks without any."""
    problem = cornstarch_problem("VALM-MM", llm="M")
    sizes = {"vision": (1,), "audio": (2,), "language_model": (2,)}
    numbers = {"vision": (12,), "audio": (2,), "language_model": (1,)}
    bound = problem_lower_bound_s(problem, num_replicas=numbers, tp=sizes)
    for term in ("_work_of_some", "_in_windows"):
        monkeypatch.setattr(f"motet.planner.lower_bound.{term}", lambda problem, layers, from_s, to_s: from_s)
    assert bound > 1.01 * problem_lower_bound_s(problem, num_replicas=numbers, tp=sizes)


@pytest.mark.parametrize("model", ["VLM-S", *in_campaigns(["ALM-M", "VALM-SS", "VALM-LM"])])
def test_no_plan_of_a_search_is_faster_than_the_bound_for_its_sizes(monkeypatch, model):
    """The named planners' plans, and all that `auto` simulates."""
    found = []
    add = _Search.add
    monkeypatch.setattr(_Search, "add", lambda search, each, what: add(search, kept(each, found), what))
    problem = cornstarch_problem(model, llm="S")
    choose(problem)
    table = problem.table
    cut = {name: {**costs, **table.sequence_parallel.get(name, {})} for name, costs in table.modules.items()}
    with_sequences = problem.with_options(table=replace(table, modules=cut))
    for evaluation in found:
        modules = evaluation.plan.modules
        stages = {name: [s for r in module.replicas for s in r.stages] for name, module in modules.items()}
        bound = problem_lower_bound_s(
            with_sequences if any(module.sequence_parallel for module in modules.values()) else problem,
            num_replicas={name: [len(module.replicas)] for name, module in modules.items()},
            tp={name: {stage.tp_size for stage in own} for name, own in stages.items()},
            cp={name: {stage.cp_size for stage in own} for name, own in stages.items()},
            mixed=any(len({stage.tp_size for stage in own}) > 1 for own in stages.values()),
        )
        assert bound <= evaluation.iteration_time_s * (1 + 1e-9), f"{evaluation.plan}"
    assert len(found) > 10


def kept(evaluations, found):
    found.extend(evaluations := list(evaluations))
    return evaluations


def draw_mixed_layout(rng, problem):
    """The language model on groups of two ranks and of one, the encoder on one of these."""
    n = problem.modules["language_model"].workload.num_layers
    sizes = rng.choice([(2, 1), (1, 2), (2, 1, 1), (1, 2, 1), (1, 1, 2)])
    inner = sorted(rng.sample(range(1, n), k=len(sizes) - 1))
    runs = zip([0, *inner], [*inner, n], strict=True)
    vision = Chunk("vision", (0, problem.modules["vision"].workload.num_layers), rng.randrange(len(sizes)))
    chunks = (vision, *(Chunk("language_model", run, group) for group, run in enumerate(runs)))
    return Layout(planner="drawn", chunks=chunks, group_sizes=sizes)


def test_no_order_of_actions_and_halves_is_faster():
    """One replica, few microbatches: all orders of all actions on all ranks, for every layout that is small enough."""
    num_tried = 0
    for seed in range(3):
        rng = Random(seed)
        problem = tiny_problem(rng, num_devices=2, num_microbatches=2)
        problem = replace(problem, samples=problem.samples[:2])
        bound = problem_lower_bound_s(problem)
        for _ in range(25):
            layout = draw_layout(rng, problem)
            evaluation = evaluate(problem, layout_plan(problem, layout))
            dependencies, routes = evaluation.program.dependencies, evaluation.program.dependencies.routes
            whole = dependencies.required()
            forwards = [action for action in whole if action.kind is Kind.FORWARD]
            halves = [
                Compute(kind, cell)
                for kind in (Kind.INPUT, Kind.WEIGHT)
                for cell in routes.cells
                if cell in routes.with_backward
            ]
            for actions in (whole, [*forwards, *halves]):
                per_rank = [0] * routes.plan.num_ranks
                for action in actions:
                    for rank in dependencies.ranks(action):
                        per_rank[rank] += 1
                if max(per_rank) > 6 or prod(2 ** max(0, n - 2) for n in per_rank) > 100:
                    continue
                best = best_time_s(routes, evaluation.costs, actions)
                assert bound <= best * (1 + 1e-9), f"seed {seed}: {layout}"
                num_tried += 1
    assert num_tried >= 10


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_one_microbatch_a_replica_and_no_pipeline_is_met_exactly(num_devices):
    """Data parallelism without messages or unequal samples: what is relaxed costs nothing but the reduction."""
    problem = small_problem(num_devices=num_devices, encoders=(), frozen=("language_model",), num_microbatches=1)
    modules = {n: replace(m, trainable=((0, 1),)) for n, m in problem.modules.items()}
    samples = (small.sample(0, image=False, sound=False),) * 8
    problem = replace(problem, modules=modules, samples=samples, dp_sizes=(num_devices,))
    layout = Layout(planner="all", chunks=(Chunk("language_model", (0, 10), 0),), group_sizes=(1,), dp=num_devices)
    evaluation = evaluate(problem, layout_plan(problem, layout))
    reduce_s = sum(s.end - s.start for s in evaluation.result.timeline.spans if s.kind == "reduce" and s.rank == 0)
    assert problem_lower_bound_s(problem) == pytest.approx(evaluation.iteration_time_s - reduce_s, rel=1e-6)


def test_gathers_of_new_parameters_count_at_the_best_placement():
    """Two replicas: side by side on a node, or on two nodes."""
    problem = small_problem(num_devices=4, encoders=(), frozen=(), dp_sizes=(2,))
    cluster = replace(problem.cluster, devices_per_node=2, between_nodes=LINKS["ethernet10"])
    problem = replace(problem, cluster=cluster, memory=replace(problem.memory, zero1=True))
    gathered, without = problem_lower_bound_s(problem), problem_lower_bound_s(problem, gathers=False)
    layout = layout_plan(problem, next(chains(problem, 1)))
    within = evaluate(problem, replicas_side_by_side(layout, 2)).result.time_shares.means_s()["gather"]
    across = evaluate(problem, layout).result.time_shares.means_s()["gather"]
    assert without < gathered
    assert gathered - without <= within < across
    # Equal parts on two groups: what the bound counts, but for the latency.
    assert gathered - without > 0.5 * within


def test_ranks_that_a_single_microbatch_cannot_occupy_wait():
    """One microbatch on four ranks: all but one of them at any time, until weight gradients can fill them."""
    problem = small_problem(num_devices=4, encoders=(), frozen=(), num_microbatches=1)
    problem = replace(problem, samples=(small.sample(0, image=False, sound=False, words=400),))
    times = problem.estimator.layer_times("language_model")
    forward, backward, weight = (
        sum(getattr(time, part) for time in times) for part in ("forward_s", "backward_s", "weight_s")
    )
    bound = problem_lower_bound_s(problem)
    # The rows of all but one wait through the forward; then weight gradients fill what input gradients leave.
    least = max(forward + backward - weight, (forward + backward + 3 * forward) / 4)
    assert bound >= least
    frozen = replace(problem, modules={n: replace(m, trainable=((0, 1),)) for n, m in problem.modules.items()})
    assert (
        problem_lower_bound_s(frozen) <= evaluate(frozen, layout_plan(frozen, next(chains(frozen, 1)))).iteration_time_s
    )


def test_ranks_that_have_a_layer_more_than_others_cannot_all_have_the_first_ones(monkeypatch):
    """Four blocks of a frozen language model on three devices, behind an encoder: one has two, and none begins at 0."""
    problem = tiny_problem(Random(0), num_devices=3, num_microbatches=4, shapes=(1, 4))
    modules = {
        name: replace(module, trainable=((n - 1, n),) if name == "vision" else (), tp_sizes=(1,), cp_sizes=(1,))
        for name, module in problem.modules.items()
        for n in [module.workload.num_layers]
    }
    problem = replace(problem, modules=modules, samples=(small.sample(0, image=True, sound=False, words=400),) * 4)
    encoder_s = sum(time.forward_s for time in problem.estimator.layer_times("vision"))
    blocks = problem.estimator.layer_times("language_model")[1:-1]
    bound = problem_lower_bound_s(problem)
    assert bound >= encoder_s + 2 * 4 * blocks[0].total_s
    monkeypatch.setattr("motet.planner.lower_bound._in_windows", lambda problem, layers, from_s, to_s: from_s)
    assert bound > 1.01 * problem_lower_bound_s(problem)


@pytest.mark.parametrize("num_draws", [200, *in_campaigns([2000])])
def test_no_division_of_whole_layers_among_ranks_undercuts_their_windows(num_draws):
    """All divisions, where each rank works as an optimal interruptible schedule does between heads and tails."""
    ratios = []
    for seed in range(num_draws):
        rng = Random(seed)
        problem = small_problem(num_devices=rng.randint(2, 4), encoders=(), frozen=())
        layers = draw_layers(rng, problem.num_devices, rng.randint(2, 6))
        bound = _in_windows(problem, layers, 0.1, inf)
        best = min(
            max(map(preemptive_time_s, jobs_of_ranks(layers, held, problem.num_devices)))
            for held in itertools.product(
                *(itertools.combinations(range(problem.num_devices), n) for n in layers.num_holders.tolist())
            )
        )
        assert bound <= best * (1 + 1e-9), f"seed {seed}: {layers}"
        at_most = 0.1 + (best - 0.1) * rng.random()
        assert _in_windows(problem, layers, 0.1, at_most) == pytest.approx(min(bound, at_most))
        ratios.append(bound / best)
    assert max(ratios) > 1 - 1e-6
    assert median(ratios) > 0.75


def draw_layers(rng, num_devices, number):
    """Blocks and a few other layers, of one module or two that do not wait for each other."""
    values = [rng.choice([0.0, 1.0, 1.0, 2.0, 2.5]) for _ in range(number)]
    weights = [rng.choice([0.0, 0.3]) * value for value in values]
    heads = list(itertools.accumulate(rng.choice([0.0, 0.1, 0.4]) for _ in range(number)))
    tails = list(itertools.accumulate(rng.choice([0.0, 0.1, 0.4]) for _ in range(number)))
    if rng.random() < 0.5:
        cut = rng.randint(0, number)
        heads, tails = heads[cut:] + heads[:cut], [tails[-1] - tail for tail in tails[cut:]] + tails[:cut]
    holders = np.array([rng.randint(1, num_devices) for _ in range(number)])
    work = np.array(values)
    nothing = np.zeros(number)
    return _Layers(
        num_holders=holders,
        device_s=holders * work,
        device_weight_s=nothing,
        work_s=work,
        weight_s=np.array(weights),
        head_s=np.array(heads),
        tail_s=np.array(tails),
        firsts=np.array([0]),
        alike=np.full(number, True),
        crowd=_Crowd([], []),
    )


def jobs_of_ranks(layers, held, num_devices):
    """`held`: the ranks that hold each layer."""
    jobs = [[] for _ in range(num_devices)]
    columns = (layers.head_s, layers.work_s, layers.weight_s, layers.tail_s)
    for ranks, head, work, weight, tail in zip(held, *(column.tolist() for column in columns), strict=True):
        for rank in ranks:
            jobs[rank] += [Job(head, work - weight, tail), Job(head, weight, 0.0)]
    return jobs


def test_the_padding_of_microbatches_that_are_known_counts():
    """One replica on one device, samples of unequal length padded: what the simulated plan computes is the bound."""
    one = entrain_problem("1b", num_devices=1, num_samples=16)
    ample = replace(one.cluster, device=replace(one.cluster.device, memory_bytes=1e15))
    one = replace(one, num_microbatches=4, cluster=ample)
    layout = Layout(
        planner="all",
        chunks=tuple(Chunk(name, (0, module.workload.num_layers), 0) for name, module in one.modules.items()),
        group_sizes=(1,),
    )
    alone_s = evaluate(one, layout_plan(one, layout)).iteration_time_s
    assert problem_lower_bound_s(one) == pytest.approx(alone_s, rel=1e-3)
    assert problem_lower_bound_s(replace(one, assignment="entrain")) < 0.95 * alone_s


def test_what_can_never_fit_has_no_bound():
    assert problem_lower_bound_s(with_memory(small_problem(), 1000.0)) == float("inf")


def test_more_choice_never_raises_it():
    problem = small_problem(num_devices=4, frozen=())
    wider = replace(problem, dp_sizes=(1, 2, 4))
    assert problem_lower_bound_s(wider) <= problem_lower_bound_s(problem)
    assert problem_lower_bound_s(wider) <= evaluate(wider, make_plan(wider)).iteration_time_s


@pytest.mark.parametrize("assignment", sorted(ASSIGNMENTS))
def test_no_assignment_undercuts_the_bound(assignment: str) -> None:
    """Samples of very unequal size, which deferral leaves in fewer or smaller microbatches."""
    one = entrain_problem("1b", num_devices=4, num_samples=16)
    one = replace(one, num_microbatches=4, assignment=assignment)
    for degrees in (Degrees(pp=2), Degrees(dp=2)):
        plan = build_plan(one, dict.fromkeys(one.modules, degrees))
        assert plan.assignment == assignment
        bound_s = problem_lower_bound_s(one, num_replicas=dict.fromkeys(one.modules, (degrees.dp,)))
        assert bound_s <= evaluate(one, plan).iteration_time_s


def test_replicas_that_are_dealt_unequal_samples_may_have_fewer_actions():
    """Two encoders for one language model: of a microbatch of two small images, one encoder gets both."""
    problem = tiny_problem(Random(0), num_devices=2, num_microbatches=4)
    table = replace(problem.table, message=FREE, all_reduce=FREE)
    encoders = {
        tp: replace(costs, layers=tuple(replace(each, forward_without_graph=Quadratic(1.0)) for each in costs.layers))
        for tp, costs in table.modules["vision"].items()
    }
    samples = [
        Sample(
            str(i),
            {
                "vision": (Segment(size, grid=(1, size)),),
                "language_model": (Segment(size, source="vision"), Segment(4)),
            },
            {"language_model": 2},
        )
        for i, size in enumerate((20, 16, 3, 3, 16, 16, 1, 1))
    ]
    modules = {name: replace(module, trainable=()) for name, module in problem.modules.items()}
    table = replace(table, modules={**table.modules, "vision": encoders})
    problem = replace(problem, modules=modules, samples=tuple(samples), table=table)
    chunks = tuple(Chunk(name, (0, module.workload.num_layers), 0) for name, module in modules.items())
    layout = Layout(planner="all", chunks=chunks, group_sizes=(2,), split=frozenset({"vision"}))
    evaluation = evaluate(problem, layout_plan(problem, layout))
    actions = [cell for cell in evaluation.program.dependencies.routes.cells if cell.module == "vision"]
    assert len(actions) == 6 < len(samples)
    numbers = {"vision": (2,), "language_model": (1,)}
    assert problem_lower_bound_s(problem, num_replicas=numbers) <= evaluation.iteration_time_s


def test_the_bound_knows_measured_gathers():
    """Of new parameters, where the optimizer's state is sharded: measured ones may be faster than the catalogue's."""
    problem = small_problem(num_devices=4, encoders=(), frozen=(), dp_sizes=(4,), num_microbatches=1)
    problem = replace(problem, memory=replace(problem.memory, zero1=True))
    link = LinkCost(latency_s=0.0, bytes_per_s=1e15)
    fast = replace(problem, table=replace(problem.table, collectives={"all_gather": link}))
    evaluation = evaluate(fast, build_plan(fast, {"language_model": Degrees(dp=4)}))
    assert problem_lower_bound_s(fast) <= evaluation.iteration_time_s
    assert problem_lower_bound_s(fast) < problem_lower_bound_s(problem)
