"""What is wrong in the user's input gets exit code 2 and one clear line: which key or file, and what would be right."""

import json
from pathlib import Path

import pytest
from mistakes import expect_mistake
from tiny_run import write_tiny_run

from motet.cli.main import main

CONTEXT = "parallel={planner: explicit, explicit: {vision: {}, audio: {}, language_model: {cp: 3, context: {%s}}}}"
EXPLICIT = "parallel={planner: explicit, explicit: {vision: {%s}, audio: {%s}, language_model: {%s}}}"

DESCRIBED = "data={kind: described, %s}"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_tiny_run(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND; see motet --help"),
        (["plam", "run.yaml"], "invalid choice: 'plam' .*'plan'"),
        (["plan"], "required: RUN.yaml; see motet plan --help"),
        (["plan", "run.yaml", "--ouput", "x"], "unrecognized arguments: --ouput x"),
        (["plan", "nothing.yaml"], r"nothing.yaml: cannot be read \(No such file or directory\)"),
        (["verify", "run.yaml", "--dtype", "float8"], "invalid choice: 'float8'"),
        (["simulate", "run.yaml", "--seed", "-1"], "argument --seed: is '-1'; give a whole number of at least 0"),
    ],
)
def test_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    expect_mistake(capsys, arguments, message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "line 1, column 9: .*correct the YAML"),
        ("train: {}\ntrain: {}\n", "line 2, column 1: key 'train' stands twice"),
        ("just words", "is not a mapping; a run file has the keys model, data, cluster, parallel, train"),
    ],
)
def test_files_that_are_no_run_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    expect_mistake(capsys, ["plan", path], f"run.yaml: {message}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trian.steps=3", "trian: is not a known key; did you mean 'train'?"),
        ("train.steps=soon", 'train.steps: is "soon"; give a whole number at least 1'),
        ("train.lr_schedule=cosin", "train.lr_schedule: is \"cosin\"; did you mean 'cosine'?"),
        ("steps=", "steps: is not a known key; known are model, data"),
        ("train.steps", "--set train.steps: is not of the form a.b.c=value"),
        # The model.
        (
            "model.language_model.config=LamaConfig",
            "model.language_model.config: LamaConfig is not known; .*LlamaConfig",
        ),
        ("model.language_model.config=SiglipVisionConfig", "model.language_model: siglip_vision_model is an encoder"),
        ("model.encoders.vision.config=LlamaConfig", "model.encoders.vision: llama is a language model"),
        (
            "model.encoders.audio.feature_layer=1",
            "model.encoders.audio.feature_layer: whisper has no features before its head",
        ),
        ("model.encoders.vision.projector=conv", 'projector: is "conv"; give one of linear, mlp, null'),
        ("model.encoders.vision={path: /nowhere}", "model.encoders.vision.path: /nowhere"),
        (
            "model.merge=cross_attention",
            "model.merge: llama has no cross-attention layers; give placeholder or prepend",
        ),
        ("model.language_model.values.vocab_size=20", "vocabulary has 20 tokens, but the tokenizer has .*vocab_size"),
        (
            "model.encoders.vision.values.hidden_size=big",
            "model.encoders.vision.values.hidden_size: is .big.; give a whole number",
        ),
        (
            "model.language_model.values.num_hidden_layers=0",
            "model.language_model.values.num_hidden_layers: is 0; give a whole number of at least 1",
        ),
        (
            "model.language_model.values.num_hidden_layers=1000000000",
            "num_hidden_layers: is 1000000000; give at most 10000",
        ),
        ("model.language_model.values.hidden_size=1" + "0" * 30, "hidden_size: is 10*; give at most 100000000"),
        (EXPLICIT % ("dp: 1000000000", "", ""), "vision.dp: is 1000000000; give a whole number .* at most 131072"),
        ("parallel.limits={tp: [1" + "0" * 20 + "]}", r"parallel.limits.tp\[0\]: is 10*; give .* at most 131072"),
        ("model.language_model.values.num_attention_heads=true", "num_attention_heads: is True; give a whole number"),
        ("model.language_model.values.num_hidden_layer=2", "num_hidden_layer: .* did you mean 'num_hidden_layers'"),
        ("model.language_model.values.num_key_value_heads=3", "3 heads of keys do not divide 4 of queries"),
        (
            "model.language_model.values.hidden_size=33",
            "model.language_model.values: .*33.* is not a multiple of the number of attention heads .4",
        ),
        ("model.encoders.vision.values.hidden_size=33", "vision: siglip.* does not run .*33.*num_heads.: 2.*; change"),
        ("model.encoders.vision.values.patch_size=0", "vision.values.patch_size: is 0; give a whole number"),
        ("model.encoders.vision.values.patch_size=100", "vision: siglip.* does not run .*100 x 100.*; change"),
        ("model.encoders.vision.values.image_size=[1, 2, 3]", r"image_size: is \[1, 2, 3\]; give a whole number"),
        ("model.encoders.vision.feature_layer=-9", "model.encoders.vision.feature_layer: -9 is not within -3 to 2"),
        ("model.placeholder_tokens={vision: ''}", "placeholder_tokens.vision: is empty; give a token of the tokenizer"),
        ("model.placeholder_tokens={vision: <picture>}", "placeholder_tokens.vision: .*does not know '<picture>'"),
        ("model.encoders.audio.values.max_source_positions=26", "max_source_positions: 26 does not divide"),
        # The layout.
        ("parallel.planner=cornstrach", "parallel.planner: 'cornstrach' is not known; did you mean 'cornstarch'"),
        ("parallel.planner=best", "parallel.planner: 'best' is not known; give one of explicit, cornstarch"),
        ("parallel.schedule=1F1B", "parallel.schedule: '1F1B' is not known; did you mean '1f1b'"),
        ("parallel.schedule=fast", "parallel.schedule: 'fast' is not known; give one of gpipe, 1f1b"),
        (EXPLICIT % ("pp: 9", "", ""), "vision.pp is 9, but it has 5 layers; give at most 5"),
        (EXPLICIT % ("", "", "tp: 8"), "language_model.*8.*(divide|heads)"),
        (
            EXPLICIT.replace("explicit,", "explicit, placement: colocated,") % ("dp: 2", "", ""),
            "dp is 2 for vision but 1 for audio, which share ranks; give all modules the same",
        ),
        (EXPLICIT % ("", "", "pp: 3"), "plan uses 5 ranks but cluster has 4; set cluster.num_devices to 5"),
        (
            EXPLICIT % ("", "", "pp: 2, layers_per_stage: [1, 2]"),
            "language_model.layers_per_stage: .* adds up to 3; .*add up to 5",
        ),
        (EXPLICIT % ("", "", "cp: 0"), "language_model.cp: is 0; give a whole number at least 1"),
        (
            EXPLICIT % ("", "", "cp: 2"),
            "language_model.cp is 2, but microbatches have about 60 tokens, too few for 2 blocks of 128; give a",
        ),
        (
            EXPLICIT % ("", "", "fully_sharded: true"),
            "language_model.fully_sharded: no ranks share the parameters, because cp and sharded_replicas are 1; give "
            "a larger dp or cp",
        ),
        (
            EXPLICIT.replace("explicit,", "explicit, zero1: true,") % ("", "", "cp: 2, fully_sharded: true"),
            "zero1: explicit.language_model.fully_sharded shards the optimizer's state already; leave one of the two",
        ),
        (
            "parallel={zero1: true, planner: oobleck, limits: {cp: [1, 2], fully_sharded: true}}",
            "parallel.zero1: limits.fully_sharded shards the optimizer's state already; leave one of the two out",
        ),
        (EXPLICIT % ("cp: 2", "", ""), "vision.cp is 2, but microbatches have about 18 tokens, too few for 2 blocks"),
        (CONTEXT % "policy: lpd", "context.policy: is \"lpd\"; did you mean 'lpt'?"),
        (CONTEXT % "policy: best", 'context.policy: is "best"; give one of lpt, lpt_uncapped, snake'),
        (CONTEXT % "block_size: 0", "context.block_size: is 0; give a whole number at least 1"),
        (CONTEXT % "method: circle", 'context.method: is "circle"; give one of all_gather, ulysses, ring'),
        (
            CONTEXT % "block_size: 4, method: ulysses",
            "language_model.context.method: ulysses cannot divide 4 query heads by 3 ranks; use all_gather",
        ),
        ("model.media_attention=mine", 'media_attention: is "mine"; give one of causal, own_item, .* prefix, family'),
        (
            "parallel.schedule=distmm_pipe",
            "parallel.schedule: distmm_pipe is for contrastive towers; give 1f1b",
        ),
        ("parallel.assignment=entrian", "parallel.assignment: is \"entrian\"; did you mean 'entrain'"),
        ("parallel.assignment=best", 'parallel.assignment: is "best"; give one of contiguous, random'),
        ("parallel.max_packed_tokens=64", "parallel.max_packed_tokens: is read with packing: true only"),
        (
            EXPLICIT % ("num_microbatches: 3", "", ""),
            "explicit.vision.num_microbatches: applies to towers only; give parallel.num",
        ),
        ("parallel={planner: explicit, explicit: {vision: {}}}", "parallel.explicit: has no audio, language_model"),
        ("parallel.recompute=[video]", "parallel.recompute: there is no module 'video'; the model has vision, audio"),
        ("cluster.num_devices=1", "cluster.num_devices: is 1, but vision and audio and language_model need at least 2"),
        ("parallel.limits={tp: [3]}", "parallel.limits: tp is 3, which vision does not support; allow 1"),
        ("parallel={planner: auto, limits: {tp: [3]}}", "parallel.limits: tp is 3, which vision does not support"),
        (
            "parallel.limits={dp: [3]}",
            "cluster.num_devices: is 4, but vision and audio .* need at least 6 under placement parallel or coloc",
        ),
        (
            "parallel.limits={dp: [5]}",
            "parallel.limits: dp 5 and tp 1, the smallest allowed for vision, need 5",
        ),
        (
            "parallel={planner: auto, placement: replicated, limits: {modules: {language_model: {tp: [2]}}}}",
            "limits: modules that share ranks under placement replicated have no tp in common; allow one that they",
        ),
        (
            "parallel={planner: auto, placement: parallel, limits: {dp: [2]}}",
            "planner: no planner finds a plan; cluster.num_devices: is 4, .* at least 6 under placement parallel, w",
        ),
        (
            "parallel={planner: auto, limits: {cp: [2]}}",
            "parallel.limits.cp: language_model.cp is 2, but microbatches have about 60 tokens, too few for 2 b",
        ),
        ("parallel.limits={tp: []}", r"parallel.limits.tp: is \[\]; give a list of at least 1"),
        ("parallel.limits={dp: []}", r"parallel.limits.dp: is \[\]; give a list of at least 1"),
        (
            "parallel.limits={modules: {vision: {tp: []}}}",
            r"limits.modules.vision.tp: is \[\]; give a list of at least",
        ),
        (
            EXPLICIT.replace("explicit,", "explicit, limits: {dp: [1]},") % ("", "", ""),
            "parallel.limits.dp: is not read by planner explicit, whose degrees are in parallel.explicit; leave it",
        ),
        (
            EXPLICIT.replace("explicit,", "explicit, limits: {modules: {vision: {max_pp: 1}}},") % ("", "", ""),
            "parallel.limits.modules.vision.max_pp: is not read by planner explicit",
        ),
        (
            "parallel={planner: auto, limits: {fully_sharded: true}}",
            "parallel.limits.fully_sharded: is read by planner oobleck, but parallel.planner is auto; leave it out, or",
        ),
        (
            "parallel={planner: oobleck, limits: {fully_sharded: true}}",
            "parallel.limits.fully_sharded: ranks that share tokens .*, but parallel.limits.cp allows 1 alone; give",
        ),
        (
            "parallel={planner: auto, limits: {modules: {vision: {cp: [1, 2]}}}}",
            "limits.modules.vision.cp: is read by planner oobleck, but parallel.planner is auto; leave it out, or give",
        ),
        ("parallel={planner: oobleck, limits: {dp: [2]}}", "parallel.limits.dp: planner oobleck looks for the number"),
        (
            "parallel={planner: fsdp, limits: {tp: [2]}}",
            "tp of vision is 2, but planner fsdp supports only tp 1 for it",
        ),
        ("parallel={planner: disttrain, limits: {dp: [3]}}", "dp is 3, but disttrain divides the global batch of"),
        ("parallel={planner: entrain, limits: {dp: [3]}}", "entrain finds no layout of vision and audio"),
        ("cluster.device=gpu", 'cluster.device: is "gpu"; give one of cpu, cuda'),
        ("cluster.speeds=/dev", "cluster.speeds: /dev cannot be read .*profile --speeds. writes one"),
        ("train.seed=-1", "train.seed: is -1; give a whole number at least 0"),
        ("cluster.accelerator=h1000", "cluster: device 'h1000' is not known; give one of cpu, v100-16, a40"),
        ("cluster.costs=nothing.json", r"costs: nothing.json: cannot be read .*motet profile. writes one"),
        ("cluster.costs=/dev/null", "costs: /dev/null is not a cost table"),
        # The data.
        ("train.global_batch_size=100", "train.global_batch_size: is 100, but there are 64 training samples"),
        ("data.num_train=1000000000000", "data.num_train: is 1000000000000; give .* at least 1 and at most 100000000"),
        (DESCRIBED % "text_tokens: 1000000000000", "data.text_tokens: is 1000000000000; .* and at most 100000000"),
        (DESCRIBED % "images: {vision: {height: 8, width: 8, count: 1000000000}}", "data.images.vision.count: is 1000"),
        (DESCRIBED % "sounds: {audio: {seconds: 1e300}}", "data.sounds.audio.seconds: is 1e[+]300; .* at most 100000"),
        (
            "parallel.num_microbatches=9",
            "parallel.num_microbatches: is 9, but train.global_batch_size is 8, which leaves some empty; give at",
        ),
        ("data.max_digits=12", "data.max_digits: is 12; give a whole number at least 1 and at most 8"),
        ("data={kind: conversation, files: a}", "data.kind: is 'conversation'; did you mean 'conversations'?"),
    ],
)
def test_values_of_the_run_file(
    capsys: pytest.CaptureFixture[str], run_file: Path, override: str, message: str
) -> None:
    expect_mistake(capsys, ["plan", run_file, "--set", override], message)


