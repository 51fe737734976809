"""Folders of tiny random models of several modalities, as save_pretrained writes them, with their own processors and
tokenizers. Nothing is downloaded."""

import base64
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM, PreTrainedTokenizerFast

pytest.importorskip("torchvision", reason="transformers' processors of images and videos need torchvision")

NAMED_TOKENS = {
    "image_token": "<image>",
    "video_token": "<video>",
    "audio_token": "<audio>",
    "boi_token": "<boi>",
    "eoi_token": "<eoi>",
    "vision_bos_token": "<vision_start>",
    "vision_eos_token": "<vision_end>",
    "audio_bos_token": "<audio_start>",
    "audio_eos_token": "<audio_end>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
    "user_token": "<|user|>",
    "assistant_token": "<|assistant|>",
    "system_token": "<|system|>",
}
"""Special tokens by the names under which processors ask the tokenizer for them."""

SIDE = 56
"""Of the images that the models take, in pixels."""
WIDTH = 32
TEXT: Mapping[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: Mapping[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 14,
}
ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
QWEN_TEXT: Mapping[str, Any] = {**TEXT, "num_attention_heads": 2, "head_dim": 16, "rope_parameters": ROPE}
QWEN_VISION: Mapping[str, Any] = {
    "depth": 3,
    "hidden_size": 24,
    "out_hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
AUDIO: Mapping[str, Any] = {
    "d_model": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "num_mel_bins": 16,
    "max_source_positions": 50,
}

CHAT_TEMPLATE = (
    "{{% for message in messages %}}{{{{ '<|' + message['role'] + '|>' }}}}"
    "{{% if message['content'] is string %}}{{{{ message['content'] }}}}{{% else %}}"
    "{{% for part in message['content'] %}}"
    "{{% if part['type'] == 'image' %}}{image}{{% elif part['type'] == 'video' %}}{video}"
    "{{% elif part['type'] == 'audio' %}}{audio}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
    "{{% endfor %}}{{% endif %}}<eos>\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|assistant|>{{% endif %}}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    special = ["<pad>", "<bos>", "<eos>", "<unk>", *NAMED_TOKENS.values()]
    vocabulary = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens=NAMED_TOKENS,
        padding_side="right",
    )


def _template(image: str = "", video: str = "", audio: str = "") -> str:
    return CHAT_TEMPLATE.format(image=image, video=video, audio=audio)


def _qwen_processors(tokenizer: Any, processor_class: str, video_class: str = "Qwen2VLVideoProcessor") -> Any:
    import transformers

    sizes = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    size = {"shortest_edge": 28 * 28, "longest_edge": SIDE * SIDE}
    image = transformers.Qwen2VLImageProcessor(**sizes, size=size)
    video = getattr(transformers, video_class)(**sizes, size={**size, "longest_edge": 8 * SIDE * SIDE})
    template = _template(
        "<vision_start><image><vision_end>", "<vision_start><video><vision_end>", "<audio_start><audio><audio_end>"
    )
    return image, video, template


def _qwen2_5_vl(tokenizer: Any) -> tuple[dict[str, Any], Any]:
    from transformers import Qwen2_5_VLProcessor

    image, video, template = _qwen_processors(tokenizer, "Qwen2_5_VLProcessor")
    vision = {**QWEN_VISION, "window_size": 28, "fullatt_block_indexes": [1]}
    return (
        {"vision_config": vision, "text_config": QWEN_TEXT},
        Qwen2_5_VLProcessor(image, tokenizer, video, chat_template=template),
    )


def _qwen3_vl(tokenizer: Any) -> tuple[dict[str, Any], Any]:
    from transformers import Qwen3VLProcessor

    image, video, template = _qwen_processors(tokenizer, "Qwen3VLProcessor", "Qwen3VLVideoProcessor")
    vision = {**QWEN_VISION, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
    return (
        {"vision_config": vision, "text_config": QWEN_TEXT},
        Qwen3VLProcessor(image, tokenizer, video, chat_template=template),
    )


def _internvl(tokenizer: Any) -> tuple[dict[str, Any], Any]:
    from transformers import GotOcr2ImageProcessor, InternVLProcessor, InternVLVideoProcessor

    size = {"height": SIDE, "width": SIDE}
    image = GotOcr2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=3)
    video = InternVLVideoProcessor(size=size)
    vision = {**VISION, "image_size": [SIDE, SIDE], "patch_size": [14, 14]}
    return (
        {"vision_config": vision, "text_config": {"model_type": "qwen2", **TEXT}, "downsample_ratio": 0.5},
        InternVLProcessor(
            image, tokenizer, video, image_seq_length=4, chat_template=_template("<IMG_CONTEXT>", "<video>")
        ),
    )


def _llava_onevision(tokenizer: Any) -> tuple[dict[str, Any], Any]:
    from transformers import LlavaOnevisionImageProcessor, LlavaOnevisionProcessor, LlavaOnevisionVideoProcessor

    size, pinpoints = {"height": SIDE, "width": SIDE}, [[SIDE, SIDE], [SIDE, 2 * SIDE], [2 * SIDE, SIDE]]
    image = LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=pinpoints)
    video = LlavaOnevisionVideoProcessor(size=size)
    vision = {"model_type": "siglip_vision_model", **VISION, "vision_use_head": False}
    return (
        {
            "vision_config": vision,
            "text_config": {"model_type": "qwen2", **TEXT},
            "image_grid_pinpoints": pinpoints,
            "vision_feature_select_strategy": "full",
        },
        LlavaOnevisionProcessor(
            image,
            tokenizer,
            video,
            num_image_tokens=16,
            vision_feature_select_strategy="full",
            chat_template=_template("<image>", "<video>"),
        ),
    )


def _gemma3(tokenizer: Any) -> tuple[dict[str, Any], Any]:
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    text = {
        **TEXT,
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "tie_word_embeddings": True,
    }
    image = Gemma3ImageProcessor(size={"height": SIDE, "width": SIDE})
    return (
        {
            "vision_config": {"model_type": "siglip_vision_model", **VISION, "vision_use_head": False},
            "text_config": text,
            "mm_tokens_per_image": 4,
            "tie_word_embeddings": True,
        },
        Gemma3Processor(image, tokenizer, image_seq_length=4, chat_template=_template("<boi>")),
    )


def _smolvlm(tokenizer: Any) -> tuple[dict[str, Any], Any]:
    from transformers import SmolVLMImageProcessor, SmolVLMProcessor, SmolVLMVideoProcessor

    edge = {"longest_edge": SIDE}
    image = SmolVLMImageProcessor(size={"longest_edge": 2 * SIDE}, max_image_size=edge)
    video = SmolVLMVideoProcessor(size=edge, max_image_size=edge, num_frames=4, fps=1)
    return (
        {
            "vision_config": VISION,
            "text_config": {"model_type": "llama", **TEXT},
            "scale_factor": 2,
            "tie_word_embeddings": False,
        },
        SmolVLMProcessor(image, tokenizer, video, image_seq_len=4, chat_template=_template("<image>", "<video>")),
    )


def _extractor(**values: Any) -> Any:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=16, chunk_length=1, hop_length=160, n_fft=400, **values)


