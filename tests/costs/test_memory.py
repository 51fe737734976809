"""Bytes by formula against what torch's autograd really saves, and against tensors counted by hand."""

import copy
from types import SimpleNamespace

import pytest
import torch
from tiny_configs import EVERY_MODEL

from motet.costs.load import microbatch_load
from motet.costs.memory import MemoryOptions, saved_layer_bytes, static_layer_bytes
from motet.data.sample import Sample, Segment
from motet.models.encoder_stage import EncoderStage
from motet.models.language_model_stage import LanguageModelStage
from motet.workload import module_workload

OPTIONS = MemoryOptions()


def measured_bytes(stage, hidden, samples):
    """Of all different tensors that autograd keeps, parameters left out."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in stage.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = stage(hidden, {}, [{} for _ in samples], samples)
    assert output.requires_grad
    return sum(size for size, _ in kept.values())


def block_stage(name, recompute=False):
    config, model_class = copy.deepcopy(EVERY_MODEL[name])
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = model_class(config)
    if name in ("llama", "qwen3", "gemma3", "phi3", "mistral"):
        return LanguageModelStage("m", model, (1, 3), recompute=recompute), [
            Sample("a", {"m": (Segment(96),)}),
            Sample("b", {"m": (Segment(96),)}),
        ]
    callbacks = dict.fromkeys(("preprocess_callback", "postprocess_module_callback", "postprocess_projector_callback"))
    modality = SimpleNamespace(module=model, projector=None, **callbacks)
    grid, tokens = {"qwen2_5_vl": ((1, 16, 16), 256), "whisper": ((100,), 50), "qwen2_audio": ((100,), 50)}.get(
        name, ((12, 12), 144)
    )
    tokens += name in ("clip", "dinov2", "dinov2-swiglu")
    stage = EncoderStage("m", modality, (1, 3), recompute=recompute)
    return stage, [Sample("a", {"m": (Segment(tokens, grid=grid), Segment(tokens, item=1, grid=grid))})]


def predicted_bytes(name, samples, *, weight_gradient=True, recompute=False):
    workload = module_workload(EVERY_MODEL[name][0])
    load = microbatch_load(workload, "m", samples)
    return sum(
        saved_layer_bytes(
            layer,
            load,
            input_gradient=True,
            weight_gradient=weight_gradient,
            recompute=recompute,
            tp_size=1,
            options=OPTIONS,
        )
        for layer in workload.layers[1:3]
    )


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gemma3", "phi3", "siglip", "clip", "dinov2", "dinov2-swiglu", "qwen2_5_vl", "whisper"]
)
@pytest.mark.parametrize("weight_gradient", [True, False])
def test_saved_activations(name, weight_gradient):
    stage, samples = block_stage(name)
    for parameter in stage.parameters():
        parameter.requires_grad_(weight_gradient)
    hidden = torch.randn(stage.input_shape(samples), requires_grad=True)
    measured = measured_bytes(stage, hidden, samples)
    predicted = predicted_bytes(name, samples, weight_gradient=weight_gradient)
    assert predicted == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize("name", ["llama", "siglip"])
def test_recomputed_blocks_keep_their_input_only(name):
    stage, samples = block_stage(name, recompute=True)
    stage.train()
    hidden = torch.randn(stage.input_shape(samples), requires_grad=True)
    measured = measured_bytes(stage, hidden, samples)
    predicted = predicted_bytes(name, samples, recompute=True)
    assert predicted == pytest.approx(measured, rel=0.2)
    assert predicted < predicted_bytes(name, samples) / 4


def test_parameters_gradients_and_moments():
    layer = module_workload(EVERY_MODEL["llama"][0]).layers[1]
    size = 4 * layer.num_parameters

    def static(trainable, num_holders=1, **options):
        return static_layer_bytes(
            layer, trainable=trainable, tp_size=1, num_holders=num_holders, options=MemoryOptions(**options)
        )

    assert static(False) == size
    assert static(True) == 4 * size
    assert static(True, num_holders=2) == 4 * size
    assert static(True, num_holders=2, zero1=True) == 3 * size
    assert static(True, optimizer_bytes=12) == 5 * size
    assert static(True, num_holders=3, zero1=True, optimizer_bytes=12) == 3 * size


def test_nothing_is_kept_where_no_gradient_passes():
    layer = module_workload(EVERY_MODEL["llama"][0]).layers[1]
    load = microbatch_load(module_workload(EVERY_MODEL["llama"][0]), "m", [Sample("a", {"m": (Segment(8),)})])
    assert (
        saved_layer_bytes(
            layer, load, input_gradient=False, weight_gradient=False, recompute=False, tp_size=1, options=OPTIONS
        )
        == 0
    )
