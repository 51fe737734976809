"""Shapes of diffusion models with their connector against diffusers' own modules."""

import inspect
from typing import Any

import pytest
import torch
from generator_run import FLUX, PIXART, QWEN_IMAGE, SANA, SD3, UNET, WIDTH
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from motet.costs.analytic import layer_flops
from motet.costs.cost_model import Load
from motet.errors import UserError
from motet.families.diffusion_models import DIFFUSION_FAMILIES, DiffusionFamily, Given, WholeModel, diffusion_class
from motet.models.stages.generator import Connector, DiffusionLoss, GeneratorStage
from motet.parallel.tensor.diffusion_cuts import diffusion_cuts
from motet.shapes.diffusion import FIXED, FREE, UNET_DEFAULTS, unet_workload
from motet.shapes.diffusion_transformers import TRANSFORMERS, Connection, own_values, transformer_workload
from motet.shapes.module_shape import ModuleWorkload


def workload_of(part: dict[str, Any], **values: Any) -> ModuleWorkload:
    config = {"_class_name": part["config"], **part["values"], **values}
    make = transformer_workload if part["config"] in TRANSFORMERS else unet_workload
    return make(config, Connection(incoming_size=WIDTH, projector="mlp"))


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_defaults_are_those_of_diffusers(name: str) -> None:
    parameters = inspect.signature(diffusion_class(name).__init__).parameters
    defaults = TRANSFORMERS[name].defaults
    assert defaults == {key: parameters[key].default for key in defaults} | (
        {"out_channels": 8} if name == "PixArtTransformer2DModel" else {}
    )


def test_every_key_of_a_u_net_is_free_or_has_the_default_of_diffusers() -> None:
    parameters = inspect.signature(diffusion_class(UNET["config"]).__init__).parameters
    defaults = {key: parameter.default for key, parameter in parameters.items() if key != "self"}
    assert defaults.keys() == {*FREE, *FIXED}
    assert {key: defaults[key] for key in (*FIXED, *UNET_DEFAULTS)} == {**FIXED, **UNET_DEFAULTS}


