import pytest

from motet.data.tasks.dial_a_digit import Dialled, accuracy, count_right_digits


@pytest.mark.parametrize(
    ("right", "given", "counts"),
    [
        ("3 1 4", "3 1 4", (3, 3)),
        ("3 1 4", "314", (3, 3)),
        ("3 1 4", "3 4", (1, 3)),
        ("3", "3 1", (1, 2)),
        ("3 1 4", "", (0, 3)),
        ("3 1", "1 3", (0, 2)),
    ],
)
def test_digits_count_in_their_place(right: str, given: str, counts: tuple[int, int]) -> None:
    assert count_right_digits(right, given) == counts


def test_accuracy_by_question() -> None:
    see, hear = Dialled(((1, 2),), ((3, 4),), "see"), Dialled(((1, 2),), ((3, 4),), "hear")
    total = Dialled(((1, 2),), ((3, 4),), "sum")
    found = accuracy([(see, "1 2"), (see, "1 3"), (hear, "3 4 5"), (total, "1 0")])
    assert found.seen_digits == 0.75
    assert found.heard_digits == pytest.approx(2 / 3)
    assert found.answers == {"see": 0.5, "hear": 0.0, "sum": 1.0}
    assert found.num_answers == {"see": 2, "hear": 1, "sum": 1}


def test_nothing_asked_is_no_accuracy() -> None:
    found = accuracy([])
    assert found.seen_digits is None
    assert found.answers == {"see": None, "hear": None, "sum": None}
