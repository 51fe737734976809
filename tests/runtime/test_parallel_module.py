"""A parallelized model equals the model in one process: loss and every gradient, for the layouts of the Python API."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_distributed
from sampling import in_campaigns
from tiny_mllm import gradients_of, randomize, tiny_batch, tiny_llama, tiny_multimodal, tiny_vision
from torch import Tensor
from transformers import LlamaForCausalLM, MllamaForCausalLM
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

from motet import ModalityModule, MultimodalModule, MultimodalParallelModule, MultimodalParallelSpec, ParallelSpec
from motet.assignment.sample import Segment
from motet.attention.masks.interval_mask import IntervalMask, interval_mask
from motet.attention.masks.rules import register_mask
from motet.errors import UserError
from motet.models.materialize import float64_throughout
from motet.plan import ContextOptions, Plan
from motet.runtime.parallel_module import ParallelModule


def backwards(segments: tuple[Segment, ...], window: int | None) -> IntervalMask:
    """Every token sees itself and what stands after it."""
    place = np.arange(sum(segment.num_tokens for segment in segments))
    return interval_mask((place, place * 0 + len(place)))


register_mask("backwards", backwards)

MIXED = [(1, 1), (0, 1), (2, 0), (0, 0), (1, 0), (1, 2), (0, 0), (3, 1)]
"""(images, clips) of each of 8 samples."""

ONE, TWO_STAGES, TWO_SHARDS = ParallelSpec(), ParallelSpec(pp_size=2), ParallelSpec(tp_size=2)
Build = Callable[[], MultimodalModule]


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with float64_throughout():
        yield


def layout(vision: ParallelSpec, audio: ParallelSpec, llm: ParallelSpec, **arguments: Any) -> MultimodalParallelSpec:
    return MultimodalParallelSpec({"vision": vision, "audio": audio}, llm, **arguments)


def one_process(build: Build, batch: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    model = build()
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), {name.removeprefix("encoders."): gradient for name, gradient in gradients_of(model).items()}


def whole_gradients(model: MultimodalParallelModule) -> dict[str, Tensor]:
    """Of what this rank holds and samples reach, by their names in the whole model."""
    held = model._engine.model.parameters
    return {p.name: p.gather(p.parameter.grad) for p in held if p.parameter.grad is not None}


def run_and_compare(
    world_size: int, spec: MultimodalParallelSpec, batch: dict[str, Any], build: Build = tiny_multimodal
) -> None:
    loss, reference = one_process(build, batch)

    def work(rank: int) -> tuple[float, float, dict[str, Tensor]]:
        model = spec.apply(build())
        output = model.execute(batch)
        return output.loss.item(), model.eval_loss(batch).item(), whole_gradients(model)

    seen = set()
    for rank_loss, eval_loss, held in run_distributed(work, world_size):
        assert rank_loss == pytest.approx(loss, rel=1e-11)
        assert eval_loss == pytest.approx(loss, rel=1e-11)
        for name, gradient in held.items():
            expected = reference[name]
            error = (gradient - expected).norm() / max(expected.norm(), 1e-6)
            assert error < 1e-9, f"{name}: {error:.1e}"
            seen.add(name)
    assert seen >= set(reference)


def test_stages_of_every_module() -> None:
    run_and_compare(5, layout(ONE, TWO_STAGES, TWO_STAGES, num_microbatches=4, microbatch_size=2), tiny_batch(MIXED))


def test_tensor_parallel_groups_of_unequal_size() -> None:
    run_and_compare(5, layout(TWO_SHARDS, ONE, TWO_SHARDS, num_microbatches=2, microbatch_size=4), tiny_batch(MIXED))


@pytest.mark.parametrize("method", ["all_gather", *in_campaigns(["ulysses"])])
def test_ranks_share_the_tokens(method: Any) -> None:
    llm = ParallelSpec(cp_size=2, pp_size=2, context=ContextOptions(block_size=4, method=method))
    run_and_compare(6, layout(ONE, ONE, llm, num_microbatches=2, microbatch_size=4), tiny_batch(MIXED))


def attending_build(media_attention: str) -> MultimodalModule:
    return tiny_multimodal(media_attention=media_attention)


@pytest.mark.parametrize("cp_size", [2, *in_campaigns([1])])
def test_what_media_see(cp_size: int) -> None:
    """A mask of one's own, which is no other's."""
    llm = ParallelSpec(cp_size=cp_size, context=ContextOptions(block_size=4))
    build = partial(attending_build, "backwards")
    batch = tiny_batch(MIXED[:4])
    run_and_compare(2 + cp_size, layout(ONE, ONE, llm, num_microbatches=2, microbatch_size=2), batch, build)
    losses = {one_process(partial(attending_build, kind), batch)[0] for kind in ("backwards", "causal", "own_item")}
    assert len(losses) == 3


def test_replicas_fill_the_world() -> None:
    spec = layout(ONE, ONE, ONE, num_microbatches=2, microbatch_size=2, schedule="gpipe", packing=True)
    run_and_compare(6, spec, tiny_batch(MIXED))


def test_encoders_share_ranks() -> None:
    llm = ParallelSpec(tp_size=2, sequence_parallel=True)
    spec = layout(ONE, ONE, llm, num_microbatches=3, modality_parallelism="colocated", recompute=("language_model",))
    run_and_compare(3, spec, tiny_batch(MIXED[:3]))


@pytest.mark.campaign
def test_replicated_encoders_whose_copies_nobody_reads() -> None:
    spec = layout(ONE, ONE, TWO_STAGES, num_microbatches=2, microbatch_size=2, modality_parallelism="replicated")
    run_and_compare(2, spec, tiny_batch(MIXED[:4]))


def test_a_batch_without_images() -> None:
    run_and_compare(3, layout(ONE, ONE, ONE, num_microbatches=2, microbatch_size=2), tiny_batch([(0, 1), (0, 0)] * 2))


def frozen_build() -> MultimodalModule:
    """As in listing 1: what is in evaluation mode is frozen."""
    model = tiny_multimodal(language_model=tiny_llama(tie_word_embeddings=True))
    model.vision_encoder.module.train(mode=False)
    model.language_model.module.train(mode=False)
    return model


def test_frozen_parts_have_no_gradient() -> None:
    spec = layout(TWO_STAGES, ONE, TWO_STAGES, num_microbatches=4, recompute=("vision", "language_model"))
    batch = tiny_batch(MIXED[:4])

    def work(rank: int) -> tuple[set[str], list[bool], float]:
        model = spec.apply(frozen_build())
        model.execute(batch)
        trained = {p.part for p in model._engine.model.parameters if p.parameter.grad is not None}
        modes = []
        for mode in (False, True):
            model.train(mode)
            modes.append(model.stages["vision"].module.training if "vision" in model.stages else False)
        return trained, modes, model.clip_gradients(1e-3).item()

    results = run_distributed(work, 5)
    assert set.union(*(trained for trained, _, _ in results)) == {"vision.projector", "audio.module", "audio.projector"}
    assert not any(any(modes) for _, modes, _ in results)
    _, gradients = one_process(frozen_build, batch)
    norm = sum(gradient.square().sum().item() for gradient in gradients.values()) ** 0.5
    assert all(clipped == pytest.approx(norm, rel=1e-9) for *_, clipped in results)
    run_and_compare(5, spec, batch, frozen_build)


def prepending_build() -> MultimodalModule:
    """With tied embeddings, and a callback that merges."""

    def merge(encoder_outputs: dict[str, Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        tokens = torch.cat(list(encoder_outputs.values())) if encoder_outputs else inputs["inputs_embeds"][:0]
        return {"inputs_embeds": torch.cat([tokens, inputs["inputs_embeds"][len(tokens) :]])}

    llama = tiny_llama(tie_word_embeddings=True)
    return tiny_multimodal(merge="prepend", language_model=llama, preprocess_callback=merge)


def test_prepending_by_callback() -> None:
    items = MIXED[:4]
    batch: dict[str, Any] = tiny_batch(items, placeholders=False)
    batch["num_vision_items"], batch["num_audio_items"] = ([counts[i] for counts in items] for i in (0, 1))
    run_and_compare(4, layout(ONE, ONE, TWO_STAGES, num_microbatches=2, microbatch_size=2), batch, prepending_build)


def cross_attending_build() -> MultimodalModule:
    torch.manual_seed(0)
    config = MllamaTextConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        cross_attention_layers=[0, 2],
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    encoders = {"vision": ModalityModule(tiny_vision(), proj="mlp")}
    model = MultimodalModule(encoders, MllamaForCausalLM(config), merge="cross_attention").double()
    randomize(model)
    return model


@pytest.mark.parametrize("placement", ["replicated", *in_campaigns(["parallel"])])
def test_cross_attention(placement: str) -> None:
    """Encoder output enters both stages; replicated encoders stand on each of them."""
    counts = [1, 0, 2, 0]
    batch: dict[str, Any] = tiny_batch([(count, 0) for count in counts], placeholders=False)
    batch["num_vision_items"] = counts
    spec = MultimodalParallelSpec(
        {"vision": ONE},
        ParallelSpec(pp_size=2, layers_per_stage=(3, 3)),
        num_microbatches=2,
        microbatch_size=2,
        modality_parallelism=placement,
    )
    run_and_compare(3 if placement == "parallel" else 2, spec, batch, cross_attending_build)


def test_training_as_in_the_listings() -> None:
    """Three steps of the user's own optimizer on two replicas, gradients of two calls accumulated in each."""
    spec = layout(ONE, ONE, ONE, num_microbatches=1, microbatch_size=2, modality_parallelism="colocated")
    batches = [tiny_batch(MIXED[:4], seed=seed) for seed in range(6)]

    def train(model: Any, run: Callable[[dict[str, Tensor]], Tensor]) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(3):
            losses += [run(batch).item() for batch in batches[2 * step : 2 * step + 2]]
            optimizer.step()
            optimizer.zero_grad()
        return losses

    def work(rank: int) -> list[float]:
        model = spec.apply(tiny_multimodal())
        return train(model, lambda batch: model.execute(batch).loss)

    reference = tiny_multimodal()

    def forward_and_backward(batch: dict[str, Tensor]) -> Tensor:
        loss = reference(**batch).loss
        loss.backward()
        return loss

    expected = train(reference, forward_and_backward)
    assert expected[-1] != pytest.approx(expected[0], rel=1e-3)
    for losses in run_distributed(work, 4):
        assert losses == pytest.approx(expected, rel=1e-8)


