"""Encoders of the user's own: registered in Python, named in a run file, or found by an entry point of a package."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from checkout import ROOT
from conversation_files import words
from distributed import run_distributed
from PIL import Image
from sampling import in_campaigns
from tiny_mllm import gradients_of, randomize, tiny_llama
from torch import Tensor, nn

from motet import ModalityModule, MultimodalModule, MultimodalParallelSpec, ParallelSpec, register_encoder, verify
from motet.api import make_plan
from motet.cli.main import main
from motet.config import RunConfig
from motet.data.chat import CHAT_TEMPLATE, word_level_tokenizer
from motet.data.run_file import open_data
from motet.errors import UserError
from motet.families.encoders import own_encoders
from motet.families.entry_points import loaded
from motet.models.hub.export import export_module, load_export
from motet.models.materialize import float64_throughout
from motet.runtime.assembly import check_linears
from motet.strict_parsing import parse_strictly

POINTS, SOUND = 38, 39


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The encoders that `examples/` shows."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("own_encoders")


@pytest.fixture
def _float64() -> Iterator[None]:
    with float64_throughout():
        yield


def model_of(examples: Any) -> MultimodalModule:
    torch.manual_seed(0)
    model = MultimodalModule(
        {"cloud": ModalityModule(examples.PointNet(), "mlp"), "sound": ModalityModule(examples.SoundNet(), "linear")},
        tiny_llama(),
        placeholder_token_ids={"cloud": POINTS, "sound": SOUND},
    ).double()
    randomize(model)
    return model


def batch_of(items: list[tuple[int, int]]) -> dict[str, Tensor]:
    """`items`: (clouds of two tokens, sounds of 25) of each sample."""
    draw = torch.Generator().manual_seed(0)
    rows = [[5, *[POINTS] * 2 * clouds, 6, *[SOUND] * 25 * sounds, 7, 8] for clouds, sounds in items]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    labels = ids.masked_fill((ids >= POINTS) | (mask == 0), -100)
    clouds, sounds = (sum(counts) for counts in zip(*items, strict=True))
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels,
        "points": torch.randn(clouds, 32, 3, generator=draw, dtype=torch.float64),
        "waveform": torch.randn(sounds, 4000, generator=draw, dtype=torch.float64),
    }


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("pp", [1, 2])
def test_a_model_on_many_processes_equals_one(examples: Any, pp: int) -> None:
    """With a projector on a stage of its own, too."""
    batch = batch_of([(1, 1), (0, 1), (2, 0), (0, 0)])
    reference = model_of(examples)
    loss = reference(**batch).loss
    loss.backward()
    expected = {name.removeprefix("encoders."): g for name, g in gradients_of(reference).items()}
    spec = MultimodalParallelSpec(
        {"cloud": ParallelSpec(pp_size=pp), "sound": ParallelSpec()},
        ParallelSpec(),
        num_microbatches=2,
        microbatch_size=2,
    )

    def work(rank: int) -> tuple[float, dict[str, Tensor]]:
        model = spec.apply(model_of(examples))
        found = model.execute(batch).loss.item()
        return found, {p.name: p.parameter.grad for p in model._engine.model.parameters}

    results = run_distributed(work, 2 + pp)
    seen = {name: gradient for _, held in results for name, gradient in held.items()}
    assert seen.keys() == expected.keys()
    assert all(found == pytest.approx(loss.item(), rel=1e-11) for found, _ in results)
    for name, gradient in seen.items():
        assert (gradient - expected[name]).norm() <= 1e-9 * max(float(expected[name].norm()), 1e-6), name


def test_what_is_read_of_the_module(examples: Any) -> None:
    config = own_encoders.adopt(examples.SoundNet(width=8))
    assert config is not None
    assert (config.hidden_size, config.num_tokens((4000,)), config.num_tokens((1600,))) == (8, (25, 25), (10, 10))
    workload = own_encoders.own_workload(config)
    assert workload.num_parameters == sum(p.numel() for p in examples.SoundNet(width=8).parameters())
    first, second = workload.layers[0].linears
    assert (first.in_features, first.out_features, first.rows_per_token) == (16, 8, 10)
    assert (second.in_features, second.out_features, second.rows_per_token) == (80, 8, 1)


class Mixer(nn.Module):
    """Embedding, a list of blocks, and a head that halves the tokens; `variant`: what keeps it from being cut."""

    def __init__(self, variant: str = "") -> None:
        super().__init__()
        self.variant = variant
        self.embed, self.places = nn.Linear(3, 12), nn.Embedding(16, 12)
        self.trunk = nn.Module()
        self.trunk.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12)) for _ in range(3)
        )
        self.head = nn.Linear(24, 10)
        if variant == "loose":
            self.bias = nn.Parameter(torch.ones(12))

    def forward(self, points: Tensor) -> Tensor:
        first = self.embed(points) + self.places(torch.arange(points.shape[1], device=points.device))
        hidden = first + self.bias if self.variant == "loose" else first
        for i, block in enumerate(self.trunk.blocks):
            if self.variant == "between" and i == 1:
                hidden = 2 * hidden
            hidden = block(hidden)
        if (
            self.variant == "skip"
            or (self.variant == "long" and points.shape[1] > 8)
            or (self.variant == "training" and self.training)
        ):
            hidden = hidden + first
        if self.variant == "twice":
            hidden = self.embed(hidden[..., :3])
        return self.head(hidden.unflatten(1, (-1, 2)).flatten(2))


register_encoder(Mixer, modality="points", example=(8, 3))


def mixing(variant: str = "") -> MultimodalModule:
    torch.manual_seed(0)
    encoder = ModalityModule(Mixer(variant), "mlp")
    model = MultimodalModule({"cloud": encoder}, tiny_llama(), placeholder_token_ids={"cloud": POINTS}).double()
    randomize(model)
    return model


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("layers", [(1, 3, 2), *in_campaigns([((2, 2, 2),), ((4, 1, 1),)])])
def test_a_regular_module_is_cut(layers: tuple[int, ...]) -> None:
    """Embedding, three blocks, head and projector; samples with clouds of different sizes, and without."""
    rows = [[POINTS] * 4 + [5, 6], [POINTS] * 8 + [7], [5, 6, 7], [POINTS] * 4 + [8]]
    ids = torch.tensor([row + [0] * (9 - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (9 - len(row)) for row in rows])
    batch = {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill((mask == 0) | (ids == POINTS), -100),
        "points": torch.randn(4, 8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    }
    config = own_encoders.adopt(Mixer())
    assert config is not None
    assert config.blocks is not None
    assert (config.blocks.path, config.blocks.before, config.blocks.after) == (
        "trunk.blocks",
        ("embed", "places"),
        ("head",),
    )
    assert (config.hidden_size, config.output_size, config.num_tokens((8, 3))) == (12, 10, (8, 4))
    assert own_encoders.own_workload(config).num_parameters == sum(p.numel() for p in Mixer().parameters())
    reference = mixing()
    loss = reference(**batch).loss
    loss.backward()
    expected = {name.removeprefix("encoders."): g for name, g in gradients_of(reference).items()}
    plain = reference.cloud_encoder
    whole = plain.projector(plain.module(batch["points"]))
    assert reference.run_node("cloud", reference.read_batch(batch), {}).hidden.allclose(whole.flatten(0, 1))
    spec = MultimodalParallelSpec(
        {"cloud": ParallelSpec(pp_size=3, layers_per_stage=layers)},
        ParallelSpec(),
        num_microbatches=2,
        microbatch_size=2,
    )

    def work(rank: int) -> tuple[float, dict[str, Tensor]]:
        model = spec.apply(mixing())
        found = model.execute(batch).loss.item()
        return found, {p.name: p.parameter.grad for p in model._engine.model.parameters}

    results = run_distributed(work, 4)
    seen = {name: gradient for _, held in results for name, gradient in held.items()}
    assert seen.keys() == expected.keys()
    assert all(found == pytest.approx(loss.item(), rel=1e-11) for found, _ in results)
    for name, gradient in seen.items():
        assert (gradient - expected[name]).norm() <= 1e-9 * max(float(expected[name].norm()), 1e-6), name


@pytest.mark.parametrize("variant", ["loose", "between", "skip", "twice", "training"])
def test_a_module_that_does_anything_else_is_one_stage(variant: str) -> None:
    config = own_encoders.adopt(Mixer(variant))
    assert config is not None
    assert config.blocks is None


def test_items_with_which_it_does_something_else_are_refused() -> None:
    config = own_encoders.adopt(Mixer("long"))
    assert config is not None
    assert config.blocks is not None
    with pytest.raises(UserError, match=r"does not run through its blocks alone for an item of shape \[10, 3\]"):
        config.num_tokens((10, 3))


def test_an_export_is_loaded_into_modules_of_ones_own(examples: Any, tmp_path: Path) -> None:
    model = model_of(examples)
    export_module(model, tmp_path / "exported")
    batch = batch_of([(1, 1), (1, 0)])
    with pytest.raises(UserError, match=r"exported/cloud: is an encoder of your own; make it and give it as encoders="):
        load_export(tmp_path / "exported")
    own = {"cloud": examples.PointNet(), "sound": examples.SoundNet()}
    loaded = load_export(tmp_path / "exported", encoders=own).double()
    assert loaded(**batch).loss.item() == pytest.approx(model(**batch).loss.item(), rel=1e-6)
    assert "...  # A own_encoders.PointNet of your own" in (tmp_path / "exported" / "README.md").read_text()


class Rejected(nn.Module):
    """What it returns is not tokens."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.weight, self.what = nn.Parameter(torch.ones(3)), what

    def forward(self, items: Tensor) -> Any:
        return self.what(items * self.weight)


