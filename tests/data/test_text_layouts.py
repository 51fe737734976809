"""How texts are laid out for towers: as the family's own processor would tokenize them."""

import pytest

from motet.assignment.sample import Segment
from motet.data.chat import plain_word_level_tokenizer
from motet.data.example import Example, Message
from motet.data.layouts import ComparisonLayout, SampleLayouts, TextLayout
from motet.errors import UserError
from motet.plan import CONTRASTIVE

WORDS = plain_word_level_tokenizer(["one two three"])
END = 5


def layout(family: str, **values: object) -> TextLayout:
    config = {"model_type": family, "vocab_size": 40, "max_position_embeddings": 6, "pad_token_id": 0, **values}
    return TextLayout(WORDS, config, "model.towers.text")


def test_clip_ends_with_its_token_and_is_pooled_there() -> None:
    text = layout("clip_text_model", eos_token_id=END)
    assert text.ids("one two")[-1] == END
    assert text.segment("one two") == Segment(3, num_outputs=1, grid=(3, 2))
    assert text.segment("one two three one two three one").grid == (6, 5)
    assert text.segment("one <|end|> two").grid == (3, 1)


def test_clip_of_old_is_pooled_at_the_highest_token() -> None:
    ids = layout("clip_text_model", eos_token_id=2).ids("one two three")
    assert layout("clip_text_model", eos_token_id=2).segment("one two three").grid == (3, ids.index(max(ids)))


def test_siglip_is_padded_and_bert_is_not() -> None:
    assert layout("siglip_text_model").ids("one")[1:] == [0] * 5
    assert layout("siglip_text_model").segment("one").grid == (6,)
    assert layout("bert").segment("one two").grid == (2,)


def test_samples_and_mistakes() -> None:
    towers = SampleLayouts(
        {
            "text": layout("bert"),
            "title": layout("siglip_text_model"),
            CONTRASTIVE: ComparisonLayout([("text", "title")]),
        }
    )
    sample = towers.sample(Example("a", (Message("user", "one"),)))
    assert sample.num_loss_tokens == {CONTRASTIVE: 1}
    assert towers.sample(Example("a", ())).num_loss_tokens == {CONTRASTIVE: 0}
    with pytest.raises(UserError, match="file:3: its text has no tokens"):
        towers.sample(Example("a", (Message("user", ""),), where="file:3"))
    with pytest.raises(UserError, match="its vocabulary has 4 tokens, but the tokenizer has"):
        layout("bert", vocab_size=4)
