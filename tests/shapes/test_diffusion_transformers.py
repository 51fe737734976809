"""Shapes of diffusion transformers against diffusers' own modules."""

import inspect
from typing import Any

import pytest
import torch
from generator_run import PIXART, SANA, SD3, WIDTH

from motet.errors import UserError
from motet.families.diffusion_models import DIFFUSION_FAMILIES, diffusion_class
from motet.models.stages.generator import Connector, DiffusionLoss, GeneratorStage
from motet.shapes.diffusion_transformers import TRANSFORMERS, Connection, transformer_workload
from motet.shapes.module_shape import ModuleWorkload


def workload_of(part: dict[str, Any], **values: Any) -> ModuleWorkload:
    config = {"_class_name": part["config"], **part["values"], **values}
    return transformer_workload(config, Connection(incoming_size=WIDTH, projector="mlp"))


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_defaults_are_those_of_diffusers(name: str) -> None:
    parameters = inspect.signature(diffusion_class(name).__init__).parameters
    assert TRANSFORMERS[name][0] == {key: parameters[key].default for key in TRANSFORMERS[name][0]} | (
        {"out_channels": 8} if name == "PixArtTransformer2DModel" else {}
    )


@pytest.mark.parametrize(
    "shape",
    [
        workload_of(SD3),
        workload_of(SD3, qk_norm="rms_norm"),
        workload_of(PIXART),
        workload_of(PIXART, attention_bias=False),
        workload_of(SANA),
        workload_of(SANA, attention_bias=True),
    ],
    ids=["SD3", "SD3 with norms", "PixArt", "PixArt without biases", "Sana", "Sana with biases"],
)
def test_each_layer_has_the_parameters_of_the_stage(shape: ModuleWorkload) -> None:
    model = diffusion_class(shape.family).from_config(
        {
            k: v
            for k, v in shape.config.items()
            if "_size" not in k[-5:] or k in ("patch_size", "sample_size", "pos_embed_max_size")
        }
    )
    sizes = shape.config["condition_size"], shape.config["pooled_size"]
    connector = Connector(WIDTH, *sizes, "mlp", dtype=torch.float32, seed=0)
    stage = GeneratorStage(
        "image",
        "language_model",
        model,
        connector,
        (0, shape.num_layers),
        workload=shape,
        loss=DiffusionLoss(),
        incoming_size=WIDTH,
    )
    counts = [0] * shape.num_layers
    for name, parameter in stage.named_parameters():
        (layer,) = stage.layers_of(name)
        counts[layer] += parameter.numel()
    assert counts == [layer.num_parameters for layer in shape.layers]


def test_every_family_has_a_shape() -> None:
    assert DIFFUSION_FAMILIES.keys() == TRANSFORMERS.keys()


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        (SD3, {"out_channels": 2}, r"values\.out_channels: is 2, but the loss compares the 1"),
        (SD3, {"caption_projection_dim": 8}, r"values\.caption_projection_dim: is 8, .* give 16"),
        (SD3, {"dual_attention_layers": [0]}, r"values\.dual_attention_layers: is not supported"),
        (PIXART, {"caption_channels": None}, r"values\.caption_channels: is missing"),
        (PIXART, {"cross_attention_dim": 8}, r"values\.cross_attention_dim: is 8, .* give 16"),
        (SANA, {"cross_attention_dim": 8}, r"values\.cross_attention_dim: is 8, .* give 16"),
        (SANA, {"qk_norm": "rms_norm_across_heads"}, r"values\.qk_norm: is not supported"),
        (PIXART, {"sample_size": 128}, r"values\.use_additional_conditions: is true"),
    ],
)
def test_values_that_cannot_be_trained_are_refused(part: dict[str, Any], values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        workload_of(part, **values)
