"""Samples by their sizes: laid out as the encoders' own rules say, for planning only."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from motet.config import load_run_config
from motet.data.run_file import open_data, open_samples
from motet.errors import UserError
from motet.planner.evaluate import evaluate
from motet.planner.from_run_file import planning_problem
from motet.planner.registry import make_plan

RUN: dict[str, Any] = {
    "model": {
        "encoders": {
            "vision": {
                "config": "CLIPVisionConfig",
                "values": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 14,
                           "intermediate_size": 64, "image_size": 336},
                "projector": "mlp",
            },
            "audio": {
                "config": "WhisperConfig",
                "values": {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64},
                "projector": "linear",
            },
        },
        "language_model": {
            "config": "LlamaConfig",
            "values": {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                       "num_attention_heads": 4, "num_key_value_heads": 4},
        },
    },
    "data": {
        "kind": "described",
        "text_tokens": 100,
        "images": {"vision": {"height": 336, "width": 336, "count": 2}},
        "sounds": {"audio": {"seconds": 30}},
    },
    "cluster": {"num_devices": 3},
}  # fmt: skip


def config(tmp_path: Path, *overrides: str) -> Any:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    return load_run_config(tmp_path / "run.yaml", list(overrides))


def test_tokens_are_those_of_the_families(tmp_path: Path) -> None:
    samples = open_samples(config(tmp_path))
    sample = samples.sample(3)
    assert sample == type(sample)("described 3", samples.sample(0).layouts, {"language_model": 100})
    vision = sample.layouts["vision"]
    assert [segment.item for segment in vision] == [0, 1]
    # CLIP adds a class token and hands on the 24 x 24 patches; Whisper halves 3000 frames.
    assert (vision[0].num_tokens, vision[0].outputs) == (577, 576)
    assert sample.num_tokens("audio") == 1500
    assert sample.num_tokens("language_model") == 2 * 576 + 1500 + 100


def test_it_cannot_be_trained_on(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.kind: is described, which has sizes but no data"):
        open_data(config(tmp_path))


def test_an_encoder_that_the_model_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data: there is no encoder 'smell'; the model has audio, vision"):
        open_samples(config(tmp_path, "data.sounds={smell: {seconds: 1}}"))


GENERATING = {
    "image": {"config": "UNet2DConditionModel", "values": {"block_out_channels": [32, 64], "attention_head_dim": 2,
              "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"]}},
}  # fmt: skip
GENERATED = {"image": {"height": 64, "width": 128, "count": 3}}


def generating(tmp_path: Path, *overrides: str) -> Any:
    given = [f"model.generators={json.dumps(GENERATING)}", f"data.generated={json.dumps(GENERATED)}"]
    return config(tmp_path, *given, *overrides)


def test_generators_work_on_latents(tmp_path: Path) -> None:
    sample = open_samples(generating(tmp_path)).sample(0)
    assert [segment.num_tokens for segment in sample.layouts["image"]] == 3 * [8 * 16]
    assert sample.num_loss_tokens == {"language_model": 100, "image": 3}


def test_a_generator_is_a_module_that_reads_the_language_model(tmp_path: Path) -> None:
    frozen = "model.generators.image.train.module=false"
    for overrides, weight in (((), 1.0), ((frozen,), 1.0)):
        run = generating(tmp_path, *overrides)
        problem = planning_problem(run, [open_samples(run).sample(i) for i in range(8)])
        module = problem.modules["image"]
        assert [(edge.source, edge.target) for edge in problem.edges if "image" in (edge.source, edge.target)] == [
            ("language_model", "image")
        ]
        # The connector reads the language model's 64 features; a U-Net's keys and values are made of its 1280.
        incoming = {linear.in_features for layer in module.workload.layers for linear in layer.linears
                    if linear.rows == "incoming"}  # fmt: skip
        assert incoming == {64, 1280}
        assert module.trainable == ((0, 1 if overrides else module.workload.num_layers),)
        assert module.loss_weight == weight


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data={kind: dial-a-digit}", "data.kind: dial-a-digit has no images to generate; .* or described to plan"),
        ("data.generated={}", "data.generated: has no entry for image; give the height and width"),
        (
            "data.generated.img={height: 8, width: 8}",
            "data.generated: there is no generator 'img'; the model has image",
        ),
        ("data.generated.image.height=60", "data.generated.image: is 60 x 128; give multiples of 8"),
        ("model.generators.image.config=UNet", "generators.image.config: 'UNet' is not known; give one of SD3"),
        ("model.generators.image.values.block_out_channels=3", "generators.image.values: do not make a UNet2DCond"),
        ("model.generators.image.values.layers_per_block=-1", "values.layers_per_block: is -1; give a whole number"),
        ("model.generators.image={path: /nowhere}", "generators.image.path: /nowhere/config.json cannot be read"),
        ("model.generators.vision={config: UNet2DConditionModel}", "generators.vision: is the name of another module"),
    ],
)
def test_mistakes_about_generators(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_samples(generating(tmp_path, override))


def test_planners_lay_generators_out(tmp_path: Path) -> None:
    limits = "parallel={num_microbatches: 2, limits: {tp: [1]}}"
    run = generating(tmp_path, "cluster={num_devices: 6, accelerator: h100, device: cuda}", limits)
    problem = planning_problem(run, [open_samples(run).sample(i) for i in range(8)])
    for planner in ("cornstarch", "disttrain", "auto"):
        plan = make_plan(problem, planner)
        assert plan.modules["image"].replicas
        assert evaluate(problem, plan).result.iteration_time_s > 0