def test_modules_that_cannot_be_encoders() -> None:
    with pytest.raises(
        UserError, match=r"encoder: Sequential is not known; .* make it known by motet.register_encoder"
    ):
        MultimodalModule({"a": nn.Sequential(nn.Linear(2, 2))}, tiny_llama())
    with pytest.raises(UserError, match="register_encoder: 7 is not a class of torch modules"):
        register_encoder(7, modality="points", example=(3,))
    with pytest.raises(UserError, match="modality '3d points' and example"):
        register_encoder(Rejected, modality="3d points", example=(3,))
    register_encoder(Rejected, modality="points", example=(4, 3))
    for what, message in (
        (lambda x: x.sum(), r"its forward returns a tensor \[\]; return \[items, tokens, width\]"),
        (lambda x: "tokens", "its forward returns a str"),
        (lambda x: x @ x, r"Rejected cannot take an item of shape \[4, 3\]"),
    ):
        with pytest.raises(UserError, match=message):
            ModalityModule(Rejected(what))


def test_a_batch_norm_that_is_trained_is_refused() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(3, 32), nn.BatchNorm1d(32)

        def forward(self, points: Tensor) -> Tensor:
            return self.norm(self.linear(points).mT).mT

    register_encoder(Normed, modality="points", example=(4, 3))
    batch = {"input_ids": torch.tensor([[38] * 4 + [5, 6]]), "points": torch.randn(1, 4, 3)}
    for trains in (True, False):
        encoder = ModalityModule(Normed())
        encoder.module.train(trains)
        model = MultimodalModule({"cloud": encoder}, tiny_llama(), placeholder_token_ids={"cloud": 38})
        if trains:
            with pytest.raises(UserError, match="Normed has a batch norm in training mode"):
                model(**batch)
        else:
            assert model(**batch).logits.shape == (1, 6, 40)


