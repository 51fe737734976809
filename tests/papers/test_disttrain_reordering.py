"""Reordering: the samples that are drawn, what they cost in a pipeline, and what their order brings."""

import numpy as np
import pytest

from papers.disttrain.models import SEQUENCE
from papers.disttrain.reordering import (
    CAPTION_TOKENS,
    Pipeline,
    _simulated_s,
    drawn_samples,
    gains,
    megatron_slowdown,
)


def test_sequences_are_full_of_images_as_the_data_set_has_them():
    samples = drawn_samples(2000, seed=7)
    sides = 16 * np.concatenate([np.array(sides) for sides in samples])
    assert max(sum(s**2 + CAPTION_TOKENS for s in sample) for sample in samples) <= SEQUENCE
    # Ten images are the paper's typical sample.
    assert np.mean([len(sample) for sample in samples]) == pytest.approx(10, abs=1)
    # Between the shares of images whose shorter and whose longer side is so large; large ones fit in less often.
    assert 0.51 < np.mean(sides >= 256) < 0.65
    assert 0.10 < np.mean(sides >= 512) < 0.27


def test_images_are_dealt_to_the_devices_of_a_replica():
    pipeline = Pipeline(
        num_replicas=1,
        num_stages=2,
        stage_s=6.0,
        num_encoders=2,
        token_s=0.3,
        num_generators=2,
        image_s=9.0,
    )
    # Tokens 16, 9, 9 on two encoders: 18 at most. Three images on two generators: two rounds.
    assert pipeline.forward_s([(4, 3, 3), (2,)]).tolist() == pytest.approx(
        np.array([[18 * 0.1, 2.0, 2.0, 6.0], [4 * 0.1, 2.0, 2.0, 3.0]])
    )


def test_a_pipeline_of_equal_stages_by_hand():
    # 1F1B of 5 microbatches in 3 stages: forward 1 s, backward 2 s.
    assert _simulated_s(np.ones((5, 3))) == pytest.approx((5 + 2) * 3)


@pytest.mark.parametrize("size", ["9B", "15B", "72B"])
def test_order_matters_but_no_order_is_better_than_alike(size):
    gain, headroom = gains(size)
    assert 1 < gain < headroom
    # Figure 18: 1.03 to 1.11.
    assert 1.015 < gain < 1.12


def test_uneven_samples_hardly_slow_megatron_where_the_language_model_is_slowest():
    assert [megatron_slowdown(size) for size in ("9B", "15B")] == pytest.approx([1, 1], abs=0.01)
    assert 1.01 < megatron_slowdown("72B") < 1.06
