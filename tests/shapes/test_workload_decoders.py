"""Shapes of caption decoders against the real transformers modules."""

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from motet.assignment.sample import Sample, Segment
from motet.costs.cost_model import Quadratic, microbatch_load
from motet.costs.kernels import layer_kernels, total_flops
from motet.errors import UserError
from motet.families.discovery.language_model_parts import causal_layer_parts, causal_paths
from motet.families.shape_reading.module_shapes import module_workload

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 30}
CONFIGS = {
    "gpt2": transformers.GPT2Config(**SIZES, n_positions=12, add_cross_attention=True),
    "gpt2 with a narrow MLP": transformers.GPT2Config(**SIZES, n_inner=20, add_cross_attention=True),
    "bert": transformers.BertConfig(**SIZES, intermediate_size=24, is_decoder=True, add_cross_attention=True),
}
CLASSES = {"gpt2": transformers.GPT2LMHeadModel, "bert": transformers.BertLMHeadModel}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_real_module(name: str) -> None:
    config = CONFIGS[name]
    model, workload = CLASSES[config.model_type](config), module_workload(config, role="decoder")
    assert workload.num_parameters == sum(p.numel() for p in model.parameters())
    assert workload.tied == ((0, 3),)
    for layer in range(workload.num_layers):
        parts = [model.get_submodule(path) for path in causal_layer_parts(model, layer)]
        assert workload.layers[layer].num_parameters == sum(p.numel() for part in parts for p in part.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_operations_of_a_block_are_those_of_the_real_one(name: str) -> None:
    """Two captions of five tokens, each of which sees an image of seven."""
    config = CONFIGS[name]
    model, workload = CLASSES[config.model_type](config), module_workload(config, role="decoder")
    block = model.get_submodule(f"{causal_paths(model).blocks}.0")
    hidden, states = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    with FlopCounterMode(display=False) as counter:
        block(hidden, None, encoder_hidden_states=states) if name == "bert" else block(hidden, None, None, states)
    samples = [Sample(f"{i}", {"image": (Segment(7),), "decoder": (Segment(5),)}) for i in range(2)]
    load = microbatch_load(workload, "decoder", samples, ["image"])
    counted: Quadratic = total_flops(layer_kernels(workload.layers[1]).forward)
    assert counted.seconds(load) == counter.get_total_flops()


def test_other_families_are_refused() -> None:
    with pytest.raises(UserError, match=r"llama .*cannot be a caption decoder"):
        module_workload({"model_type": "llama"}, role="decoder")
