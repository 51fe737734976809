"""Shapes that are read from modules, against the modules: parameters exactly, FLOPs as torch counts them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_configs import EVERY_MODEL, TEXT
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from motet.costs.analytic import layer_flops
from motet.costs.cost_model import Load
from motet.errors import UserError
from motet.families.shape_reading import module_shapes
from motet.families.shape_reading.module_shapes import make_shapes, module_workload, shape_of
from motet.shapes.module_shape import Attention, LayerShape, Linear
from motet.shapes.shape_card import ShapeCard, ShapeRequest, cards_folder, read_card, walker_files

EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
MLA = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
MECHANISMS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 2},  # Convolutions of width 1, learned positions.
    "granite": {"embedding_multiplier": 1.7},
    "qwen3_moe": {"num_experts": 4, **EXPERTS, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},  # Sinks, alternating windows.
    "deepseek_v3": {**MLA, **EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4},
    "bloom": {"n_layer": 2, "n_head": 4},  # Its attention does not go through transformers' interface.
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2, "n_groups": 1, "state_size": 8, "chunk_size": 32},
    "qwen3_next": {**EXPERTS, **LINEAR, "linear_value_head_dim": 16, "head_dim": 16, "num_experts": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 80},
}


def test_an_edit_of_the_walker_makes_cards_anew() -> None:
    assert Path(module_shapes.__file__).with_name("shape_walker.py") in walker_files()


@pytest.mark.parametrize("family", MECHANISMS)
def test_parameters_and_flops(family: str) -> None:
    config = AutoConfig.for_model(family, **{**TEXT, **MECHANISMS[family]})
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    workload = module_workload(config, role="language_model")
    assert workload.num_parameters == sum(p.numel() for p in model.parameters())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(64)[None], use_cache=False)
    load = Load(tokens=64, pairs=64**2, outputs=64, sequences=1)
    flops = sum(layer_flops(layer).forward.seconds(load) for layer in workload.layers)
    assert flops == pytest.approx(counter.get_total_flops(), rel=0.03)


def test_a_block() -> None:
    block = module_workload(LlamaConfig(**TEXT)).layers[1]
    inward, keys, gate = (Linear(64, size, cut="column") for size in (64, 32, 96))
    assert block == LayerShape(
        "block",
        64,
        (inward, keys, keys, Linear(64, 64, cut="row"), gate, gate, Linear(96, 64, cut="row")),
        Attention(4, 2, 16),
        other_parameters=2 * 64,
        saved_vectors=2,
        saved_vectors_for_weights=2,
        float32_vectors=2,
        gated=True,
    )


def test_windows_and_what_reads_an_encoder() -> None:
    assert [
        layer.attention and layer.attention.window for layer in module_workload(EVERY_MODEL["qwen2_5_vl"][0]).layers
    ] == [
        None,
        64,
        None,
        None,
    ]
    crossing = module_workload(EVERY_MODEL["mllama"][0]).layers[2]
    assert crossing.attention is not None
    assert crossing.attention.reads_encoder
    assert [linear.rows for linear in crossing.linears[:4]] == ["tokens", "incoming", "incoming", "tokens"]


def test_experts_have_copies_of_which_each_token_meets_some() -> None:
    config = AutoConfig.for_model("qwen3_moe", **{**TEXT, **MECHANISMS["qwen3_moe"]})
    *_, down = module_workload(config).layers[1].linears
    assert (down.num_copies, down.rows_per_token, down.cut) == (4, 2.0, "row")
    assert down.num_parameters == 4 * 32 * 64


def test_a_large_model_takes_no_memory() -> None:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256}
    workload = module_workload(LlamaConfig(**sizes, num_attention_heads=64, num_key_value_heads=8))
    assert workload.num_parameters == 70_553_706_496


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOTET_CACHE", str(tmp_path))
    monkeypatch.setattr(module_shapes, "_known", {})
    return tmp_path


REQUEST = ShapeRequest(role="language_model", config="LlamaConfig", values=TEXT)


def test_a_card_is_written_and_read_without_the_walker(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = shape_of(REQUEST)
    monkeypatch.setattr(module_shapes, "_known", {})
    monkeypatch.setattr(module_shapes, "_walk_here", None)
    assert shape_of(REQUEST) == made


@pytest.mark.parametrize("damage", ["", "{}", '{"format": 2}', "[]"])
def test_a_damaged_card_is_made_again(empty_cache: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = shape_of(REQUEST)
    (card,) = cards_folder().iterdir()
    whole = card.read_text()
    card.write_text(damage or whole[:-2])
    assert read_card(REQUEST, ShapeCard) is None
    monkeypatch.setattr(module_shapes, "_known", {})
    assert shape_of(REQUEST) == made
    assert card.read_text() == whole


def test_a_card_with_an_unknown_key_is_not_read(empty_cache: Path) -> None:
    shape_of(REQUEST)
    (card,) = cards_folder().iterdir()
    card.write_text(json.dumps({**json.loads(card.read_text()), "more": 1}))
    assert read_card(REQUEST, ShapeCard) is None


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOTET_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(module_shapes, "_known", {})
    assert shape_of(REQUEST).num_layers == 4


def test_cards_of_a_run_are_made_by_one_process(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = module_shapes._walk_here([REQUEST])
    monkeypatch.setattr(module_shapes, "sys", type("WithoutTorch", (), {"modules": {}, "executable": sys.executable}))
    wrong = ShapeRequest(role="encoder", config="LlamaConfig")
    make_shapes([REQUEST, wrong])
    assert [read_card(REQUEST, ShapeCard)] == here
    with pytest.raises(UserError, match=": llama is a language model; give an encoder"):
        shape_of(wrong)


def test_without_torch_and_without_a_card(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_shapes, "sys", type("WithoutTorch", (), {"modules": {}, "executable": sys.executable}))
    monkeypatch.setattr(module_shapes, "WALKER", "motet.nothing")
    with pytest.raises(UserError, match=r"No module named motet\.nothing.*has no card of it; plan once where torch"):
        shape_of(REQUEST)
