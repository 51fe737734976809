"""Generates answers of a multimodal model, by transformers' own `generate`.

Encoders run by their own forward, projectors are torch modules, and the language model generates from `inputs_embeds`
(or, with cross-attention, from token ids and the encoders' outputs). Decoding is greedy.

Limits: with cross-attention every step runs the whole sequence, because transformers' cache would append the same
encoder outputs anew in each step. A language model with a `preprocess_callback` is not supported.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from motet.assignment.sample import Segment
from motet.errors import UserError
from motet.families.encoders.encoder_families import family_of
from motet.models.graph import ModalityModule
from motet.models.hub.export import load_export
from motet.models.multimodal import MultimodalModule
from motet.models.reference import plain_encoder_output
from motet.models.stages.projector import PROJECTORS

BATCH_SIZE = 64


@dataclass(frozen=True)
class Prompt:
    """One sample up to where its answer begins."""

    input_ids: Tensor
    """[T], with a placeholder for each encoder output, at its position or, with `merge: prepend`, at the front."""
    segments: Mapping[str, tuple[Segment, ...]] = field(default_factory=dict)
    """The sample's layout in each encoder. An encoder that the sample does not use has no entry, or an empty one."""
    features: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """Results of `Batch.features`, by encoder."""


@torch.no_grad()
def generate_answers(
    model: MultimodalModule | str | Path,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    eos_token_id: int | None = None,
    batch_size: int = BATCH_SIZE,
) -> list[list[int]]:
    """Generates answers and returns their token ids, without the token that ends them, in the order of the prompts.

    Args:
        model: in memory, or the folder of an exported one.
        eos_token_id: ends an answer; None: what the model's own generation configuration says, if anything.
        batch_size: prompts that run together, padded on the left.

    Raises `UserError` if a prompt's placeholders do not fit its encoders' outputs.
    """
    if not isinstance(model, MultimodalModule):
        model = load_export(model)
    if model.preprocess_callback is not None:
        raise UserError("generate: preprocess_callback of the language model is not supported; merge by placeholders")
    if model.media_attention != "causal":
        raise UserError(f"generate: media_attention {model.media_attention} is not supported; only causal is")
    was_training = {name: part.training for name, part in model.parts().items()}
    for part in model.parts().values():
        part.eval()
    answers: list[list[int]] = [[] for _ in prompts]
    try:
        for indices in _batches(model, prompts, batch_size):
            generated = _generate(model, [prompts[i] for i in indices], max_new_tokens, eos_token_id)
            for i, answer in zip(indices, generated, strict=True):
                answers[i] = answer
    finally:
        for name, part in model.parts().items():
            part.train(was_training[name])
    return answers


def _batches(model: MultimodalModule, prompts: Sequence[Prompt], batch_size: int) -> Iterator[list[int]]:
    """Groups prompts of similar length. With cross-attention, those without encoder outputs have their own batches."""

    def key(index: int) -> tuple[bool, int]:
        cross_attends = model.merge == "cross_attention" and any(prompts[index].segments.values())
        return cross_attends, len(prompts[index].input_ids)

    for _, run in groupby(sorted(range(len(prompts)), key=key), key=lambda index: key(index)[0]):
        alike = list(run)
        for first in range(0, len(alike), batch_size):
            yield alike[first : first + batch_size]


def _generate(
    model: MultimodalModule, prompts: Sequence[Prompt], max_new_tokens: int, eos_token_id: int | None
) -> list[list[int]]:
    language_model = model.language_model.module
    own = language_model.generation_config
    ends = own.eos_token_id if eos_token_id is None else eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    lengths = [len(prompt.input_ids) for prompt in prompts]
    if model.merge == "cross_attention":
        inputs = _cross_attention_inputs(language_model, prompts, _encoder_outputs(model, prompts))
    else:
        embeddings = prompt_embeddings(model, prompts)
        inputs = {"inputs_embeds": pad_sequence(embeddings, batch_first=True, padding_side="left")}
    device = language_model.device
    ones = [torch.ones(length, dtype=torch.long, device=device) for length in lengths]
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=ends or None,
        # What fills up answers that have ended; cut off below.
        pad_token_id=ends[0] if ends else 0,
        use_cache=model.merge != "cross_attention",
    )
    generated = language_model.generate(
        **inputs,
        attention_mask=pad_sequence(ones, batch_first=True, padding_side="left"),
        generation_config=config,
    )
    # From embeddings transformers returns the new tokens alone, from ids the prompt as well.
    new = generated[:, max(lengths) :] if "input_ids" in inputs else generated
    return [next((row[:i] for i, token in enumerate(row) if token in ends), row) for row in new.tolist()]


