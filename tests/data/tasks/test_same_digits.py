"""The same digits seen, heard and named."""

import numpy as np

from motet.data.tasks.same_digits import NAMES, SameDigits, SameDigitsExamples


def test_examples_are_a_function_of_their_index() -> None:
    task = SameDigits(seed=3, min_digits=2, max_digits=4)
    once, again = (SameDigitsExamples(task, "train", 10) for _ in range(2))
    assert len(once) == 10
    for i in range(10):
        digits = task.digits("train", i)
        assert 2 <= len(digits) <= 4
        assert once[i].messages[0].content == " ".join(NAMES[digit] for digit in digits)
        image, sound = once[i].media["image"][0], once[i].media["audio"][0]
        assert np.array_equal(np.asarray(image.load()), np.asarray(again[i].media["image"][0].load()))
        assert np.array_equal(sound.load(), again[i].media["audio"][0].load())
        assert sound.size()[0] == len(sound.load())


def test_splits_and_seeds_differ() -> None:
    drawn = {
        tuple(SameDigits(seed=seed).digits(split, i) for i in range(20))
        for seed in (0, 1)
        for split in ("train", "held_out")
    }
    assert len(drawn) == 4
