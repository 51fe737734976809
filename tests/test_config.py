"""Run files and plans are read strictly, and what is wrong is told in one line with what would be right."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkout import ROOT

from docs.generate.run_file import describe, descriptions
from motet.config import RunConfig, load_run_config
from motet.errors import UserError
from motet.plan import ModulePlan, Plan, Replica, Stage

RUN = """
model:
  encoders:
    vision:
      config: SiglipVisionConfig
      values: {hidden_size: 64}
      train: {module: false}
  language_model:
    config: LlamaConfig
data: {kind: dial-a-digit}
train:
  learning_rate: 1e-3
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


def test_reads_values_and_defaults(run_file: Path) -> None:
    config = load_run_config(run_file)
    assert config.train.learning_rate == 1e-3
    assert config.train.betas == (0.9, 0.95)
    assert config.model.module_names == ("vision", "language_model")
    assert not config.model.encoders["vision"].train.module
    assert config.model.encoders["vision"].train.projector
    assert config.parallel.planner == "cornstarch"


def test_overrides_replace_and_add(run_file: Path) -> None:
    config = load_run_config(
        run_file,
        [
            "train.steps=7",
            "model.encoders.vision.values.num_hidden_layers=2",
            "parallel={planner: explicit, explicit: {vision: {}, language_model: {pp: 2, layers_per_stage: [3, 4]}}}",
            "data={kind: conversations, files: a.jsonl}",
            "train.resume=latest",
        ],
    )
    assert config.train.steps == 7
    assert config.model.encoders["vision"].values == {"hidden_size": 64, "num_hidden_layers": 2}
    assert config.parallel.explicit["language_model"].layers_per_stage == (3, 4)
    assert config.data.kind == "conversations"
    assert config.data.files == ("a.jsonl",)


def test_is_frozen(run_file: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_run_config(run_file).train.steps = 3


def test_every_field_says_what_it_means() -> None:
    """The run file's page is made of these."""
    from pydantic import BaseModel

    sections, seen = [RunConfig], set[type[BaseModel]]()
    while sections:
        section = sections.pop()
        if section in seen:
            continue
        seen.add(section)
        described = descriptions(section)
        for name, field in section.model_fields.items():
            kinds = [k for k in _types_in(field.annotation) if isinstance(k, type) and issubclass(k, BaseModel)]
            sections += kinds
            assert described.get(name) or kinds or name == "kind", f"{section.__name__}.{name} has no docstring"
    assert len(seen) > 8


def test_the_page_of_the_run_file_is_up_to_date() -> None:
    page = ROOT / "docs" / "run-file.md"
    assert page.read_text() == describe(), "run: make docs"


def _types_in(annotation: Any) -> list[Any]:
    from typing import get_args

    return [annotation, *(inner for argument in get_args(annotation) for inner in _types_in(argument))]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stpes=3", "train.stpes: is not a known key; did you mean 'steps'?"),
        ("trian={}", "trian: is not a known key; did you mean 'train'?"),
        ("model.encoders.vision.train.modul=true", "model.encoders.vision.train.modul: .*did you mean 'module'"),
        ("train.steps=many", 'train.steps: is "many"; give a whole number at least 1'),
        ("train.steps=0", "train.steps: is 0; give a whole number at least 1"),
        ("train.steps=1.5", r"train.steps: is 1.5; give a whole number"),
        ("train.steps=true", "train.steps: is true; give a whole number"),
        ("train.betas=[0.9, 2]", r"train.betas\[1\]: is 2; give a number at least 0 and below 1"),
        ("train.betas=[0.9]", r"train.betas\[1\]: is missing"),
        ("train.metrics=[jsnl]", r"train.metrics\[0\]: is \"jsnl\"; did you mean 'jsonl'"),
        ("train=3", "train: is 3; give a mapping with the keys steps, "),
        ("data.kind=dial", "data.kind: is 'dial'; give one of dial-a-digit, conversations"),
        ("data={}", "data.kind: is missing; give one of"),
        ("data={kind: conversations}", "data.files: is missing; give a list of at least 1, each entry a text"),
        ("data.max_digits=9", "data.max_digits: is 9; give a whole number at least 1 and at most 8"),
        ("data={kind: dial-a-digit, no_image: 0.7, no_sound: 0.5}", "data: no_image and no_sound are 1.2 together"),
        ("data.drawings=0.5", "data.drawings: needs a generator of images; give model.generators, or leave it out"),
        ("model.language_model.config=null", "model.language_model: has no source; give one of hub, path and config"),
        ("model.language_model.hub=x", "model.language_model: hub and config are given; keep one"),
        ("model.encoders.language_model={config: X}", "model.encoders.language_model: is the language model's name"),
        (
            "model.placeholder_tokens={x: a}",
            "model.placeholder_tokens.x: is not an encoder or generator; give one of vision",
        ),
        ("cluster={num_devices: 5, num_nodes: 2}", "cluster.num_devices: is 5, which 2 nodes cannot share equally"),
        ("parallel.explicit={vision: {}, language_model: {}}", "parallel.planner: is 'cornstarch', so explicit"),
        ("parallel.planner=explicit", "parallel.explicit: is empty"),
        ("parallel={planner: explicit, explicit: {vision: {}}}", "parallel.explicit: has no language_model"),
        (
            "parallel.recompute=['vision:half']",
            "parallel.recompute: vision has the kind 'half'; give blocks, attention",
        ),
        ("parallel.recompute=[vision, 'vision:offload']", "parallel.recompute: vision is listed twice; give it once"),
        ("parallel.recompute=[audio]", "parallel.recompute: there is no module 'audio'; the model has vision"),
        (
            "parallel={planner: explicit, explicit: {vision: {pp: 2, layers_per_stage: [3]}, language_model: {}}}",
            "parallel.explicit.vision.layers_per_stage: has 1 entries for pp: 2",
        ),
        (
            "parallel={planner: explicit, explicit: {vision: {ep: 2}, language_model: {}}}",
            "parallel.explicit.vision.ep: is 2, but only a language model has experts",
        ),
        ("train.steps.more=3", 'train.steps: is {"more": 3}'),
        ("train.learning_rate.x.y=3", "train.learning_rate is 0.001, which has no keys"),
        ("steps", "--set steps: is not of the form a.b.c=value"),
        ("train..steps=3", "is not of the form a.b.c=value"),
        ("train.steps=[1", "--set train.steps=.*correct the YAML"),
    ],
)
def test_explains_what_is_wrong(run_file: Path, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_run_config(run_file, [override])
    assert "\n" not in str(caught.value)


def test_refuses_a_model_with_nothing_to_train(run_file: Path) -> None:
    overrides = ["model.language_model.train.module=false", "model.encoders.vision.train.projector=false"]
    with pytest.raises(UserError, match="model: nothing is trainable; set"):
        load_run_config(run_file, overrides)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "line 1, column .*correct the YAML"),
        ("train: {steps: 1}\ntrain: {steps: 2}", "line 2, column 1: key 'train' stands twice"),
        ("train: {steps: 1, steps: 2}", "key 'steps' stands twice"),
        ("- a\n- b", "is not a mapping; a run file has the keys model, data"),
        ("", "is not a mapping"),
        ("!!python/object:os.system {}", "could not determine a constructor"),
        ("[a]: b", "a key must be a word"),
        ("model: &x {y: *z}", "undefined alias"),
        ("data: {kind: dial-a-digit}", "model: is missing; give a mapping"),
    ],
)
def test_refuses_what_is_no_run_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_run_config(path)
    assert str(caught.value).startswith(str(path))


