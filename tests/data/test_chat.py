"""The loss is exactly on the answers and the tokens that end them, for the chat templates in use."""

import pytest
from transformers import PreTrainedTokenizerFast

from motet.data.chat import check_tokenizer, render, tokenize_conversation, tokenize_prompt, word_level_tokenizer
from motet.data.example import Message
from motet.errors import UserError

CHAT_ML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INST = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<s>[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' </s>' }}{% endif %}{% endfor %}"
)
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ 'USER: ' if m.role == 'user' else 'ASSISTANT: ' }}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]", "<think>", "</think>", "<image>")
MESSAGES = (
    Message("user", "<image> is this a cat?"),
    Message("assistant", "a cat it is"),
    Message("user", "a cat?"),
    Message("assistant", "a"),
)


def tokenizer_with(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = word_level_tokenizer([m.content for m in MESSAGES] + ["USER: ASSISTANT: system user assistant"])
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.chat_template = template
    return tokenizer


def spoken(template: str, messages: tuple[Message, ...] = MESSAGES) -> list[str]:
    """The tokens that carry loss, those of each answer joined."""
    tokenizer = tokenizer_with(template)
    ids, is_answer = tokenize_conversation(tokenizer, messages)
    runs: list[list[str]] = []
    for t, (token, answer) in enumerate(zip(tokenizer.convert_ids_to_tokens(ids), is_answer, strict=True)):
        if answer:
            if t == 0 or not is_answer[t - 1]:
                runs.append([])
            runs[-1].append(token)
    return [" ".join(run) for run in runs]


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (CHAT_ML, ["a cat it is <|im_end|>", "a <|im_end|>"]),
        (INST, ["a cat it is </s>", "a </s>"]),
        (THINKING, ["a cat it is <|im_end|>", "<think> </think> a <|im_end|>"]),
        (PLAIN, ["a cat it is", "a"]),
    ],
    ids=["chat-ml", "inst", "thinking", "plain"],
)
def test_loss_is_on_the_answers_alone(template: str, answers: list[str]) -> None:
    assert spoken(template) == answers


def test_it_agrees_with_a_template_that_marks_its_answers_itself() -> None:
    tokenizer = word_level_tokenizer([m.content for m in MESSAGES])
    ids, is_answer = tokenize_conversation(tokenizer, MESSAGES)
    turns = [{"role": m.role, "content": m.content} for m in MESSAGES]
    marked = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    assert ids == marked["input_ids"]
    assert is_answer == [bool(mask) for mask in marked["assistant_masks"]]


def test_a_system_turn_carries_no_loss() -> None:
    assert spoken(CHAT_ML, (Message("system", "a cat it is"), *MESSAGES[:2])) == ["a cat it is <|im_end|>"]


@pytest.mark.parametrize("template", [CHAT_ML, INST, THINKING, PLAIN])
def test_a_prompt_is_what_stands_before_the_answer(template: str) -> None:
    tokenizer = tokenizer_with(template)
    prompt = tokenize_prompt(tokenizer, MESSAGES[:3])
    ids, is_answer = tokenize_conversation(tokenizer, MESSAGES)
    assert ids[: len(prompt)] == prompt
    assert is_answer[len(prompt)]
    assert not is_answer[len(prompt) - 1]


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    counting = "{% for m in messages %}{{ messages|length }} {{ m.role }} {{ m.content }}\n{% endfor %}"
    with pytest.raises(UserError, match="changes a turn"):
        spoken(counting)


def test_what_the_template_says_reaches_the_user() -> None:
    refusing = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match="rejects the conversation: roles must alternate"):
        render(tokenizer_with(refusing), MESSAGES)


def test_a_tokenizer_without_template_is_refused() -> None:
    with pytest.raises(UserError, match="has no chat template"):
        check_tokenizer(tokenizer_with(None))
