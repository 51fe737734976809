"""An exported model has the same weights and the same outputs, and what is wrong with one is said in one line."""

import json
import re
import weakref
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from tiny_encoders import ENCODERS
from tiny_language_models import SIZES, TINY
from tiny_multimodal import IMAGE_ID, prompts_of, tiny_multimodal
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from transformers import AutoTokenizer, LlamaForCausalLM, SiglipImageProcessor

from motet.config import EncoderConfig, LanguageModelConfig, ModelConfig
from motet.data.chat import word_level_tokenizer
from motet.errors import UserError
from motet.models.hub.export import (
    describe_config,
    describe_module,
    export_module,
    export_parts,
    graph_tensors,
    load_export,
)
from motet.models.hub.generation import generate_answers
from motet.models.hub.weights import CheckpointTensors
from motet.models.materialize import materialize
from motet.models.multimodal import MultimodalModule


def assert_same_parameters(left: nn.Module, right: nn.Module) -> None:
    expected, found = (
        graph_tensors(model) if isinstance(model, MultimodalModule) else dict(model.named_parameters())
        for model in (left, right)
    )
    assert set(found) == set(expected)
    for name, parameter in expected.items():
        assert torch.equal(found[name], parameter), name
        assert found[name].dtype == parameter.dtype, name


@pytest.mark.parametrize("family", ENCODERS)
def test_every_encoder_comes_back_by_plain_from_pretrained(family: str, tmp_path: Path) -> None:
    model = tiny_multimodal(vision=family)
    export_module(model, tmp_path / "out")
    encoder = model.vision_encoder.module
    assert_same_parameters(encoder, type(encoder).from_pretrained(tmp_path / "out" / "vision"))
    loaded = load_export(tmp_path / "out")
    assert_same_parameters(model, loaded)
    assert not loaded.training


@pytest.mark.parametrize("family", TINY)
def test_every_language_model_comes_back_by_plain_from_pretrained(family: str, tmp_path: Path) -> None:
    model = tiny_multimodal(language_model=family, dtype=torch.float32)
    export_module(model, tmp_path / "out")
    language_model = model.language_model.module
    loaded = type(language_model).from_pretrained(tmp_path / "out" / "language_model")
    assert_same_parameters(language_model, loaded)
    ids = torch.arange(3, 20)[None]
    assert torch.equal(loaded(ids).logits, language_model.eval()(ids).logits)


def test_tied_embeddings_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    model = tiny_multimodal(language_model="llama-tied")
    export_module(model, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "language_model" / "model.safetensors")
    assert "lm_head.weight" not in stored
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out" / "language_model")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, model.language_model.module.lm_head.weight)


def test_settings_tokenizer_and_processors_come_back(tmp_path: Path) -> None:
    tokenizer = word_level_tokenizer(["what do you see"])
    model = tiny_multimodal(vision="clip", feature_layer=-2, feature_select="full", merge="prepend")
    export_module(model, tmp_path / "out", processors={"vision": SiglipImageProcessor(), "language_model": tokenizer})
    loaded = load_export(tmp_path / "out")
    assert (loaded.vision_encoder.feature_layer, loaded.vision_encoder.feature_select) == (-2, "full")
    assert (loaded.merge, loaded.placeholder_token_ids) == ("prepend", {"vision": IMAGE_ID})
    assert AutoTokenizer.from_pretrained(tmp_path / "out" / "language_model").get_vocab() == tokenizer.get_vocab()
    assert SiglipImageProcessor.from_pretrained(tmp_path / "out" / "vision").size == SiglipImageProcessor().size
    assert loaded.language_model.module.generation_config.eos_token_id == tokenizer.eos_token_id


def test_a_projector_of_the_users_own_comes_back_into_his_module(tmp_path: Path) -> None:
    def own() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)).double()

    model = tiny_multimodal(projector=own())
    export_module(model, tmp_path / "out")
    assert_same_parameters(model, load_export(tmp_path / "out", projectors={"vision": own()}))
    with pytest.raises(UserError, match="projector of the user's own"):
        load_export(tmp_path / "out")


