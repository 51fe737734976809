"""A multimodal model in one process equals plain transformers: loss and every gradient."""

import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from tiny_mllm import (
    IMAGE,
    PATCHES,
    VOCABULARY,
    gradients_of,
    plain_loss,
    randomize,
    tiny_batch,
    tiny_llama,
    tiny_multimodal,
    tiny_vision,
)
from torch import Tensor, nn
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MllamaForCausalLM,
)
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

from motet import ModalityModule, MultimodalModule
from motet.errors import UserError
from motet.models.materialize import float64_throughout
from motet.models.stages.projector import build_projector

MIXED = [(1, 1), (0, 1), (2, 0), (0, 0), (1, 2)]


@pytest.fixture(autouse=True)
def _float64():
    with float64_throughout():
        yield


def compare(model: nn.Module, loss: Tensor, plain: Tensor) -> None:
    """Both losses of the same model, and all gradients."""
    assert loss.item() == pytest.approx(plain.item(), rel=1e-12)
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    ours = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    theirs = torch.autograd.grad(plain, parameters, allow_unused=True)
    assert sum(gradient is not None for gradient in theirs) > 20
    for name, own, other in zip(names, ours, theirs, strict=True):
        assert (own is None) == (other is None), name
        if own is not None:
            torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-13, msg=name)


def test_outputs_in_place_of_placeholders() -> None:
    model, batch = tiny_multimodal(), tiny_batch(MIXED)
    output = model(**batch)
    compare(model, output.loss, plain_loss(model, batch))
    assert output.logits.shape == (*batch["input_ids"].shape, VOCABULARY)


def test_text_alone() -> None:
    model, batch = tiny_multimodal(), tiny_batch([(0, 0)] * 3)
    torch.testing.assert_close(model(**batch).loss, plain_loss(model, batch), rtol=1e-12, atol=0)


def test_padding_on_the_left_is_no_different() -> None:
    model, batch = tiny_multimodal(), tiny_batch(MIXED)
    lengths = batch["attention_mask"].sum(1)
    turned = dict(batch)
    for key in ("input_ids", "attention_mask", "labels"):
        rows = [row.roll(len(row) - int(length)) for row, length in zip(batch[key], lengths, strict=True)]
        turned[key] = torch.stack(rows)
    assert not turned["attention_mask"][:, 0].all()
    torch.testing.assert_close(model(**turned).loss, model(**batch).loss, rtol=1e-12, atol=0)


def test_without_labels_there_are_logits_alone() -> None:
    model, batch = tiny_multimodal(), tiny_batch(MIXED)
    logits = model(**batch).logits
    del batch["labels"]
    output = model(**batch)
    assert set(output) == {"logits"}
    assert torch.equal(output.logits, logits)


def test_outputs_before_the_text() -> None:
    torch.manual_seed(0)
    model = MultimodalModule({"vision": ModalityModule(tiny_vision(), proj="mlp")}, tiny_llama()).double()
    assert model.merge == "prepend"
    batch = tiny_batch([(2, 0)] * 3, placeholders=False)
    llm = model.language_model.module
    images = model.vision_encoder.projector(model.vision_encoder.module(batch["pixel_values"]).last_hidden_state)
    embeddings = torch.cat([images.unflatten(0, (3, 2)).flatten(1, 2), llm.model.embed_tokens(batch["input_ids"])], 1)
    front = torch.ones(3, 2 * PATCHES, dtype=torch.long)
    plain = llm(
        inputs_embeds=embeddings,
        attention_mask=torch.cat([front, batch["attention_mask"]], 1),
        labels=torch.cat([-100 * front, batch["labels"]], 1),
    )
    output = model(**batch)
    compare(model, output.loss, plain.loss)
    assert output.logits.shape == plain.logits.shape


def test_cross_attention() -> None:
    torch.manual_seed(0)
    config = MllamaTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        cross_attention_layers=[1, 3],
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    model = MultimodalModule(
        {"vision": ModalityModule(tiny_vision(), proj="mlp")}, MllamaForCausalLM(config), merge="cross_attention"
    ).double()
    randomize(model)
    counts = [1, 0, 2]
    batch = tiny_batch([(count, 0) for count in counts], placeholders=False)
    llm = model.language_model.module
    images = model.vision_encoder.projector(model.vision_encoder.module(batch["pixel_values"]).last_hidden_state)
    total, num_tokens = torch.zeros(()), 0
    for i, own in enumerate(images.split(counts)):
        length = int(batch["attention_mask"][i].sum())
        ids, labels = batch["input_ids"][i, :length], batch["labels"][i, :length]
        states = own.flatten(0, 1)[None]
        extra = {
            "cross_attention_states": states,
            "cross_attention_mask": torch.zeros(1, 1, length, states.shape[1], dtype=torch.float64),
        }
        logits = llm(input_ids=ids[None], use_cache=False, **(extra if counts[i] else {})).logits[0]
        total = total + nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum")
        num_tokens += length - 1
    output = model(**batch, num_vision_items=counts)
    compare(model, output.loss, total / num_tokens)


def test_equals_llava() -> None:
    """transformers' own multimodal model with the same modules; its projector is the user's own here."""
    torch.manual_seed(0)
    text = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
    )
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, image_size=8, patch_size=4
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_layer=-2)
    llava = LlavaForConditionalGeneration(config).double()
    randomize(llava)
    llava.eval()
    language_model = LlamaForCausalLM(text)
    language_model.model, language_model.lm_head = llava.model.language_model, llava.lm_head
    model = MultimodalModule(
        {"vision": ModalityModule(llava.model.vision_tower, llava.model.multi_modal_projector, feature_layer=-2)},
        language_model,
        placeholder_token_ids={"vision": IMAGE},
    )
    batch = tiny_batch([(1, 0), (2, 0), (0, 0)])
    plain = llava(**batch)
    output = model(**batch)
    compare(model, output.loss, plain.loss)
    own = batch["attention_mask"] == 1
    torch.testing.assert_close(output.logits[own], plain.logits[own], rtol=1e-10, atol=1e-12)