def test_refuses_a_missing_and_a_binary_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing.yaml: cannot be read \(No such file or directory\)"):
        load_run_config(tmp_path / "nothing.yaml")
    (tmp_path / "image.yaml").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(UserError, match="is not a text file"):
        load_run_config(tmp_path / "image.yaml")


def test_merge_keys_and_anchors_work(tmp_path: Path) -> None:
    values = yaml.safe_load(RUN)
    text = yaml.safe_dump({k: v for k, v in values.items() if k != "cluster"})
    path = tmp_path / "run.yaml"
    path.write_text(text + "cluster: &c {num_devices: 4}\n")
    assert load_run_config(path).cluster.num_devices == 4


def plan() -> Plan:
    stages = (Stage(layers=(0, 2), ranks=(0,)), Stage(layers=(2, 4), ranks=(1, 2), tp_size=2))
    module = ModulePlan(
        kind="language_model", num_layers=4, replicas=(Replica(stages=stages),), trainable=((0, 4),), loss_weight=1.0
    )
    return Plan(modules={"language_model": module}, edges=(), num_microbatches=2)


def test_a_plan_round_trips() -> None:
    assert Plan.from_json(plan().to_json()) == plan()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["microbatches"], 3, "plan: microbatches: is not a known key; did you mean 'num_microbatches'"),
        (["num_microbatches"], None, "plan: num_microbatches: is null; give a whole number"),
        (["num_microbatches"], "4", 'plan: num_microbatches: is "4"; give a whole number'),
        (["modules", "language_model", "kind"], "encodr", "kind: is \"encodr\"; did you mean 'encoder'"),
        (["modules", "language_model", "replicas", 0, "stages", 1, "layer"], 2, r"stages\[1\].layer: .*'layers'"),
        (["modules", "language_model", "replicas", 0, "stages", 1, "layers"], [1, 4], r"plan: modules.*begins at 2"),
        (["modules", "language_model", "replicas", 0, "stages", 1, "ranks"], [1], "different ranks"),
        (["modules"], {}, "plan: modules: is empty"),
    ],
)
def test_explains_what_is_wrong_in_a_plan(path: list[Any], value: Any, message: str) -> None:
    document = json.loads(plan().to_json())
    at = document
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(UserError, match=message) as caught:
        Plan.from_json(json.dumps(document))
    assert "plan: plan:" not in str(caught.value)


def test_refuses_what_is_no_plan() -> None:
    with pytest.raises(UserError, match="plan: is not JSON"):
        Plan.from_json("{")
    with pytest.raises(UserError, match="plan: the whole: is"):
        Plan.from_json("[1]")
