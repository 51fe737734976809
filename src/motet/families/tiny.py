"""Tiny versions of a transformers configuration, for probes and tests, with all features of the family in small sizes.

The user's own configuration keeps its flags, activations, norms and kinds of layers. Sizes become small, lists of one
entry a layer keep each kind of layer, thresholds (attention windows, lengths at which rotary positions scale) become
shorter than the probe's samples, and multipliers leave the value 1, at which a forgotten one would go unnoticed.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from motet.errors import UserError, one_line

NUM_LAYERS = 4
WIDTH, NUM_HEADS, HEAD_DIM = 64, 4, 16
WINDOW, THRESHOLD, MOST_POSITIONS = 8, 16, 64
NUM_PATCHES = 16
"""Patches of an image: 4 x 4."""

SIZES: tuple[tuple[str, int], ...] = (
    (r"(num_|n_)?((hidden|decoder|encoder|num_decoder|num_encoder)_)?(layers?|blocks)", NUM_LAYERS),
    (r"num_(hidden|decoder|encoder)_layers|n_layers?|num_layers|depth", NUM_LAYERS),
    (r"hidden_size|lru_width|n_embd|d_model|dim|embedding_(size|dim)|emb_dim|dim_model|attention_hidden_size", WIDTH),
    (r"(dense_|shared_)?intermediate_size(_mlp)?|(decoder_|encoder_)?ffn_dim|n_inner|d_ff|dim_ff", 96),
    (r"ffn_hidden_size|feed_?forward_(size|dim)|block_ff_dim", 96),
    (r"moe_\w*intermediate_size|shared_expert_intermediate_size|(expert_)?ffn_hidden_size|share_expert_dim", 32),
    (r"(num_|n_)((attention|decoder_attention|encoder_attention|mamba)_)?heads?", NUM_HEADS),
    (r"(de|en)coder_attention_heads|mamba_(n|num)_heads|linear_num_(value_)?heads", NUM_HEADS),
    (r"linear_num_key_heads|num_query_groups|n_mamba_heads", 2),
    (r"qk_(rope|nope)_head_dim|rotary_dim|(ssm_)?state_size|mamba_d_state|mamba_dt_rank|index_topk|index_head_dim", 8),
    (r"\w*head_dim|d_head|kv_channels|linear_(key|value)_head_dim|kv_lora_rank|v_head_dim", HEAD_DIM),
    (r"q_lora_rank|mamba_d_head", 32),
    (r"(mamba_)?chunk_size|hidden_size_per_layer_input|laurel_rank", 8),
    (r"index_n_heads|num_kv_shared_layers", 2),
    (
        r"n_groups?|num_expert_group|topk_group|n_shared_experts|num_shared_experts|first_k_dense_replace|mamba_n_groups",
        1,
    ),
    (r"(n_routed|num|num_local|moe_num|n)_experts", 4),
    (r"\w*vocab_size\w*", 128),
    (r"max_(decoder_)?position_embeddings|n_positions|n_ctx|max_(target|source)_positions", MOST_POSITIONS),
    (r"context_length|max_seq_len|seq_length", MOST_POSITIONS),
    (r"original_max_position_embeddings", THRESHOLD),
    (r"sliding_window|attention_window_size|attention_chunk_size", WINDOW),
)
"""Names of settings, and their tiny values. The first pattern that is the whole name counts."""
SIZES_OF_MEDIA: tuple[tuple[str, int], ...] = (
    (r"embed_dim|output_dim|out_hidden_size|text_hidden_size|proj(ection|ector)_dim|vision_output_dim", WIDTH),
    (r"(projector|alignment|adapter|merger)_(hidden|intermediate)_size", WIDTH),
    (r"projector_(input|output)_dim|adapter_in_dim", WIDTH),
    (r"num_position_embeddings|num_patches|position_embedding_size", NUM_PATCHES),
    (r"mm_tokens_per_image|default_output_length", NUM_PATCHES // 4),
    (r"num_mel_bins|feature_size|(audio_)?chunk_length", 16),
    (r"n_window(_infer)?", 8),
)
"""The same of what a model of several modalities has besides."""
MEDIA_TOKEN = re.compile(r"(?!(pad|bos|eos|unk|sep|cls|mask|decoder_start)_)(\w+)_(token_id|token_index)")
"""Ids of placeholders and what stands around them."""
MEDIA_TOKEN_IDS: Mapping[str, int] = {
    name: 100 + i
    for i, name in enumerate(
        ("image", "video", "audio", "vision_start", "vision_end", "image_start", "image_end", "boi", "eoi")
    )
}
KEY_VALUE_HEADS = re.compile(r"(swa_)?num_(key_value|kv|global_key_value)_heads")
EXPERTS_OF_A_TOKEN = re.compile(r"num_experts_per_tok(en)?|moe_topk|top_k_experts|moe_k")
MULTIPLIERS: Mapping[str, float] = {
    "embedding_multiplier": 1.7,
    "scale_emb": 1.7,
    "logits_scaling": 1.3,
    "residual_multiplier": 0.9,
    "lm_head_multiplier": 1.2,
    "logit_scale": 0.8,
}
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
WITHOUT_DEFAULT: Mapping[str, int] = {"head_dim": HEAD_DIM, "num_experts_per_tok": 2}
"""Settings that some classes leave to each checkpoint."""
SPECIAL_TOKENS: Mapping[str, int] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
RANDOM = re.compile(r"\w*((dropout|pdrop|layerdrop)(_prob)?|jitter_noise|drop_path(_rate)?)")
"""Probabilities of dropout and the like: what is drawn anew in each forward cannot be compared."""


def tiny_config(config: PretrainedConfig, *, media: bool = False) -> PretrainedConfig:
    """The tiny configuration, of the same class. Configurations that differ in size only have the same one.

    `media`: of a model of several modalities, or a part of one: sizes of images and sounds become small too, and
    placeholders fit in the vocabulary. Raises `UserError` if the class refuses the tiny sizes."""
    values = _shrunk(config, media)
    try:
        tiny = type(config)(**values)
    except Exception as error:  # Whatever its checks raise.
        reason = one_line(f"{type(error).__name__}: {error}")[:200]
        raise UserError(f"{config.model_type}: no tiny model of it can be built to probe it ({reason})") from None
    for part in _parts(tiny):
        # Kernels for experts do not compute in float64.
        part._experts_implementation = "eager"
    return tiny


def perturb(model: nn.Module) -> None:
    """Adds noise to every parameter: norms' weights of one and biases of zero would hide wrong gradients."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise.to(parameter.dtype), alpha=0.05)


