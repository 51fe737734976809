"""Small configurations of every family, with the transformers class that each is for."""

import torch
from transformers import (
    BertConfig,
    BertModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PixtralVisionConfig,
    PixtralVisionModel,
    Qwen2AudioEncoderConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    SiglipTextConfig,
    SiglipTextModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    WhisperConfig,
)
from transformers.models.mllama.configuration_mllama import MllamaTextConfig
from transformers.models.mllama.modeling_mllama import MllamaForCausalLM
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder
from transformers.models.whisper.modeling_whisper import WhisperEncoder

TEXT = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 80,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "image_size": 96,
    "patch_size": 8,
}
AUDIO = {
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "max_source_positions": 50,
    "num_mel_bins": 16,
}
CAPTION = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 80,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DINO = {key: value for key, value in VISION.items() if key != "intermediate_size"}

LANGUAGE_MODELS = {
    "llama": (LlamaConfig(**TEXT), LlamaForCausalLM),
    "llama-bias-tied": (
        LlamaConfig(**TEXT, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        LlamaForCausalLM,
    ),
    "qwen3": (Qwen3Config(**TEXT, head_dim=32), Qwen3ForCausalLM),
    "mistral": (MistralConfig(**TEXT), MistralForCausalLM),
    "gemma3": (Gemma3TextConfig(**TEXT, head_dim=32), Gemma3ForCausalLM),
    "phi3": (Phi3Config(**TEXT), Phi3ForCausalLM),
    "mllama": (MllamaTextConfig(**TEXT, cross_attention_layers=[1]), MllamaForCausalLM),
}
ENCODERS = {
    "siglip": (SiglipVisionConfig(**VISION), SiglipVisionModel),
    "siglip-no-head": (SiglipVisionConfig(**VISION, vision_use_head=False), SiglipVisionModel),
    "clip": (CLIPVisionConfig(**VISION), CLIPVisionModel),
    "clip_text": (CLIPTextConfig(**CAPTION), CLIPTextModel),
    "siglip_text": (SiglipTextConfig(**CAPTION, projection_size=48), SiglipTextModel),
    "bert": (BertConfig(**CAPTION), BertModel),
    "dinov2": (Dinov2Config(**DINO), Dinov2Model),
    "dinov2-swiglu": (Dinov2Config(**DINO, use_swiglu_ffn=True, use_mask_token=False), Dinov2Model),
    "pixtral": (
        PixtralVisionConfig(**{**VISION, "head_dim": 16}),
        PixtralVisionModel,
    ),
    "qwen2_5_vl": (
        Qwen2_5_VLVisionConfig(
            depth=2,
            hidden_size=64,
            num_heads=4,
            intermediate_size=96,
            out_hidden_size=48,
            patch_size=4,
            window_size=32,
            fullatt_block_indexes=[1],
        ),
        Qwen2_5_VisionTransformerPretrainedModel,
    ),
    "whisper": (WhisperConfig(**AUDIO, decoder_layers=1), WhisperEncoder),
    "qwen2_audio": (Qwen2AudioEncoderConfig(**AUDIO), Qwen2AudioEncoder),
}
EVERY_MODEL = {**LANGUAGE_MODELS, **ENCODERS}


def meta_model(name):
    config, model_class = EVERY_MODEL[name]
    with torch.device("meta"):
        return model_class(config)
