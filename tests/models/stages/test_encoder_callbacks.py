"""Callbacks of listing 2 in stages, against the plain forward; and what does not fit is named."""

import dataclasses
from itertools import pairwise

import pytest
import torch
from tiny_encoders import BLOCKS, HIDDEN, features_of, modality_module, samples_of, tiny_encoder
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from motet.assignment.sample import Sample
from motet.families.encoders.encoder_families import family_of
from motet.families.encoders.token_counts import encoder_segment
from motet.models.reference import plain_encoder_output
from motet.models.stages.encoder import EncoderStage
from motet.models.stages.projector import build_projector, projected_size
from motet.models.stages.stage import StageInput

CUTS = [(0, BLOCKS + 3), (0, 2, BLOCKS + 2, BLOCKS + 3), (0, BLOCKS + 1, BLOCKS + 3)]


def split_into_tiles(inputs):
    """[n, C, 2H, 2W] -> four tiles of [H, W] each, as a batch."""
    pixels = inputs["pixel_values"]
    rows = [half.chunk(2, dim=-1) for half in pixels.chunk(2, dim=-2)]
    return {"pixel_values": torch.stack([tile for row in rows for tile in row], dim=1).flatten(0, 1)}


def merge_four(inputs, output):
    """Means of four tokens, scaled by the inputs, so that a wrong sample's inputs would show."""
    return (output[0].unflatten(0, (-1, 4)).mean(1) * inputs["pixel_values"].mean(),)


def add_bias(inputs, output):
    return BaseModelOutput(last_hidden_state=output[0] + inputs["pixel_values"].std())


def outputs_of(module, cuts, features, samples):
    stages = [EncoderStage("encoder", module(), cut) for cut in pairwise(cuts)]
    hidden = None
    for stage in stages:
        read = features if stage.needs_features else [{} for _ in samples]
        hidden = stage(StageInput(samples, read, hidden)).hidden
        assert hidden.shape == stage.output_shape(samples)
    return hidden, stages


def plain(module, features, samples):
    return torch.cat(
        [plain_encoder_output(module, f, s.layouts["encoder"]) for f, s in zip(features, samples, strict=True)]
    )