def _parts(config: PretrainedConfig) -> list[PretrainedConfig]:
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", None) or {}]
    return [config, *(part for each in inner if isinstance(each, PretrainedConfig) for part in _parts(each))]


def _shrunk(config: PretrainedConfig, media: bool) -> dict[str, Any]:
    values = {
        key: value for key, value in config.to_dict().items() if key not in ("model_type", "transformers_version")
    }
    chosen = _chosen_layers(values)
    result = {key: _tiny_value(values, key, value, chosen) for key, value in values.items()}
    for name in getattr(config, "sub_configs", None) or {}:
        part = getattr(config, name, None)
        if isinstance(part, PretrainedConfig):
            result[name] = tiny_config(part, media=media).to_dict()
    if media:
        result |= _tiny_media(values)
    if isinstance(values.get("expand") or values.get("mamba_expand"), int | float):
        # The heads of a state-space layer fill its inner width.
        inner = int((values.get("expand") or values["mamba_expand"]) * WIDTH)
        sizes = {"mamba_d_head": inner // NUM_HEADS, "mamba_head_dim": inner // NUM_HEADS, "mamba_d_ssm": inner}
        if "expand" in values:
            sizes["head_dim"] = inner // NUM_HEADS
        result |= {key: size for key, size in sizes.items() if isinstance(values.get(key), int)}
    if values.get("head_dim") is not None and values.get("head_dim") == values.get("qk_rope_head_dim"):
        result["head_dim"] = result["qk_rope_head_dim"]  # The rotary positions' own width (LongCat).
    if "dynamic" in _rope_types(values) and isinstance(values.get("max_position_embeddings"), int):
        result["max_position_embeddings"] = THRESHOLD
    return result


def _tiny_media(values: Mapping[str, Any]) -> dict[str, Any]:
    """Changes for a multimodal model: images of 4 x 4 patches, and placeholders within the vocabulary."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        found = MEDIA_TOKEN.fullmatch(key)
        if found and isinstance(value, int):
            result[key] = MEDIA_TOKEN_IDS.get(found[2], 120)
        elif isinstance(value, int) and not isinstance(value, bool):
            size = next((size for pattern, size in SIZES_OF_MEDIA if re.fullmatch(pattern, key)), None)
            result |= {} if size is None else {key: size}
        elif key.endswith("_indexes") and isinstance(value, list | tuple):
            result[key] = list(range(1, 1 + min(len(value), NUM_LAYERS - 1)))
        elif key.startswith("vision_feature_layer") and isinstance(value, list | tuple):
            result[key] = [max(layer, -NUM_LAYERS) for layer in value]
    wide, width = values.get("intermediate_size"), values.get("hidden_size")
    if "num_mel_bins" in values and isinstance(wide, int) and isinstance(width, int) and wide % width == 0:
        result["intermediate_size"] = wide // width * WIDTH  # As many rows become one for the projector (Voxtral).
    patch, side = values.get("patch_size"), values.get("image_size")
    if isinstance(patch, int) and isinstance(side, int):
        result["image_size"] = 4 * patch
    elif isinstance(patch, list | tuple) and isinstance(side, list | tuple):
        result["image_size"] = [4 * each for each in patch]
    if isinstance(patch, int) and isinstance(values.get("window_size"), int):
        result["window_size"] = 2 * patch
    if "image_grid_pinpoints" in values and isinstance(values.get("vision_config"), Mapping):
        side = 4 * int(values["vision_config"]["patch_size"])
        result["image_grid_pinpoints"] = [[side, side], [side, 2 * side]]
    return result


def _rope_types(values: Any) -> set[str]:
    """All kinds of rotary positions that the settings name."""
    if not isinstance(values, Mapping):
        return set()
    own = {values["rope_type"]} if isinstance(values.get("rope_type"), str) else set()
    return own.union(*map(_rope_types, values.values()))


def _chosen_layers(values: Mapping[str, Any]) -> list[int]:
    """Indices of the layers that the tiny model has: the first ones if these have every kind, else one of each kind in
    turn. Empty if the configuration does not count layers."""
    num_layers = next((values[key] for key in LAYER_COUNTS if isinstance(values.get(key), int)), 0)
    of_layer = _by_layer(values.get("per_layer_config"))
    lists = [v for key, v in values.items() if num_layers and _is_of_layers(values, key, v) and len(v) == num_layers]
    kinds = [str(([each[i] for each in lists], of_layer.get(i))) for i in range(num_layers)]
    one_of_each = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    first = list(range(min(NUM_LAYERS, num_layers)))
    chosen = first if {kinds[i] for i in first} == set(kinds) else one_of_each
    return (chosen * NUM_LAYERS)[:NUM_LAYERS]


def _is_of_layers(values: Mapping[str, Any], key: str, value: Any) -> bool:
    """Whether a setting is a list of one entry a layer."""
    is_list = isinstance(value, list | tuple) and key not in ("patch_size", "image_size")
    return is_list and any(values.get(count) == len(value) for count in LAYER_COUNTS)


def _tiny_value(values: Mapping[str, Any], key: str, value: Any, chosen: Sequence[int]) -> Any:
    if value is None and key in WITHOUT_DEFAULT:
        return WITHOUT_DEFAULT[key]
    if isinstance(value, bool) or value is None:
        return value
    if KEY_VALUE_HEADS.fullmatch(key) and isinstance(value, int):
        return NUM_HEADS if value == values.get("num_attention_heads") else min(value, 2)
    if EXPERTS_OF_A_TOKEN.fullmatch(key) and isinstance(value, int):
        return min(value, 2)
    if key in SPECIAL_TOKENS and isinstance(value, int):
        return SPECIAL_TOKENS[key]
    if key in MULTIPLIERS and isinstance(value, int | float):
        return MULTIPLIERS[key]
    if RANDOM.fullmatch(key) and isinstance(value, int | float):
        return type(value)(0)
    if isinstance(value, int):
        return next((size for pattern, size in SIZES if re.fullmatch(pattern, key)), value)
    if _is_of_layers(values, key, value):
        return type(value)(_tiny_value(values, key, value[i], ()) for i in chosen)
    if isinstance(value, Mapping) and key == "per_layer_config":
        of_layer = _by_layer(value)
        return {
            place: {k: _tiny_value({**values, **of_layer[i]}, k, v, ()) for k, v in of_layer[i].items()}
            for place, i in enumerate(chosen)
            if i in of_layer
        }
    if isinstance(value, Mapping) and key.startswith("rope"):
        return _tiny_rope(value)
    return copy.deepcopy(value)


def _by_layer(per_layer_config: Any) -> dict[int, Mapping[str, Any]]:
    """Settings of single layers, whose numbers are text in stored configurations."""
    return {int(layer): settings for layer, settings in (per_layer_config or {}).items()}


def _tiny_rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """Factors of one entry a frequency are cut to a tiny head's; thresholds become small."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result[key] = _tiny_rope(value)
        elif isinstance(value, list | tuple):
            # Sections of rotary positions of several axes fill half of the width that is rotated.
            half = int(HEAD_DIM * (values.get("partial_rotary_factor") or 1.0)) // 2
            sections = [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]
            result[key] = list(value[: HEAD_DIM // 2]) if "factor" in key else sections if "section" in key else value
        else:
            result[key] = THRESHOLD if key == "original_max_position_embeddings" else value
    return result
