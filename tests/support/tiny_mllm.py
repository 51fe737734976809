"""Small multimodal models, and batches for them as HuggingFace processors return them.

`plain_loss` is what a user would write with transformers alone, without motet: a batch padded on the right, encoder
outputs put where the placeholder ids stand.
"""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, SiglipVisionConfig, SiglipVisionModel, WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from motet import ModalityModule, MultimodalModule

IMAGE, SOUND = 38, 39
"""Placeholder ids."""
VOCABULARY = 40
PATCHES, CLIP_TOKENS = 4, 6
"""Tokens that an image and a clip become."""


def tiny_vision() -> SiglipVisionModel:
    return SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=8,
            patch_size=4,
            vision_use_head=False,
        )
    )


def tiny_audio() -> WhisperEncoder:
    return WhisperEncoder(
        WhisperConfig(
            d_model=16,
            encoder_layers=2,
            encoder_attention_heads=2,
            encoder_ffn_dim=24,
            num_mel_bins=5,
            max_source_positions=CLIP_TOKENS,
        )
    )


def tiny_llama(**values: object) -> LlamaForCausalLM:
    torch.manual_seed(0)  # Made in every process anew, and compared.
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=0,
            **values,
        )
    )


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Fresh norms and biases would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.1 * drawn.to(parameter.dtype))


def tiny_multimodal(
    *, merge: str = "placeholder", language_model: nn.Module | None = None, **arguments: object
) -> MultimodalModule:
    """Vision with an MLP and audio with a linear projector, in float64."""
    torch.manual_seed(0)
    model = MultimodalModule(
        encoders={
            "vision": ModalityModule(tiny_vision(), proj="mlp"),
            "audio": ModalityModule(tiny_audio(), proj="linear"),
        },
        language_model=language_model or tiny_llama(),
        merge=merge,
        placeholder_token_ids={"vision": IMAGE, "audio": SOUND},
        **arguments,
    ).double()
    randomize(model)
    return model


def tiny_batch(items: list[tuple[int, int]], *, seed: int = 0, placeholders: bool = True) -> dict[str, Tensor]:
    """`items`: (images, clips) of each sample. Padded on the right, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def text(length: int) -> list[int]:
        return torch.randint(1, VOCABULARY - 2, (length,), generator=generator).tolist()

    rows = []
    for index, (images, clips) in enumerate(items):
        row = text(1 + index % 2)
        if placeholders:
            for _ in range(images):
                row += [IMAGE] * PATCHES + text(index % 2)
            for _ in range(clips):
                row += text(1) + [SOUND] * CLIP_TOKENS
        rows.append(row + text(2 + index % 3))
    columns = max(map(len, rows))
    ids = torch.tensor([row + [0] * (columns - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (columns - len(row)) for row in rows])
    labels = ids.masked_fill((mask == 0) | (ids == IMAGE) | (ids == SOUND), -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    num_images, num_clips = (sum(counts) for counts in zip(*items, strict=True))
    if num_images:
        batch["pixel_values"] = torch.randn(num_images, 3, 8, 8, generator=generator, dtype=torch.float64)
    if num_clips:
        batch["input_features"] = torch.randn(num_clips, 5, 2 * CLIP_TOKENS, generator=generator, dtype=torch.float64)
    return batch


def plain_loss(model: MultimodalModule, batch: dict[str, Tensor]) -> Tensor:
    """Reads nothing of motet but which transformers modules there are."""
    llm = model.language_model.module
    embeddings = llm.get_input_embeddings()(batch["input_ids"])
    if "pixel_values" in batch:
        outputs = model.vision_encoder.module(batch["pixel_values"]).last_hidden_state
        embeddings = _put(embeddings, batch["input_ids"] == IMAGE, model.vision_encoder.projector(outputs))
    if "input_features" in batch:
        outputs = model.audio_encoder.module(batch["input_features"]).last_hidden_state
        embeddings = _put(embeddings, batch["input_ids"] == SOUND, model.audio_encoder.projector(outputs))
    return llm(inputs_embeds=embeddings, attention_mask=batch["attention_mask"], labels=batch["labels"]).loss


def _put(embeddings: Tensor, where: Tensor, outputs: Tensor) -> Tensor:
    return embeddings.masked_scatter(where[..., None], outputs.flatten(0, 1))


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
