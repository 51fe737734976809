"""Four synthetic distributions of image-text samples, shaped after the thesis' data sets (Figures 4.3 and 4.4).

The figures are pictures, so parameters are chosen, not fitted. What shaped them: images of COCO (CocoQA, LLaVA-150k)
are 640 pixels on the longer side, so that their work hardly varies; charts (ChartQA) vary some; synthetic charts
(SynthChartNet) vary most, in picture and text, with heavy tails, and are the most variable of the four in the thesis.
Texts are drawn by themselves ("independently varying", Figure 4.3). The encoder's share of the work and its spread
should come near to what the thesis' trials tell (tables 4.2 and C.2-C.8); benchmarks/balanced_data.py prints them.

Fixed before any assignment was tuned on them. `SEED` and the batch's number decide every draw.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from motet.assignment.sample import Sample, Segment
from motet.data.encoder_layout import image_rule
from motet.families.encoders.token_counts import encoder_segment

SEED = 20261122
PATCH = 14
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": PATCH,
    "merge_size": 2,
    "min_pixels": 3136,
    "max_pixels": 12845056,
}
"""Qwen2.5-VL's."""


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """Images of a log-normal number of pixels and sides of a log-normal ratio; texts of log-normal lengths."""

    megapixels: float = 0.0
    """Median; not with a longest side."""
    pixel_spread: float = 0.0
    """Standard deviation of the logarithm, here and below."""
    ratio_spread: float = 0.25
    longest_side: int | None = None
    """All images have it; then only the ratio varies."""
    max_megapixels: float = 8.0
    text_tokens: float
    """Median; not with a longest side."""
    text_spread: float
    max_text_tokens: int = 8192

    def image(self, rng: np.random.Generator) -> tuple[int, int]:
        """Height and width in pixels."""
        ratio = float(np.exp(rng.normal(np.log(0.75), self.ratio_spread)))
        if self.longest_side is not None:
            ratio = float(np.clip(ratio, 0.4, 1.0))
            sides = (self.longest_side, max(1, round(self.longest_side * ratio)))
            return sides if rng.random() < 0.25 else (sides[1], sides[0])
        pixels = 1e6 * min(self.max_megapixels, self.megapixels * float(np.exp(rng.normal(0, self.pixel_spread))))
        width = np.sqrt(pixels / ratio)
        return max(28, round(width * ratio)), max(28, round(width))

    def text(self, rng: np.random.Generator) -> int:
        return int(np.clip(round(rng.lognormal(np.log(self.text_tokens), self.text_spread)), 8, self.max_text_tokens))


DATA_SETS: Mapping[str, DataSet] = {
    "SynthChartNet": DataSet(megapixels=0.9, pixel_spread=0.75, text_tokens=140, text_spread=0.9),
    "ChartQA": DataSet(megapixels=0.45, pixel_spread=0.3, text_tokens=40, text_spread=0.5),
    "CocoQA": DataSet(longest_side=640, ratio_spread=0.12, text_tokens=30, text_spread=0.5),
    "LLaVA-150k": DataSet(longest_side=640, ratio_spread=0.12, text_tokens=170, text_spread=0.6),
}


def draw(data_set: str, num_samples: int, *, batch: int, vision: Mapping[str, object]) -> tuple[Sample, ...]:
    """One global batch. `vision`: the encoder's configuration (Qwen2.5-VL's vision tower)."""
    law = DATA_SETS[data_set]
    rng = np.random.default_rng((SEED, list(DATA_SETS).index(data_set), batch))
    resized = image_rule(PROCESSOR, "qwen2_5_vl_vision")
    assert resized is not None
    samples = []
    for i in range(num_samples):
        height, width = resized(law.image(rng))
        image = encoder_segment(vision, item=0, grid=(1, height // PATCH, width // PATCH))
        num_words = law.text(rng)
        layouts = {"vision": (image,), "language_model": (Segment(image.outputs, source="vision"), Segment(num_words))}
        samples.append(Sample(f"{data_set}/{batch}/{i}", layouts, {"language_model": num_words}))
    return tuple(samples)
