import pytest

from motet.parallel.tensor.tensor_plans import Shard, check_tp, local_ranges

TEXT = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}


@pytest.mark.parametrize("tp_size", [1, 2])
def test_sizes_that_divide_pass(tp_size: int) -> None:
    check_tp(TEXT, tp_size)


@pytest.mark.parametrize(
    ("numbers", "tp_size", "message"),
    [
        (TEXT, 3, "3 does not divide num_attention_heads 4 / num_key_value_heads 2; use 1 or 2"),
        (TEXT, 4, "4 does not divide num_key_value_heads 2; use 1 or 2"),
        (TEXT | {"num_attention_heads": 3, "num_key_value_heads": 3}, 2, "heads 3 .* use 1 or 3"),
        (TEXT | {"num_key_value_heads": 1}, 2, "num_key_value_heads 1; use 1$"),
        ({"encoder_attention_heads": 8, "encoder_ffn_dim": 12}, 8, "encoder_ffn_dim 12; use 1, 2 or 4"),
        (TEXT, 0, "0 does not divide"),
    ],
)
def test_sizes_that_do_not_divide_are_named(numbers: dict[str, int], tp_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"tp_size: .*{message}"):
        check_tp(numbers, tp_size)


def test_ranges_cover_the_dimension_once() -> None:
    shard = Shard(0, (2, 1, 1))
    assert local_ranges(16, shard, 0, 2) == [(0, 4), (8, 10), (12, 14)]
    assert local_ranges(16, shard, 1, 2) == [(4, 8), (10, 12), (14, 16)]