def into_blocks(inputs: dict) -> dict:
    pixels = inputs["pixel_values"]
    blocks = pixels.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5)
    return {"pixel_values": blocks.flatten(0, 2), "scale": inputs["scale"]}


def mean_of_blocks(inputs: dict, output: tuple) -> tuple:
    """[items x 4 blocks x patches, H] -> [items x patches, H], each item scaled by its own number."""
    items = output[0].unflatten(0, (-1, 4, PATCHES)).mean(1)
    return ((items * inputs["scale"][:, None, None]).flatten(0, 1),)


@pytest.mark.parametrize("merges_itself", [False, True])
def test_callbacks(merges_itself: bool) -> None:
    """Of listing 2: blocks of images, their outputs reduced, and the user's own merging."""
    calls = []

    def merge(encoder_outputs: dict, inputs: dict) -> dict:
        calls.append(len(encoder_outputs["vision"]))
        where = (inputs["input_ids"] == IMAGE)[:, None]
        return {"inputs_embeds": inputs["inputs_embeds"].masked_scatter(where, encoder_outputs["vision"])}

    torch.manual_seed(0)
    encoder = ModalityModule(
        tiny_vision(), "mlp", preprocess_callback=into_blocks, postprocess_module_callback=mean_of_blocks
    )
    model = MultimodalModule(
        {"vision": encoder},
        tiny_llama(),
        preprocess_callback=merge if merges_itself else None,
        placeholder_token_ids={"vision": IMAGE},
    ).double()
    batch = tiny_batch([(1, 0), (2, 0)])
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(3, 3, 16, 16, generator=generator, dtype=torch.float64)
    scale = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    del batch["pixel_values"]

    blocks = into_blocks({"pixel_values": pixels, "scale": scale})["pixel_values"]
    hidden = encoder.module(blocks).last_hidden_state
    outputs = encoder.projector(mean_of_blocks({"scale": scale}, (hidden.flatten(0, 1),))[0])
    llm = model.language_model.module
    embeddings = llm.model.embed_tokens(batch["input_ids"])
    embeddings = embeddings.masked_scatter((batch["input_ids"] == IMAGE)[..., None], outputs)
    plain = llm(inputs_embeds=embeddings, attention_mask=batch["attention_mask"], labels=batch["labels"])

    loss = model(**batch, vision={"pixel_values": pixels, "scale": scale}, num_vision_items=[1, 2]).loss
    compare(model, loss, plain.loss)
    assert calls == ([PATCHES, 2 * PATCHES] if merges_itself else [])


def test_frozen_as_in_listing_1() -> None:
    model, batch = tiny_multimodal(), tiny_batch(MIXED)
    model.vision_encoder.module.train(mode=False)
    model.vision_encoder.projector.train(mode=True)
    model(**batch).loss.backward()
    trained = set(gradients_of(model))
    assert model.frozen_parts() == {"vision.module"}
    assert not any(name.startswith("encoders.vision.module.") for name in trained)
    for part in ("encoders.vision.projector.", "encoders.audio.module.", "language_model.module."):
        assert any(name.startswith(part) for name in trained), part


def own_projector() -> nn.Module:
    return build_projector("linear", 16, 20)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"merge": "append"}, "merge: 'append' is not known; give one of placeholder, prepend, cross_attention"),
        ({"merge": "cross_attention"}, "LlamaForCausalLM has no cross-attention layers"),
        ({"placeholder_token_ids": {"sight": 1}}, "placeholder_token_ids: there is no encoder 'sight'; give vision"),
        ({"encoders": {"vision": ModalityModule(tiny_vision())}}, "is 16 wide and the language model 32"),
        ({"encoders": {"vision": tiny_llama()}}, "LlamaForCausalLM is not known; known are SiglipVisionModel"),
        (
            {"encoders": {"vision": ModalityModule(tiny_vision(), own_projector())}},
            "is 20 wide and the language model 32",
        ),
        ({"language_model": tiny_vision()}, "language_model: SiglipVisionModel is not a causal language model"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict, message: str) -> None:
    fitting = {"encoders": {"vision": ModalityModule(tiny_vision(), "mlp")}, "language_model": tiny_llama()}
    with pytest.raises(ValueError, match=message) as caught:
        MultimodalModule(**{**fitting, **arguments})
    assert "\n" not in str(caught.value)


def test_two_encoders_cannot_share_a_placeholder() -> None:
    encoders = {name: ModalityModule(tiny_vision(), "mlp") for name in ("near", "far")}
    with pytest.raises(ValueError, match="7 stands for both near and far; give each a token of its own"):
        MultimodalModule(encoders, tiny_llama(), placeholder_token_ids={"near": 7, "far": 7})


@pytest.mark.parametrize("how", ["get_peft_model", "inject_adapter_in_model"])
def test_a_model_with_adapters_is_refused_in_one_line(how: str) -> None:
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
    model = LlamaForCausalLM(config)
    lora = LoraConfig(target_modules=["q_proj"])
    if how == "get_peft_model":
        model = get_peft_model(model, lora)
    else:
        inject_adapter_in_model(lora, model)  # As transformers' `add_adapter` does.
    with pytest.raises(UserError, match=r"has adapters of peft.*merge_and_unload"):
        MultimodalModule({}, model)
