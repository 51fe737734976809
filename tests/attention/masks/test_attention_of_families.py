"""The rule of a family is the mask that transformers makes for it."""

import numpy as np
import pytest
import torch
from transformers import Gemma3ForConditionalGeneration, Gemma3TextConfig, MistralConfig
from transformers.masking_utils import create_sliding_window_causal_mask

from motet.assignment.sample import Segment
from motet.attention.masks.rules import mask_of, rule_of_family
from motet.attention.masks.token_layout import Document, layout_of_documents

WINDOW = 6
SEGMENTS = (Segment(4), Segment(9, "vision", 0), Segment(3), Segment(5, "vision", 1), Segment(10))
NUM_TOKENS = sum(segment.num_tokens for segment in SEGMENTS)


def arguments(config: object) -> dict:
    return {
        "config": config,
        "inputs_embeds": torch.zeros(1, NUM_TOKENS, 8),
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": torch.arange(NUM_TOKENS)[None],
    }


def lowered(model_type: str, window: int | None) -> np.ndarray:
    layout = layout_of_documents([Document(SEGMENTS)])
    return mask_of(layout, rule_of_family(model_type, sliding_window=window)).dense()


@pytest.mark.parametrize(("layer_type", "window"), [("full_attention", None), ("sliding_attention", WINDOW)])
def test_gemma3(layer_type: str, window: int | None) -> None:
    config = Gemma3TextConfig(num_hidden_layers=6, sliding_window=WINDOW, attn_implementation="sdpa")
    types = torch.tensor([[int(segment.source is not None) for segment in SEGMENTS for _ in range(segment.num_tokens)]])
    masks = Gemma3ForConditionalGeneration.create_masks_for_generate(**arguments(config), token_type_ids=types)
    np.testing.assert_array_equal(lowered("gemma3_text", window), masks[layer_type][0, 0].numpy())


def test_mistral() -> None:
    config = MistralConfig(sliding_window=WINDOW, attn_implementation="sdpa")
    expected = create_sliding_window_causal_mask(**arguments(config))
    np.testing.assert_array_equal(lowered("mistral", WINDOW), expected[0, 0].numpy())
