"""Degrees of parallelism that generators cannot have, and values that nothing reads, are refused in one line."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from generator_run import FLUX, PIXART, SANA, SD3, UNET, generator_config, planned

from motet.data.run_file import open_samples
from motet.errors import UserError
from motet.models.from_run_file import build_node
from motet.plan import Replica
from motet.planner.evaluate import check_same_model
from motet.planner.from_run_file import planning_problem


@pytest.mark.parametrize(
    ("generator", "degrees", "message"),
    [
        (UNET, {"pp": 2}, r"image\.pp is 2, but UNet2DConditionModel can be cut into 1 at most"),
        (UNET, {"tp": 2}, r"image\.tp_size: UNet2DConditionModel has no rules for tensor parallelism; use 1"),
        (SANA, {"tp": 2}, r"image\.tp_size: SanaTransformer2DModel has no rules for tensor parallelism; use 1"),
        (FLUX, {"tp": 4}, r"image\.tp_size: 4 does not divide num_attention_heads 2; use 1 or 2"),
        (SD3, {"tp": 3}, r"image\.tp_size: 3 does not divide num_attention_heads 2; use 1 or 2"),
    ],
)
def test_what_has_not_been_shown_is_refused(
    tmp_path: Path, generator: dict[str, Any], degrees: dict[str, int], message: str
) -> None:
    case = {"generator": generator, "explicit": {"image": degrees}, "num_devices": 2 + max(degrees.values())}
    with pytest.raises(UserError, match=message):
        planned(tmp_path, case)


def test_query_tokens_are_whole_where_all_modules_are_cut(tmp_path: Path) -> None:
    parallel = {"planner": "megatron_balanced", "explicit": {}, "limits": {"tp": [2]}}
    _, plan = planned(tmp_path, {"generator": FLUX, "num_devices": 4, "parallel": parallel})
    sizes = {
        name: {stage.tp_size for r in module.replicas for stage in r.stages} for name, module in plan.modules.items()
    }
    assert sizes == {"image_queries": {1}, "vision": {2}, "language_model": {2}, "image": {2}}


def test_a_plan_with_a_u_net_in_two_stages_is_refused(tmp_path: Path) -> None:
    config, plan = planned(tmp_path, {"generator": UNET})
    module = plan.modules["image"]
    (stage,) = module.replicas[0].stages
    halves = tuple(replace(stage, layers=layers) for layers in ((0, 5), (5, module.num_layers)))
    cut = replace(plan, modules={**plan.modules, "image": replace(module, replicas=(Replica(stages=halves),))})
    problem = planning_problem(config, [open_samples(config).sample(0)])
    check_same_model(problem, plan)
    with pytest.raises(UserError, match=r"modules\.image: has 2 stages, but a UNet2DConditionModel can be cut into 1"):
        check_same_model(problem, cut)


@pytest.mark.parametrize(
    ("generator", "values", "message"),
    [
        (PIXART, {"num_layer": 2}, r"image\.values\.num_layer: is not known; see PixArtTransformer2DModel"),
        (PIXART, {"dropout": 0.5}, r"image\.values\.dropout: is 0\.5, which is not supported"),
    ],
)
def test_values_that_nothing_reads_are_refused(
    tmp_path: Path, generator: dict[str, Any], values: dict[str, Any], message: str
) -> None:
    config = generator_config(tmp_path, {**generator, "values": {**generator["values"], **values}})
    with pytest.raises(UserError, match=message):
        build_node(config, "image", (0, 6), torch.float32)


def test_guidance_is_told_to_models_that_take_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"image\.guidance: the model has no guidance embeddings"):
        planned(tmp_path, {"generator": FLUX, "guidance": 3.5})
