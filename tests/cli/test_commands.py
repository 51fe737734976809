"""Every command from its arguments to its JSON, in this process."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mistakes import expect_mistake
from quick_profile import profile_quickly
from tiny_run import write_tiny_run

from motet.api import read_batch
from motet.cli.main import COMMANDS, main
from motet.config import load_run_config
from motet.costs.cost_model import CostTable
from motet.planner.from_run_file import plan_for, planning_problem

GENERATOR = (
    "{image: {config: SD3Transformer2DModel, queries: 2, values: {sample_size: 8, patch_size: 2, in_channels: 1, "
    "out_channels: 1, num_layers: 1, attention_head_dim: 8, num_attention_heads: 2, joint_attention_dim: 16, "
    "caption_projection_dim: 16, pooled_projection_dim: 16, pos_embed_max_size: 4}}}"
)
FORECAST_KEYS = {
    "planner",
    "fits",
    "iteration_time_s",
    "throughput_samples_per_s",
    "bubble_fraction",
    "mfu",
    "peak_memory_bytes",
    "num_devices",
    "stages",
    "lower_bound_s",
    "planning_time_s",
}
TWO_STAGES = (
    "parallel={planner: explicit, num_microbatches: 2, explicit: {vision: {}, audio: {}, language_model: {%s}}}"
)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_tiny_run(tmp_path)


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """What the command prints on stdout, which is one JSON object and nothing else."""
    capsys.readouterr()
    code = main([str(argument) for argument in (*arguments, "--json")])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


def test_help_needs_neither_torch_nor_time() -> None:
    code = (
        "import sys, time; started = time.perf_counter()\n"
        "from motet.cli.main import main\n"
        "try: main(['plan', '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "RUN.yaml" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert "--set a.b.c=value" in capsys.readouterr().out


def test_plan_and_simulate_tell_the_same(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    plan_file, picture, trace = (run_file.with_name(name) for name in ("plan.json", "timeline.png", "trace.json"))
    planned = run_json(capsys, "plan", run_file, "--out", plan_file)
    assert planned.keys() >= FORECAST_KEYS
    assert planned["num_devices"] == 4
    assert planned["iteration_time_s"] >= planned["lower_bound_s"] > 0
    simulated = run_json(capsys, "simulate", run_file, "--plan", plan_file, "--picture", picture, "--trace", trace)
    for key in FORECAST_KEYS - {"planning_time_s"}:
        assert simulated[key] == planned[key], key
    assert picture.stat().st_size > 1000
    assert json.loads(trace.read_text())["traceEvents"]


def test_an_edited_plan_is_what_is_simulated(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    plan_file = run_file.with_name("plan.json")
    run_json(capsys, "plan", run_file, "--set", TWO_STAGES % "pp: 2, layers_per_stage: [2, 3]", "--out", plan_file)
    plan = json.loads(plan_file.read_text())
    first, second = plan["modules"]["language_model"]["replicas"][0]["stages"]
    first["layers"], second["layers"] = [0, 4], [4, 5]
    plan_file.write_text(json.dumps(plan))
    stages = run_json(capsys, "simulate", run_file, "--plan", plan_file)["stages"]
    assert [stage["layers"] for stage in stages if stage["module"] == "language_model"] == [[0, 4], [4, 5]]


def test_people_get_a_table(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    assert main(["plan", str(run_file)]) == 0
    out = capsys.readouterr().out
    assert "planner cornstarch, 4 devices" in out
    assert "language_model" in out


def test_train_writes_all_that_it_says(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    options = ["--set", "train.eval_every=2", "--set", "train.checkpoint_every=2"]
    trained = run_json(capsys, "train", run_file, *options)
    assert trained["steps"] == 4
    assert len(trained["losses"]) == 4
    assert trained["world_size"] == 4
    assert set(trained["evaluations"]) == {"2", "4"}
    assert trained["predicted"].keys() >= FORECAST_KEYS
    assert trained["measured"]["iteration_time_s"] > 0
    assert {"planner", "fits", "mfu", "stages", "lower_bound_s", "planning_time_s"} <= trained["measured"].keys()
    assert all(stage["forward_s"] > 0 for stage in trained["measured"]["stages"])
    # A step is an iteration and the wait for its data.
    assert 0 < trained["steps_per_s"] <= 1 / trained["measured"]["iteration_time_s"]
    output = run_file.with_name("output")
    for name in ("timeline.png", "trace.json", "predicted.json", "measured.json", "export/motet.json"):
        assert (output / name).is_file(), name
    assert len((output / "metrics.jsonl").read_text().splitlines()) >= 4
    assert Path(trained["checkpoint"]).name == "step_00000004"

    more = ["--set", "train.steps=6", "--set", "train.resume=latest"]
    resumed = run_json(capsys, "train", run_file, *options, *more)
    assert len(resumed["losses"]) == 2
    assert resumed["losses"][0] < trained["losses"][0]


def test_what_processes_are_given_can_be_sent_to_them(run_file: Path) -> None:
    """Where they cannot be forked (CUDA), it is pickled."""
    config = load_run_config(run_file)
    batch = read_batch(config)
    plan = plan_for(config, planning_problem(config, batch.samples))
    config_there, plan_there, batch_there = pickle.loads(pickle.dumps((config, plan, batch)))
    assert (config_there, plan_there, batch_there.samples) == (config, plan, batch.samples)
    i = next(i for i, sample in enumerate(batch.samples) if sample.has("vision"))
    there, here = (b.features("vision", i)["pixel_values"] for b in (batch_there, batch))
    assert there.equal(here)


def test_verify_compares_every_parameter(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    verified = run_json(capsys, "verify", run_file, "--set", TWO_STAGES % "pp: 2", "--dtype", "float64")
    assert verified["passed"]
    assert verified["loss_rel_err"] <= 1e-9
    assert verified["max_grad_rel_err"] <= 1e-9
    assert verified["num_parameters_compared"] > 80
    assert verified["world_size"] == 4
    assert verified.keys() >= {"loss_reference", "loss_distributed", "floored_parameters", "worst_parameter"}


def test_verify_that_fails_exits_with_1(
    capsys: pytest.CaptureFixture[str], run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from motet.runtime.verification import comparison

    monkeypatch.setitem(comparison.TOLERANCES, "float32", 0.0)
    assert main(["verify", str(run_file)]) == 1
    assert "NOT equal to one process" in capsys.readouterr().out


@pytest.mark.campaign
def test_profile_in_float64(
    capsys: pytest.CaptureFixture[str], run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a language model with cross-attention: encoder outputs enter it in the same dtype."""
    profile_quickly(monkeypatch)
    values = "hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, vocab_size: 64, "
    values += "num_key_value_heads: 2, cross_attention_layers: [1], pad_token_id: 0, bos_token_id: 1, eos_token_id: 2"
    model = f"model.language_model={{config: MllamaTextConfig, values: {{{values}}}}}"
    overrides = [model, "model.merge=cross_attention", "train.dtype=float64", "cluster.num_devices=2"]
    costs = run_file.with_name("costs.json")
    run_json(capsys, "profile", run_file, "--out", costs, *(part for each in overrides for part in ("--set", each)))
    assert CostTable.load(costs).modules.keys() == {"vision", "audio", "language_model"}