# Run files -----------------------------------------------------------------------------------------------------------

TEMPLATE_WORDS = [*words(), "Where is it and how does it sound ?"]


def records() -> list[dict[str, Any]]:
    def asks(question: str, **media: Any) -> dict[str, Any]:
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": "A cat."}]
        return {**media, "conversations": turns}

    return [
        asks("Where is it ? <points>", points="a.npy"),
        asks("<audio> how does it sound ?", audio="a.wav"),
        asks("What is old ?"),
        asks("<points> <audio> <points>", points=["a.npy", "b.npy"], audio="a.wav"),
    ]


def write_run(folder: Path, **encoders: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        np.save(folder / f"{name}.npy", rng.normal(size=(48, 3)).astype(np.float32))
    soundfile.write(folder / "a.wav", rng.uniform(-0.5, 0.5, 3000), 8000)
    Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(folder / "a.png")
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records()))
    tokenizer = word_level_tokenizer(TEMPLATE_WORDS)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<points>"]})
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder / "tokenizer")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 4}  # fmt: skip
    return {
        "model": {"encoders": encoders, "language_model": {"config": "LlamaConfig", "values": sizes}},
        "data": {
            "kind": "conversations",
            "files": str(folder / "data.jsonl"),
            "audio_folder": str(folder),
            "media_folder": str(folder),
            "tokenizer": str(folder / "tokenizer"),
        },
        "cluster": {"num_devices": 3},
        "parallel": {"num_microbatches": 2, "planner": "explicit",
                     "explicit": {**{name: {} for name in encoders}, "language_model": {}}},
        "train": {"global_batch_size": 4, "dtype": "float64", "steps": 2, "output": str(folder / "output"),
                  "checkpoint_every": 2},
    }  # fmt: skip


