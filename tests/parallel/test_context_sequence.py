"""What a language model's stage refuses when its tokens are to be shared out, and how long what it derives is kept."""

from weakref import ref

import pytest
import torch
from tiny_language_models import SIZES
from tiny_mllm import tiny_llama
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM

from motet.assignment.sample import Segment
from motet.attention.masks.rules import AttentionRule
from motet.attention.masks.token_layout import Document
from motet.errors import UserError
from motet.families.discovery.language_model_parts import num_causal_layers
from motet.families.family_features import probing
from motet.models.stages.language_model import LanguageModelStage
from motet.parallel.context.context_attention import ContextParallel
from motet.parallel.context.context_sequence import (
    CHANGES_OF_ATTENTION,
    ContextSequence,
    context_sequence,
    num_rows,
    shared_attention,
)
from motet.plan import ContextOptions

CPU = torch.device("cpu")
RULES = (AttentionRule(),)
DOCUMENTS = (Document((Segment(5),)),)


def share(tp_size: int = 1, *, size: int = 2, **values: object) -> None:
    model = tiny_llama(**values)
    stage = LanguageModelStage("language_model", model, (0, num_causal_layers(model)))
    stage.enable_context_parallel(ContextParallel(None, 0, size, ContextOptions(method="ulysses"), tp_size=tp_size))


def test_ulysses_divides_the_heads_that_tensor_parallelism_leaves() -> None:
    share()  # 4 heads and 2 key heads.
    with pytest.raises(UserError, match="ulysses cannot divide 1 key heads by 2 ranks"):
        share(tp_size=2)
    with pytest.raises(UserError, match="ulysses cannot divide 4 query heads by 3 ranks"):
        share(size=3)


def test_dropout() -> None:
    with pytest.raises(UserError, match=r"parallel: language_model has attention_dropout 0\.1"):
        share(attention_dropout=0.1)


class TestWhatChangesAttention:
    def test_capped_logits(self) -> None:
        model = Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8))
        stage = LanguageModelStage("language_model", model, (0, num_causal_layers(model)))
        refused = pytest.raises(UserError, match=r"language_model has attn_logit_softcapping 50\.0.*; use cp 1")
        with probing(), refused:
            stage.enable_context_parallel(ContextParallel(None, 0, 2, ContextOptions()))

    def test_masks_that_are_not_known(self) -> None:
        """They would run as full attention."""
        model = tiny_llama()
        model.config.layer_types = ["dilated_attention", *["full_attention"] * (model.config.num_hidden_layers - 1)]
        stage = LanguageModelStage("language_model", model, (0, num_causal_layers(model)))
        refused = pytest.raises(UserError, match=r"language_model has layers of dilated_attention.*; use cp 1")
        with probing(), refused:
            stage.enable_context_parallel(ContextParallel(None, 0, 2, ContextOptions()))

    @pytest.mark.parametrize("name", CHANGES_OF_ATTENTION)
    def test_is_never_ignored(self, name: str) -> None:
        """Also where a model hands it on without a key in its configuration that we know."""
        context = context_sequence(DOCUMENTS, RULES, ContextParallel(None, 0, 1, ContextOptions()), CPU)
        query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
        shared_attention(nn.Module(), query, key, key, None, context=context)
        with pytest.raises(AssertionError, match=name):
            shared_attention(nn.Module(), query, key, key, None, context=context, **{name: 30.0})


class TestHeld:
    def test_one_while_it_is_held(self) -> None:
        cp = ContextParallel(None, 0, 1, ContextOptions())
        held = [context_sequence((Document((Segment(n),)),), RULES, cp, CPU) for n in range(1, 200)]
        again = [context_sequence((Document((Segment(n),)),), RULES, cp, CPU) for n in range(1, 200)]
        assert all(one is other for one, other in zip(held, again, strict=True))

    def test_not_longer(self) -> None:
        """Masks of every batch that was ever trained on would fill the memory."""
        cp = ContextParallel(None, 0, 1, ContextOptions())
        gone = ref(context_sequence(DOCUMENTS, RULES, cp, CPU))
        assert gone() is None

    @pytest.mark.parametrize("size", [1, 2, 3])
    @pytest.mark.parametrize("num_tokens", [1, 40, 300])
    def test_rows_are_known_without_it(self, size: int, num_tokens: int) -> None:
        documents = (Document((Segment(num_tokens),)),)
        for rank in range(size):
            cp = ContextParallel(None, rank, size, ContextOptions(block_size=16))
            assert num_rows(documents, RULES, cp) == len(ContextSequence(documents, RULES, cp, CPU).host_tokens)
