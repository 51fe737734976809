from pathlib import Path

from transformers import AutoTokenizer

from motet.data.chat import plain_word_level_tokenizer, word_level_tokenizer
from motet.data.tasks.dial_a_digit import QUESTIONS

TOKENIZER = word_level_tokenizer(QUESTIONS.values())


def test_every_digit_sign_and_placeholder_is_one_token() -> None:
    tokens = TOKENIZER.convert_ids_to_tokens(TOKENIZER("<image><audio>What do you see? 314")["input_ids"])
    assert tokens == ["<image>", "<audio>", "What", "do", "you", "see", "?", "3", "1", "4"]


def test_what_it_does_not_know_is_unknown() -> None:
    assert TOKENIZER("elephants")["input_ids"] == [TOKENIZER.unk_token_id]


def test_it_is_saved_and_loaded_like_any_other(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "<image>What do you hear? 2 0"
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "2 0"}]
    assert loaded(text)["input_ids"] == TOKENIZER(text)["input_ids"]
    assert loaded.apply_chat_template(turns, tokenize=False) == TOKENIZER.apply_chat_template(turns, tokenize=False)
    assert (loaded.eos_token, loaded.pad_token) == ("<|end|>", "<pad>")
    assert loaded.decode(loaded("2 0")["input_ids"]) == "2 0"


def test_placeholders_among_the_texts_are_special_tokens() -> None:
    drawing = word_level_tokenizer([*QUESTIONS.values(), "Draw .", "<generate>"])
    ids = drawing("Draw 7 <generate> .")["input_ids"]
    assert drawing.convert_ids_to_tokens(ids) == ["Draw", "7", "<generate>", "."]
    assert drawing.decode(ids, skip_special_tokens=True) == "Draw 7 ."
    plain = plain_word_level_tokenizer([*QUESTIONS.values(), "Draw .", "<generate>"])
    assert plain("Draw 7 <generate> .")["input_ids"] == ids
    assert "<generate>" not in TOKENIZER.get_vocab()