def test_large_models_are_written_in_shards_one_in_memory_at_a_time(tmp_path: Path) -> None:
    model = tiny_multimodal(dtype=torch.float32)
    tensors = graph_tensors(model)
    max_shard_size = 10_000
    largest = max(tensor.nbytes for tensor in tensors.values())
    alive = {"now": 0, "most": 0}

    def freed(num_bytes: int) -> None:
        alive["now"] -= num_bytes

    class Lazy(Mapping):
        """Reads a fresh copy at every access, as from disk, and counts the bytes that are held."""

        def __getitem__(self, name):
            tensor = tensors[name].clone()
            alive["now"] += tensor.nbytes
            alive["most"] = max(alive["most"], alive["now"])
            weakref.finalize(tensor, freed, tensor.nbytes)
            return tensor

        def __iter__(self):
            return iter(tensors)

        def __len__(self):
            return len(tensors)

    export_parts(Lazy(), describe_module(model), tmp_path / "out", max_shard_size=max_shard_size)
    assert len(list((tmp_path / "out" / "language_model").glob("model-*.safetensors"))) > 3
    assert sum(tensor.nbytes for tensor in tensors.values()) > 5 * (max_shard_size + largest)
    assert 0 < alive["most"] <= max_shard_size + 2 * largest
    assert_same_parameters(model, load_export(tmp_path / "out"))


def test_a_run_file_and_a_checkpoint_are_exported(tmp_path: Path) -> None:
    vision = {**ENCODERS["siglip"][2]}
    config = ModelConfig.model_validate(
        {
            "encoders": {"vision": {"config": "SiglipVisionConfig", "values": vision, "projector": "linear"}},
            "language_model": {"config": "LlamaConfig", "values": SIZES},
        }
    )
    model = tiny_multimodal(projector="linear", dtype=torch.float32)
    tensors = graph_tensors(model)
    # As motet.runtime.checkpoint.checkpoint writes them: a file of each rank, the optimizer's tensors among them.
    names = sorted(tensors)
    checkpoint = tmp_path / "step_00000001"
    first = {f"model/{name}": tensors[name] for name in names[::2]}
    moments = {f"optimizer/exp_avg/{name}": tensors[name] + 1 for name in names[::2]}
    writer = HuggingFaceStorageWriter(str(checkpoint), save_distributed=True)
    dcp.save(first | moments, storage_writer=writer, no_dist=True)
    save_file({f"model/{name}": tensors[name] for name in names[1::2]}, checkpoint / "shard-00002.safetensors")
    lazily = CheckpointTensors(checkpoint)
    assert set(lazily) == set(tensors)
    export_parts(lazily, describe_config(config, {"vision": IMAGE_ID}), tmp_path / "out")
    assert_same_parameters(model, load_export(tmp_path / "out"))


