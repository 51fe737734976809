"""FLOPs and parameters of U-Nets by formula against torch's count on modules of the same shapes."""

import pytest
import torch
from diffusion_modules import UNet
from torch.utils.flop_counter import FlopCounterMode

from motet.costs.analytic import layer_flops
from motet.costs.cost_model import Load
from motet.errors import UserError
from motet.shapes.diffusion import generator_workload

UNET = {
    "_class_name": "UNet2DConditionModel",
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": [16, 32, 48],
    "layers_per_block": 2,
    "cross_attention_dim": 24,
    "attention_head_dim": [2, 4, 6],
    "down_block_types": ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
}
STABLE_DIFFUSION_2_1 = {
    "_class_name": "UNet2DConditionModel",
    "attention_head_dim": [5, 10, 20, 20],
    "block_out_channels": [320, 640, 1280, 1280],
    "cross_attention_dim": 1024,
}


def unet_case():
    inputs = (torch.randn(2, 4, 16, 16), torch.randn(2, 16), torch.randn(2, 7, 24))
    # Each of two images is conditioned on 7 tokens of its own.
    load = Load(tokens=512, pairs=2 * 256**2, sequences=2, incoming=14, incoming_pairs=2 * 256 * 7)
    return UNet(UNET), inputs, load, UNET


def test_flops_of_forward_and_backward():
    torch.manual_seed(0)
    model, inputs, load, config = unet_case()
    inputs = tuple(x.requires_grad_() for x in inputs)
    with FlopCounterMode(display=False) as forward:
        output = model(*inputs)
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    costs = [layer_flops(layer) for layer in generator_workload(config).layers]
    assert sum(cost.forward.seconds(load) for cost in costs) == pytest.approx(forward.get_total_flops(), rel=0.01)
    both = sum(cost.passes(input_gradient=True, weight_gradient=True).backward.seconds(load) for cost in costs[1:])
    embed = model.conv_in
    # The first layer has no input gradient here; torch computes one for the latent image.
    first = costs[0].weight_gradient_alone.seconds(load) + counted_input_gradient(embed, inputs[0])
    time = counted_input_gradient(model.time[0], inputs[1])
    assert both + first + time == pytest.approx(backward.get_total_flops(), rel=0.01)


def counted_input_gradient(layer, given):
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    given = given.detach().requires_grad_()
    output = layer(given)
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    return counter.get_total_flops()


def test_parameters():
    model, _, _, config = unet_case()
    assert generator_workload(config).num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_stable_diffusion_2_1_has_as_many_parameters_as_published():
    """865.9 million, as its model card says."""
    assert generator_workload(STABLE_DIFFUSION_2_1).num_parameters == pytest.approx(865.9e6, rel=1e-3)


def test_an_unknown_class_is_refused():
    with pytest.raises(UserError, match="_class_name 'VAE' is not known; known are UNet2DConditionModel"):
        generator_workload({"_class_name": "VAE"})
