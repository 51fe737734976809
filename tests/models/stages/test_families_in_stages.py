"""A sample of transformers' causal models, chosen for what their forwards do: in three stages as in one process."""

import copy

import pytest
import torch
from stage_chain import largest_difference, run_chain, run_whole, text_samples
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from motet.errors import UserError
from motet.families.capabilities import attends_causally
from motet.families.discovery.language_model_parts import num_causal_layers
from motet.families.tiny import perturb, tiny_config
from motet.models.materialize import float64_throughout
from motet.models.stages.language_model import LanguageModelStage
from motet.parallel.context.context_sequence import ContextParallel
from motet.plan import ContextOptions

SAMPLE = {
    "granite": "multiplies embeddings, residuals and logits",
    "cohere2": "scales logits, alternating windows",
    "qwen2": "biases of queries and keys",
    "gemma2": "caps on logits and scores",
    "gemma3_text": "two kinds of rotary positions",
    "olmo2": "norms behind the blocks' parts",
    "starcoder2": "LayerNorm with biases, MLP without gate",
    "nanochat": "norms without weights, a cap",
    "glm4": "partial rotary positions",
    "minicpm3": "latent attention, scaled residuals",
    "gpt2": "learned positions, Conv1D",
    "opt": "positions that begin at 2",
    "bloom": "ALiBi, tuples",
    "gptj": "attention beside the MLP, tuples",
    "falcon": "tuples, parallel attention",
    "gpt_neox": "one linear for queries, keys and values",
    "codegen": "rotated pairs, tuples",
    "mpt": "ALiBi of its own",
    "bart": "a decoder of an encoder-decoder",
    "roberta": "positions counted from the padding",
    "qwen3_moe": "experts",
    "mamba": "states instead of attention",
    "bamba": "states and attention in turn",
    "gemma4_text": "embeddings of each layer, shared keys and values",
    "gemma3n_text": "four copies of hidden states",
}
EXTRA = {"roberta": {"is_decoder": True}, "bamba": {"attn_layer_indices": [1, 3]}}


def tiny_model(model_type: str) -> torch.nn.Module:
    config = tiny_config(CONFIG_MAPPING[model_type](**EXTRA.get(model_type, {})))
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    perturb(model)
    return model


@pytest.mark.parametrize("model_type", SAMPLE)
def test_three_stages_equal_the_plain_model(model_type: str) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 100, (length,), generator=generator) for length in (9, 14)]
    features = [{"input_ids": own, "labels": own} for own in ids]
    with float64_throughout():
        model = tiny_model(model_type)
        num_layers = num_causal_layers(model)
        bounds = [(0, 2), (2, num_layers - 2), (num_layers - 2, num_layers)]
        stages = [LanguageModelStage("language_model", copy.deepcopy(model), layers) for layers in bounds]
        ours = run_chain(stages, text_samples(ids), features)
        assert largest_difference(ours, run_whole(model, features)) < 1e-9


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("zamba2", "share the parameter"),
        ("glm_moe_dsa", "cannot be passed on token by token"),
        ("xlm", "spread over the lists"),
        ("deepseek_v4", "hold whole numbers"),
    ],
)
def test_models_that_cannot_be_cut_are_refused(model_type: str, reason: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(CONFIG_MAPPING[model_type]()))
    with pytest.raises(UserError, match=reason):
        LanguageModelStage("language_model", model, (0, 2))


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral", "gemma3_text", "phi3", "gpt_oss", "llama4_text"])
def test_causal_models_need_no_mask_for_padding(model_type: str) -> None:
    """Padding stands behind its sample. Windows and chunks are shorter than the longer sample."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 100, (length,), generator=generator) for length in (9, 14)]
    features = [{"input_ids": own, "labels": own} for own in ids]
    masks: list[object] = []

    def note(module: torch.nn.Module, args: object, kwargs: dict[str, object]) -> None:
        masks.append(kwargs["attention_mask"])

    with float64_throughout():
        model = tiny_model(model_type)
        assert attends_causally(model.config)
        for key in ("sliding_window", "attention_chunk_size"):
            if getattr(model.config, key, None):
                setattr(model.config, key, 4)
        stage = LanguageModelStage("language_model", copy.deepcopy(model), (0, num_causal_layers(model)))
        stage.module.register_forward_pre_hook(note, with_kwargs=True)
        ours = run_chain([stage], text_samples(ids), features)
        assert largest_difference(ours, run_whole(model, features)) < 1e-9
    assert masks == [None]


@pytest.mark.parametrize(("num_tokens", "num_logits"), [(40, 80), (20, 38)])
@pytest.mark.parametrize("packing", [False, True])
def test_few_tokens_without_label_get_logits_too(num_tokens: int, num_logits: int, packing: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 100, (num_tokens,), generator=generator) for _ in range(2)]
    features = [{"input_ids": own, "labels": own} for own in ids]
    shapes: list[torch.Size] = []
    with float64_throughout():
        model = tiny_model("llama")
        num_layers = num_causal_layers(model)
        bounds = [(0, 2), (2, num_layers)]
        stages = [LanguageModelStage("language_model", copy.deepcopy(model), own, packing=packing) for own in bounds]
        stages[-1].module.lm_head.register_forward_hook(lambda module, args, logits: shapes.append(logits.shape))
        ours = run_chain(stages, text_samples(ids), features)
        assert largest_difference(ours, run_whole(model, features)) < 1e-9
    assert [shape[:-1].numel() for shape in shapes] == [num_logits]


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("llama", "is_causal", False),
        ("qwen3", "is_causal", False),
        ("gemma3_text", "use_bidirectional_attention", True),
    ],
)
def test_tokens_that_see_those_behind_them_do_not_see_padding(model_type: str, key: str, value: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 100, (length,), generator=generator) for length in (9, 14)]
    features = [{"input_ids": own, "labels": own} for own in ids]
    with float64_throughout():
        config = tiny_config(CONFIG_MAPPING[model_type]())
        setattr(config, key, value)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
        perturb(model)
        layers = (0, num_causal_layers(model))
        stage = LanguageModelStage("language_model", copy.deepcopy(model), layers)
        assert largest_difference(run_chain([stage], text_samples(ids), features), run_whole(model, features)) < 1e-9
        alone = ContextParallel(group=None, rank=0, size=1, options=ContextOptions())
        with pytest.raises(UserError, match="is not causal"):
            stage.enable_context_parallel(alone)
        with pytest.raises(UserError, match="has not been verified"):
            LanguageModelStage("language_model", copy.deepcopy(model), layers, packing=True)


def test_families_with_positions_in_their_attention_are_not_known_to_be_causal() -> None:
    assert not attends_causally(CONFIG_MAPPING["bloom"]())
