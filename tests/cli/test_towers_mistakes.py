"""What is wrong in run files with towers."""

import json
from pathlib import Path

import pytest
from mistakes import expect_mistake
from tower_run import give_stored_clip, write_tower_run


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_tower_run(tmp_path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.towers.image.config=LlamaConfig", "model.towers.image: llama is a language model; give an encoder"),
        (
            "model.towers.image.values.vision_use_head=false",
            "vision_use_head: is false, so the encoder has no pooled output",
        ),
        ("model.towers.image.projector=null", "projector: is null, but the tower's width is 16 and that .* 8"),
        ("model.towers.image.projector=conv", 'projector: is "conv"; give one of projection, linear, mlp'),
        ("model.towers={image: {config: SiglipVisionConfig}}", "model.towers: has image only; give at least two"),
        ("model.contrastive.loss=softmin", 'model.contrastive.loss: is "softmin"; give one of softmax, sigmoid'),
        ("model.contrastive.anchor=txet", "contrastive.anchor: there is no tower 'txet'; give one of image, audio"),
        ("model.contrastive.width=null", "contrastive.width: is missing"),
        (
            "model.contrastive.max_logit_scale=1.0",
            "max_logit_scale: is 1.0, less than the initial logit_scale 2.66; give",
        ),
        (
            "model.contrastive={width: 8, logit_scale: 5.0, max_logit_scale: 4.6}",
            "max_logit_scale: is 4.6, less than the initial logit_scale 5; give",
        ),
        (
            "model.contrastive.logit_scale=90",
            "model.contrastive.logit_scale: is 90; give a number at least -7",
        ),
        ("model.contrastive.logit_scale=.nan", "model.contrastive.logit_scale: is NaN; give a number at least -7"),
        ("model.contrastive.max_logit_scale=.inf", "model.contrastive.max_logit_scale: is Infinity; give a number at"),
        ("model.contrastive.logit_bias=-.inf", "model.contrastive.logit_bias: is -Infinity; give a number at least"),
        ("model.contrastive.logit_bias=1.0", "contrastive.logit_bias: applies to loss: sigmoid only"),
        ("model.merge=prepend", "merge: cannot be combined with towers"),
        ("model.towers.text.values.vocab_size=20", "model.towers.text: its vocabulary has 20 tokens, but .* 28"),
        ("train.contrastive_batch_size=3", "contrastive_batch_size: is 3, which does not divide .*global_batch_size 8"),
        ("train.contrastive_batch_size=1", "train.contrastive_batch_size: is 1, which leaves nothing to compare"),
        ("data={kind: dial-a-digit}", "data.kind: dial-a-digit has no pairs for towers; give pairs or same-digits"),
        ("data.min_digits=6", "max_digits: is 5, less than min_digits 6"),
        (
            "parallel.explicit.image.cp=2",
            "parallel.explicit.image.cp: is 2, but context parallelism is not supported for towers",
        ),
        ("parallel.explicit.image.dp=2", "the plan uses 4 ranks but cluster has 3"),
        ("parallel.explicit.contrastive={}", "parallel.explicit: there is no module 'contrastive'"),
        ("parallel.recompute_features=[img]", "parallel.recompute_features: there is no module 'img'"),
        (
            "parallel={planner: distmm, recompute_features: [image]}",
            "parallel.recompute_features: planners choose that themselves",
        ),
        (
            "parallel={planner: auto, recompute_features: [image]}",
            "recompute_features: planners choose that themselves",
        ),
        (
            "parallel={planner: distmm, num_microbatches: 4}",
            "parallel.num_microbatches: planners choose that themselves for towers; leave it out, or give planner: exp",
        ),
        (
            "parallel={planner: auto, limits: {cp: [2]}}",
            "parallel.limits.cp: .* not supported for towers; leave it out",
        ),
        ("parallel.limits={cp: [1, 2]}", "parallel.limits.cp: is not read by planner explicit"),
        (
            "parallel={planner: distmm, limits: {modules: {contrastive: {max_pp: 1}}}}",
            "parallel.limits.modules.contrastive: a loss is one stage on all ranks that hold features; leave it out",
        ),
        (
            "parallel={planner: distmm, limits: {dp: [2]}}",
            "parallel.limits.dp: planners choose the replicas of towers",
        ),
        ("parallel={planner: distmm, packing: true}", "parallel.packing: applies to language models only"),
        ("parallel={planner: auto, placement: replicated}", "parallel.placement: distmm puts towers on separate ranks"),
        ("parallel={planner: cornstarch}", "the model has contrastive towers; give distmm, auto or explicit"),
        ("parallel.placement=replicated", "parallel.placement: replicated is for encoders of a language model"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], run_file: Path, override: str, message: str) -> None:
    expect_mistake(capsys, ["plan", run_file, "--set", override], message)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.contrastive_batch_size=4", "train.contrastive_batch_size: applies to towers only"),
        ("parallel.recompute_features=[vision]", "recompute_features: is read for encoders with planner explicit"),
        ("data={kind: same-digits}", "data.kind: same-digits is for towers"),
        ("model.contrastive={width: 8}", "model.contrastive: applies to towers only"),
        ("model.decoder={config: GPT2Config, reads: vision}", "model.decoder: applies to towers only; give towers"),
        ("model={encoders: {}}", "model.language_model: is missing; give one, or towers"),
    ],
)
def test_keys_of_towers_without_towers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, override: str, message: str
) -> None:
    from tiny_run import write_tiny_run

    expect_mistake(capsys, ["plan", write_tiny_run(tmp_path), "--set", override], message)


def test_mistakes_about_a_stored_model(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    _, folder = give_stored_clip(run_file)
    capsys.readouterr()  # transformers tells how far it has stored.
    tower = "model.towers.text"
    for override, message in (
        (f"{tower}.part=null", f"{tower}.part: is missing, but what is stored is a clip of two towers; give image or"),
        (f"{tower}.part=words", f'{tower}.part: is "words"; give one of image, text'),
        (f"{tower}={{config: BertConfig, part: text}}", f"{tower}.part: is text, but config names one encoder; leave"),
        (
            f"{tower}={{path: {folder}, values: {{model_type: bert}}}}",
            "values.model_type: follows from config, hub or path",
        ),
        (
            "model.contrastive.width=9",
            "image.projector: the stored projection is 8 wide, but the features are 9 wide",
        ),
    ):
        expect_mistake(capsys, ["plan", run_file, "--set", override], message)
    whole = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**whole["text_config"], "model_type": "clip_text_model"}))
    expect_mistake(
        capsys, ["plan", run_file], "image.part: is image, but what is stored is one clip_text_model without"
    )
