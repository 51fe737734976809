"""Pipelines become others after a failure: who lacks layers, or shares of them, gets copies."""

from pathlib import Path
from typing import Any

import pytest
from interrupted_training import at, before_each_step, die, failures
from sampling import in_campaigns
from unlike_pipelines import (
    MadeTemplates,
    context_parallel_templates,
    encoder_sharded_templates,
    encoder_sharing_templates,
    sharded_templates,
    tensor_parallel_templates,
    undisturbed_unlike,
    unlike_config,
    unlike_on_nodes_of_three,
)

from motet.api import read_problem
from motet.config import RunConfig
from motet.plan import Plan
from motet.planner.reconfiguration.reconfigure import reconfigure
from motet.planner.templates.pipelines import Templates
from motet.planner.templates.planner import make_templates, plan_with_sizes
from motet.resilience.launch_nodes import train_on_nodes


def lose(config: RunConfig, templates: Templates, plan: Plan, rank: int) -> dict[str, Any]:
    """The rank dies before the third step. What the log says of it; something has moved, and no loss has changed."""
    size = templates.devices_per_node
    with before_each_step(at(2, rank, die)):
        result = train_on_nodes(config, plan, templates, num_nodes=plan.num_ranks // size, node_size=size)
    assert result["losses"] == pytest.approx(undisturbed_unlike(), rel=1e-12)
    assert result["world_size"] == plan.num_ranks - size
    [failure] = failures(config)
    assert failure["moved_bytes"] > 0
    return failure


@pytest.mark.parametrize("rank", [3, *in_campaigns([0])])
def test_pipelines_become_others_and_copy_what_they_lack(tmp_path: Path, rank: int) -> None:
    """Of a pipeline of one node and one of two; the microbatches stay what they were."""
    config = unlike_config(tmp_path, 3)
    problem = read_problem(config)
    templates = make_templates(problem)
    plan = plan_with_sizes(problem, templates, (1, 2))
    failure = lose(config, templates, plan, rank)
    # What moves is the fewest bytes that the plan can do with, by the sizes of the layers.
    planned = reconfigure(plan, templates, lost=[rank // 2]).copies
    assert failure["moved_bytes"] == sum(copy.num_bytes for copy in planned)


@pytest.mark.parametrize("rank", [1, *in_campaigns([5])])
def test_shards_are_copied_from_stages_that_are_cut_in_another_way(tmp_path: Path, rank: int) -> None:
    """Of the whole a half, of two halves the whole, and halves from halves; within a node and between nodes."""
    lose(*unlike_on_nodes_of_three(unlike_config(tmp_path, 3), tensor_parallel_templates, (1, 2)), rank)


@pytest.mark.parametrize(("sizes", "rank"), [((2, 2), 1), *in_campaigns([((1, 2), 4), ((1, 2), 1)])])
def test_stages_that_share_tokens_become_others(tmp_path: Path, sizes: tuple[int, ...], rank: int) -> None:
    """With context parallelism from without, and the other way."""
    config = unlike_config(tmp_path, sum(sizes))
    config, templates, plan = unlike_on_nodes_of_three(config, context_parallel_templates, sizes)
    planned = reconfigure(plan, templates, lost=[rank // 3]).plan
    assert planned is not None
    assert 2 in {s.cp_size for replica in planned.modules["language_model"].replicas for s in replica.stages}
    lose(config, templates, plan, rank)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("templates_of", "sizes", "rank"),
    [
        (encoder_sharded_templates, (1, 2), 4),
        *in_campaigns([(encoder_sharing_templates, (1, 2), 4), (encoder_sharing_templates, (2, 2), 1)]),
    ],
)
def test_encoders_that_share_tokens_become_others(
    tmp_path: Path, templates_of: MadeTemplates, sizes: tuple[int, ...], rank: int
) -> None:
    """All of a pipeline's stages share them, or one does: from one kind of pipeline to the other."""
    config = unlike_config(tmp_path, sum(sizes))
    config, templates, plan = unlike_on_nodes_of_three(config, templates_of, sizes)
    planned = reconfigure(plan, templates, lost=[rank // 3]).plan
    assert planned is not None
    shapes = [
        {tuple(stage.cp_size for stage in replica.stages) for replica in each.modules["vision"].replicas}
        for each in (plan, planned)
    ]
    assert shapes[0] != shapes[1]
    lose(config, templates, plan, rank)


@pytest.mark.campaign
def test_shared_parameters_are_copied_from_those_that_keep_them(tmp_path: Path) -> None:
    config, templates, plan = unlike_on_nodes_of_three(unlike_config(tmp_path, 3), sharded_templates, (1, 2))
    assert plan.modules["language_model"].fully_sharded
    lose(config, templates, plan, 3)
