"""Samples that a run file describes by their sizes alone, to plan and simulate without data."""

from collections.abc import Mapping
from dataclasses import dataclass

from motet.assignment.sample import Sample, Segment
from motet.config import DescribedConfig, EncoderConfig, RunConfig
from motet.config.data_section import DescribedImagesConfig
from motet.errors import UserError
from motet.families.configured_graph import ConfiguredGraph, ConfiguredModule
from motet.families.encoders.token_counts import config_value, encoder_segment, grid_of, pooled, reads_text
from motet.plan import CONTRASTIVE, DECODER, LANGUAGE_MODEL, queries_of
from motet.shapes.module_shape import QUERY_TOKENS, ModuleWorkload

MEL_FRAMES_PER_S = 100
LATENT_SIDE = 8
"""Pixels along each side of a position of a latent image, by the autoencoders of latent diffusion."""


@dataclass(frozen=True)
class DescribedSamples:
    """Samples that are all alike."""

    layouts: Mapping[str, tuple[Segment, ...]]
    num_loss_tokens: Mapping[str, int]
    num_samples: int
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.num_samples

    def sample(self, index: int) -> Sample:
        return Sample(f"described {index}", self.layouts, self.num_loss_tokens)


def described_samples(config: RunConfig, data: DescribedConfig, graph: ConfiguredGraph) -> DescribedSamples:
    """Lays one sample out for every module of the graph.

    Raises `UserError` for an encoder that the model does not have, and for a size that an encoder cannot take."""
    layouts = _encoder_layouts(data, graph)
    num_loss_tokens: dict[str, int] = {}
    if LANGUAGE_MODEL in graph.modules:
        text = [Segment(data.text_tokens)]
        if config.model.merge != "cross_attention":
            media = [Segment(s.outputs, source=name, item=s.item) for name, items in layouts.items() for s in items]
            text = media + text
        for name, part in config.model.generators.items():
            if part.queries and name in data.generated:
                numbers = range(data.generated[name].count)
                layouts[queries_of(name)] = tuple(Segment(part.queries, item=i) for i in numbers)
                text += [Segment(part.queries, source=queries_of(name), item=i, target=name) for i in numbers]
        layouts[LANGUAGE_MODEL], num_loss_tokens[LANGUAGE_MODEL] = tuple(text), data.text_tokens
    for name, images in _latents(config, data, graph).items():
        layouts[name] = images
        is_per_image = config.model.generators[name].loss_per == "image"
        num_loss_tokens[name] = len(images) if is_per_image else sum(image.num_tokens for image in images)
    if CONTRASTIVE in graph.modules:
        num_loss_tokens[CONTRASTIVE] = len(graph.compared)
        if DECODER in graph.modules:
            num_tokens = _text_length(data, graph.modules[DECODER].workload)
            layouts[DECODER], num_loss_tokens[DECODER] = (Segment(num_tokens),), num_tokens - 1
    return DescribedSamples(layouts, num_loss_tokens, data.num_train)


def _encoder_layouts(data: DescribedConfig, graph: ConfiguredGraph) -> dict[str, tuple[Segment, ...]]:
    encoders = {
        name: node for name, node in graph.of_kind("encoder", "tower").items() if node.workload.family != QUERY_TOKENS
    }
    for name in (*data.images, *data.sounds):
        if name not in encoders:
            raise UserError(f"data: there is no encoder {name!r}; the model has {', '.join(encoders)}")
    layouts = {}
    for name, image in data.images.items():
        layouts[name] = _items(encoders[name], _image_grid(encoders[name].workload, image), image.count)
    for name, sound in data.sounds.items():
        grid = grid_of(encoders[name].workload.config, num_mel_frames=round(sound.seconds * MEL_FRAMES_PER_S))
        layouts[name] = _items(encoders[name], grid, sound.count)
    for name, node in encoders.items():
        if reads_text(node.workload.config):
            layouts[name] = _items(node, (_text_length(data, node.workload),), 1)
        elif node.pooling is not None and name not in layouts:
            raise UserError(f"data: has no entry for {node.workload.kind} {name!r}; give it under images or sounds")
    return layouts


def _items(node: ConfiguredModule, grid: tuple[int, ...], count: int) -> tuple[Segment, ...]:
    """The layout of `count` items; encoders that pool have one in each sample."""
    if node.pooling is not None:
        return (pooled(encoder_segment(node.workload.config, item=0, grid=grid), node.pooling),)
    assert isinstance(node.part, EncoderConfig)
    select = node.part.feature_select
    return tuple(encoder_segment(node.workload.config, item=i, grid=grid, feature_select=select) for i in range(count))


def _text_length(data: DescribedConfig, workload: ModuleWorkload) -> int:
    return min(data.text_tokens, config_value(workload.config, "max_position_embeddings"))


def _image_grid(workload: ModuleWorkload, image: DescribedImagesConfig) -> tuple[int, ...]:
    values, size = workload.config, (image.height, image.width)
    patch = values.get("patch_size", 1)
    rows, columns = patch if isinstance(patch, tuple | list) else (patch, patch)
    return grid_of(values, image_size=size, image_grid_thw=(1, size[0] // rows, size[1] // columns))


def _latents(config: RunConfig, data: DescribedConfig, graph: ConfiguredGraph) -> dict[str, tuple[Segment, ...]]:
    """The layouts of generators: the places of U-Nets are those of the latents, of transformers patches of them."""
    for name in data.generated:
        if name not in config.model.generators:
            known = ", ".join(config.model.generators) or "none"
            raise UserError(f"data.generated: there is no generator {name!r}; the model has {known}")
    latents = {}
    for name in config.model.generators:
        if name not in data.generated:
            raise UserError(f"data.generated: has no entry for {name}; give the height and width of its images")
        image = data.generated[name]
        codec = graph.modules[name].workload.config.get("codec")
        if codec is not None:
            if image.height != codec.num_codebooks:
                raise UserError(
                    f"data.generated.{name}.height: is {image.height}, but the generator makes codes of "
                    f"{codec.num_codebooks} codebooks; give {codec.num_codebooks}"
                )
            latents[name] = tuple(Segment(codec.num_tokens(image.width), item=i) for i in range(image.count))
            continue
        is_sound = config.model.generators[name].spectrogram is not None
        side = (1 if is_sound else LATENT_SIDE) * graph.modules[name].workload.config["place_side"]
        if image.height % side or image.width % side:
            raise UserError(
                f"data.generated.{name}: is {image.height} x {image.width}; give multiples of {side}, the "
                "side of one patch of the generator"
            )
        rows, columns = image.height // side, image.width // side
        latents[name] = tuple(Segment(rows * columns, item=i, grid=(rows, columns)) for i in range(image.count))
    return latents
