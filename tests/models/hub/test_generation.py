"""Answers generated in padded batches with transformers' cache equal a naive loop, prompt by prompt, without either."""

import pytest
import torch
from tiny_language_models import TINY
from tiny_multimodal import AUDIO_ID, IMAGE_ID, prompts_of, tiny_multimodal

from motet.errors import UserError
from motet.models.hub.generation import Prompt, generate_answers
from motet.models.multimodal import MultimodalModule
from motet.models.reference import plain_encoder_output

MAX_NEW_TOKENS = 6


@torch.no_grad()
def naive_answer(model: MultimodalModule, prompt: Prompt, ends: set[int]) -> list[int]:
    """Runs everything anew for each token."""
    language_model = model.language_model.module.eval()
    encoders = model.modality_modules(encoders_only=True)
    answer: list[int] = []
    while len(answer) < MAX_NEW_TOKENS:
        ids = torch.cat([prompt.input_ids, torch.tensor(answer, dtype=torch.long)])
        outputs = {}
        for name, segments in prompt.segments.items():
            for part in encoders[name].parts().values():
                part.eval()
            outputs[name] = plain_encoder_output(encoders[name], prompt.features[name], segments)
        if model.merge == "cross_attention":
            states = torch.cat(list(outputs.values()))[None] if outputs else None
            mask = None if states is None else states.new_zeros(1, 1, len(ids), states.shape[1])
            extra = {} if states is None else {"cross_attention_states": states, "cross_attention_mask": mask}
            logits = language_model(ids[None], use_cache=False, **extra).logits
        else:
            embeddings = language_model.get_input_embeddings()(ids).clone()
            start = 0
            for name, tokens in outputs.items():
                if model.merge == "prepend":
                    embeddings[start : start + len(tokens)] = tokens
                    start += len(tokens)
                else:
                    embeddings[ids == model.placeholder_token_ids[name]] = tokens
            logits = language_model(inputs_embeds=embeddings[None], use_cache=False).logits
        token = int(logits[0, -1].argmax())
        if token in ends:
            break
        answer.append(token)
    return answer


@pytest.mark.parametrize("merge", ["placeholder", "prepend"])
@pytest.mark.parametrize("family", [family for family in TINY if family != "mllama"])
def test_batches_equal_a_naive_loop(family: str, merge: str) -> None:
    model = tiny_multimodal(vision="clip", audio="whisper", language_model=family, merge=merge)
    prompts = prompts_of(model)
    expected = [naive_answer(model, prompt, {2}) for prompt in prompts]
    assert generate_answers(model, prompts, max_new_tokens=MAX_NEW_TOKENS, batch_size=4) == expected
    assert len({tuple(answer) for answer in expected}) > 1


def test_cross_attention_equals_a_naive_loop() -> None:
    model = tiny_multimodal(vision="siglip", language_model="mllama", merge="cross_attention")
    prompts = [prompt for prompt in prompts_of(model) if "audio" not in prompt.segments]
    expected = [naive_answer(model, prompt, {2}) for prompt in prompts]
    assert generate_answers(model, prompts, max_new_tokens=MAX_NEW_TOKENS, batch_size=4) == expected


@pytest.mark.parametrize("vision", ["pixtral", "qwen2_5_vl", "dinov2"])
def test_encoders_run_in_batches(vision: str) -> None:
    model = tiny_multimodal(vision=vision)
    prompts = [prompt for prompt in prompts_of(model) if "audio" not in prompt.segments]
    expected = [naive_answer(model, prompt, {2}) for prompt in prompts]
    assert generate_answers(model, prompts, max_new_tokens=MAX_NEW_TOKENS) == expected


def test_an_answer_ends_where_it_should() -> None:
    model = tiny_multimodal()
    prompts = prompts_of(model)[:3]
    free = generate_answers(model, prompts, max_new_tokens=MAX_NEW_TOKENS, eos_token_id=0)
    end = free[0][2]
    expected = [naive_answer(model, prompt, {end}) for prompt in prompts]
    assert generate_answers(model, prompts, max_new_tokens=MAX_NEW_TOKENS, eos_token_id=end) == expected
    assert len(expected[0]) <= 2


def test_a_placeholder_may_be_outside_of_the_vocabulary() -> None:
    model = tiny_multimodal()
    prompts = prompts_of(model)[:2]
    expected = generate_answers(model, prompts, max_new_tokens=3)
    model.placeholder_token_ids["vision"] = 10_000
    outside = [
        Prompt(p.input_ids.masked_fill(p.input_ids == IMAGE_ID, 10_000), p.segments, p.features) for p in prompts
    ]
    assert generate_answers(model, outside, max_new_tokens=3) == expected


def test_the_model_is_left_in_its_mode() -> None:
    model = tiny_multimodal(audio="whisper")
    model.audio_encoder.module.eval()
    generate_answers(model, prompts_of(model)[:2], max_new_tokens=2)
    modes = {name: part.training for name, part in model.parts().items()}
    assert modes == {name: name != "audio.module" for name in modes}


def test_placeholders_that_do_not_fit_are_refused() -> None:
    model = tiny_multimodal(audio="whisper")
    prompt = prompts_of(model)[1]
    ids = prompt.input_ids
    cut = Prompt(torch.cat([ids[:2], ids[3:]]), prompt.segments, prompt.features)
    more = Prompt(torch.cat([ids, torch.tensor([AUDIO_ID])]), prompt.segments, prompt.features)
    with pytest.raises(UserError, match="15 placeholders of vision, which outputs 16 tokens"):
        generate_answers(model, [cut], max_new_tokens=2)
    with pytest.raises(UserError, match="1 placeholders of audio, which outputs 0 tokens"):
        generate_answers(model, [more], max_new_tokens=2)
    short = Prompt(ids[:5], prompt.segments, prompt.features)
    with pytest.raises(UserError, match="no room for 16 encoder outputs"):
        generate_answers(tiny_multimodal(merge="prepend"), [short], max_new_tokens=2)
