"""FLOPs by formula against torch's FlopCounterMode on the real transformers modules."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from tiny_configs import EVERY_MODEL
from torch.utils.flop_counter import FlopCounterMode

from motet.cluster import LINKS, cpu_cluster
from motet.costs.analytic import AnalyticCosts, Speed, Speeds, analytic_table, kernel_seconds, layer_flops
from motet.costs.communication import collective_seconds
from motet.costs.cost_model import Load
from motet.costs.kernels import layer_kernels
from motet.costs.software import MOTET
from motet.families.shape_reading.module_shapes import module_workload
from motet.models.stages.projector import build_projector
from motet.shapes.module_shape import projector_layer

TOKENS = 128


def eager_model(name):
    config, model_class = EVERY_MODEL[name]
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return model_class(config)


def run_language_model(model, hidden):
    return model(inputs_embeds=hidden).logits


def run_block_of(name, model, index, hidden):
    """One block on [1, TOKENS, width], with what it takes beside it."""
    width = model.config.hidden_size if hasattr(model.config, "hidden_size") else model.config.d_model
    if name == "qwen2_5_vl":
        rotary = (torch.ones(TOKENS, width // 4), torch.zeros(TOKENS, width // 4))
        window = TOKENS if index in model.config.fullatt_block_indexes else 64
        bounds = torch.arange(0, TOKENS + 1, window, dtype=torch.int32)
        return model.blocks[index](hidden[0], cu_seqlens=bounds, position_embeddings=rotary)
    if name == "pixtral":
        rotary = (torch.ones(1, TOKENS, width // 4), torch.zeros(1, TOKENS, width // 4))
        return model.transformer.layers[index](hidden, attention_mask=None, position_embeddings=rotary)
    blocks = {"dinov2": "encoder.layer", "dinov2-swiglu": "encoder.layer"}.get(name, "encoder.layers")
    blocks = "layers" if name in ("whisper", "qwen2_audio") else blocks
    block = model.get_submodule(blocks)[index]
    output = block(hidden, **({} if name.startswith("dinov2") else {"attention_mask": None}))
    return output[0] if isinstance(output, tuple) else output


def counted(function):
    with FlopCounterMode(display=False) as counter:
        result = function()
    return counter.get_total_flops(), result


def count_parts(run, hidden, parameters):
    """FLOPs of forward, and of backward for: input only, input and weights, weights only."""
    backward = []
    for input_gradient, weight_gradient in ((True, False), (True, True), (False, True)):
        for parameter in parameters:
            parameter.requires_grad_(weight_gradient)
        hidden = hidden.detach().requires_grad_(input_gradient)
        forward, output = counted(lambda hidden=hidden: run(hidden))
        flops, _ = counted(lambda output=output: output.sum().backward())
        backward.append(flops)
    return forward, *backward


def assert_equal_parts(cost, load, parts, tolerance=0.01):
    forward, input_only, both, weights_only = parts
    assert cost.forward.seconds(load) == pytest.approx(forward, rel=tolerance)
    assert cost.input_gradient.seconds(load) == pytest.approx(input_only, rel=tolerance)
    full = cost.passes(input_gradient=True, weight_gradient=True).backward
    assert full.seconds(load) == pytest.approx(both, rel=tolerance)
    assert cost.weight_gradient_alone.seconds(load) == pytest.approx(weights_only, rel=tolerance)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    "name", ["siglip", "clip", "dinov2", "dinov2-swiglu", "pixtral", "qwen2_5_vl", "whisper", "qwen2_audio"]
)
def test_encoder_blocks(name, index):
    model = eager_model(name)
    workload = module_workload(EVERY_MODEL[name][0])
    hidden = torch.randn(1, TOKENS, workload.hidden_size)
    parts = count_parts(lambda x: run_block_of(name, model, index, x), hidden, list(model.parameters()))
    load = Load(tokens=TOKENS, pairs=TOKENS**2, sequences=1)
    assert_equal_parts(layer_flops(workload.layers[1 + index]), load, parts)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3", "phi3"])
def test_language_models(name):
    """Blocks and head together, of two sequences."""
    model = eager_model(name)
    workload = module_workload(EVERY_MODEL[name][0])
    hidden = torch.randn(2, TOKENS, workload.hidden_size)
    parts = count_parts(lambda x: run_language_model(model, x), hidden, list(model.parameters()))
    load = Load(tokens=2 * TOKENS, pairs=2 * TOKENS**2, sequences=2, outputs=2 * TOKENS)
    costs = [layer_flops(layer) for layer in workload.layers[1:]]
    assert sum(c.forward.seconds(load) for c in costs) == pytest.approx(parts[0], rel=0.01)
    assert sum(c.input_gradient.seconds(load) for c in costs) == pytest.approx(parts[1], rel=0.01)
    both = sum(c.passes(input_gradient=True, weight_gradient=True).backward.seconds(load) for c in costs)
    assert both == pytest.approx(parts[2], rel=0.01)
    first, *rest = costs
    alone = first.weight_gradient_alone.seconds(load) + sum(
        c.passes(input_gradient=True, weight_gradient=True).backward.seconds(load) for c in rest
    )
    assert alone == pytest.approx(parts[3], rel=0.01)


def test_cross_attention_block():
    model = eager_model("mllama")
    workload = module_workload(EVERY_MODEL["mllama"][0])
    num_encoder_tokens = 96
    encoder = torch.randn(1, num_encoder_tokens, 64)
    block = model.model.layers[1]
    mask = torch.ones(1, 1, TOKENS, 1)

    def run(hidden):
        output = block(
            hidden,
            cross_attention_states=encoder,
            cross_attention_mask=None,
            attention_mask=None,
            full_text_row_masked_out_mask=mask[:, 0][:, None],
            position_embeddings=None,
        )
        return output[0] if isinstance(output, tuple) else output

    block.cross_attn_attn_gate.data.fill_(1.0)
    block.cross_attn_mlp_gate.data.fill_(1.0)
    hidden = torch.randn(1, TOKENS, 64)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    forward, output = counted(lambda: run(hidden.requires_grad_(True)))
    encoder.requires_grad_(True)
    _, output = counted(lambda: run(hidden))
    backward, _ = counted(lambda: output.sum().backward())
    load = Load(
        tokens=TOKENS,
        pairs=TOKENS**2,
        sequences=1,
        incoming=num_encoder_tokens,
        incoming_pairs=TOKENS * num_encoder_tokens,
    )
    cost = layer_flops(workload.layers[2])
    assert cost.forward.seconds(load) == pytest.approx(forward, rel=0.01)
    full = cost.passes(input_gradient=True, weight_gradient=True).backward
    assert full.seconds(load) == pytest.approx(backward, rel=0.01)


@pytest.mark.parametrize("name", ["siglip", "clip", "dinov2", "pixtral", "qwen2_5_vl", "whisper", "qwen2_audio"])
def test_embeddings_and_heads_of_encoders(name):
    """The whole encoder's forward, with 144 patches to a class token."""
    model = eager_model(name).eval()
    workload = module_workload(EVERY_MODEL[name][0])
    if name == "qwen2_5_vl":
        num_tokens, windows = 16 * 16, 4
        features = {"hidden_states": torch.randn(256, 3 * 2 * 4 * 4), "grid_thw": torch.tensor([[1, 16, 16]])}
        assert windows * 64 == num_tokens
    elif name in ("whisper", "qwen2_audio"):
        num_tokens, features = 50, {"input_features": torch.randn(1, 16, 100)}
    else:
        num_tokens = 144 + (name in ("clip", "dinov2"))
        features = {"pixel_values": torch.randn(1, 3, 96, 96)}
    with torch.no_grad():
        forward, _ = counted(lambda: model(**features))
    load = Load(tokens=num_tokens, pairs=num_tokens**2, sequences=1)
    predicted = sum(layer_flops(layer).forward.seconds(load) for layer in workload.layers)
    if name == "siglip":  # The pooler is computed by the whole model, not by our head.
        pooler = model.vision_model.head if hasattr(model, "vision_model") else model.head
        forward -= counted(lambda: pooler(torch.randn(1, num_tokens, 64)))[0]
    assert forward == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize("projector", ["linear", "mlp"])
