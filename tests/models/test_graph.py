"""What planners are told of a model in memory."""

import pytest
import torch
from tiny_encoders import ENCODERS, tiny_encoder
from tiny_language_models import tiny_language_model
from tiny_mllm import tiny_llama, tiny_multimodal, tiny_vision
from torch import nn

from motet import ModalityModule, MultimodalModule
from motet.plan import Edge


def test_layers_and_what_is_trainable() -> None:
    nodes = tiny_multimodal().nodes
    assert {name: s.workload().num_layers for name, s in nodes.items()} == {
        "vision": 5,
        "audio": 5,
        "language_model": 6,
    }
    assert [s.trainable for s in nodes.values()] == [((0, 5),), ((0, 5),), ((0, 6),)]
    assert [s.loss_weight for s in nodes.values()] == [0, 0, 1]
    assert [s.workload().output_size for s in nodes.values()] == [32, 32, 32]


def test_frozen_parts_and_layers() -> None:
    model = tiny_multimodal()
    model.vision_encoder.module.requires_grad_(False)
    model.audio_encoder.projector.requires_grad_(False)
    model.language_model.module.requires_grad_(False)
    model.language_model.module.model.layers[0].mlp.requires_grad_(True)
    model.language_model.module.model.layers[3].requires_grad_(True)
    nodes = model.nodes
    assert nodes["vision"].trainable == ((4, 5),)
    assert nodes["audio"].trainable == ((0, 4),)
    assert nodes["language_model"].trainable == ((1, 2), (4, 5))


def test_a_shared_weight_belongs_to_two_layers() -> None:
    model = tiny_multimodal(language_model=tiny_llama(tie_word_embeddings=True))
    model.language_model.module.requires_grad_(False)
    model.language_model.module.model.embed_tokens.requires_grad_(True)
    language_model = model.nodes["language_model"]
    assert language_model.workload().tied == ((0, 5),)
    assert language_model.trainable == ((0, 1), (5, 6))
    assert tiny_multimodal().nodes["language_model"].workload().tied == ()


def test_a_projector_of_the_users_own() -> None:
    projector = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 32, bias=False))
    model = MultimodalModule({"vision": ModalityModule(tiny_vision(), projector)}, tiny_llama())
    vision = model.nodes["vision"]
    assert vision.workload().layers[-1].part == "projector"
    assert vision.workload().layers[-1].num_parameters == sum(p.numel() for p in projector.parameters())
    assert vision.trainable == ((0, 5),)


def test_where_encoders_enter() -> None:
    assert tiny_multimodal().edges == (
        Edge(source="vision", target="language_model"),
        Edge(source="audio", target="language_model"),
    )
    encoders = {"vision": ModalityModule(tiny_encoder("siglip", dtype=torch.float32), "mlp")}
    crossing = MultimodalModule(encoders, tiny_language_model("mllama"), merge="cross_attention")
    assert crossing.edges == (Edge(source="vision", target="language_model", layers=(2, 4)),)
    assert [segment.source for segment in crossing.typical_sample().layouts["language_model"]] == [None]


@pytest.mark.parametrize("family", ENCODERS)
def test_every_encoder_has_a_typical_item(family: str) -> None:
    encoder = ModalityModule(tiny_encoder(family), "mlp")
    sample = MultimodalModule({"encoder": encoder}, tiny_language_model("llama")).typical_sample()
    outputs, text = sample.layouts["language_model"]
    assert outputs.num_tokens == sample.num_outputs("encoder") > 0
    assert outputs.source == "encoder"
    assert text.num_tokens > sample.num_loss_tokens["language_model"] > 0
