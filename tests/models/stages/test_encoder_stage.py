"""Encoders cut into stages against the plain transformers forward and backward, written here once more by hand."""

import copy
from itertools import pairwise

import pytest
import torch
from recomputing import recomputing
from tiny_encoders import (
    BLOCKS,
    ENCODERS,
    HIDDEN,
    MEL_FRAMES,
    features_of,
    modality_module,
    samples_of,
    tiny_encoder,
)
from torch import nn

from motet.families.encoders.encoder_families import family_of
from motet.models.reference import plain_encoder_output
from motet.models.stages.encoder import EncoderStage, encoder_layer_parts, num_encoder_layers
from motet.models.stages.projector import build_projector
from motet.models.stages.stage import StageInput, StageModule

TOLERANCE = 1e-12
CUTS = {
    "whole": (0, BLOCKS + 3),
    "two": (0, 3, BLOCKS + 3),
    "three": (0, 2, 5, BLOCKS + 3),
    "uneven": (0, 1, 2, BLOCKS + 2, BLOCKS + 3),
    "each layer": tuple(range(BLOCKS + 4)),
}


def by_hand(family, model, features, segments, select="patch"):
    """One sample at a time, items one at a time where the model allows it: no batch, no packing."""
    grids = [segment.grid for segment in segments]
    if family == "qwen2_5_vl":
        pieces = features["pixel_values"].split([t * h * w for t, h, w in grids])
        return [
            model(piece, grid_thw=torch.tensor([grid])).pooler_output for piece, grid in zip(pieces, grids, strict=True)
        ]
    if family == "pixtral":
        return [
            model(image[None, :, : 4 * rows, : 4 * columns]).last_hidden_state[0]
            for image, (rows, columns) in zip(features["pixel_values"], grids, strict=True)
        ]
    if family in ("whisper", "qwen2_audio"):
        outputs = []
        for mel, grid in zip(features["input_features"], grids, strict=True):
            frames = grid[0] if grid else MEL_FRAMES
            valid = -(-frames // 2)
            mask = None
            if family == "qwen2_audio":
                mask = torch.zeros(1, 1, MEL_FRAMES // 2, MEL_FRAMES // 2, dtype=mel.dtype)
                mask[..., valid:] = -torch.inf
            hidden = model(mel[None], attention_mask=mask).last_hidden_state[0]
            num_outputs = valid if family == "whisper" else (valid - 2) // 2 + 1
            outputs.append(hidden if select == "full" else hidden[:num_outputs])
        return outputs
    first = 1 if family in ("clip", "dinov2") and select == "patch" else 0
    return [model(image[None]).last_hidden_state[0, first:] for image in features["pixel_values"]]


def build_stages(module, cuts, *, recompute=False):
    return [recomputing(EncoderStage("encoder", copy.deepcopy(module), cut), recompute) for cut in pairwise(cuts)]


def run(stages, features, samples):
    hidden = None
    for stage in stages:
        if hidden is not None:
            assert hidden.shape == stage.input_shape(samples)
        read = features if stage.needs_features else [{} for _ in samples]
        hidden = stage(StageInput(samples, read, hidden)).hidden
        assert hidden.shape == stage.output_shape(samples)
    return hidden


def project_to_loss(output):
    """Random weights: a mean square after a norm has gradients near zero, which would hide mistakes."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return (output.double() * weights).sum()


def relative_error(value, reference):
    return ((value - reference).norm() / reference.norm().clamp_min(1e-30)).item()


def gradients(*modules):
    """By canonical name. Stages are cut from copies, so a parameter's gradient comes from one of them."""
    found = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            assert name not in found, f"{name} is held twice"
            found[name] = parameter.grad
    return found


def compare_gradients(found, expected, tolerance):
    """Relative to the norm, floored: gradients that are zero by mathematics (the keys' biases) hold rounding only."""
    assert set(found) == set(expected)
    present = [gradient for gradient in expected.values() if gradient is not None]
    mean_square = sum(gradient.square().sum() for gradient in present) / sum(gradient.numel() for gradient in present)
    compared = 0
    for name, reference in expected.items():
        if reference is None:
            assert found[name] is None or not found[name].any(), name
            continue
        assert reference.any(), f"{name}: a gradient of zero compares nothing"
        floor = 1e-3 * (mean_square * reference.numel()).sqrt()
        error = (found[name] - reference).norm() / torch.maximum(reference.norm(), floor)
        # transformers interpolates DINOv2's positions in float32, whatever the model's dtype.
        allowed = max(tolerance, 1e-6) if name.endswith("embeddings.position_embeddings") else tolerance
        assert error <= allowed, f"{name}: {error}"
        compared += 1
    assert compared > 0


def reference_of(module, family, features, samples, select="patch"):
    items = [
        item
        for tensors, sample in zip(features, samples, strict=True)
        for item in by_hand(family, module.module, tensors, sample.layouts["encoder"], select)
    ]
    output = torch.cat(items)
    return output if module.projector is None else module.projector(output)


def named_holder(module):
    holder = nn.Module()
    holder.module = module.module
    if module.projector is not None:
        holder.projector = module.projector
    return holder


def setup(family, *, projector="mlp", select="patch", dtype=torch.float64):
    model = tiny_encoder(family, dtype=dtype)
    features_size = getattr(model.config, family_of(model).output_size)
    built = build_projector(projector, features_size, 20).to(dtype) if projector else None
    samples = samples_of(family, model.config, select=select)
    features = [
        features_of(family, sample.layouts["encoder"], seed=index, dtype=dtype) for index, sample in enumerate(samples)
    ]
    return modality_module(model, built), features, samples


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("family", ENCODERS)
def test_stages_equal_plain_transformers(family, cuts):
    module, features, samples = setup(family)
    stages = build_stages(module, cuts)
    output = run(stages, features, samples)
    project_to_loss(output).backward()
    expected = reference_of(module, family, features, samples)
    project_to_loss(expected).backward()
    assert relative_error(output, expected) <= TOLERANCE
    compare_gradients(gradients(*stages), gradients(named_holder(module)), TOLERANCE)


@pytest.mark.parametrize("family", ENCODERS)
def test_without_projector_in_float32(family):
    """Stages are as close to the gradients in float64 as plain transformers in float32 is."""
    module, features, samples = setup(family, projector=None, dtype=torch.float32)
    exact = modality_module(copy.deepcopy(module.module).double())
    stages = build_stages(module, (0, 2, BLOCKS + 2))
    output = run(stages, features, samples)
    expected = reference_of(module, family, features, samples)
    doubled = [{key: tensor.double() for key, tensor in tensors.items()} for tensors in features]
    for result in (output, expected, reference_of(exact, family, doubled, samples)):
        project_to_loss(result).backward()
    assert relative_error(output, expected) <= 1e-6
    found, plain, truth = gradients(*stages), gradients(named_holder(module)), gradients(named_holder(exact))
    for name, reference in truth.items():
        if reference is not None:
            error, usual = ((g[name] - reference).norm() for g in (found, plain))
            assert error <= 2 * usual + 1e-6 * reference.norm(), name


@pytest.mark.parametrize("family", ENCODERS)
def test_full_features(family):
    module, features, samples = setup(family, projector=None, select="full")
    output = run(build_stages(module, (0, 3, BLOCKS + 2)), features, samples)
    assert relative_error(output, reference_of(module, family, features, samples, "full")) <= TOLERANCE


@pytest.mark.parametrize("feature_layer", [-1, -2, 1])
@pytest.mark.parametrize("family", [family for family in ENCODERS if not family.startswith(("qwen2", "whisper"))])
def test_features_of_an_inner_layer(family, feature_layer):
    """As LLaVA takes them: blocks behind the layer and the last norm stay without gradient."""
    module, features, samples = setup(family)
    module.feature_layer = feature_layer
    stages = build_stages(module, (0, 2, 4, BLOCKS + 3))
    output = run(stages, features, samples)
    project_to_loss(output).backward()
    expected = torch.cat(
        [plain_encoder_output(module, f, s.layouts["encoder"]) for f, s in zip(features, samples, strict=True)]
    )
    project_to_loss(expected).backward()
    assert relative_error(output, expected) <= TOLERANCE
    found = gradients(*stages)
    compare_gradients(found, gradients(named_holder(module)), TOLERANCE)
    running = feature_layer % (BLOCKS + 1)
    for stage in stages:
        for name, _ in stage.named_parameters():
            if running < stage.layers_of(name)[0] < BLOCKS + 2:
                assert found[name] is None, name


@pytest.mark.parametrize(
    ("family", "layer", "message"), [("clip", 5, "not within -5 to 4"), ("qwen2_audio", -2, "head")]
)
def test_impossible_feature_layer_is_refused(family, layer, message):
    module, _, _ = setup(family)
    module.feature_layer = layer
    with pytest.raises(ValueError, match=message):
        EncoderStage("encoder", module, (0, BLOCKS + 3))


@pytest.mark.parametrize("family", ENCODERS)
def test_eager_attention(family):
    module, features, samples = setup(family)
    module.module.set_attn_implementation("eager")
    output = run(build_stages(module, (0, 3, BLOCKS + 3)), features, samples)
    expected = reference_of(module, family, features, samples)
    # Some families take eager softmax in float32.
    assert relative_error(output, expected) <= (
        1e-6 if family in ("pixtral", "qwen2_5_vl", "siglip", "clip") else 1e-12
    )


@pytest.mark.parametrize("family", ENCODERS)
def test_recompute_changes_nothing(family):
    module, features, samples = setup(family)
    kept, recomputed = (
        build_stages(module, (0, 3, BLOCKS + 3)),
        build_stages(module, (0, 3, BLOCKS + 3), recompute=True),
    )
    runs = []
    counts = []
    for stages in (kept, recomputed):
        forwards = count_block_forwards(stages)
        output = run(stages, features, samples)
        project_to_loss(output).backward()
        runs.append((output, gradients(*stages)))
        counts.append(len(forwards))
    assert counts[1] == 2 * counts[0]
    assert torch.equal(runs[0][0], runs[1][0])
    compare_gradients(runs[1][1], runs[0][1], TOLERANCE)


def count_block_forwards(stages):
    seen = []
    for stage in stages:
        for block in stage.module.get_submodule(stage.family.blocks):
            if not isinstance(block, nn.Identity):
                norm = next(layer for layer in block.children() if any(True for _ in layer.parameters()))
                norm.register_forward_hook(lambda *_: seen.append(1))
    return seen


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", ENCODERS)
def test_frozen_encoder_with_trainable_projector(family, recompute):
    module, features, samples = setup(family)
    module.module.requires_grad_(False)
    stages = build_stages(module, (0, 3, BLOCKS + 3), recompute=recompute)
    output = run(stages, features, samples)
    project_to_loss(output).backward()
    project_to_loss(reference_of(module, family, features, samples)).backward()
    found = gradients(*stages)
    assert all(gradient is None for name, gradient in found.items() if name.startswith("module."))
    compare_gradients(found, gradients(named_holder(module)), TOLERANCE)


@pytest.mark.parametrize("family", ENCODERS)
def test_bf16_autocast_stays_close(family):
    module, features, samples = setup(family, dtype=torch.float32)
    exact = reference_of(module, family, features, samples)
    with torch.autocast("cpu", torch.bfloat16):
        output = run(build_stages(module, (0, 3, BLOCKS + 3)), features, samples)
        plain = reference_of(module, family, features, samples)
    own, usual = relative_error(output.float(), exact), relative_error(plain.float(), exact)
    assert 1e-4 < own <= 1.5 * usual + 1e-3


@pytest.mark.parametrize("select", ["patch", "full"])
@pytest.mark.parametrize("family", ENCODERS)
def test_plain_output_equals_items_by_hand(family, select):
    module, features, samples = setup(family, select=select)
    for tensors, sample in zip(features, samples, strict=True):
        output = plain_encoder_output(module, tensors, sample.layouts["encoder"])
        expected = reference_of(module, family, [tensors], [sample], select)
        assert output.shape[0] == sample.num_outputs("encoder")
        assert relative_error(output, expected) <= TOLERANCE


@pytest.mark.parametrize("family", ENCODERS)
def test_layers_cover_every_parameter_once(family):
    model = tiny_encoder(family)
    projector = nn.Linear(2, 2)
    assert num_encoder_layers(model, projector) == BLOCKS + 3 == 1 + num_encoder_layers(model, None)
    parts = [part for layer in range(BLOCKS + 3) for part in encoder_layer_parts(model, layer)]
    for name, _ in model.named_parameters():
        assert sum(name.startswith(f"{part}.") for part in parts) == 1, name


def test_stages_name_parameters_as_the_whole_model_does():
    module, _, _ = setup("whisper")
    whole = {name: parameter.shape for name, parameter in named_holder(module).named_parameters()}
    found, layers = {}, set()
    for cut in pairwise((0, 2, BLOCKS + 3)):
        stage: StageModule = EncoderStage("audio", copy.deepcopy(module), cut)
        for name, parameter in stage.named_parameters():
            found[stage.canonical_name(name)] = parameter.shape
            (layer,) = stage.layers_of(name)
            assert cut[0] <= layer < cut[1]
            layers.add(layer)
    assert found == whole
    assert layers == set(range(BLOCKS + 3))


def test_shapes_come_from_metadata():
    module, _, samples = setup("qwen2_5_vl")
    stages = build_stages(module, (0, 1, BLOCKS + 1, BLOCKS + 2, BLOCKS + 3))
    tokens, outputs = (24 + 60 + 48 + 4), (24 + 60 + 48 + 4) // 4
    assert [stage.output_shape(samples) for stage in stages] == [
        (tokens, HIDDEN),
        (tokens, HIDDEN),
        (outputs, 24),
        (outputs, 20),
    ]
    assert [(stage.hidden_size, stage.output_size) for stage in stages] == [
        (HIDDEN, HIDDEN),
        (HIDDEN, HIDDEN),
        (HIDDEN, 24),
        (24, 20),
    ]
    assert [stage.needs_features for stage in stages] == [True, False, False, False]
