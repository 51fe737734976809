"""Tables of how each family's linear layers are cut for tensor parallelism, and the pure functions that read them.

Every transformer layer is cut as Megatron-LM does (Shoeybi et al. 2019, section 3): queries, keys, values and the first
half of the MLP by their outputs ("column"), the attention's and the MLP's last linear by their inputs ("row"), so that
each rank computes whole heads and a slice of the MLP and one sum closes each half. Embedding and output head are cut by
the vocabulary if it divides evenly, and are whole on every rank if not. Everything else is whole on every rank.

Limits: key-value heads are never copied, so `tp_size` must divide their number; projectors are not cut. No torch here.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from motet.errors import UserError

Config = Mapping[str, Any] | Any
"""A transformers configuration: the object, or its complete `to_dict()`."""


@dataclass(frozen=True)
class Shard:
    """The cut of one parameter: every section of `dim` evenly over the ranks."""

    dim: int
    sections: tuple[int, ...] = (1,)
    """Relative sizes of the sections that lie one after the other along `dim` (fused queries | keys | values)."""


@dataclass(frozen=True, kw_only=True)
class FamilyShards:
    """The cut of one family. Paths are relative to a transformer layer unless said otherwise; some may be absent."""

    layers: str
    """The list of transformer layers: the end of its path in the model."""
    column: Mapping[str, tuple[int | str, ...]]
    """Linears cut by their outputs, with the relative sizes of fused sections: numbers, or names of settings."""
    row: tuple[str, ...]
    """Linears cut by their inputs; their outputs are summed over the ranks, then their bias is added."""
    regions: tuple[str, ...]
    """Modules at whose entry the activation, whole on every rank, goes into column linears."""
    counts: tuple[str, ...] = ()
    """Attributes that count heads and that a forward reads; each rank must see its own number."""
    local_heads: tuple[str, ...] = ()
    """Modules whose parameters are whole but applied to the rank's own heads: their gradients are partial sums."""
    region_inputs: tuple[str, ...] = ()
    """Keyword inputs of a region, besides the hidden states, that go into column linears (encoder outputs)."""
    sequence_inputs: tuple[str, ...] = ()
    """Keyword inputs of a layer that it multiplies with the hidden states: [..., T, 1]."""
    skippable: tuple[str, ...] = ()
    """Submodules that mark a layer as one that a forward may leave out (cross-attention without encoder output)."""
    vocabulary: tuple[str, ...] = ()
    """Embedding and output head: the ends of their paths in the model."""
    must_divide: Mapping[str, Callable[[Config], int]] = field(default_factory=dict)
    """What `tp_size` must divide, by its name in the configuration."""
    transposed: bool = False
    """The layers' weights are [in, out] (transformers' Conv1D)."""


def setting(config: Config, name: str, default: Any = None) -> Any:
    """A value of the configuration, `default` if it is absent or None."""
    value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return default if value is None else value


def _named(*names: str) -> dict[str, Callable[[Config], int]]:
    return {name: partial(setting, name=name) for name in names}


def _num_key_value_heads(config: Config) -> int:
    return setting(config, "num_key_value_heads") or setting(config, "num_attention_heads")


def _dinov2_mlp_width(config: Config) -> int:
    width = int(setting(config, "hidden_size") * setting(config, "mlp_ratio"))
    return (int(width * 2 / 3) + 7) // 8 * 8 if setting(config, "use_swiglu_ffn") else width


def _gpt2_heads(config: Config) -> int:
    """By GPT-2's own name, or that of all other families."""
    return setting(config, "n_head") or setting(config, "num_attention_heads")


def _gpt2_mlp_width(config: Config) -> int:
    width = setting(config, "n_embd") or setting(config, "hidden_size")
    return setting(config, "n_inner") or setting(config, "intermediate_size") or 4 * width


def _columns(*paths: str) -> dict[str, tuple[int | str, ...]]:
    return dict.fromkeys(paths, (1,))


_SELF_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_BERT_ATTENTION = ("attention.self", "crossattention.self")
_GATED_MLP = ("mlp.gate_proj", "mlp.up_proj")
_VOCABULARY = ("embed_tokens", "lm_head")
_GROUPED_QUERY = {
    **_named("num_attention_heads"),
    "num_key_value_heads": _num_key_value_heads,
    **_named("intermediate_size"),
}

