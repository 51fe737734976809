"""The corrections of routers' scores have no gradients and survive: whoever trains has them as they are."""

from pathlib import Path

import pytest
from distributed import run_distributed
from interrupted_training import at, before_each_step, die, failures
from sampling import in_campaigns
from unlike_pipelines import train_and_join, unlike_config

from motet.api import read_problem
from motet.config import RunConfig
from motet.planner.templates.planner import make_templates, plan_with_sizes
from motet.resilience.launch_nodes import train_on_nodes
from motet.runtime.training.worker import train_worker

MIXTURE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",
}


def mixture_config(output: Path, num_nodes: int, *, rate: float = 0.2, zero1: bool = False) -> RunConfig:
    values = unlike_config(output, num_nodes).model_dump(exclude_unset=True)
    values["model"]["language_model"] = {
        "config": "Glm4MoeConfig",
        "values": MIXTURE,
        "router_bias_update_rate": rate,
    }
    values["parallel"]["zero1"] = zero1
    return RunConfig.model_validate(values)


def undisturbed(output: Path, rate: float = 0.2) -> list[float]:
    config = mixture_config(output, 2, rate=rate)
    problem = read_problem(config)
    plan = plan_with_sizes(problem, make_templates(problem), (1, 1))
    return run_distributed(lambda rank: train_worker(config, plan), plan.num_ranks)[0]["losses"]


@pytest.mark.parametrize("zero1", [True, *in_campaigns([False])])
def test_survivors_keep_them(tmp_path: Path, zero1: bool) -> None:
    config = mixture_config(tmp_path / "disturbed", 3, zero1=zero1)
    problem = read_problem(config)
    templates = make_templates(problem)
    plan = plan_with_sizes(problem, templates, (1, 1, 1))
    with before_each_step(at(3, 2, die)):
        result = train_on_nodes(config, plan, templates, num_nodes=3, node_size=2)
    expected = undisturbed(tmp_path / "undisturbed")
    assert result["losses"] == pytest.approx(expected, rel=1e-12)
    assert expected != pytest.approx(undisturbed(tmp_path / "without", rate=0.0), rel=1e-6)
    [failure] = failures(config)
    assert failure["step"] == 4


@pytest.mark.campaign
def test_who_joins_gets_them(tmp_path: Path) -> None:
    config = mixture_config(tmp_path / "joined", 2)
    problem = read_problem(config)
    templates = make_templates(problem)
    result = train_and_join(config, plan_with_sizes(problem, templates, (1, 1)), templates)
    assert result["losses"] == pytest.approx(undisturbed(tmp_path / "undisturbed"), rel=1e-12)
    assert result["world_size"] == 6
