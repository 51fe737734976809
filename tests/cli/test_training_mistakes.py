"""Mistakes that show when training begins: in one line too, and no process is left behind."""

import hashlib
import json
import os
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
from mistakes import expect_mistake
from sampling import in_campaigns
from tiny_run import write_tiny_run

from motet.cli.main import main
from motet.config import load_run_config
from motet.resilience.membership import RUN, RunRecord, as_json
from motet.resilience.process_control import Children
from motet.resilience.store.embedded import EmbeddedStore, StoreProcess
from motet.resilience.store.store import SECRET_VARIABLE
from motet.runtime.checkpoint.folder import changes_of_training, check_same_computation, read_manifest

EXPLICIT = "parallel={planner: explicit, num_microbatches: 2, explicit: {vision: {}, audio: {}, language_model: {}}}"
TWO_PIPELINES = (
    "parallel={planner: explicit, placement: colocated, explicit: {vision: {dp: 2}, audio: {dp: 2}, "
    "language_model: {dp: 2}}}"
)
SURVIVING = [
    part
    for key in (TWO_PIPELINES, "cluster.num_devices=4", "cluster.num_nodes=4", "train.failures.tolerate=1")
    for part in ("--set", key)
]

SECRET = "a secret of all machines"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_tiny_run(tmp_path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the tiny run after two steps."""
    folder = tmp_path_factory.mktemp("trained")
    run_file = write_tiny_run(folder)
    options = [EXPLICIT, "cluster.num_devices=3", "train.steps=2", "train.checkpoint_every=2", "train.export=false"]
    assert main(["train", str(run_file), *(part for option in options for part in ("--set", option))]) == 0
    return folder / "output" / "checkpoints" / "step_00000002"


def expect_refusal(capsys: pytest.CaptureFixture[str], run_file: Path, overrides: list[str], message: str) -> None:
    three = [EXPLICIT, "cluster.num_devices=3"]
    options = [part for override in (*three, *overrides) for part in ("--set", override)]
    expect_mistake(capsys, ["train", run_file, *options], message, says_more=True)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.resume=/nowhere"], "train.resume: /nowhere is not a folder; give a checkpoint's"),
        (["train.resume=/"], "train.resume: / is not a checkpoint: checkpoint.json is missing"),
        (["cluster.memory_bytes=1e5"], "does not fit: rank [0-2] needs .* more stages or tensor parallelism"),
        (["cluster.num_nodes=3"], "cluster.num_nodes: is 3; processes on several machines are started by torchrun"),
        (
            ["train.failures.tolerate=1"],
            "train.failures.tolerate: is 1, but the plan has 1 pipeline on nodes of",
        ),
        (["train.failures.tolerate=-1"], "train.failures.tolerate: is -1; give a whole number at least 0"),
        (["train.failures.tolerate=0"], "train.failures.tolerate: is 0, and the plan has one pipeline, so a loss"),
        (
            [*SURVIVING[1::2], "parallel.zero1=true", "train.failures.tolerate=0"],
            "train.failures.tolerate: is 0, and with parallel.zero1 one pipeline keeps each state, so a loss",
        ),
        (["train.failures.slow_ratio=1"], "train.failures.slow_ratio: is 1; give a number above 1 or null"),
        (["model.encoders.vision.values.num_attention_heads=5"], "model.encoders.vision.*heads"),
        (["model.encoders.vision.path=/nowhere", "model.encoders.vision.config=null"], "vision.path: /nowhere"),
    ],
)
def test_values(capsys: pytest.CaptureFixture[str], run_file: Path, overrides: list[str], message: str) -> None:
    expect_refusal(capsys, run_file, overrides, message)


def test_a_run_that_does_not_export(checkpoint: Path) -> None:
    assert not (checkpoint.parents[1] / "export").exists()


def test_a_refused_run_deletes_no_checkpoints(
    capsys: pytest.CaptureFixture[str], run_file: Path, checkpoint: Path
) -> None:
    there = run_file.parent / "output" / "checkpoints" / checkpoint.name
    shutil.copytree(checkpoint, there)
    refused = ["train.overwrite=true", "train.failures.tolerate=1"]
    expect_refusal(capsys, run_file, refused, "train.failures.tolerate: is 1, but the plan has 1 pipeline")
    assert there.is_dir()


@pytest.mark.parametrize(
    ("address", "failures", "message"),
    [
        ("nowhere", "{}", "--join: is 'nowhere'; give HOST:PORT, or etcd://HOST:PORT,HOST:PORT,.../NAME"),
        ("etcd://a:1", "{}", "--join: is 'etcd://a:1'; give HOST:PORT, or etcd://"),
        ("localhost:70000", "{}", "--join: is 'localhost:70000'; give HOST:PORT"),
        ("localhost:1", "null", "--join: train.failures is null; set it, give the run file of the training"),
        ("localhost:1", "{}", "--join: localhost:1: no training answers there .*; is it still running?"),
        ("..:29500", "{}", "--join: ..:29500: no training answers there .*; is it still running?"),
    ],
)
def test_joining(
    capsys: pytest.CaptureFixture[str],
    run_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    failures: str,
    message: str,
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    keys = (EXPLICIT, "cluster.num_devices=3", f"train.failures={failures}")
    options = [part for key in keys for part in ("--set", key)]
    expect_mistake(capsys, ["train", run_file, "--join", address, *options], message, says_more=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--listen", "here:0"], "--listen: train.failures is null; set it"),
        (["--listen", "29500", "--set", "train.failures={}"], "--listen: is '29500'; give HOST:PORT"),
        (
            ["--listen", "192.0.2.1:29500", *SURVIVING],
            "--listen: 192.0.2.1:29500 cannot be used as an address .*this machine",
        ),
        (
            ["--listen", "..:29500", *SURVIVING],
            "--listen: ..:29500 cannot be used as an address .no host can have this name",
        ),
        (
            ["--listen", f"{'a' * 64}:1", *SURVIVING],
            "--listen: a*:1 cannot be used as an address .no host can have this name",
        ),
        (["--listen", "here:1", "--join", "there:1"], "--listen: cannot be combined with --join"),
        (["--store", "here:1", *SURVIVING], "--store: takes etcd://HOST:PORT,.../NAME only"),
        (["--store", "etcd://a:1/x", "--listen", "b:1", *SURVIVING], "--store: takes etcd://HOST:PORT,.../NAME only"),
    ],
)
def test_listening(
    capsys: pytest.CaptureFixture[str],
    run_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    expect_mistake(capsys, ["train", run_file, *options], message, says_more=True)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.learning_rate=0.5", "train.learning_rate: is 0.5 here and is 0.001 there"),
        ("model.language_model.values.hidden_size=64", "model.language_model.values.hidden_size: is 64 here"),
        ("cluster.num_devices=8", "cluster.num_devices: is 8 here and is 4 there"),
    ],
)
def test_another_run_file(
    capsys: pytest.CaptureFixture[str],
    run_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    override: str,
    message: str,
) -> None:
    """Taken in, such a node would train another model, or end the others."""
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    keys = SURVIVING[1::2]
    with StoreProcess(("127.0.0.1", 0), SECRET.encode(), 1.0) as process, Children() as children:
        process.start(children)
        with EmbeddedStore(process.address, SECRET.encode(), 30) as store:
            store.create(RUN, RunRecord(config=as_json(load_run_config(str(run_file), keys))).to_json())
        arguments = ["train", run_file, "--join", f"127.0.0.1:{process.address[1]}", *SURVIVING, "--set", override]
        expect_mistake(capsys, arguments, message, says_more=True)


def test_survivors_are_not_started_by_torchrun(
    capsys: pytest.CaptureFixture[str], run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    expect_mistake(
        capsys,
        ["train", run_file, *SURVIVING],
        "train.failures: motet starts the processes of such a run itself",
        says_more=True,
    )


def test_no_space_for_a_checkpoint(
    capsys: pytest.CaptureFixture[str], run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 1000, 1000))
    expect_refusal(
        capsys, run_file, ["train.checkpoint_every=2"], "train.output: no space for a checkpoint in .*; choose another"
    )


def test_an_output_folder_that_cannot_be(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    expect_refusal(capsys, run_file, [f"train.output={run_file}/inside"], "train.output: .*run.yaml/inside")


def test_a_finished_run_is_not_resumed(capsys: pytest.CaptureFixture[str], run_file: Path, checkpoint: Path) -> None:
    overrides = [f"train.resume={checkpoint}", "train.steps=2"]
    expect_refusal(capsys, run_file, overrides, "train.steps: is 2, but .* has finished 2 steps; give more")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "language_model.values.intermediate_size=96",
            "model.values.intermediate_size is 64 there and 96 here",
        ),
        ("encoders.vision.feature_layer=-2", "model.encoders.vision.feature_layer is null there and -2 here; resume"),
        *in_campaigns(
            [
                (
                    "language_model.values.rope_theta=500.0",
                    "rope_theta is 10000.0 there and 500.0 here",
                ),
                (
                    "language_model.values.num_attention_heads=2",
                    "model.values.num_attention_heads is 4 there and 2 here",
                ),
                (
                    "encoders.vision.values.hidden_act=relu",
                    'vision.values.hidden_act is "gelu_pytorch_tanh" there and "relu"',
                ),
                ("media_attention=own_item", 'model.media_attention is "causal" there and "own_item" here'),
            ]
        ),
    ],
)
def test_a_checkpoint_of_another_model(
    capsys: pytest.CaptureFixture[str], run_file: Path, checkpoint: Path, override: str, message: str
) -> None:
    """Most of these have parameters of the same names and shapes."""
    overrides = [f"train.resume={checkpoint}", f"model.{override}"]
    expect_refusal(capsys, run_file, overrides, f"train.resume: .*step_00000002 belongs to another model: .*{message}")


def test_a_rule_of_attention_by_another_name_is_the_same(run_file: Path, checkpoint: Path) -> None:
    """Llama's own is `causal`."""
    overrides = [EXPLICIT, "cluster.num_devices=3", f"train.resume={checkpoint}", "train.steps=3"]
    overrides += ["model.media_attention=family"]
    assert main(["train", str(run_file), *(part for override in overrides for part in ("--set", override))]) == 0


def test_another_placeholder_is_told_and_not_refused() -> None:
    """What stands there is replaced by the encoder's outputs."""
    saved, now = ({"model.placeholder_tokens.vision": token} for token in ("<image>", "<|image|>"))
    check_same_computation("step_00000002", saved, now)
    assert changes_of_training(saved, now) == ['model.placeholder_tokens.vision was "<image>" and is "<|image|>"']


@pytest.fixture
def old_checkpoint(checkpoint: Path, tmp_path: Path) -> Path:
    """As motet wrote them before they said what the model computes."""
    copy = tmp_path / "step_00000002"
    shutil.copytree(checkpoint, copy)
    manifest = read_manifest(copy)
    document = json.loads(replace(manifest, state=replace(manifest.state, model={})).to_json())
    del document["state"]["model"], document["sha256"]
    sha256 = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
    (copy / "checkpoint.json").write_text(json.dumps({**document, "sha256": sha256}))
    assert read_manifest(copy).state.model == {}
    return copy


def test_an_old_checkpoint_of_another_model(
    capsys: pytest.CaptureFixture[str], run_file: Path, old_checkpoint: Path
) -> None:
    overrides = [f"train.resume={old_checkpoint}", "model.language_model.values.intermediate_size=96"]
    expect_refusal(
        capsys, run_file, overrides, "train.resume: .*step_00000002 belongs to another model: .*mlp.gate_proj.weight is"
    )


def test_an_old_checkpoint_is_resumed(capsys: pytest.CaptureFixture[str], run_file: Path, old_checkpoint: Path) -> None:
    overrides = [EXPLICIT, "cluster.num_devices=3", f"train.resume={old_checkpoint}", "train.steps=3"]
    assert main(["train", str(run_file), *(part for override in overrides for part in ("--set", override))]) == 0


def test_a_part_that_is_frozen_when_training_goes_on(
    capfd: pytest.CaptureFixture[str], run_file: Path, checkpoint: Path
) -> None:
    """That is no mistake, but it is told."""
    overrides = [EXPLICIT, "cluster.num_devices=3", f"train.resume={checkpoint}", "train.steps=3"]
    overrides.append("model.encoders.vision.train={module: false, projector: true}")
    assert main(["train", str(run_file), *(part for override in overrides for part in ("--set", override))]) == 0
    assert "; model.encoders.vision.train.module was true and is false" in capfd.readouterr().err


def test_a_checkpoint_cut_short(
    capsys: pytest.CaptureFixture[str], run_file: Path, checkpoint: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "step_00000002"
    shutil.copytree(checkpoint, copy)
    shard = max(copy.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    os.truncate(shard, shard.stat().st_size // 2)
    expect_refusal(capsys, run_file, [f"train.resume={copy}"], "train.resume: .*is cut short: .* bytes; use another")


def test_a_checkpoint_with_a_flipped_bit(
    capsys: pytest.CaptureFixture[str], run_file: Path, checkpoint: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "step_00000002"
    shutil.copytree(checkpoint, copy)
    shard = max(copy.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    expect_refusal(capsys, run_file, [f"train.resume={copy}"], "train.resume: .* has changed since it was written")


def test_a_damaged_manifest(
    capsys: pytest.CaptureFixture[str], run_file: Path, checkpoint: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "step_00000002"
    shutil.copytree(checkpoint, copy)
    (copy / "checkpoint.json").write_text("{")
    expect_refusal(capsys, run_file, [f"train.resume={copy}"], "checkpoint.json is damaged")


def test_a_world_that_is_too_small_for_the_plan(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    plan_file = run_file.with_name("plan.json")
    options = ["--set", EXPLICIT, "--set", "cluster.num_devices=3"]
    assert main(["plan", str(run_file), *options, "--out", str(plan_file)]) == 0
    capsys.readouterr()
    arguments = ["train", run_file, "--plan", plan_file, "--set", "cluster.num_devices=2"]
    expect_mistake(capsys, arguments, "cluster.num_devices: is 2, but the plan has 3 ranks; give cluster.num_devices=3")


def test_torchrun_with_another_number_of_processes(
    capsys: pytest.CaptureFixture[str], run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    expect_mistake(capsys, ["train", run_file], "the plan has 4 ranks, but torchrun started 2 processes; start 4")


def test_a_plan_of_another_model_is_not_verified(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    plan_file = run_file.with_name("plan.json")
    assert main(["plan", str(run_file), "--out", str(plan_file)]) == 0
    capsys.readouterr()
    plan = json.loads(plan_file.read_text())
    plan["modules"]["vision"]["trainable"] = []
    plan_file.write_text(json.dumps(plan))
    expect_mistake(capsys, ["verify", run_file, "--plan", plan_file], "vision.trainable: is .*, but in the model it is")