def _qwen2_audio(tokenizer: Any) -> tuple[dict[str, Any], Any]:
    from transformers import Qwen2AudioProcessor

    return (
        {"audio_config": AUDIO, "text_config": {"model_type": "qwen2", **TEXT}},
        Qwen2AudioProcessor(_extractor(), tokenizer, chat_template=_template(audio="<audio>")),
    )


def _qwen2_5_omni_thinker(tokenizer: Any) -> tuple[dict[str, Any], Any]:
    from transformers import Qwen2_5OmniProcessor

    image, video, template = _qwen_processors(tokenizer, "Qwen2_5OmniProcessor")
    vision = {**QWEN_VISION, "window_size": 28, "fullatt_block_indexes": [1]}
    return (
        {
            "vision_config": vision,
            "text_config": QWEN_TEXT,
            "audio_config": {**AUDIO, "output_dim": WIDTH, "n_window": 25},
        },
        Qwen2_5OmniProcessor(image, video, _extractor(), tokenizer, chat_template=template),
    )


CONTROL_TOKENS = {
    **dict(enumerate(["<unk>", "<s>", "</s>", "[INST]", "[/INST]"])),
    **{11: "<pad>", 17: "[SYSTEM_PROMPT]", 18: "[/SYSTEM_PROMPT]"},
    **{24: "[AUDIO]", 25: "[BEGIN_AUDIO]", 34: "[TRANSCRIBE]"},
}
OTHER_CONTROL_TOKENS = (
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[TOOL_CONTENT]",
)
"""Tokens that mistral-common wants to exist."""
_folder = TemporaryDirectory(prefix="motet-tekken-")


