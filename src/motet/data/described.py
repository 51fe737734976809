"""Samples that a run file describes by their sizes alone, to plan for data that are not at hand. They cannot be trained
on."""

from collections.abc import Mapping
from dataclasses import dataclass

from motet.config import LANGUAGE_MODEL, DescribedConfig, RunConfig
from motet.data.sample import Sample, Segment
from motet.errors import UserError
from motet.models.token_counts import encoder_segment, grid_of
from motet.workload import ModuleWorkload

MEL_FRAMES_PER_S = 100


@dataclass(frozen=True)
class DescribedSamples:
    """All alike."""

    layouts: Mapping[str, tuple[Segment, ...]]
    num_loss_tokens: int
    num_samples: int

    def __len__(self) -> int:
        return self.num_samples

    def sample(self, index: int) -> Sample:
        return Sample(f"described {index}", self.layouts, {LANGUAGE_MODEL: self.num_loss_tokens})


def described_samples(
    config: RunConfig, data: DescribedConfig, workloads: Mapping[str, ModuleWorkload]
) -> DescribedSamples:
    """Raises `UserError` for an encoder that the model does not have, and for a size that the encoder cannot take."""
    for name in (*data.images, *data.sounds):
        if name not in config.model.encoders:
            raise UserError(f"data: there is no encoder {name!r}; the model has {', '.join(config.model.encoders)}")
    layouts: dict[str, tuple[Segment, ...]] = {}
    for name, image in data.images.items():
        values, size = workloads[name].config, (image.height, image.width)
        patch = values.get("patch_size", 1)
        rows, columns = patch if isinstance(patch, tuple | list) else (patch, patch)
        grid = grid_of(values, image_size=size, image_grid_thw=(1, size[0] // rows, size[1] // columns))
        layouts[name] = _segments(config, workloads[name], name, grid, image.count)
    for name, sound in data.sounds.items():
        grid = grid_of(workloads[name].config, num_mel_frames=round(sound.seconds * MEL_FRAMES_PER_S))
        layouts[name] = _segments(config, workloads[name], name, grid, sound.count)
    text = [Segment(data.text_tokens)]
    if config.model.merge != "cross_attention":
        text = [Segment(s.outputs, source=name, item=s.item) for name, items in layouts.items() for s in items] + text
    layouts[LANGUAGE_MODEL] = tuple(text)
    return DescribedSamples(layouts, data.text_tokens, data.num_train)


def _segments(
    config: RunConfig, workload: ModuleWorkload, name: str, grid: tuple[int, ...], count: int
) -> tuple[Segment, ...]:
    select = config.model.encoders[name].feature_select
    return tuple(encoder_segment(workload.config, item=i, grid=grid, feature_select=select) for i in range(count))
