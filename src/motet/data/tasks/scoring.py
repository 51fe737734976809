"""How well answers to *dial a digit* are. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from motet.data.tasks.dial_a_digit import QUESTIONS, Dialled, Question


@dataclass(frozen=True)
class Accuracy:
    """Shares from 0 to 1; None where nothing was asked."""

    seen_digits: float | None
    """Of the digits in answers to "see": the i-th of the answer equals the i-th that is right."""
    heard_digits: float | None
    answers: dict[Question, float | None]
    """By question, of answers that are right as a whole."""
    num_answers: dict[Question, int]


def digits_of(text: str) -> str:
    """The digits of an answer, without whatever stands between them."""
    return "".join(character for character in text if character.isdigit())


def count_right_digits(right: str, given: str) -> tuple[int, int]:
    """(digits in their right place, digits asked or given, whichever are more): a missing digit is as wrong as one too
    many."""
    right, given = digits_of(right), digits_of(given)
    return sum(a == b for a, b in zip(right, given, strict=False)), max(len(right), len(given))


def accuracy(answers: Iterable[tuple[Dialled, str]]) -> Accuracy:
    """Of the given answer texts."""
    digits = {question: [0, 0] for question in QUESTIONS}
    whole = {question: [0, 0] for question in QUESTIONS}
    for content, given in answers:
        num_right, num_digits = count_right_digits(content.answer, given)
        digits[content.question][0] += num_right
        digits[content.question][1] += num_digits
        whole[content.question][0] += digits_of(content.answer) == digits_of(given)
        whole[content.question][1] += 1
    return Accuracy(
        seen_digits=_share(digits["see"]),
        heard_digits=_share(digits["hear"]),
        answers={question: _share(counts) for question, counts in whole.items()},
        num_answers={question: counts[1] for question, counts in whole.items()},
    )


def _share(counts: list[int]) -> float | None:
    right, asked = counts
    return right / asked if asked else None