_LLAMA = FamilyShards(
    layers="layers",
    column=_columns(*_SELF_ATTENTION, *_GATED_MLP),
    row=("self_attn.o_proj", "mlp.down_proj"),
    regions=("self_attn", "mlp"),
    vocabulary=_VOCABULARY,
    must_divide=_GROUPED_QUERY,
)
_QUERY_KEY_NORM = FamilyShards(
    layers="layers",
    column=_LLAMA.column,
    row=_LLAMA.row,
    regions=_LLAMA.regions,
    local_heads=("self_attn.q_norm", "self_attn.k_norm"),
    vocabulary=_VOCABULARY,
    must_divide=_GROUPED_QUERY,
)
_CLIP = FamilyShards(
    layers="encoder.layers",
    column=_columns(*_SELF_ATTENTION, "mlp.fc1"),
    row=("self_attn.out_proj", "mlp.fc2"),
    regions=("self_attn", "mlp"),
    counts=("self_attn.num_heads",),
    must_divide=_named("num_attention_heads", "intermediate_size"),
)
_WHISPER = FamilyShards(
    layers="layers",
    column=_columns(*_SELF_ATTENTION, "fc1"),
    row=("self_attn.out_proj", "fc2"),
    regions=("self_attn", "fc1"),
    counts=("self_attn.num_heads",),
    must_divide=_named("encoder_attention_heads", "encoder_ffn_dim"),
)

SHARDS: Mapping[str, FamilyShards] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen3": _QUERY_KEY_NORM,
    "gemma3_text": _QUERY_KEY_NORM,
    "phi3": FamilyShards(
        layers="layers",
        column={
            "self_attn.qkv_proj": ("num_attention_heads", "num_key_value_heads", "num_key_value_heads"),
            "mlp.gate_up_proj": (1, 1),
        },
        row=("self_attn.o_proj", "mlp.down_proj"),
        regions=("self_attn", "mlp"),
        counts=("self_attn.num_key_value_heads", "self_attn.config.num_attention_heads"),
        vocabulary=_VOCABULARY,
        must_divide=_GROUPED_QUERY,
    ),
    "mllama_text_model": FamilyShards(
        layers="layers",
        column=_columns(*_SELF_ATTENTION, "cross_attn.q_proj", "cross_attn.k_proj", "cross_attn.v_proj", *_GATED_MLP),
        row=("self_attn.o_proj", "cross_attn.o_proj", "mlp.down_proj"),
        regions=("self_attn", "cross_attn", "mlp"),
        counts=(
            "self_attn.num_heads",
            "self_attn.num_key_value_heads",
            "cross_attn.num_heads",
            "cross_attn.num_key_value_heads",
        ),
        local_heads=("cross_attn.q_norm", "cross_attn.k_norm"),
        region_inputs=("cross_attention_states",),
        sequence_inputs=("full_text_row_masked_out_mask",),
        skippable=("cross_attn",),
        vocabulary=_VOCABULARY,
        must_divide=_GROUPED_QUERY,
    ),
    "siglip_vision_model": _CLIP,
    "clip_vision_model": _CLIP,
    "clip_text_model": _CLIP,
    "siglip_text_model": _CLIP,
    "bert": FamilyShards(
        layers="encoder.layer",
        column=_columns(
            *(f"{path}.{name}" for path in _BERT_ATTENTION for name in ("query", "key", "value")), "intermediate.dense"
        ),
        row=("attention.output.dense", "crossattention.output.dense", "output.dense"),
        regions=(*_BERT_ATTENTION, "intermediate"),
        counts=tuple(f"{path}.{name}" for path in _BERT_ATTENTION for name in ("num_attention_heads", "all_head_size")),
        region_inputs=("encoder_hidden_states",),
        must_divide=_named("num_attention_heads", "intermediate_size"),
    ),
    "gpt2": FamilyShards(
        layers="h",
        column={
            "attn.c_attn": (1, 1, 1),
            "crossattention.q_attn": (1,),
            "crossattention.c_attn": (1, 1),
            "mlp.c_fc": (1,),
        },
        row=("attn.c_proj", "crossattention.c_proj", "mlp.c_proj"),
        regions=("attn", "crossattention", "mlp"),
        counts=tuple(f"{path}.{name}" for path in ("attn", "crossattention") for name in ("num_heads", "split_size")),
        region_inputs=("encoder_hidden_states",),
        must_divide={"n_head": _gpt2_heads, "n_inner": _gpt2_mlp_width},
        transposed=True,
    ),
    "dinov2": FamilyShards(
        layers="encoder.layer",
        column=_columns(
            "attention.q_proj",
            "attention.k_proj",
            "attention.v_proj",
            "mlp.fc1",
            "mlp.gate_proj",
            "mlp.up_proj",
        ),
        row=("attention.o_proj", "mlp.fc2", "mlp.down_proj"),
        regions=("attention", "mlp"),
        counts=("attention.num_attention_heads",),
        must_divide={**_named("num_attention_heads"), "MLP width (hidden_size x mlp_ratio)": _dinov2_mlp_width},
    ),
    "qwen2_5_vl_vision": FamilyShards(
        layers="blocks",
        column={"attn.qkv": (1, 1, 1), **_columns(*_GATED_MLP)},
        row=("attn.proj", "mlp.down_proj"),
        regions=("attn", "mlp"),
        counts=("attn.num_heads",),
        must_divide=_named("num_heads", "intermediate_size"),
    ),
    "pixtral": FamilyShards(
        layers="transformer.layers",
        column=_columns(
            "attention.q_proj",
            "attention.k_proj",
            "attention.v_proj",
            "feed_forward.gate_proj",
            "feed_forward.up_proj",
        ),
        row=("attention.o_proj", "feed_forward.down_proj"),
        regions=("attention", "feed_forward"),
        counts=("attention.num_heads",),
        must_divide=_named("num_attention_heads", "intermediate_size"),
    ),
    "whisper": _WHISPER,
    "qwen2_audio_encoder": _WHISPER,
}
"""By family: the `model_type` of its transformers configuration."""