def _write_tekken(path: Path) -> None:
    """A vocabulary of mistral-common: one token a byte."""
    others = iter(OTHER_CONTROL_TOKENS)
    control = [CONTROL_TOKENS.get(i) or next(others, f"<SPECIAL_{i}>") for i in range(35)]
    values = {
        "config": {
            "pattern": r"[^\r\n]+|[\r\n]+",
            "num_vocab_tokens": 256,
            "default_vocab_size": 256 + len(control),
            "default_num_special_tokens": len(control),
            "version": "v7",
        },
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": None} for i in range(256)
        ],
        "special_tokens": [{"rank": i, "token_str": token, "is_control": True} for i, token in enumerate(control)],
        "audio": {
            "sampling_rate": 16000,
            "frame_rate": 12.5,
            "audio_encoding_config": {"num_mel_bins": 128, "hop_length": 160, "window_size": 400},
            "chunk_length_s": 30.0,
        },
    }
    path.write_text(json.dumps(values))


def _voxtral(tokenizer: Any) -> tuple[dict[str, Any], Any]:
    """The sizes of sounds are those of every Voxtral, as its processor has no others: 1500 positions of 30 s. So its
    encoder is the smallest of all."""
    pytest.importorskip("mistral_common", reason="Voxtral's processor needs mistral-common")
    from transformers import MistralCommonBackend, VoxtralProcessor, WhisperFeatureExtractor

    tekken = Path(_folder.name) / "tekken.json"
    _write_tekken(tekken)
    processor = VoxtralProcessor(
        WhisperFeatureExtractor(feature_size=128), MistralCommonBackend(tokenizer_path=str(tekken))
    )
    audio = {
        "hidden_size": 16,
        "intermediate_size": 4 * 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    text = {"model_type": "llama", **TEXT, "num_attention_heads": 2, "head_dim": 16, "initializer_range": 0.1}
    return {"audio_config": audio, "text_config": text, "audio_token_id": 24}, processor


COMPOSITES: Mapping[str, Callable[[Any], tuple[dict[str, Any], Any]]] = {
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "internvl": _internvl,
    "llava_onevision": _llava_onevision,
    "gemma3": _gemma3,
    "smolvlm": _smolvlm,
    "qwen2_audio": _qwen2_audio,
    "qwen2_5_omni_thinker": _qwen2_5_omni_thinker,
    "voxtral": _voxtral,
}
"""By `model_type`: the configuration's values without ids of tokens, and the processor."""

ID_KEYS = {
    "image_token": ("image_token_id", "image_token_index"),
    "video_token": ("video_token_id", "video_token_index"),
    "audio_token": ("audio_token_id", "audio_token_index"),
    "boi_token": ("boi_token_index",),
    "eoi_token": ("eoi_token_index",),
    "vision_bos_token": ("vision_start_token_id",),
    "vision_eos_token": ("vision_end_token_id",),
    "audio_bos_token": ("audio_start_token_id",),
    "audio_eos_token": ("audio_end_token_id",),
}


def tiny_composite_config(name: str, tokenizer: Any = None) -> Any:
    return _made(name, tokenizer or tiny_tokenizer())[0]


def _made(name: str, tokenizer: Any) -> tuple[Any, Any]:
    """The configuration and the processor."""
    values, processor = COMPOSITES[name](tokenizer)
    ids = {
        key: tokenizer.convert_tokens_to_ids(getattr(tokenizer, token))
        for token, keys in ID_KEYS.items()
        for key in keys
    }
    if name == "internvl":
        ids["image_token_id"] = tokenizer.convert_tokens_to_ids(tokenizer.context_image_token)
    values["text_config"] = {**values["text_config"], "vocab_size": len(processor.tokenizer)}
    return CONFIG_MAPPING[name](**{**ids, **values}), processor


def save_tiny_composite(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Writes the model with its processor; returns the folder."""
    config, processor = _made(name, tiny_tokenizer())
    torch.manual_seed(seed)
    AutoModelForMultimodalLM.from_config(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
