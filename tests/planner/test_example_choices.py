"""Example configurations of which planner `auto` chooses a mechanism, because plans without it are slower."""

from dataclasses import replace

from checkout import ROOT

from motet.api import read_problem
from motet.cluster.pipelines_on_nodes import nodes_of_pipelines
from motet.config import load_run_config
from motet.planner.auto import may_share_experts
from motet.planner.choice import Choice
from motet.planner.evaluate import evaluate
from motet.planner.layouts.context_methods import context_variants
from motet.planner.layouts.sharing import sharing_plans
from motet.planner.problem import PlanningProblem
from motet.planner.registry import choose

LM = "language_model"


def choice_of(example: str) -> tuple[PlanningProblem, Choice]:
    problem = read_problem(load_run_config(ROOT / "examples" / "layout" / f"{example}.yaml"))
    choice = choose(problem)
    assert choice.evaluation.fits
    assert choice.lower_bound_s is not None
    assert choice.lower_bound_s <= choice.evaluation.iteration_time_s
    return problem, choice


def test_a_long_sample_is_shared_by_two_nodes_in_a_ring_of_traders() -> None:
    problem, choice = choice_of("long_16_h100")
    plan, chosen_s = choice.evaluation.plan, choice.evaluation.iteration_time_s
    module = plan.modules[LM]
    assert module.replicas[0].stages[0].cp_size == 16
    assert (module.context.method, module.context.ulysses_size) == ("hybrid", 8)
    gathered = replace(plan, modules={LM: replace(module, context=problem.modules[LM].context)})
    others = [gathered, *(other for other in context_variants(problem, gathered) if other.modules != plan.modules)]
    assert {other.modules[LM].context.method for other in others} == {"all_gather", "ring"}
    assert all(evaluate(choice.evaluation.problem, other).iteration_time_s > 1.01 * chosen_s for other in others)


def test_replicas_share_parameters_of_a_model_without_pipelines() -> None:
    problem, choice = choice_of("sharded_8_a100")
    module = choice.evaluation.plan.modules[LM]
    assert module.shares_over_replicas
    without = choose(replace(problem, may_share_parameters=False))
    assert without.evaluation.iteration_time_s > 1.02 * choice.evaluation.iteration_time_s
    whole = replace(module, fully_sharded=False, sharded_replicas=1)
    plan = replace(choice.evaluation.plan, modules={LM: whole})
    assert not evaluate(choice.evaluation.problem, plan).fits


def test_ranks_of_a_node_share_the_experts_of_a_mixture() -> None:
    problem, choice = choice_of("mixture_16_h100")
    assert choice.evaluation.plan.modules[LM].ep == problem.cluster.devices_per_node
    without = choose(replace(problem, survives_losses=True))
    assert without.evaluation.iteration_time_s > 1.1 * choice.evaluation.iteration_time_s


def test_no_experts_are_distributed_where_ranks_may_be_lost() -> None:
    config = load_run_config(ROOT / "examples" / "layout" / "mixture_16_h100.yaml", ["train.failures.tolerate=1"])
    problem = read_problem(config)
    assert problem.survives_losses
    assert not may_share_experts(problem)


def test_groups_share_parameters_where_nodes_may_be_lost() -> None:
    """A group on each of two nodes; on one node nobody else would hold a share."""
    config = load_run_config(
        ROOT / "examples" / "layout" / "sharded_8_a100.yaml",
        ["train.failures.tolerate=1", "cluster.num_devices=16", "cluster.num_nodes=2"],
    )
    problem = read_problem(config)
    choice = choose(problem)
    assert choice.evaluation.fits
    module = choice.evaluation.plan.modules[LM]
    assert module.shares_over_replicas
    assert len(nodes_of_pipelines(choice.evaluation.plan, 8)) == 2
    assert not choose(replace(problem, may_share_parameters=False)).evaluation.fits
    plan = choice.evaluation.plan
    whole = {name: replace(m, fully_sharded=False, sharded_replicas=1) for name, m in plan.modules.items()}
    unshared = replace(plan, modules=whole)
    one_node = replace(problem, cluster=replace(problem.cluster, devices_per_node=16))
    assert list(sharing_plans(problem, unshared))
    assert not list(sharing_plans(one_node, unshared))
