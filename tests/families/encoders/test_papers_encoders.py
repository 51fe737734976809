"""Models that Cornstarch names. Two of its encoders have no entry in the table of families: EVA-CLIP's and the one for
sounds of Phi-4, which are wrapped in a module of one's own."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checkout import ROOT
from distributed import run_distributed
from tiny_mllm import gradients_of, randomize, tiny_llama
from torch import Tensor, nn
from transformers import Phi4MultimodalAudioConfig, Phi4MultimodalAudioModel

from motet import ModalityModule, MultimodalModule, MultimodalParallelSpec, ParallelSpec, register_encoder
from motet.models.materialize import float64_throughout

PLACE = 38
LANGUAGE_MODELS = (
    "llama",
    "llama4_text",
    "mistral",
    "mixtral",
    "gemma",
    "gemma2",
    "qwen2",
    "qwen3",
    "phi3",
    "internlm3",
)
"""Those that the thesis lists in table B.1, or their successors."""


def test_its_language_models_were_found_equal() -> None:
    families = json.loads((ROOT / "docs" / "generate" / "probed_families.json").read_text())["families"]
    for name in LANGUAGE_MODELS:
        reasons = families[name]["reasons"]
        assert reasons["pipeline"] is None
        assert reasons["tensor and pipeline"] is None


class Eva(nn.Module):
    """The tower of EVA-CLIP, as timm has it."""

    def __init__(self) -> None:
        super().__init__()
        from timm.models.eva import Eva as Tower

        self.tower = Tower(img_size=28, patch_size=14, embed_dim=16, depth=2, num_heads=2, mlp_ratio=2, num_classes=0)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.tower.forward_features(pixel_values)


class PhiAudio(nn.Module):
    """The audio encoder of Phi-4 multimodal."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_blocks": 2, "num_attention_heads": 2}
        channels = dict.fromkeys(("ext_pw_out_channel", "depthwise_separable_out_channel", "nemo_conv_channels"), 16)
        self.audio = Phi4MultimodalAudioModel(Phi4MultimodalAudioConfig(**sizes, **channels, input_size=16))

    def forward(self, spoken: Tensor) -> Tensor:
        return self.audio(spoken, None)


register_encoder(Eva, modality="picture", example=(3, 28, 28))
register_encoder(PhiAudio, modality="spoken", example=(32, 16))
SHAPES = {Eva: (3, 28, 28), PhiAudio: (32, 16)}
NUM_TOKENS = {Eva: 5, PhiAudio: 4}


@pytest.fixture
def _float64() -> Iterator[None]:
    with float64_throughout():
        yield


def model_of(encoder: Any) -> MultimodalModule:
    torch.manual_seed(0)
    parts = {"medium": ModalityModule(encoder(), "mlp")}
    model = MultimodalModule(parts, tiny_llama(), placeholder_token_ids={"medium": PLACE}).double()
    randomize(model)
    return model


def batch_of(encoder: Any) -> dict[str, Tensor]:
    """Three samples with an item, and one without."""
    media = [PLACE] * NUM_TOKENS[encoder]
    rows = [[*media, 5, 6, 7], [5, *media, 8], [5, 6, 7], [*media, 9, 10]]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    items = torch.randn(3, *SHAPES[encoder], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    key = "picture" if encoder is Eva else "spoken"
    labels = ids.masked_fill((mask == 0) | (ids == PLACE), -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, key: items}


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("encoder", SHAPES)
def test_they_equal_one_process_beside_a_pipeline(encoder: Any) -> None:
    if encoder is Eva:
        pytest.importorskip("timm", reason="EVA's tower is timm's")
    batch = batch_of(encoder)
    reference = model_of(encoder)
    loss = reference(**batch).loss
    loss.backward()
    expected = {name.removeprefix("encoders."): g for name, g in gradients_of(reference).items()}
    spec = MultimodalParallelSpec(
        {"medium": ParallelSpec()}, ParallelSpec(pp_size=2), num_microbatches=2, microbatch_size=2
    )

    def work(rank: int) -> tuple[float, dict[str, Tensor]]:
        model = spec.apply(model_of(encoder))
        found = model.execute(batch).loss.item()
        return found, {p.name: p.parameter.grad for p in model._engine.model.parameters}

    results = run_distributed(work, 3)
    seen = {name: gradient for _, held in results for name, gradient in held.items() if gradient is not None}
    assert all(found == pytest.approx(loss.item(), rel=1e-11) for found, _ in results)
    assert seen.keys() == {name for name, gradient in expected.items() if gradient is not None}
    for name, gradient in seen.items():
        assert (gradient - expected[name]).norm() <= 1e-9 * max(float(expected[name].norm()), 1e-6), name