def prompt_embeddings(model: MultimodalModule, prompts: Sequence[Prompt]) -> list[Tensor]:
    """[T, hidden_size] of each prompt: what the language model reads. Raises `UserError` as `generate_answers`."""
    outputs = _encoder_outputs(model, prompts)
    return [_merged(model, prompt, own) for prompt, own in zip(prompts, outputs, strict=True)]


def _encoder_outputs(model: MultimodalModule, prompts: Sequence[Prompt]) -> list[dict[str, Tensor]]:
    """For each prompt, by encoder: [sum of num_outputs, hidden_size]. Inputs of one shape run together."""
    outputs: list[dict[str, Tensor]] = [{} for _ in prompts]
    for name, encoder in model.modality_modules(encoders_only=True).items():
        key = family_of(encoder.module).feature
        members = [i for i, prompt in enumerate(prompts) if prompt.segments.get(name)]
        weight = next(encoder.module.parameters())
        device, dtype = weight.device, weight.dtype
        values = {i: prompts[i].features[name][key].to(device, dtype) for i in members}
        for together in _batchable(encoder, values):
            segments = [segment for i in together for segment in prompts[i].segments[name]]
            tokens = plain_encoder_output(encoder, {key: torch.cat([values[i] for i in together])}, segments)
            sizes = [sum(segment.outputs for segment in prompts[i].segments[name]) for i in together]
            for i, own in zip(together, tokens.split(sizes), strict=True):
                outputs[i][name] = own
    return outputs


def _batchable(encoder: ModalityModule, values: Mapping[int, Tensor]) -> list[list[int]]:
    """Groups prompts whose features may be concatenated. Callbacks see one sample at a time."""
    if any(callback is not None for callback in encoder.callbacks) or (
        encoder.projector is not None and type(encoder.projector) not in PROJECTORS.values()
    ):
        return [[i] for i in values]
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for i, value in values.items():
        by_shape.setdefault(tuple(value.shape[1:]), []).append(i)
    return list(by_shape.values())


def _merged(model: MultimodalModule, prompt: Prompt, outputs: Mapping[str, Tensor]) -> Tensor:
    """[T, hidden_size]: the text's embeddings with the encoders' outputs in their places."""
    language_model = model.language_model.module
    ids = prompt.input_ids.to(language_model.device)
    places = _places(model, ids, outputs)
    for name, at in places.items():
        num_outputs = len(outputs.get(name, ()))
        if len(at) != num_outputs:
            raise UserError(
                f"generate: a prompt has {len(at)} placeholders of {name}, which outputs {num_outputs} tokens"
            )
    replaced = torch.cat(list(places.values())) if places else ids.new_zeros(0)
    # A placeholder need not be in the vocabulary.
    embeddings = language_model.get_input_embeddings()(ids.index_fill(0, replaced, 0))
    for name, tokens in outputs.items():
        embeddings = embeddings.index_copy(0, places[name], tokens.to(embeddings.dtype))
    return embeddings


def _places(model: MultimodalModule, ids: Tensor, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the positions of each encoder's outputs in the text."""
    if model.merge == "placeholder":
        return {name: (ids == token).nonzero().squeeze(-1) for name, token in model.placeholder_token_ids.items()}
    front = torch.arange(min(len(ids), sum(len(tokens) for tokens in outputs.values())), device=ids.device)
    sizes = [len(tokens) for tokens in outputs.values()]
    if sum(sizes) > len(ids):
        raise UserError(f"generate: a prompt of {len(ids)} tokens has no room for {sum(sizes)} encoder outputs")
    return dict(zip(outputs, front.split(sizes), strict=True)) if outputs else {}


def _cross_attention_inputs(
    language_model: Any, prompts: Sequence[Prompt], outputs: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Returns token ids and, if the prompts have any, encoder outputs that every token of the sample sees."""
    device, dtype = language_model.device, language_model.dtype
    longest = max(len(prompt.input_ids) for prompt in prompts)
    rows = [pad(prompt.input_ids.to(device), (longest - len(prompt.input_ids), 0)) for prompt in prompts]
    inputs = {"input_ids": torch.stack(rows)}
    if not outputs[0]:
        return inputs
    states = [torch.cat(list(own.values())).to(dtype) for own in outputs]
    num_states = torch.tensor([len(own) for own in states], device=device)
    inputs["cross_attention_states"] = pad_sequence(states, batch_first=True)
    is_padding = torch.arange(int(num_states.max()), device=device) >= num_states[:, None]
    mask = torch.zeros(is_padding.shape, dtype=dtype, device=device).masked_fill(is_padding, torch.finfo(dtype).min)
    inputs["cross_attention_mask"] = mask[:, None, None]
    return inputs
