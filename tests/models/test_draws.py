"""Noise depends on its key alone."""

import numpy as np

from motet.models.draws import draw_noise, draw_normal, draw_uniform, has_null_condition

SHAPE = (1, 4, 4)


def test_a_draw_is_the_same_again_and_differs_for_every_part_of_its_key() -> None:
    keys = [
        ((0, 1), "image", "a", 0),
        ((0, 2), "image", "a", 0),
        ((1, 1), "image", "a", 0),
        ((0, 1), "other", "a", 0),
        ((0, 1), "image", "b", 0),
        ((0, 1), "image", "a", 1),
        (None, "image", "a", 0),
    ]
    drawn = [draw_noise(*key, SHAPE) for key in keys]
    for i, noise in enumerate(drawn):
        assert np.array_equal(noise, draw_noise(*keys[i], SHAPE))
        assert all(not np.array_equal(noise, other) for other in drawn[:i])
    assert len({draw_normal(*key) for key in keys}) == len({draw_uniform(*key) for key in keys}) == len(keys)


def test_numbers_are_distributed_as_they_say() -> None:
    normal = np.array([draw_normal((0, step), "image", "a", 0) for step in range(2000)])
    assert abs(normal.mean()) < 0.1
    assert abs(normal.std() - 1) < 0.05
    share = np.mean([has_null_condition((0, step), "image", "a", 0, 0.25) for step in range(2000)])
    assert abs(share - 0.25) < 0.04


def test_evaluation_keeps_all_conditions() -> None:
    assert not any(has_null_condition(None, "image", str(i), 0, 0.99) for i in range(20))