def test_ranks_begin_with_the_weights_of_the_first_and_keep_only_their_own() -> None:
    spec = layout(ONE, ONE, TWO_STAGES)

    def work(rank: int) -> tuple[float, int, int]:
        model = tiny_multimodal()
        randomize(model, seed=rank)
        parallel = spec.apply(model)
        held = sum(p.numel() for p in model.parameters() if not p.is_meta)
        return parallel.eval_loss(tiny_batch([(1, 1)])).item(), held, sum(p.numel() for p in parallel.parameters())

    model = tiny_multimodal()
    randomize(model, seed=0)
    loss = model(**tiny_batch([(1, 1)])).loss.item()
    results = run_distributed(work, 4)
    for rank_loss, held, own in results:
        assert rank_loss == pytest.approx(loss, rel=1e-11)
        assert held == own
    assert sum(own for *_, own in results) == sum(p.numel() for p in model.parameters())


def message_of(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def tied_multimodal() -> MultimodalModule:
    model = tiny_multimodal()
    model.audio_encoder.projector.linear.bias = model.vision_encoder.projector.linear_1.bias
    return model


def test_what_does_not_fit_is_named() -> None:
    def work(rank: int) -> list[str]:
        model = tiny_multimodal()
        batch = tiny_batch(MIXED[:2])
        wrong: list[Callable[[], object]] = [
            lambda: MultimodalParallelSpec({"vision": ONE}, ONE).apply(model),
            lambda: MultimodalParallelSpec({"vision": ONE, "audio": ONE, "video": ONE}, ONE).apply(model),
            lambda: layout(ONE, ONE, ONE).apply(model),
            lambda: layout(ONE, ONE, ParallelSpec(tp_size=3)).apply(model),
            lambda: layout(ONE, ONE, ParallelSpec(pp_size=7)).apply(model),
            lambda: layout(ONE, ONE, ONE, modality_parallelism="serial").apply(model),
            lambda: layout(ONE, ONE, ONE, schedule="2f2b").apply(model),
            lambda: layout(ONE, ONE, ONE, recompute=("llm",)).apply(model),
            lambda: layout(ONE, ONE, ONE, num_microbatches=0).apply(model),
            lambda: layout(ONE, ONE, ONE).apply(tied_multimodal()),
        ]
        messages = [message_of(call) for call in wrong]
        spec = layout(ONE, ONE, ONE, num_microbatches=2, modality_parallelism="colocated")
        parallel = spec.apply(model)
        other = {**batch, "input_ids": batch["input_ids"].clone()}
        other["input_ids"][0, 0] = 1 + rank
        wrong = [
            lambda: spec.apply(model),
            lambda: model(**batch),
            lambda: parallel.execute(tiny_batch(MIXED[:3])),
            lambda: parallel.execute({key: value for key, value in batch.items() if key != "labels"}),
            lambda: parallel.execute(other),
            lambda: spec.apply(tiny_multimodal().requires_grad_(False)).execute(batch),
        ]
        return messages + [message_of(call) for call in wrong]

    expected = [
        "encoder_specs: audio is missing; give its ParallelSpec",
        "encoder_specs: there is no encoder 'video'; the model has vision, audio, language_model",
        "one copy of the model takes 3 ranks, which 2 processes cannot be divided into; start a multiple of 3",
        "parallel: language_model.tp_size",
        "parallel: language_model.pp is 7, but it has 6 layers; give at most 6",
        "modality_parallelism: 'serial' is not known; give one of parallel, colocated, replicated",
        "schedule: '2f2b' is not known; give one of gpipe, 1f1b",
        "recompute: there is no module 'llm'; the model has vision, audio, language_model",
        "num_microbatches is 0; give at least 1",
        "model: vision.projector and audio.projector have the parameter linear.bias in common",
        "this MultimodalModule was parallelized before; build a new one",
        "this MultimodalModule was given to a parallel module, which now owns its modules",
        "batch: has 3 samples; give the global batch of 2",
        "batch: labels is missing",
        "batch: the ranks were given different batches; give the same global batch to every rank",
        "nothing is trainable",
    ]
    for messages in run_distributed(work, 2):
        for message, beginning in zip(messages, expected, strict=True):
            assert message.startswith(beginning)
            assert "\n" not in message


def test_specs_are_checked() -> None:
    for arguments, message in [
        ({"tp_size": 0}, "ParallelSpec: tp_size is 0; give at least 1"),
        ({"cp_size": 0}, "ParallelSpec: cp_size is 0; give at least 1"),
        ({"pp_size": 2, "layers_per_stage": (6,)}, "layers_per_stage has 1 entries for pp_size 2; give 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            ParallelSpec(**arguments)
    with pytest.raises(ValueError, match="there is no process group; call"):
        layout(ONE, ONE, ONE).apply(tiny_multimodal())


def test_any_plan_of_the_graph_and_the_whole_model_afterwards() -> None:
    batch = tiny_batch(MIXED[:4])
    loss, reference = one_process(tiny_multimodal, batch)
    weights = {name: parameter.detach() for name, parameter in tiny_multimodal().named_parameters()}

    def work(rank: int) -> tuple[float, Any]:
        spec = layout(ONE, ONE, TWO_SHARDS, num_microbatches=2, microbatch_size=2)
        plan = Plan.from_json(spec.apply(tiny_multimodal()).plan.to_json())
        parallel = ParallelModule(tiny_multimodal(), plan)
        found = parallel.execute(batch).loss.item()
        for parameter in parallel.parameters():
            if parameter.grad is not None:
                with torch.no_grad():
                    parameter.add_(parameter.grad, alpha=-0.1)
        whole = parallel.whole_model()
        return found, whole and {name: parameter.detach() for name, parameter in whole.named_parameters()}

    (first, whole), *others = run_distributed(work, 4)
    assert all(other is None for _, other in others)
    assert first == pytest.approx(loss, rel=1e-11)
    assert whole.keys() == weights.keys()
    for name, weight in weights.items():
        gradient = reference.get(name.removeprefix("encoders."), torch.zeros_like(weight))
        torch.testing.assert_close(whole[name], weight - 0.1 * gradient, rtol=1e-9, atol=1e-12)


def test_a_plan_of_another_model_is_refused() -> None:
    def work(rank: int) -> list[str]:
        plan = layout(ONE, ONE, ONE).apply(tiny_multimodal()).plan
        config = tiny_llama().config
        config.num_hidden_layers = 5
        deeper = LlamaForCausalLM(config)
        models = (
            MultimodalModule({"vision": ModalityModule(tiny_vision(), "mlp")}, tiny_llama()),
            tiny_multimodal(language_model=deeper),
        )
        said = []
        for model in models:
            with pytest.raises(UserError) as caught:
                ParallelModule(model, plan)
            said.append(str(caught.value))
        return said

    other, deeper = run_distributed(work, 3)[0]
    assert other == "plan: its modules are vision, audio, language_model, but the model has vision, language_model"
    assert deeper == "plan: language_model has 6 layers, but the model's has 7"
