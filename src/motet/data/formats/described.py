"""Samples that a run file describes by their sizes alone, to plan for data that are not at hand. They cannot be trained
on."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from motet.assignment.sample import Sample, Segment
from motet.config import DescribedConfig, RunConfig
from motet.config.data_section import DescribedImagesConfig, DescribedSoundsConfig
from motet.errors import UserError
from motet.families.token_counts import config_value, encoder_segment, grid_of, reads_text
from motet.plan import CONTRASTIVE, DECODER, LANGUAGE_MODEL
from motet.schedule.batch_sync import pairs_of
from motet.shapes.module_shape import ModuleWorkload

MEL_FRAMES_PER_S = 100
LATENT_SIDE = 8
"""Pixels along each side of a place of a latent image, by the autoencoders of latent diffusion."""


@dataclass(frozen=True)
class DescribedSamples:
    """All alike."""

    layouts: Mapping[str, tuple[Segment, ...]]
    num_loss_tokens: Mapping[str, int]
    num_samples: int

    def __len__(self) -> int:
        return self.num_samples

    def sample(self, index: int) -> Sample:
        return Sample(f"described {index}", self.layouts, self.num_loss_tokens)


def described_samples(
    config: RunConfig, data: DescribedConfig, workloads: Mapping[str, ModuleWorkload]
) -> DescribedSamples:
    """Raises `UserError` for an encoder that the model does not have, and for a size that the encoder cannot take."""
    if config.model.towers:
        return _described_towers(config, data, workloads)
    for name in (*data.images, *data.sounds):
        if name not in config.model.encoders:
            raise UserError(f"data: there is no encoder {name!r}; the model has {', '.join(config.model.encoders)}")
    layouts: dict[str, tuple[Segment, ...]] = {}
    for name, image in data.images.items():
        layouts[name] = _segments(config, workloads[name], name, _image_grid(workloads[name], image), image.count)
    for name, sound in data.sounds.items():
        layouts[name] = _segments(config, workloads[name], name, _sound_grid(workloads[name], sound), sound.count)
    text = [Segment(data.text_tokens)]
    if config.model.merge != "cross_attention":
        text = [Segment(s.outputs, source=name, item=s.item) for name, items in layouts.items() for s in items] + text
    layouts[LANGUAGE_MODEL] = tuple(text)
    generated = _latents(config, data)
    num_places = {name: sum(image.num_tokens for image in images) for name, images in generated.items()}
    return DescribedSamples({**layouts, **generated}, {LANGUAGE_MODEL: data.text_tokens, **num_places}, data.num_train)


def _latents(config: RunConfig, data: DescribedConfig) -> dict[str, tuple[Segment, ...]]:
    """What generators work on; a loss on each place of the latents."""
    for name in data.generated:
        if name not in config.model.generators:
            known = ", ".join(config.model.generators) or "none"
            raise UserError(f"data.generated: there is no generator {name!r}; the model has {known}")
    latents = {}
    for name in config.model.generators:
        if name not in data.generated:
            raise UserError(f"data.generated: says nothing of {name}; give the height and width of its images")
        image = data.generated[name]
        if image.height % LATENT_SIDE or image.width % LATENT_SIDE:
            raise UserError(
                f"data.generated.{name}: is {image.height} x {image.width}; give multiples of {LATENT_SIDE}, which a "
                "place of the latents stands for"
            )
        places = (image.height // LATENT_SIDE) * (image.width // LATENT_SIDE)
        latents[name] = tuple(Segment(places, item=i) for i in range(image.count))
    return latents


def _described_towers(
    config: RunConfig, data: DescribedConfig, workloads: Mapping[str, ModuleWorkload]
) -> DescribedSamples:
    """One item of each sample for every tower; texts are `text_tokens` long, but no longer than what reads them
    takes."""
    grids: dict[str, tuple[int, ...]] = {}
    for name in config.model.towers:
        values = workloads[name].config
        if reads_text(values):
            grids[name] = (min(data.text_tokens, config_value(values, "max_position_embeddings")),)
        elif name in data.images:
            grids[name] = _image_grid(workloads[name], data.images[name])
        elif name in data.sounds:
            grids[name] = _sound_grid(workloads[name], data.sounds[name])
        else:
            raise UserError(f"data: says nothing of tower {name!r}; give it under images or sounds")
    layouts = {}
    for name, grid in grids.items():
        segment = encoder_segment(workloads[name].config, item=0, grid=grid)
        layouts[name] = (Segment(segment.num_tokens, num_outputs=1, grid=grid),)
    pairs = pairs_of(tuple(config.model.towers), config.model.contrastive.anchor)
    num_loss_tokens, decoder = {CONTRASTIVE: len(pairs)}, config.model.decoder
    if decoder is not None:
        (seen,) = layouts[decoder.reads]
        layouts[decoder.reads] = (replace(seen, num_outputs=1 + seen.num_tokens),)
        num_tokens = min(data.text_tokens, config_value(workloads[DECODER].config, "max_position_embeddings"))
        layouts[DECODER] = (Segment(num_tokens),)
        num_loss_tokens[DECODER] = num_tokens - 1
    return DescribedSamples(layouts, num_loss_tokens, data.num_train)


def _image_grid(workload: ModuleWorkload, image: DescribedImagesConfig) -> tuple[int, ...]:
    values, size = workload.config, (image.height, image.width)
    patch = values.get("patch_size", 1)
    rows, columns = patch if isinstance(patch, tuple | list) else (patch, patch)
    return grid_of(values, image_size=size, image_grid_thw=(1, size[0] // rows, size[1] // columns))


def _sound_grid(workload: ModuleWorkload, sound: DescribedSoundsConfig) -> tuple[int, ...]:
    return grid_of(workload.config, num_mel_frames=round(sound.seconds * MEL_FRAMES_PER_S))


def _segments(
    config: RunConfig, workload: ModuleWorkload, name: str, grid: tuple[int, ...], count: int
) -> tuple[Segment, ...]:
    select = config.model.encoders[name].feature_select
    return tuple(encoder_segment(workload.config, item=i, grid=grid, feature_select=select) for i in range(count))
