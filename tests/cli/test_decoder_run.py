"""Run files with towers and a decoder through every command, and what is wrong in them."""

import json
from pathlib import Path

import pytest
from mistakes import expect_mistake
from tower_run import give_decoder, run, write_tower_run
from transformers import GPT2Config, GPT2LMHeadModel

from motet.cli.main import main
from motet.models.hub.export import load_towers


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_tower_run(tmp_path)


@pytest.mark.campaign
def test_a_decoder_that_captions(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    give_decoder(run_file, "GPT2Config")
    planned = run(capsys, "plan", run_file)
    assert [stage["module"] for stage in planned["stages"]] == ["image", "text", "contrastive", "decoder", "decoder"]
    assert run(capsys, "verify", run_file)["passed"]
    trained = run(capsys, "train", run_file, "--set", "train.eval_every=2", "--set", "train.lr_schedule=constant")
    exported = load_towers(trained["export"])
    assert (exported.reads, exported.caption_weight, type(exported.decoder).__name__) == (
        "image",
        2.0,
        "GPT2LMHeadModel",
    )
    longer = ("--set", "train.steps=4", "--set", "train.lr_schedule=constant")
    layout = "parallel.explicit={image: {dp: 2}, text: {pp: 2}, decoder: {}}"
    other = ("--set", layout, "--set", "cluster.num_devices=5", "--set", "parallel.zero1=true")
    resumed = run(capsys, "train", run_file, *longer, "--set", "train.resume=latest", *other)
    straight = run(capsys, "train", run_file, *longer, "--set", f"train.output={run_file.parent / 'straight'}")
    assert resumed["losses"] == pytest.approx(straight["losses"][2:], rel=1e-5)
    data = "data={kind: described, text_tokens: 8, images: {image: {height: 48, width: 48}}}"
    assert run(capsys, "plan", run_file, "--set", data)["fits"]


@pytest.mark.campaign
@pytest.mark.parametrize(("planner", "family"), [("distmm", "GPT2Config"), ("auto", "BertConfig")])
def test_planners_place_a_decoder(
    capsys: pytest.CaptureFixture[str], run_file: Path, planner: str, family: str
) -> None:
    give_decoder(run_file, family)
    parallel = ("--set", f"parallel={{planner: {planner}}}")
    planned = run(capsys, "plan", run_file, *parallel)
    ranks = {
        name: {r for s in planned["stages"] if s["module"] == name for r in s["ranks"]} for name in ("decoder", "image")
    }
    assert ranks["decoder"]
    assert ranks["decoder"].isdisjoint(ranks["image"])
    assert run(capsys, "verify", run_file, *parallel)["passed"]
    message = "parallel.planner: no layout of image and text and decoder fits into 1 devices"
    expect_mistake(capsys, ["plan", run_file, *parallel, "--set", "cluster.num_devices=1"], message)


def test_devices_that_the_plan_leaves_over_stay_idle(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    """What is best for models as small as these may be a plan of fewer ranks than there are devices."""
    give_decoder(run_file, "GPT2Config")
    parallel = ("--set", "parallel={planner: distmm}", "--set", "cluster.num_devices=8")
    used = run(capsys, "plan", run_file, *parallel)["num_devices"]
    assert used < 8
    assert main(["train", str(run_file), *parallel, "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["world_size"] == used
    assert f"the plan runs on {used} of 8 devices" in printed.err


def test_a_pretrained_decoder_gets_cross_attention(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    """A GPT-2 that was stored without it; what is stored is kept, the rest is drawn."""
    give_decoder(run_file, "GPT2Config")
    folder = run_file.parent / "gpt2"
    config = GPT2Config(n_embd=8, n_layer=2, n_head=2, n_positions=12, vocab_size=32)
    GPT2LMHeadModel(config).save_pretrained(folder)
    decoder = f"model.decoder={{path: {folder}, reads: image}}"
    assert run(capsys, "verify", run_file, "--set", decoder)["passed"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.decoder.reads=sound", "model.decoder.reads: there is no tower 'sound'; give one of image, text"),
        ("model.decoder.config=LlamaConfig", "model.decoder: llama cannot be a caption decoder; give one of gpt2"),
        ("model.decoder.values.hidden_size=12", "model.decoder: is 12 wide, but the towers' features 8; set model.con"),
        ("model.decoder.values.is_decoder=false", "model.decoder.values.is_decoder: is False, but a decoder needs"),
        ("model.decoder.values.vocab_size=9", "model.decoder: its vocabulary has 9 tokens, but the tokenizer has 28"),
        ("parallel.explicit.decoder.tp=3", "parallel: decoder.tp_size: 3 does not divide num_attention_heads 2"),
        (
            "parallel.explicit.decoder.cp=2",
            "parallel.explicit.decoder.cp: is 2, but context parallelism is not supported for towers",
        ),
        ("parallel.explicit={image: {}, text: {}}", "parallel.explicit: has no decoder; give the layout of every"),
        ("model.decoder.loss_weight=0", "model.decoder.loss_weight: is 0"),
    ],
)
def test_mistakes_about_a_decoder(
    capsys: pytest.CaptureFixture[str], run_file: Path, override: str, message: str
) -> None:
    give_decoder(run_file, "GPT2Config")
    expect_mistake(capsys, ["plan", run_file, "--set", override], message)
