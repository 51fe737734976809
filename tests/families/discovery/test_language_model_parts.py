import pytest
import torch
from tiny_language_models import TINY, tiny_language_model
from torch import nn
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    SiglipVisionConfig,
    XLMConfig,
    XLMWithLMHeadModel,
)
from transformers.models.llama import LlamaConfig

from motet.errors import UserError
from motet.families.discovery.language_model_parts import CausalPaths, causal_paths

SMALL = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 32}
BART = {"decoder_layers": 2, "d_model": 16, "decoder_attention_heads": 2, "decoder_ffn_dim": 16, "vocab_size": 32}
EXPECTED = {
    "gpt2": (
        lambda: GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32)),
        CausalPaths(
            base="transformer",
            words="transformer.wte",
            blocks="transformer.h",
            embed_parts=("transformer.wte", "transformer.wpe"),
            head_parts=("transformer.ln_f", "lm_head"),
            output="lm_head",
        ),
    ),
    "bert": (
        lambda: BertLMHeadModel(BertConfig(**SMALL, intermediate_size=16, is_decoder=True)),
        CausalPaths(
            base="bert",
            words="bert.embeddings.word_embeddings",
            blocks="bert.encoder.layer",
            embed_parts=("bert.embeddings",),
            head_parts=("cls",),
            output="cls.predictions.decoder",
        ),
    ),
    "bart": (
        lambda: BartForCausalLM(BartConfig(**BART)),
        CausalPaths(
            base="model.decoder",
            words="model.decoder.embed_tokens",
            blocks="model.decoder.layers",
            embed_parts=(
                "model.decoder.embed_tokens",
                "model.decoder.embed_positions",
                "model.decoder.layernorm_embedding",
            ),
            head_parts=("lm_head",),
            output="lm_head",
        ),
    ),
    "bloom": (
        lambda: BloomForCausalLM(BloomConfig(hidden_size=16, n_layer=2, n_head=2, vocab_size=32)),
        CausalPaths(
            base="transformer",
            words="transformer.word_embeddings",
            blocks="transformer.h",
            embed_parts=("transformer.word_embeddings", "transformer.word_embeddings_layernorm"),
            head_parts=("transformer.ln_f", "lm_head"),
            output="lm_head",
        ),
    ),
    "opt": (
        lambda: OPTForCausalLM(OPTConfig(**SMALL, ffn_dim=16, word_embed_proj_dim=16)),
        CausalPaths(
            base="model.decoder",
            words="model.decoder.embed_tokens",
            blocks="model.decoder.layers",
            embed_parts=("model.decoder.embed_tokens", "model.decoder.embed_positions"),
            head_parts=("model.decoder.final_layer_norm", "lm_head"),
            output="lm_head",
        ),
    ),
    "phi": (
        lambda: PhiForCausalLM(PhiConfig(**SMALL, intermediate_size=16)),
        CausalPaths(
            base="model",
            words="model.embed_tokens",
            blocks="model.layers",
            embed_parts=("model.embed_tokens",),
            head_parts=("model.final_layernorm", "lm_head"),
            output="lm_head",
        ),
    ),
    # Registered in another order than it runs.
    "gemma3n": (
        lambda: Gemma3nForCausalLM(Gemma3nTextConfig(**SMALL, vocab_size_per_layer_input=32, num_kv_shared_layers=0)),
        CausalPaths(
            base="model",
            words="model.embed_tokens",
            blocks="model.layers",
            embed_parts=(
                "model.embed_tokens",
                "model.embed_tokens_per_layer",
                "model.per_layer_model_projection",
                "model.per_layer_projection_norm",
                *(f"model.altup_projections.{i}" for i in range(3)),
            ),
            head_parts=("model.norm", *(f"model.altup_unembed_projections.{i}" for i in range(3)), "lm_head"),
            output="lm_head",
        ),
    ),
    "llava": (
        lambda: LlavaForConditionalGeneration(
            LlavaConfig(
                text_config=LlamaConfig(**SMALL, intermediate_size=16),
                vision_config=SiglipVisionConfig(
                    hidden_size=32, num_hidden_layers=8, num_attention_heads=2, intermediate_size=64, image_size=28
                ),
            )
        ),
        CausalPaths(
            base="model.language_model",
            words="model.language_model.embed_tokens",
            blocks="model.language_model.layers",
            embed_parts=("model.language_model.embed_tokens",),
            head_parts=("model.language_model.norm", "lm_head"),
            output="lm_head",
        ),
    ),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", EXPECTED)
def test_parts_of_models_of_many_forms(name, device):
    build, expected = EXPECTED[name]
    with torch.device(device):
        model = build()

    assert causal_paths(model) == expected


@pytest.mark.parametrize("name", TINY)
def test_parts_of_the_usual_form(name):
    assert causal_paths(tiny_language_model(name)) == CausalPaths(
        base="model",
        words="model.embed_tokens",
        blocks="model.layers",
        embed_parts=("model.embed_tokens",),
        head_parts=("model.norm", "lm_head"),
        output="lm_head",
    )


def test_searching_leaves_no_trace():
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32))

    before = torch.get_rng_state()
    causal_paths(model)

    assert torch.equal(before, torch.get_rng_state())
    assert all("forward" not in vars(module) and not module._forward_pre_hooks for module in model.modules())
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_a_model_that_was_cut_keeps_its_paths():
    model = tiny_language_model("llama")
    paths = causal_paths(model)
    model.model.embed_tokens = nn.Identity()

    assert causal_paths(model) is paths


def test_models_without_one_list_of_blocks_are_refused():
    with torch.device("meta"):
        model = XLMWithLMHeadModel(XLMConfig(emb_dim=16, n_layers=2, n_heads=2, vocab_size=32))

    with pytest.raises(UserError, match="spread over the lists"):
        causal_paths(model)