@pytest.mark.parametrize(
    "shape",
    [
        workload_of(FLUX),
        workload_of(FLUX, guidance_embeds=True),
        workload_of(QWEN_IMAGE),
        workload_of(UNET),
        workload_of(
            UNET,
            block_out_channels=[8, 16, 24],
            layers_per_block=2,
            attention_head_dim=[2, 4, 3],
            use_linear_projection=True,
            down_block_types=["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
            up_block_types=["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        ),
        workload_of(SD3),
        workload_of(SD3, qk_norm="rms_norm"),
        workload_of(PIXART),
        workload_of(PIXART, attention_bias=False),
        workload_of(SANA),
        workload_of(SANA, attention_bias=True),
    ],
    ids=[
        "Flux",
        "Flux told guidance",
        "Qwen-Image",
        "U-Net",
        "U-Net of three levels",
        "SD3",
        "SD3 with norms",
        "PixArt",
        "PixArt without biases",
        "Sana",
        "Sana with biases",
    ],
)
def test_each_layer_has_the_parameters_of_the_stage(shape: ModuleWorkload) -> None:
    model = diffusion_class(shape.family).from_config(own_values(shape.config))
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


@pytest.mark.parametrize("part", [SD3, PIXART, SANA, FLUX, QWEN_IMAGE, UNET], ids=lambda part: part["config"])
def test_flops_of_a_forward_are_those_that_torch_counts(part: dict[str, Any]) -> None:
    """Where both attend jointly, the shape leaves out pairs of two conditions, and one or both of the two pairs of a
    condition and a place."""
    shape = workload_of(part)
    model = diffusion_class(shape.family).from_config(own_values(shape.config))
    family, rows, columns, number, images = DIFFUSION_FAMILIES[shape.family], 8, 6, 2, 3
    side, channels = shape.config["place_side"], shape.config["latent_channels"]
    given = Given(
        torch.randn(images, channels, side * rows, side * columns),
        torch.tensor([1.0, 500.0, 999.0]),
        torch.randn(images, number, shape.config["condition_size"]),
        torch.randn(images, shape.config["pooled_size"]) if shape.config["pooled_size"] else None,
        None,
    )
    # torch counts products, not the attention kernel of CPUs.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        if isinstance(family, WholeModel):
            family.predict(model, given)
        else:
            streams = family.embed(model, given)
            positions = family.positions(model, streams, (rows, columns))
            for path in family.blocks:
                for block in model.get_submodule(path):
                    streams = family.block(block, streams, (rows, columns), positions)
            family.head(model, streams, (rows, columns))
    places = rows * columns
    load = Load(
        tokens=images * places,
        pairs=images * places**2,
        sequences=images,
        incoming=images * number,
        incoming_pairs=images * places * number,
        outputs=images * places,
        tokens_squared=(images * places) ** 2,
    )
    expected = sum(layer_flops(layer).forward.seconds(load) for layer in shape.layers[1:])
    to_places = {
        "SD3Transformer2DModel": (3, 0),
        "FluxTransformer2DModel": (2, 2),
        "QwenImageTransformer2DModel": (3, 0),
    }
    double, single = to_places.get(part["config"], (0, 0))
    left_out = double * (places * number + number**2) + single * (2 * places * number + number**2)
    assert counted.get_total_flops() == expected + 4 * shape.hidden_size * images * left_out


@pytest.mark.parametrize("part", [FLUX, QWEN_IMAGE, SD3, PIXART], ids=lambda part: part["config"])
def test_two_ranks_hold_what_the_cuts_say(part: dict[str, Any]) -> None:
    shape = workload_of(part)
    model = diffusion_class(shape.family).from_config(own_values(shape.config))
    family = DIFFUSION_FAMILIES[shape.family]
    assert isinstance(family, DiffusionFamily)
    blocks = {f"{path}.{i}": block for path in family.blocks for i, block in enumerate(model.get_submodule(path))}
    cuts = diffusion_cuts(blocks)
    for (path, block), layer in zip(blocks.items(), shape.layers[2:-1], strict=True):
        held = 0
        for name, parameter in block.named_parameters():
            own = cuts.shard_of(model, f"{path}.{name}", tuple(parameter.shape), 2)
            held += parameter.numel() // (1 if own is None or parameter.dim() == 1 else 2)
        assert layer.num_parameters_per_rank(2) == held


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        (SD3, {"out_channels": 2}, r"values\.out_channels: is 2, but the loss .* latents of 1 channels .* give 1"),
        (SD3, {"caption_projection_dim": 8}, r"values\.caption_projection_dim: is 8, .* give 16"),
        (SD3, {"dual_attention_layers": [0]}, r"values\.dual_attention_layers: is not supported"),
        (PIXART, {"caption_channels": None}, r"values\.caption_channels: is missing"),
        (PIXART, {"cross_attention_dim": 8}, r"values\.cross_attention_dim: is 8, .* give 16"),
        (SANA, {"cross_attention_dim": 8}, r"values\.cross_attention_dim: is 8, .* give 16"),
        (SANA, {"qk_norm": "rms_norm_across_heads"}, r"values\.qk_norm: is not supported"),
        (PIXART, {"sample_size": 128}, r"values\.use_additional_conditions: is true"),
        (FLUX, {"in_channels": 6}, r"values\.in_channels: is 6, but two by two places"),
        (FLUX, {"patch_size": 2}, r"values\.patch_size: is 2, .* give 1"),
        (FLUX, {"out_channels": 1}, r"values\.out_channels: is 1, .* give 4"),
        (FLUX, {"num_single_layers": 0}, r"values\.num_single_layers: is 0; give at least 1"),
        (FLUX, {"axes_dims_rope": [2, 2, 2]}, r"values\.axes_dims_rope: is \[2, 2, 2\]; give three even numbers .* 8"),
        (QWEN_IMAGE, {"out_channels": 4}, r"values\.out_channels: is 4, .* give 1"),
        (QWEN_IMAGE, {"patch_size": 1}, r"values\.patch_size: latents are packed two by two; give 2"),
        (QWEN_IMAGE, {"zero_cond_t": True}, r"values\.zero_cond_t: is not supported"),
        (QWEN_IMAGE, {"guidance_embeds": True}, r"values\.guidance_embeds: is not supported"),
        (UNET, {"out_channels": 2}, r"values\.out_channels: is 2, but the loss .* latents of 1 channels .* give 1"),
        (UNET, {"dropout": 0.1}, r"values\.dropout: is 0\.1, which is not supported"),
        (UNET, {"addition_embed_type": "text_time"}, r"values\.addition_embed_type: is text_time, which is not"),
        (UNET, {"down_block_types": ["DownBlock2D", "AttnDownBlock2D"]}, r"down_block_types: AttnDownBlock2D is not"),
        (UNET, {"up_block_types": ["UpBlock2D", "UpBlock2D"]}, r"up_block_types: is .*; give the mirror image"),
        (UNET, {"transformer_layers_per_block": 2}, r"values\.transformer_layers_per_block: more than 1"),
        (UNET, {"sample_size": [8, 8]}, r"values\.sample_size: give one number"),
        (UNET, {"cross_attention_dim": [8, 8]}, r"values\.cross_attention_dim: one width"),
        (UNET, {"colour": 1}, r"values\.colour: is not known"),
    ],
)
def test_values_that_cannot_be_trained_are_refused(part: dict[str, Any], values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        workload_of(part, **values)
