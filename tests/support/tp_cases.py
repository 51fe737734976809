"""One tiny model of every family, and how to run it: what the tests of tensor parallelism compare.

Weights are drawn so that nothing vanishes (gates and norm weights of zero would hide wrong gradients), head counts
differ (grouped queries where the family has them), sequences are odd and their samples differ.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
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
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MllamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PixtralVisionConfig,
    PixtralVisionModel,
    Qwen2AudioEncoder,
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
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from motet.parallel.tensor.vocab_parallel import cross_entropy_sum, vocabulary_group

TEXT = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
TEXT_TOWER = {key: value for key, value in TEXT.items() if key not in ("num_key_value_heads", "tie_word_embeddings")}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 12,
    "patch_size": 4,
}
AUDIO = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "num_mel_bins": 8,
    "max_source_positions": 7,
}


@dataclass(frozen=True)
class Case:
    family: str
    build: Callable[[], nn.Module]
    run: Callable[[nn.Module], Tensor]
    """The loss of a forward pass: the same number on every rank."""

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        torch.manual_seed(0)
        model = self.build().to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        # HF freezes Whisper's positions; a gradient there is compared as well.
        return model.requires_grad_(True).train()


def random(*shape: int, seed: int, like: nn.Module) -> Tensor:
    dtype = next(like.parameters()).dtype
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def projected(output: Tensor, model: nn.Module) -> Tensor:
    """A loss whose gradient is far from zero everywhere: the mean square after a norm would be constant."""
    return (output * random(*output.shape, seed=7, like=model).to(output.dtype)).sum()


def run_text(model: Any, num_tokens: int = 5, **inputs: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 48, (2, num_tokens), generator=generator)
    ids[0, 0] = 3  # the padding token: torch's embedding gives its row no gradient
    labels = torch.randint(0, 48, (2, num_tokens), generator=generator)
    labels[1, :2] = -100
    hidden = model.model(input_ids=ids, use_cache=False, **inputs).last_hidden_state
    logits = model.lm_head(hidden)
    return cross_entropy_sum(logits, labels, vocabulary_group(model.lm_head)) + projected(hidden, model)


def run_text_tower(model: Any) -> Tensor:
    ids = torch.randint(4, 48, (2, 5), generator=torch.Generator().manual_seed(1))
    ids[:, -1] = 2  # where CLIP pools
    output = model(input_ids=ids)
    return projected(output.last_hidden_state, model) + projected(output.pooler_output, model)


def run_cross_attention(model: Any) -> Tensor:
    states = random(2, 3, 32, seed=2, like=model).requires_grad_()
    seen = torch.ones(2, 1, 5, 1, dtype=states.dtype)
    seen[0, 0, :2] = 0
    loss = run_text(
        model,
        cross_attention_states=states * 1.0,
        cross_attention_mask=torch.zeros(2, 1, 5, 3, dtype=states.dtype),
        full_text_row_masked_out_mask=seen,  # type: ignore[arg-type]
    )
    # The encoder's gradient must be whole on every rank: make it part of what is compared.
    model.states = states
    return loss


def run_gpt2(model: Any) -> Tensor:
    states = random(2, 3, 32, seed=2, like=model).requires_grad_()
    ids = torch.randint(0, 48, (2, 5), generator=torch.Generator().manual_seed(1))
    hidden = model(input_ids=ids, encoder_hidden_states=states * 1.0, use_cache=False).last_hidden_state
    model.states = states
    return projected(hidden, model)


def run_vision(model: Any) -> Tensor:
    output = model(pixel_values=random(2, 3, 12, 12, seed=3, like=model)).last_hidden_state
    return projected(output, model)


def run_pixtral(model: Any) -> Tensor:
    sizes = torch.tensor([[12, 4], [8, 8]])
    output = model(pixel_values=random(2, 3, 12, 8, seed=3, like=model), image_sizes=sizes).last_hidden_state
    return projected(output, model)


def run_qwen2_5_vl(model: Any) -> Tensor:
    grid = torch.tensor([[1, 4, 2], [1, 2, 2], [1, 6, 4]])
    patches = random(36, 3 * 2 * 4 * 4, seed=3, like=model)
    return projected(model(patches, grid_thw=grid).pooler_output, model)


def run_audio(model: Any) -> Tensor:
    return projected(model(random(2, 8, 14, seed=3, like=model)).last_hidden_state, model)


def llama(**settings: Any) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**TEXT | settings))


def dinov2(**settings: Any) -> nn.Module:
    values = {name: value for name, value in VISION.items() if name != "intermediate_size"}
    return Dinov2Model(Dinov2Config(**values, mlp_ratio=2, **settings))


CASES = [
    Case("llama", lambda: llama(attention_bias=True, mlp_bias=True), run_text),
    Case("llama", lambda: llama(tie_word_embeddings=True), run_text),
    Case("llama", lambda: llama(vocab_size=49), run_text),  # does not divide: whole on every rank
    Case("qwen3", lambda: Qwen3ForCausalLM(Qwen3Config(**TEXT, head_dim=8)), run_text),
    Case("mistral", lambda: MistralForCausalLM(MistralConfig(**TEXT, sliding_window=3)), run_text),
    Case(
        "gemma3_text",
        lambda: Gemma3ForCausalLM(
            Gemma3TextConfig(
                **TEXT | {"tie_word_embeddings": True},
                head_dim=8,
                sliding_window=3,
                layer_types=["sliding_attention", "full_attention"],
            )
        ),
        run_text,
    ),
    Case("phi3", lambda: Phi3ForCausalLM(Phi3Config(**TEXT)), run_text),
    Case(
        "mllama_text_model",
        lambda: MllamaForCausalLM(
            MllamaTextConfig(**TEXT | {"num_hidden_layers": 4}, cross_attention_layers=[0, 2, 3], dropout=0)
        ),
        run_cross_attention,
    ),
    Case(
        "mllama_text_model",  # text alone: the first and the last layers are left out
        lambda: MllamaForCausalLM(
            MllamaTextConfig(**TEXT | {"num_hidden_layers": 4}, cross_attention_layers=[0, 2, 3], dropout=0)
        ),
        run_text,
    ),
    Case("siglip_vision_model", lambda: SiglipVisionModel(SiglipVisionConfig(**VISION)), run_vision),
    Case("clip_vision_model", lambda: CLIPVisionModel(CLIPVisionConfig(**VISION)), run_vision),
    Case("dinov2", dinov2, run_vision),
    Case("dinov2", lambda: dinov2(use_swiglu_ffn=True), run_vision),
    Case(
        "qwen2_5_vl_vision",
        lambda: Qwen2_5_VisionTransformerPretrainedModel(
            Qwen2_5_VLVisionConfig(
                depth=2,
                hidden_size=32,
                intermediate_size=24,
                num_heads=4,
                patch_size=4,
                window_size=16,
                out_hidden_size=16,
                fullatt_block_indexes=[1],
            )
        ),
        run_qwen2_5_vl,
    ),
    Case("pixtral", lambda: PixtralVisionModel(PixtralVisionConfig(**VISION)), run_pixtral),
    Case("clip_text_model", lambda: CLIPTextModel(CLIPTextConfig(**TEXT_TOWER)), run_text_tower),
    Case("siglip_text_model", lambda: SiglipTextModel(SiglipTextConfig(**TEXT_TOWER)), run_text_tower),
    Case(
        "bert",
        lambda: BertModel(BertConfig(**TEXT_TOWER, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)),
        run_text_tower,
    ),
    Case(
        "gpt2",
        lambda: GPT2Model(
            GPT2Config(
                **{
                    name: TEXT[name]
                    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
                },
                n_inner=24,
                add_cross_attention=True,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        ),
        run_gpt2,
    ),
    Case("whisper", lambda: WhisperEncoder(WhisperConfig(**AUDIO)), run_audio),
    Case("qwen2_audio_encoder", lambda: Qwen2AudioEncoder(Qwen2AudioEncoderConfig(**AUDIO)), run_audio),
]