def test_projectors(projector):
    built = build_projector(projector, 24, 40)
    parts = count_parts(built, torch.randn(TOKENS, 24), list(built.parameters()))
    assert_equal_parts(layer_flops(projector_layer(projector, 24, 40)), Load(outputs=TOKENS), parts)


SPEED = Speed(limit=0.5, overhead_s=1e-6)
SPEEDS = Speeds(gemm=SPEED, convolution=SPEED, attention=SPEED, memory=Speed(limit=1.0, overhead_s=1e-6))
LOAD = Load(tokens=64, pairs=64**2, sequences=1, outputs=8)


PLAIN = replace(MOTET, leaves_out_hidden_pairs=False, attention_backward=2.0, memory_traffic=1.0)
"""Every operand is moved once, and attention computes what is counted."""


def costs_of(num_devices=2, software=PLAIN):
    cluster = cpu_cluster(num_devices)
    return AnalyticCosts(cluster=cluster, dtype="float32", message_bytes=4, speeds=SPEEDS, software=software)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("load", [LOAD, Load(tokens=1, pairs=1, sequences=1, outputs=1), Load(tokens=9e4, pairs=8e9)])
def test_a_layers_seconds_are_its_kernels_and_at_most_twice_their_roofline(tp_size, sequence_parallel, load):
    cluster = cpu_cluster(2)
    workload = module_workload(EVERY_MODEL["llama"][0])
    costs = costs_of().module(workload, tp_size=tp_size, sequence_parallel=sequence_parallel)
    peaks = {"peak_flops": cluster.device.peak("float32"), "bytes_per_s": cluster.device.memory_bytes_per_s}
    for index, layer in enumerate(workload.layers):
        kernels = layer_kernels(layer, tp_size=tp_size, sequence_parallel=sequence_parallel, element_bytes=4)
        roofline = collectives = 0.0
        for kernel in (shape.at(load) for shape in kernels.forward):
            if kernel.collective:
                collectives += collective_seconds(cluster, kernel.collective, range(tp_size), kernel.num_bytes)
            else:
                roofline += kernel_seconds(kernel, SPEEDS, **peaks)
        seconds = costs.layers[index].forward.seconds(load)
        assert roofline <= (seconds - collectives) * (1 + 1e-9)
        assert seconds - collectives <= 2 * roofline + 1e-12