def family_shards(family: str) -> FamilyShards:
    """Raises `ValueError` for a family that cannot be cut."""
    if family not in SHARDS:
        raise UserError(f"tp_size: {family} has no rules for tensor parallelism; use 1, or one of {', '.join(SHARDS)}")
    return SHARDS[family]


def check_tp(family: str, config: Config, tp_size: int) -> None:
    """Raises `ValueError`, naming what does not divide and which sizes would do, before any process is started."""
    if tp_size == 1:
        return
    values = {name: value(config) for name, value in family_shards(family).must_divide.items()}
    if tp_size >= 1 and all(value % tp_size == 0 for value in values.values()):
        return
    common = math.gcd(*values.values())
    fitting = [str(size) for size in range(1, common + 1) if common % size == 0]
    wrong = [f"{name} {value}" for name, value in values.items() if tp_size < 1 or value % tp_size]
    use = fitting[0] if len(fitting) == 1 else f"{', '.join(fitting[:-1])} or {fitting[-1]}"
    raise UserError(f"tp_size: {tp_size} does not divide {' / '.join(wrong)}; use {use}")


def layer_pattern(family: str) -> re.Pattern[str]:
    """Matches the path of a transformer layer, or of a part of it (group 2: the path within); never in a projector."""
    return re.compile(rf"((?!projector\.)(?:.*\.)?{re.escape(family_shards(family).layers)}\.\d+)(?:\.(.+))?")


def parameter_shard(family: str, config: Config, name: str, shape: Sequence[int], tp_size: int) -> Shard | None:
    """How the parameter called `name` (its path in the model), of whole `shape`, is cut; None: whole on every rank."""
    if tp_size == 1:
        return None
    rules = family_shards(family)
    path, _, kind = name.rpartition(".")
    for end in rules.vocabulary:
        if path == end or path.endswith(f".{end}"):
            return Shard(0) if shape[0] % tp_size == 0 else None
    match = layer_pattern(family).fullmatch(path)
    within = match.group(2) if match else ""
    if within in rules.column:
        sections = (setting(config, s) if isinstance(s, str) else s for s in rules.column[within])
        return Shard(int(rules.transposed and kind == "weight"), tuple(sections))
    if within in rules.row and kind == "weight":
        return Shard(int(not rules.transposed))
    return None


def local_ranges(full_size: int, shard: Shard, rank: int, tp_size: int) -> list[tuple[int, int]]:
    """The half-open ranges of the whole dimension that make up `rank`'s shard, one per section."""
    unit, rest = divmod(full_size, sum(shard.sections))
    assert rest == 0, f"sections {shard.sections} do not divide {full_size}"
    ranges, start = [], 0
    for section in shard.sections:
        size, rest = divmod(section * unit, tp_size)
        assert rest == 0, f"a section of {section * unit} does not divide by {tp_size}"
        ranges.append((start + rank * size, start + (rank + 1) * size))
        start += section * unit
    return ranges
