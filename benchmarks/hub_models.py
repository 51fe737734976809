"""Stand-ins for models of the hub: a folder as the hub's client caches them, with configurations, tokenizer and
processor but no weights, and run files that name them.

Architectures are those of the published models. Tokenizers are made here, with vocabularies of the same size.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VISION_TOKENS = {
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
}
VOCABULARY = 151_936
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *VISION_TOKENS.values())
ENCODER: Mapping[str, Any] = {
    "model_type": "siglip",
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 384,
        "patch_size": 14,
    },
    "text_config": {"model_type": "siglip_text_model", "hidden_size": 1152},
}
LANGUAGE_MODEL: Mapping[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
WHOLE: Mapping[str, Any] = {
    "model_type": "qwen3_vl",
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "vocab_size": VOCABULARY,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262_144,
        "rope_theta": 5_000_000,
        "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NUM_SAMPLES = 256
CLUSTER = {"device": "cuda", "accelerator": "h100", "num_devices": 64, "num_nodes": 8}


def write_run(folder: Path) -> None:
    """Writes the hub's cache (`hub`), samples with images, and the run files `parts.json` and `whole.json`."""
    hub = folder / "hub"
    _write_model(hub, "google/siglip-so400m-patch14-384", ENCODER)
    _write_model(hub, "meta-llama/Llama-3.1-70B", LANGUAGE_MODEL)
    _write_processor(_write_model(hub, "Qwen/Qwen3-VL-8B-Instruct", WHOLE))
    _write_samples(folder)
    same = {"cluster": CLUSTER, "train": {"global_batch_size": 256, "dtype": "bfloat16"}}
    parts = {
        "model": {
            "encoders": {"vision": {"hub": "google/siglip-so400m-patch14-384", "train": {"module": False}}},
            "language_model": {"hub": "meta-llama/Llama-3.1-70B"},
        },
        "data": {"kind": "dial-a-digit", "no_image": 0.0, "no_sound": 1.0, "num_train": 4096},
        "parallel": {
            "planner": "cornstarch",
            "num_microbatches": 16,
            "recompute": ["language_model"],
            "zero1": True,
        },
        **same,
    }
    whole = {
        "model": {"hub": "Qwen/Qwen3-VL-8B-Instruct", "parts": {"vision": {"train": {"module": False}}}},
        "data": {"kind": "conversations", "files": "data.jsonl", "image_folder": "."},
        "parallel": {
            "planner": "explicit",
            "num_microbatches": 16,
            "explicit": {"vision": {"dp": 8}, "language_model": {"tp": 2, "pp": 2, "dp": 8}},
            "zero1": True,
        },
        **same,
        "cluster": {**CLUSTER, "num_devices": 40, "num_nodes": 5},
    }
    (folder / "parts.json").write_text(json.dumps(parts))
    (folder / "whole.json").write_text(json.dumps(whole))


def _write_model(hub: Path, name: str, config: Mapping[str, Any]) -> Path:
    """The folder of the only commit."""
    model = hub / f"models--{name.replace('/', '--')}"
    commit = "0" * 40
    snapshot = model / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    (snapshot / "config.json").write_text(json.dumps(config))
    return snapshot


def _write_processor(folder: Path) -> None:
    """The processor, with a tokenizer of as many tokens as Qwen's."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    import motet  # noqa: F401 (before transformers: it makes torchvision's wheels importable without CUDA)

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(first, second) for first in letters for second in letters]
    merges = pairs + [(first + second, third) for third in letters for first, second in pairs]
    merges = merges[: VOCABULARY - len(letters) - len(SPECIAL)]
    words = [*letters, *dict.fromkeys(first + second for first, second in merges)]
    tokenizer = Tokenizer(BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    named = {f"{name}_token": token for name, token in VISION_TOKENS.items() if name in ("image", "video")}
    named |= {"vision_bos_token": VISION_TOKENS["vision_start"], "vision_eos_token": VISION_TOKENS["vision_end"]}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens=named
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]}, replace_extra_special_tokens=False)
    sizes = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    Qwen3VLProcessor(
        Qwen2VLImageProcessor(**sizes, size={"shortest_edge": 65_536, "longest_edge": 16_777_216}),
        fast,
        Qwen3VLVideoProcessor(**sizes, size={"shortest_edge": 4096, "longest_edge": 25_165_824}),
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {f"{name}_token_id": fast.convert_tokens_to_ids(token) for name, token in VISION_TOKENS.items()}
    (folder / "config.json").write_text(json.dumps(config))


def _write_samples(folder: Path) -> None:
    from PIL import Image

    for side in (336, 448, 672):
        Image.new("RGB", (side, 448)).save(folder / f"{side}.png")
    records = []
    for i in range(NUM_SAMPLES):
        turns = [
            {"from": "human", "value": f"<image>What is shown in picture {i}?"},
            {"from": "gpt", "value": "Nothing but black. " * (1 + i % 20)},
        ]
        records.append(json.dumps({"image": f"{(336, 448, 672)[i % 3]}.png", "conversations": turns}))
    (folder / "data.jsonl").write_text("\n".join(records))
