from types import SimpleNamespace

import pytest

from motet.parallel.tensor_plans import SHARDS, Shard, check_tp, local_ranges, parameter_shard

TEXT = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}


def test_sizes_that_divide_pass() -> None:
    for tp_size in (1, 2):
        check_tp("llama", TEXT, tp_size)
        check_tp("llama", SimpleNamespace(**TEXT), tp_size)
    check_tp("llama", TEXT | {"num_key_value_heads": None}, 4)  # as many as there are heads


@pytest.mark.parametrize(
    ("family", "config", "tp_size", "message"),
    [
        ("llama", TEXT, 3, "3 does not divide num_attention_heads 4 / num_key_value_heads 2; use 1 or 2"),
        ("llama", TEXT, 4, "4 does not divide num_key_value_heads 2; use 1 or 2"),
        ("llama", TEXT | {"num_attention_heads": 3, "num_key_value_heads": 3}, 2, "heads 3 .* use 1 or 3"),
        ("llama", TEXT | {"num_key_value_heads": 1}, 2, "num_key_value_heads 1; use 1$"),
        ("phi3", TEXT | {"intermediate_size": 25}, 2, "intermediate_size 25; use 1"),
        ("whisper", {"encoder_attention_heads": 8, "encoder_ffn_dim": 12}, 8, "encoder_ffn_dim 12; use 1, 2 or 4"),
        ("qwen2_5_vl_vision", {"num_heads": 6, "intermediate_size": 12}, 4, "num_heads 6; use 1, 2, 3 or 6"),
        ("dinov2", {"num_attention_heads": 4, "hidden_size": 6, "mlp_ratio": 3}, 4, "MLP width .* 18; use 1 or 2"),
        ("llama", TEXT, 0, "0 does not divide"),
        ("gpt2", {"n_head": 4, "n_embd": 10}, 8, "does not divide n_head 4; use 1, 2 or 4"),
        ("gpt2", {"num_attention_heads": 6, "intermediate_size": 9}, 2, "n_inner 9; use 1 or 3"),
        ("smollm3", TEXT, 2, "smollm3 has no rules for tensor parallelism; use 1, or one of llama"),
    ],
)
def test_sizes_that_do_not_divide_are_named(family: str, config: dict[str, int], tp_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"tp_size: .*{message}"):
        check_tp(family, config, tp_size)


def test_swiglu_width_of_dinov2() -> None:
    # two thirds of 6 x 4, rounded up to a multiple of 8: 16
    check_tp("dinov2", {"num_attention_heads": 16, "hidden_size": 6, "mlp_ratio": 4, "use_swiglu_ffn": True}, 16)


def test_parameters_by_name() -> None:
    def shard(family: str, name: str, *shape: int) -> Shard | None:
        return parameter_shard(family, TEXT, name, shape, 2)

    layer = "model.layers.3."
    assert shard("llama", layer + "self_attn.q_proj.weight", 32, 32) == Shard(0)
    assert shard("llama", layer + "self_attn.q_proj.bias", 32) == Shard(0)
    assert shard("llama", layer + "self_attn.o_proj.weight", 32, 32) == Shard(1)
    assert shard("llama", layer + "self_attn.o_proj.bias", 32) is None
    assert shard("llama", layer + "input_layernorm.weight", 32) is None
    assert shard("qwen3", layer + "self_attn.q_norm.weight", 8) is None
    assert shard("phi3", layer + "self_attn.qkv_proj.weight", 64, 32) == Shard(0, (4, 2, 2))
    assert shard("phi3", layer + "mlp.gate_up_proj.weight", 48, 32) == Shard(0, (1, 1))
    assert shard("qwen2_5_vl_vision", "blocks.0.attn.qkv.bias", 96) == Shard(0, (1, 1, 1))
    assert shard("gpt2", "transformer.h.0.attn.c_attn.weight", 32, 96) == Shard(1, (1, 1, 1))
    assert shard("gpt2", "transformer.h.0.attn.c_attn.bias", 96) == Shard(0, (1, 1, 1))
    assert shard("gpt2", "transformer.h.0.crossattention.c_attn.weight", 32, 64) == Shard(1, (1, 1))
    assert shard("gpt2", "transformer.h.0.mlp.c_proj.weight", 128, 32) == Shard(0)
    assert shard("gpt2", "transformer.h.0.mlp.c_proj.bias", 32) is None
    assert shard("llama", "lm_head.weight", 48, 32) == Shard(0)
    assert shard("llama", "model.embed_tokens.weight", 49, 32) is None  # does not divide: whole on every rank
    assert parameter_shard("llama", TEXT, "lm_head.weight", (48, 32), 1) is None


def test_names_in_projectors_are_not_layers() -> None:
    """The user's projector may be called like a layer inside."""
    shape = (8, 8)
    assert parameter_shard("whisper", {}, "layers.0.fc1.weight", shape, 2) == Shard(0)
    assert parameter_shard("whisper", {}, "module.layers.0.fc1.weight", shape, 2) == Shard(0)
    assert parameter_shard("whisper", {}, "projector.layers.0.fc1.weight", shape, 2) is None
    assert parameter_shard("whisper", {}, "projector.fc1.weight", shape, 2) is None


def test_ranges_cover_the_dimension_once() -> None:
    shard = Shard(0, (2, 1, 1))
    assert local_ranges(16, shard, 0, 2) == [(0, 4), (8, 10), (12, 14)]
    assert local_ranges(16, shard, 1, 2) == [(4, 8), (10, 12), (14, 16)]


def test_every_family_is_known() -> None:
    assert len(SHARDS) == 17