def test_the_readme_loads_every_part_without_motet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_multimodal(audio="whisper", dtype=torch.float32).eval()
    export_module(model, tmp_path / "out", processors={"language_model": word_level_tokenizer(["what do you see"])})
    text = (tmp_path / "out" / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert f"id {IMAGE_ID}" in text
    assert "motet" not in code
    monkeypatch.chdir(tmp_path / "out")
    loaded: dict = {}
    exec(code, loaded)
    pixels = torch.linspace(-1, 1, 3 * 16 * 16).view(1, 3, 16, 16)
    vision, language_model = model.vision_encoder, model.language_model.module
    with torch.no_grad():
        tokens = loaded["vision_projector"](loaded["vision"](pixels).last_hidden_state)
        assert torch.equal(tokens, vision.projector(vision.module(pixels).last_hidden_state))
        logits = loaded["language_model"](inputs_embeds=tokens).logits
        assert torch.equal(logits, language_model(inputs_embeds=tokens).logits)
    assert_same_parameters(model.audio_encoder.module, loaded["audio"])
    assert_same_parameters(model.audio_encoder.projector, loaded["audio_projector"])
    assert loaded["tokenizer"].convert_tokens_to_ids("see") > 0


def test_an_earlier_export_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    model = tiny_multimodal()
    export_module(model, tmp_path / "out")
    with torch.no_grad():
        model.vision_encoder.projector.linear_1.weight.add_(1)
    export_module(model, tmp_path / "out")
    assert_same_parameters(model, load_export(tmp_path / "out"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="not an earlier export"):
        export_module(model, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").is_file()


def test_an_export_that_fails_leaves_the_earlier_one(tmp_path: Path) -> None:
    model = tiny_multimodal()
    export_module(model, tmp_path / "out")

    class FullDisk:
        def save_pretrained(self, folder: Path) -> None:
            raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        export_module(model, tmp_path / "out", processors={"language_model": FullDisk()})
    assert_same_parameters(model, load_export(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _without(name: str):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def _with(name: str, tensor: torch.Tensor):
    return lambda tensors: {**tensors, name: tensor}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without("vision.module.post_layernorm.weight"), "vision.module has no tensor post_layernorm.weight"),
        (_without("vision.projector.linear_1.bias"), "vision.projector has no tensor linear_1.bias"),
        (_without("language_model.module.lm_head.weight"), "language_model.module has no tensor lm_head.weight"),
        (
            _with("language_model.module.model.norm.weight", torch.ones(5)),
            r"language_model.module.model.norm.weight is \[5\] and should be \[32\]",
        ),
        (_with("vision.projector.linear_2.bias", torch.ones(7)), r"linear_2.bias is \[7\] and should be \[32\]"),
        (_with("audio.module.conv1.weight", torch.ones(7)), "audio.module.conv1.weight belongs to no part"),
        (_with("vision.module.layer_99.weight", torch.ones(7)), "vision.module has no parameter layer_99.weight"),
    ],
)
def test_tensors_of_another_model_are_refused(change, words: str, tmp_path: Path) -> None:
    model = tiny_multimodal()
    with pytest.raises(UserError, match=words) as caught:
        export_parts(change(graph_tensors(model)), describe_module(model), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def _cut_short(folder: Path) -> None:
    path = folder / "vision" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _drop_a_tensor(folder: Path) -> None:
    path = folder / "language_model" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


def _reshape_a_tensor(folder: Path) -> None:
    path = folder / "vision_projector" / "model.safetensors"
    save_file(load_file(path) | {"linear_1.bias": torch.ones(3)}, path)


def _of_another_format(folder: Path) -> None:
    manifest = json.loads((folder / "motet.json").read_text())
    (folder / "motet.json").write_text(json.dumps(manifest | {"format": 2}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "motet.json").unlink(), "is not an exported model"),
        (lambda folder: (folder / "motet.json").write_text("{"), "motet.json: is damaged"),
        (_of_another_format, "has another format"),
        (lambda folder: (folder / "vision" / "config.json").unlink(), "config.json: is missing"),
        (lambda folder: (folder / "vision" / "model.safetensors").unlink(), "vision: cannot be loaded"),
        (
            lambda folder: (folder / "vision_projector" / "model.safetensors").unlink(),
            "vision_projector: config.json or model.safetensors is missing",
        ),
        (_cut_short, "vision: cannot be loaded"),
        (_drop_a_tensor, "language_model: has no tensor model.norm.weight"),
        (_reshape_a_tensor, "vision_projector: cannot be loaded"),
    ],
)
def test_a_damaged_export_is_refused(damage, words: str, tmp_path: Path) -> None:
    export_module(tiny_multimodal(), tmp_path / "out")
    damage(tmp_path / "out")
    with pytest.raises(UserError, match=words) as caught:
        load_export(tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_model_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no model"):
        CheckpointTensors(tmp_path)
    (tmp_path / "shard.safetensors").write_bytes(b"cut short")
    with pytest.raises(UserError, match="is damaged"):
        CheckpointTensors(tmp_path)


@pytest.mark.parametrize("family", ["dinov2", "clip", "whisper", "qwen2_audio"])
def test_a_part_stands_as_path_in_another_run(family: str, tmp_path: Path) -> None:
    model = tiny_multimodal(vision=family, language_model="llama-tied", dtype=torch.float32)
    export_module(model, tmp_path / "out")
    encoder = materialize(EncoderConfig(path=str(tmp_path / "out" / "vision")), "encoder", name="v", where="model.v")
    assert_same_parameters(model.vision_encoder.module, encoder)
    path = str(tmp_path / "out" / "language_model")
    llm = materialize(LanguageModelConfig(path=path), "language_model", name="l", where="model.l")
    assert_same_parameters(model.language_model.module, llm)


def test_the_exported_model_answers_as_the_one_in_memory(tmp_path: Path) -> None:
    model = tiny_multimodal(audio="qwen2_audio", language_model="qwen3")
    prompts = prompts_of(model)
    export_module(model, tmp_path / "out")
    expected = generate_answers(model, prompts, max_new_tokens=5)
    assert generate_answers(tmp_path / "out", prompts, max_new_tokens=5) == expected