@pytest.mark.parametrize(
    ("context", "model", "message"),
    [
        ("backend: flex, block_size: 16", [], "context.backend: flex has no backward on the CPU; give dense"),
        ("backend: triton, block_size: 12", [], "context.block_size is 12; kernels need a power of two of at least 16"),
        ("", ["attention_dropout=0.1"], "language_model has attention_dropout 0.1, which .* set it to 0, or use cp 1"),
    ],
)
def test_attention_that_cannot_be_computed(
    capsys: pytest.CaptureFixture[str], run_file: Path, context: str, model: list[str], message: str
) -> None:
    """On the machine where it is to run."""
    overrides = [EXPLICIT % ("", "", "cp: 2, context: {%s}" % (context or "block_size: 16"))]
    overrides += [f"model.language_model.values.{value}" for value in model]
    arguments = [argument for override in overrides for argument in ("--set", override)]
    expect_mistake(capsys, ["verify", run_file, *arguments], message)


def test_nothing_to_train(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    frozen = ["encoders.vision.train={module: false, projector: false}", "language_model.train.module=false"]
    frozen.append("encoders.audio.train={module: false, projector: false}")
    overrides = [argument for override in frozen for argument in ("--set", f"model.{override}")]
    expect_mistake(capsys, ["plan", run_file, *overrides], "model: nothing is trainable; set train.module or")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["modules", "vision", "num_layers"], 6, r"\[0\]: its stages end at layer 5, but the module has 6 layers"),
        (["num_microbatch"], 2, "num_microbatch: is not a known key; did you mean 'num_microbatches'?"),
        (["schedule"], "2f2b", "schedule '2f2b' is not known; known are gpipe, 1f1b"),
        (["run_ahead"], True, r"--plan .*plan\.json: run_ahead: no encoder begins with a frozen layer; freeze"),
        (["version"], 2, "version: is 2; this motet reads 1, so make the plan anew"),
        (["modules", "vision", "trainable"], [[0, 4]], r"vision.trainable: is \[\[0, 4\]\], but in the model it is"),
        (["edges"], [], "edges: vision must enter language_model at layers .0., as in the model"),
        (
            ["modules", "vision", "replicas", 0, "stages", 0, "ranks"],
            [7],
            "of 0..7 have no stage; number the ranks without gaps",
        ),
    ],
)
def test_plans(
    capsys: pytest.CaptureFixture[str], run_file: Path, path: list[str | int], value: object, message: str
) -> None:
    plan_file = run_file.with_name("plan.json")
    assert main(["plan", str(run_file), "--out", str(plan_file)]) == 0
    capsys.readouterr()
    document = at = json.loads(plan_file.read_text())
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    plan_file.write_text(json.dumps(document))
    expect_mistake(capsys, ["simulate", run_file, "--plan", plan_file], message)