def test_demo_goes_the_whole_way(
    capsys: pytest.CaptureFixture[str], run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile_quickly(monkeypatch)
    overrides = ("train.checkpoint_every=4", f"model.generators={GENERATOR}", "data.drawings=0.5")
    shown = run_json(capsys, "demo", run_file, *(part for each in overrides for part in ("--set", each)))
    output = run_file.with_name("output")
    costs = CostTable.load(output / "costs.json")
    assert costs.modules.keys() == {"vision", "audio", "language_model", "image_queries", "image"}
    assert shown["predicted"]["costs"]["source"] == "profiled"
    drawings, answers = shown["drawings"], shown["answers"]
    assert answers["num_samples"] + drawings["num_drawings"] == 16
    assert answers["accuracy"].keys() >= {"seen_digits", "heard_digits", "answers"}
    assert drawings["num_drawings"] > 2
    assert set(drawings["right"]) == {"told", "sum", "seen", "heard"}
    assert 0 <= drawings["right_without_condition"] <= 1
    assert shown["seconds"] == pytest.approx(sum(shown["seconds_of"].values()))
    assert set(shown["seconds_of"]) == {"profile", "plan", "train", "evaluate"}
    assert (output / "export" / "language_model" / "model.safetensors").is_file()
    assert (output / "export" / "image" / "diffusion_pytorch_model.safetensors").is_file()
    assert Path(drawings["sheet"]).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("key", ["train.checkpoint_every=0", "train.export=false"])
def test_demo_without_an_export_is_refused(capsys: pytest.CaptureFixture[str], key: str) -> None:
    expect_mistake(capsys, ["demo", "--set", key], rf"{key.partition('=')[0]}: is \w+, (so|but) the demo ")


def test_demo_without_diffusers_is_refused(
    capsys: pytest.CaptureFixture[str], run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert main(["demo", "--set", f"train.output={run_file.with_name('output')}"]) == 2
    err = capsys.readouterr().err.strip()
    assert "needs the package diffusers" in err
    assert "pip install 'motet[generators]'" in err
    assert "\n" not in err


def test_torchrun_starts_the_processes_and_train_joins(run_file: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "motet.cli.main", "train", str(run_file), "--json", "--set", "train.steps=2"]
    command += ["--set", "cluster.num_devices=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    trained = json.loads(done.stdout)
    assert trained["world_size"] == 2
    assert len(trained["losses"]) == 2
