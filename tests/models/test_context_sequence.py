"""What a language model's stage refuses when its tokens are to be shared out."""

import pytest
from tiny_mllm import tiny_llama

from motet.attention.context_parallel import ContextParallel
from motet.errors import UserError
from motet.models.language_model_stage import LanguageModelStage, num_language_model_layers
from motet.plan import ContextOptions


def share(tp_size: int = 1, *, size: int = 2, **values: object) -> None:
    model = tiny_llama(**values)
    stage = LanguageModelStage("language_model", model, (0, num_language_model_layers(model)))
    stage.share_context(ContextParallel(None, 0, size, ContextOptions(method="ulysses"), tp_size=tp_size))


def test_ulysses_divides_the_heads_that_tensor_parallelism_leaves() -> None:
    share()  # 4 heads and 2 key heads.
    with pytest.raises(UserError, match="ulysses cannot divide 1 key heads by cp_size 2"):
        share(tp_size=2)
    with pytest.raises(UserError, match="ulysses cannot divide 4 query heads by cp_size 3"):
        share(size=3)


def test_dropout() -> None:
    with pytest.raises(UserError, match=r"parallel: language_model has attention_dropout 0\.1"):
        share(attention_dropout=0.1)