def test_files_that_are_no_plans(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    expect_mistake(capsys, ["simulate", run_file, "--plan", "nothing.json"], "--plan nothing.json: cannot be read")
    expect_mistake(capsys, ["simulate", run_file, "--plan", run_file], "--plan .*run.yaml: plan: is not JSON")
    deep = run_file.with_name("deep.json")
    deep.write_text("[" * 100_000)
    expect_mistake(capsys, ["simulate", run_file, "--plan", deep], "--plan .*deep.json: plan: is not JSON")
    expect_mistake(
        capsys, ["plan", run_file, "--out", run_file.parent], "--out .*: cannot be written; give the path of"
    )


def test_a_plan_of_another_model(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    plan_file = run_file.with_name("plan.json")
    assert main(["plan", str(run_file), "--out", str(plan_file)]) == 0
    capsys.readouterr()
    deeper = ["--set", "model.language_model.values.num_hidden_layers=4"]
    arguments = ["simulate", run_file, "--plan", plan_file, *deeper]
    expect_mistake(capsys, arguments, "language_model.num_layers: is 5, but the model has 6")


def test_encoders_that_cannot_share_tokens(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    nodes = ["--set", "cluster={num_devices: 8, num_nodes: 4}"]
    shared = ["--set", "parallel={planner: oobleck, limits: {modules: {vision: {cp: [2]}}}}"]
    short = r"limits: no tp of \[1\] with a cp of \[2\] gives vision a stage .* leaves each rank some tokens"
    expect_mistake(capsys, ["plan", run_file, *nodes, *shared], short)
    pixtral = ["--set", "model.encoders.vision.config=PixtralVisionConfig"]
    refused = (
        r"limits.modules.vision.cp: is \[2\], but context parallelism is not supported for a pixtral; leave it out"
    )
    expect_mistake(capsys, ["plan", run_file, *nodes, *shared, *pixtral], refused)


def test_planner_auto_tells_the_cause(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    arguments = ["plan", run_file, "--set", "parallel.planner=auto", "--set"]
    apart = ["parallel.placement=parallel", "--set", "cluster.num_devices=2"]
    expect_mistake(capsys, [*arguments, *apart], "cluster.num_devices: is 2, .* at least 3 under placement parallel")
    replicas = ["parallel.limits={dp: [2]}", "--set", "cluster.num_devices=1"]
    expect_mistake(
        capsys, [*arguments, *replicas], "limits: dp 2 .* need 2 devices, but cluster.num_devices is 1; allow"
    )
    many = ["parallel.limits={dp: [16]}", "--set", "cluster.num_devices=16"]
    expect_mistake(
        capsys,
        [*arguments, *many],
        "limits.dp: the smallest size is 16, but train.global_batch_size is 8, which",
    )


def test_what_planner_explicit_reads_where_nodes_may_fail(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    """Templates of other pipelines are made beside the given ones, within these limits, and with ZeRO-1."""
    explicit = "zero1: true, planner: explicit, explicit: {vision: {}, audio: {}, language_model: {}}"
    common = ["--set", "train.failures={}", "--set", "cluster.num_devices=3"]
    limits = "parallel={limits: {max_pp: 2, %s}, " + explicit + "}"
    sharded = limits % "cp: [1, 2], fully_sharded: true"
    assert main(["plan", str(run_file), *common, "--set", sharded]) == 0
    capsys.readouterr()
    arguments = ["plan", run_file, *common, "--set", limits % "tp: [1]"]
    expect_mistake(capsys, arguments, "parallel.limits.tp: is not read by planner explicit")


def test_a_plan_whose_modules_shard_their_states(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    plan_file = run_file.with_name("plan.json")
    explicit = EXPLICIT % ("", "", "cp: 2, fully_sharded: true, context: {block_size: 4}")
    assert main(["plan", str(run_file), "--set", explicit, "--out", str(plan_file)]) == 0
    capsys.readouterr()
    for command in ("simulate", "verify", "train"):
        arguments = [command, run_file, "--plan", plan_file, "--set", "parallel.zero1=true"]
        message = "--plan .*plan.json: modules.language_model.fully_sharded shards .* set parallel.zero1 to false"
        expect_mistake(capsys, arguments, message)


def test_a_plan_whose_experts_could_be_lost(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    plan_file = run_file.with_name("plan.json")
    assert main(["plan", str(run_file), "--set", EXPLICIT % ("", "", "tp: 2"), "--out", str(plan_file)]) == 0
    capsys.readouterr()
    document = json.loads(plan_file.read_text())
    document["modules"]["language_model"]["ep"] = 2
    plan_file.write_text(json.dumps(document))
    arguments = ["train", run_file, "--plan", plan_file, "--set", "train.failures={}"]
    expect_mistake(capsys, arguments, "modules.language_model.ep: is 2, but experts of ranks that fail have no other")


def test_places_that_cannot_be_written(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    inside_a_file = run_file / "plan.json"
    assert main(["plan", str(run_file), "--out", str(inside_a_file)]) == 2
    assert "--out" in (error := capsys.readouterr().err)
    assert "cannot be written" in error.splitlines()[-1]