def test_tensor_parallelism_divides_blocks_and_adds_collectives():
    workload = module_workload(EVERY_MODEL["llama"][0])
    one, two = (costs_of().module(workload, tp_size=size).layers[1].forward for size in (1, 2))
    link = LINKS["loopback"]
    # Two all-reduces, each two steps with half of the bytes.
    collectives = 2 * (2 * link.latency_s + 64 * 64 * 4 / link.bytes_per_s)
    kernels = layer_kernels(workload.layers[1], element_bytes=4).forward
    divided = sum(costs_of().kernel(k).seconds(LOAD) - 1e-6 for k in kernels if k.name not in ("norm", "residual"))
    # Each rank's products read and write their uncut side whole.
    assert -divided / 2 < two.seconds(LOAD) - one.seconds(LOAD) - collectives < -divided / 2.5


def test_software_charges_hidden_pairs_the_backward_of_attention_and_passes_over_memory():
    workload = module_workload(EVERY_MODEL["llama"][0])
    encoder = module_workload(EVERY_MODEL["siglip"][0])

    def per_pair(of, **changes):
        block = costs_of(software=replace(PLAIN, **changes)).module(of).layers[1]
        return block.forward.per_pair, block.input_gradient.per_pair

    forward, backward = per_pair(workload)
    assert backward == pytest.approx(2 * forward)
    assert per_pair(workload, leaves_out_hidden_pairs=True) == pytest.approx((forward / 2, backward / 2))
    assert per_pair(workload, attention_backward=2.5) == pytest.approx((forward, 2.5 * forward))
    # An encoder's attention hides nothing.
    assert per_pair(encoder, leaves_out_hidden_pairs=True) == pytest.approx(per_pair(encoder))
    once, thrice = (
        costs_of(software=replace(PLAIN, memory_traffic=times)).module(workload).layers[1].forward for times in (1, 3)
    )
    kernels = layer_kernels(workload.layers[1], element_bytes=4).forward
    moved = sum(k.num_bytes.seconds(LOAD) for k in kernels if k.kind in ("norm", "elementwise"))
    bandwidth = cpu_cluster(1).device.memory_bytes_per_s
    assert thrice.seconds(LOAD) - once.seconds(LOAD) == pytest.approx(2 * moved / bandwidth)


def test_exposed_bytes_add_to_the_time_of_a_product():
    shape = layer_kernels(module_workload(EVERY_MODEL["llama"][0]).layers[1], element_bytes=4).forward[1]
    assert shape.kind == "gemm"
    adding = replace(SPEEDS, gemm=replace(SPEED, exposed=1.0))
    device = cpu_cluster(1).device
    flops, num_bytes = shape.flops.seconds(LOAD), shape.num_bytes.seconds(LOAD)
    expected = 1e-6 + flops / (0.5 * device.peak("float32")) + num_bytes / device.memory_bytes_per_s
    assert replace(costs_of(), speeds=adding).kernel(shape).seconds(LOAD) == pytest.approx(expected)
    peaks = {"peak_flops": device.peak("float32"), "bytes_per_s": device.memory_bytes_per_s}
    assert kernel_seconds(shape.at(LOAD), adding, **peaks) == pytest.approx(expected)


def test_table_of_a_cluster():
    workload = module_workload(EVERY_MODEL["llama"][0])
    table = analytic_table({"language_model": workload}, cpu_cluster(4), tp_sizes=(1, 2))
    assert table.source == "analytic"
    assert len(table.of("language_model", 2).layers) == workload.num_layers
    with nullcontext(), pytest.raises(ValueError, match="was not measured with tp_size 4, only 1, 2"):
        table.of("language_model", 4)