OWN = {
    "cloud": {"module": "own_encoders:PointNet", "values": {"width": 8}},
    "sound": {"module": "own_encoders:SoundNet", "values": {"width": 8}, "projector": "linear"},
}


@pytest.mark.usefixtures("examples")
def test_a_run_file_names_modules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = write_run(tmp_path, **OWN)
    run = parse_strictly(RunConfig, json.dumps(values), what="run.yaml")
    sample = open_data(run).train.sample(3)
    assert [(s.source, s.item, s.num_tokens) for s in sample.layouts["language_model"] if s.source] == [
        ("cloud", 0, 3),
        ("sound", 0, 25),
        ("cloud", 1, 3),
    ]
    found = verify(run)
    assert found["passed"]
    assert found["max_grad_rel_err"] < 1e-9
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    assert main(["train", str(tmp_path / "run.yaml"), "--set", "train.dtype=float32", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["steps"] == 2
    assert (
        json.loads((Path(result["export"]) / "cloud" / "config.json").read_text())["module"] == "own_encoders:PointNet"
    )


@pytest.mark.usefixtures("examples")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"module": "nowhere:Net"}, "model.encoders.cloud.module: nowhere:Net cannot be imported"),
        ({"module": "own_encoders:Net"}, "model.encoders.cloud.module: own_encoders:Net cannot be imported"),
        ({"module": "pointnet"}, "there is no entry point of this name in the group motet.encoders"),
        ({"module": "own_encoders:PointNet", "values": {"depth": 1}}, "cloud.values: own_encoders:PointNet cannot be"),
        ({"module": "torch.nn:GELU"}, "cloud.module: GELU is not registered; call motet.register_encoder"),
        ({"module": "builtins:dict"}, "cloud.module: builtins:dict makes a dict, which is not a torch module"),
        ({"module": "a:b", "config": "SiglipVisionConfig"}, "config and module are given; keep one"),
    ],
)
def test_mistakes_in_a_run_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "run.yaml").write_text(json.dumps(write_run(tmp_path, **{**OWN, "cloud": changes})))
    assert main(["plan", str(tmp_path / "run.yaml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_it_has_no_other_parallelism(examples: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = write_run(tmp_path, **OWN)
    values["cluster"]["num_devices"] = 4
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    for key in ("tp", "cp"):
        assert main(["plan", str(tmp_path / "run.yaml"), "--set", f"parallel.explicit.cloud.{key}=2"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "cloud" in line
        assert key in line


@pytest.mark.usefixtures("examples")
def test_its_linear_layers_do_not_compute_in_float8(tmp_path: Path) -> None:
    values = write_run(tmp_path, **OWN)
    values["train"]["linears"] = "float8"
    run = parse_strictly(RunConfig, json.dumps(values), what="run.yaml")
    with pytest.raises(UserError, match="not supported with encoders of your own, which cloud has"):
        check_linears(run, make_plan(run).plan, torch.device("cpu"))


# A package of its own ------------------------------------------------------------------------------------------------

PACKAGE = {
    "motet_registers/__init__.py": '''
"""DINOv2 with registers, which is in none of motet's tables."""

import motet
import numpy as np
from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel


def pixels(image):
    return np.asarray(image.load().resize((28, 28)), np.float32).transpose(2, 0, 1) / 255


motet.register_encoder(Dinov2WithRegistersModel, modality="image", example=(3, 28, 28), prepare=pixels)


def make(**values):
    return Dinov2WithRegistersModel(Dinov2WithRegistersConfig(image_size=28, **values))
''',
    "motet_registers-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: motet-registers\nVersion: 1.0\n",
    "motet_registers-1.0.dist-info/entry_points.txt": "[motet.encoders]\nregisters = motet_registers:make\n",
}


def test_a_family_from_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed, it is known by its name; no file of motet is changed."""
    for name, text in PACKAGE.items():
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    loaded.cache_clear()
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 2}
    values = write_run(tmp_path, vision={"module": "registers", "values": small})
    values["data"]["image_folder"] = str(tmp_path)
    turns = [{"from": "human", "value": "What is this? <image>"}, {"from": "gpt", "value": "A cat."}]
    lines = [{"image": "a.png", "conversations": turns}, records()[2]] * 2
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values["cluster"]["num_devices"] = 2
    found = verify(parse_strictly(RunConfig, json.dumps(values), what="run.yaml"))
    assert found["passed"]
    assert found["max_grad_rel_err"] < 1e-9
    assert found["num_parameters_compared"] > 40
