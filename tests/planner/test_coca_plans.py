"""Plans of a caption decoder beside towers, at a size where a stage's work counts: 12 layers of width 768 each."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from motet.api import read_problem
from motet.config import load_run_config
from motet.planner.distmm.local_search import search_towers
from motet.planner.distmm.towers import TowerLayout, tower_plan
from motet.planner.distmm.units import Partition, unit_choices
from motet.planner.evaluate import evaluate
from motet.planner.problem import Degrees, PlanningProblem
from motet.planner.registry import make_plan
from motet.schedule.action import Compute, Kind
from motet.schedule.routes import Cell

RUN_FILE = """
model:
  towers:
    image:
      config: SiglipVisionConfig
      values: {hidden_size: 768, intermediate_size: 3072, num_hidden_layers: 12, num_attention_heads: 12}
      projector: null
    text:
      config: SiglipTextConfig
      values: {hidden_size: 768, intermediate_size: 3072, num_hidden_layers: 12, num_attention_heads: 12}
      projector: null
  contrastive: {loss: softmax}
  decoder:
    config: GPT2Config
    values: {hidden_size: 768, num_attention_heads: 12, vocab_size: 32000, num_hidden_layers: 12}
    reads: image
data: {kind: described, text_tokens: 64, images: {image: {height: 224, width: 224}}}
cluster: {device: cuda, num_devices: 8}
train: {global_batch_size: 512, contrastive_batch_size: 512}
"""


def coca(tmp_path: Path, *overrides: str) -> PlanningProblem:
    """On 8 H100."""
    path = tmp_path / "run.yaml"
    path.write_text(RUN_FILE)
    return read_problem(load_run_config(path, overrides))


def by_hand(problem: PlanningProblem, tower_dp: int, per_batch: int) -> float:
    """Seconds with both towers on the same devices, and the decoder on the others."""
    towers = TowerLayout(degrees=Degrees(dp=tower_dp), per_batch=per_batch)
    decoder = TowerLayout(degrees=Degrees(dp=problem.num_devices - tower_dp), per_batch=per_batch)
    layouts = {**dict.fromkeys(problem.towers, towers), "decoder": decoder}
    plan = tower_plan(problem, layouts, together=[problem.towers], schedule="distmm_pipe")
    return evaluate(problem, plan).iteration_time_s


@pytest.mark.campaign
@pytest.mark.parametrize("contrastive_batch_size", [512, 128])
def test_the_plan_is_near_the_best_of_those_made_by_hand(tmp_path: Path, contrastive_batch_size: int) -> None:
    """The decoder waits for its tower's first microbatch, so several of them are needed, or several batches."""
    problem = coca(tmp_path, f"train.contrastive_batch_size={contrastive_batch_size}")
    best = min(by_hand(problem, dp, k) for dp in (4, 5, 6) for k in (1, 2, 4, 8, 16))
    assert best < 0.85 * by_hand(problem, 4, 1)
    found = search_towers(problem)
    assert found.of_distmm.iteration_time_s <= 1.05 * best
    assert found.best.iteration_time_s <= 1.02 * best
    assert make_plan(problem, "auto").modules == found.best.plan.modules


def test_estimates_of_a_decoder_count_what_it_reads(tmp_path: Path) -> None:
    """A turn of the decoder with cross-attention to the image's 197 tokens, against what its action costs."""
    problem = coca(tmp_path)
    choices = unit_choices(problem, ("decoder",), partitions=[Partition(1, 1)], computation_only=True)
    per_batch = 8
    (row,) = np.flatnonzero((choices.dp == 4) & (choices.per_batch == per_batch))
    layout = TowerLayout(degrees=Degrees(dp=4), per_batch=per_batch)
    tower = TowerLayout(degrees=Degrees(dp=2), per_batch=per_batch)
    layouts = {**dict.fromkeys(problem.towers, tower), "decoder": layout}
    costs = evaluate(problem, tower_plan(problem, layouts)).costs
    turn_s = sum(costs.compute_s(Compute(kind, Cell("decoder", 0, 0, 0))) for kind in (Kind.FORWARD, Kind.BACKWARD))
    # A turn more: the decoder waits for its tower's first microbatch.
    assert choices.seconds[row] == pytest.approx((per_batch + 1) * turn_s)


def test_only_the_tower_that_is_read_has_a_turn_more(tmp_path: Path) -> None:
    problem = coca(tmp_path)
    towers_alone = replace(
        problem,
        modules={name: module for name, module in problem.modules.items() if name != "decoder"},
        edges=tuple(edge for edge in problem.edges if edge.target != "decoder"),
    )

    def seconds(given: PlanningProblem, *unit: str) -> float:
        choices = unit_choices(given, unit, partitions=[Partition(1, 1)], computation_only=True)
        (row,) = np.flatnonzero((choices.dp == 4) & (choices.per_batch == 4) & ~choices.recomputes)
        return float(choices.seconds[row])

    turn_s = seconds(towers_alone, "image") / 4
    assert seconds(problem, "text") == pytest.approx(seconds(towers_alone, "text"))
    for unit in (("image",), ("image", "text")):
        assert seconds(problem, *unit) == pytest.approx(seconds(towers_alone, *unit) + turn_s)