def tiled_samples(config, *, merged):
    samples = []
    for index, num_items in enumerate((2, 1)):
        segments = tuple(encoder_segment(config, item=item, grid=(4, 4), num_tiles=4) for item in range(num_items))
        if merged:
            segments = tuple(dataclasses.replace(s, num_outputs=s.outputs // 4) for s in segments)
        samples.append(Sample(id=f"s{index}", layouts={"encoder": segments}))
    features = [
        {"pixel_values": torch.randn(len(s.layouts["encoder"]), 3, 32, 32, dtype=torch.float64)} for s in samples
    ]
    return samples, features


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("family", ["siglip", "clip"])
def test_all_callbacks(family, cuts):
    def module():
        model = tiny_encoder(family)
        return modality_module(
            model,
            build_projector("mlp", HIDDEN, 20).double(),
            preprocess_callback=split_into_tiles,
            postprocess_module_callback=merge_four,
            postprocess_projector_callback=add_bias,
        )

    reference = module()
    samples, features = tiled_samples(reference.module.config, merged=True)
    output, stages = outputs_of(module, cuts, features, samples)
    torch.testing.assert_close(output, plain(reference, features, samples), rtol=1e-12, atol=1e-12)
    assert output.shape[0] == (2 + 1) * 16
    for stage in stages:
        assert stage.needs_features == any(stage.holds(layer) for layer in (0, BLOCKS + 1, BLOCKS + 2))


def test_callback_may_return_a_tensor():
    def module():
        return modality_module(
            tiny_encoder("siglip"), postprocess_module_callback=lambda inputs, output: merge_four(inputs, output)[0]
        )

    reference = module()
    samples, features = tiled_samples(reference.module.config, merged=True)
    reference.preprocess_callback = split_into_tiles

    def with_tiles():
        made = module()
        made.preprocess_callback = split_into_tiles
        return made

    output, _ = outputs_of(with_tiles, (0, 3, BLOCKS + 2), features, samples)
    torch.testing.assert_close(output, plain(reference, features, samples), rtol=1e-12, atol=1e-12)


class PoolingProjector(nn.Module):
    """The user's own: one token for each sample, so it must never see two samples at once."""

    out_features = HIDDEN

    def forward(self, features):
        return features.cumsum(0)[-1:].tanh()


def test_own_projector_sees_one_sample_at_a_time():
    def module():
        return modality_module(tiny_encoder("pixtral"), PoolingProjector())

    reference = module()
    samples = [
        Sample(
            id=sample.id,
            layouts={
                "encoder": tuple(
                    dataclasses.replace(segment, num_outputs=int(segment.item == 0))
                    for segment in sample.layouts["encoder"]
                )
            },
        )
        for sample in samples_of("pixtral", reference.module.config)
    ]
    features = [features_of("pixtral", s.layouts["encoder"], seed=i) for i, s in enumerate(samples)]
    output, _ = outputs_of(module, (0, 3, BLOCKS + 2, BLOCKS + 3), features, samples)
    assert output.shape == (len(samples), HIDDEN)
    torch.testing.assert_close(output, plain(reference, features, samples), rtol=1e-12, atol=1e-12)


def whole_stage(family="clip"):
    model = tiny_encoder(family)
    samples = samples_of(family, model.config)
    features = [features_of(family, s.layouts["encoder"], seed=i) for i, s in enumerate(samples)]
    return EncoderStage("encoder", modality_module(model), (0, BLOCKS + 2)), features, samples


def test_misfits_name_the_sample():
    stage, features, samples = whole_stage()
    with pytest.raises(ValueError, match="'s0' has no pixel_values for encoder"):
        stage(StageInput(samples, [{}, *features[1:]]))
    with pytest.raises(ValueError, match="makes 85 tokens in encoder, but the layouts have 102"):
        stage(StageInput(samples, [{"pixel_values": features[0]["pixel_values"][:1]}, *features[1:]]))
    swapped = Sample(id="s0", layouts={"encoder": samples[0].layouts["encoder"][::-1]})
    with pytest.raises(ValueError, match=r"'s0' has encoder's items as \[1, 0\]; put them in order"):
        stage(StageInput([swapped, *samples[1:]], features))
    short = dataclasses.replace(samples[1].layouts["encoder"][0], num_outputs=5)
    wrong = [samples[0], Sample(id="s1", layouts={"encoder": (short,)}), samples[2]]
    with pytest.raises(ValueError, match=r"'s1' says that encoder outputs 5 tokens, but its layers .* made 16"):
        stage(StageInput(wrong, features))


def test_short_mel_is_refused():
    stage, features, samples = whole_stage("whisper")
    features[0]["input_features"] = features[0]["input_features"][..., :20]
    with pytest.raises(ValueError, match="needs 24 mel frames, not 20"):
        stage(StageInput(samples, features))


def test_what_is_no_encoder_is_refused():
    from transformers import WhisperConfig, WhisperModel

    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    whole = WhisperModel(WhisperConfig(**sizes, encoder_attention_heads=1, decoder_attention_heads=1, vocab_size=60000))
    with pytest.raises(ValueError, match=r"WhisperModel is not known; known are .*WhisperEncoder"):
        family_of(whole)
    whole.encoder.config.encoder_layerdrop = 0.1
    with pytest.raises(ValueError, match=r"encoder_layerdrop 0\.1; set it to 0"):
        family_of(whole.encoder)
    pixtral = tiny_encoder("pixtral")
    pixtral.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="flash attention"):
        family_of(pixtral)


def test_projector_of_unknown_width_is_refused():
    with pytest.raises(ValueError, match="Tanh has no linear layer; give it an attribute out_features"):
        projected_size(nn.Tanh())
    assert projected_size(nn.Sequential(nn.Linear(2, 3), nn.Tanh())) == 3
    assert projected_size(PoolingProjector()) == HIDDEN
