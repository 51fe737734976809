"""Adapters (LoRA) in run files: the shapes that plans are made of, what is trained, and mistakes in one line."""

import copy
from typing import Any

import pytest
from tiny_run import TINY_RUN

from motet.config import RunConfig
from motet.errors import UserError
from motet.families.configured_graph import ConfiguredModule, read_graph
from motet.runtime.checkpoint.folder import changes_of_training, check_same_computation, computation_of


def run_file(*, key: str = "language_model", **lora: Any) -> RunConfig:
    values = copy.deepcopy(TINY_RUN)
    part = values["model"]["encoders"][key] if key != "language_model" else values["model"][key]
    part["train"] = {"lora": lora}
    return RunConfig.model_validate(values)


def language_model(**lora: Any) -> ConfiguredModule:
    return read_graph(run_file(**lora)).modules["language_model"]


def test_adapters_are_trained_and_nothing_else() -> None:
    module = language_model(rank=4)
    workload = module.workload
    assert not run_file(rank=4).model.causal_lm.train.module
    assert module.trainable == ((1, workload.num_layers - 1),)
    embed, block, *_, head = workload.layers
    assert (embed.num_adapter_parameters(), head.num_adapter_parameters()) == (0, 0)
    # Width 32, MLP 64, keys and values 16: q, k, v, o and three of the MLP.
    by_hand = 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64))
    assert block.num_adapter_parameters() == block.num_trained_per_rank(1) == by_hand
    assert block.num_parameters == block.num_own_parameters + by_hand
    # Of columns the second matrix is cut, of rows the first.
    halves = 4 * ((32 + 16) + 2 * (32 + 8) + (16 + 32) + 2 * (32 + 32) + (32 + 32))
    assert block.num_trained_per_rank(2) == halves


def test_targets_are_ends_of_paths() -> None:
    block = language_model(rank=4, targets=["q_proj", "mlp.down_proj"]).workload.layers[1]
    assert {linear.name for linear in block.linears if linear.adapter_rank} == {"self_attn.q_proj", "mlp.down_proj"}


def test_an_encoders_projector_is_trained_beside_its_adapters() -> None:
    vision = read_graph(run_file(key="vision", rank=2)).modules["vision"]
    num_layers = vision.workload.num_layers
    # Embedding and head are frozen, blocks have adapters, the projector is trained.
    assert vision.trainable == ((1, num_layers - 2), (num_layers - 1, num_layers))


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (
            {"targets": ["nope"]},
            r"model\.language_model\.train\.lora\.targets: no block of llama has a linear nope; give",
        ),
        ({"targets": [""]}, "targets: has no name, or an empty one"),
        ({"targets": []}, "targets: has no name, or an empty one"),
        ({"rank": 0}, r"lora\.rank"),
        ({"dropout": 1.0}, r"lora\.dropout"),
        ({"ranks": 8}, r"lora\.ranks"),
    ],
)
def test_mistakes(lora: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        language_model(**lora)


def test_own_weights_are_frozen_beside_adapters() -> None:
    values = copy.deepcopy(TINY_RUN)
    values["model"]["language_model"]["train"] = {"module": True, "lora": {}}
    with pytest.raises(ValueError, match="beside lora the module's own weights are frozen; leave it out"):
        RunConfig.model_validate(values)


def test_a_checkpoint_goes_on_with_another_dropout_and_not_with_another_alpha() -> None:
    saved = computation_of(run_file(rank=4, alpha=8))
    assert changes_of_training(saved, computation_of(run_file(rank=4, alpha=8, dropout=0.1)))
    check_same_computation("there", saved, computation_of(run_file(rank=4, alpha=8, dropout=0.1)))
    with pytest.raises(UserError, match=r"train\.lora\.alpha is 8\.0 there and 16\.0 here"):
        check_same_computation("there", saved, computation_of(run_file(rank=4, alpha=16)))
