"""A run of a generator's layers as a pipeline stage: connector | embed | n blocks | head and loss.

The generator is an unmodified diffusion model of diffusers (`motet.families.diffusion_models`). Layer 0 is the
connector alone, so that connector and model are frozen or trained separately. For each image (an item of a
sample), in the order (sample, item), the rows that travel between stages are

* behind the connector: the image's conditions and, if the family has one, the pooled condition;
* behind any later layer: the places of the image, its conditions, and the vectors of its time step.

Conditions are the language model's hidden states at the image's query tokens, or all of its prompt. Images of one size
with equally many conditions are computed together: no condition is padded, as SD3 has no mask for conditions. Noise,
time steps and null conditions are drawn by keys (`motet.models.draws`): the embedding adds the noise, and the head
draws it again.

Limits: no context parallelism; a U-Net is one stage.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from motet.assignment.sample import Sample, Segment
from motet.devices import to_device
from motet.errors import UserError
from motet.families.diffusion_models import DIFFUSION_FAMILIES, DiffusionFamily, Given, Streams, WholeModel
from motet.models.draws import Key, draw_latents, draw_noise, draw_normal, draw_uniform, has_null_condition
from motet.models.stages.projector import PROJECTORS, initialize_projector
from motet.models.stages.stage import StageBase, StageInput, StageOutput
from motet.plan import LayerRange
from motet.shapes.module_shape import ModuleWorkload

NUM_TIMESTEPS = 1000
"""Time steps run from 0 to 1000, where nothing but noise is left."""
Objective = Literal["flow", "epsilon", "v"]


@dataclass(frozen=True, kw_only=True)
class DiffusionLoss:
    """Loss of a diffusion model: the predicted quantity, and the average of errors."""

    objective: Objective = "flow"
    per: Literal["image", "place"] = "image"
    """Each image counts once, or as often as it has places."""
    null_condition: float = 0.0
    """Probability with which an image of the training is not given its conditions."""

    def timestep(self, key: Key, generator: str, sample: str, item: int) -> float:
        """Flow matching: logit-normal (Esser et al. 2024, section 3.1). Diffusion: a whole number from 0 on."""
        if self.objective == "flow":
            drawn = torch.tensor(draw_normal(key, generator, sample, item), dtype=torch.float64)
            return NUM_TIMESTEPS * torch.sigmoid(drawn).item()
        return float(int(NUM_TIMESTEPS * draw_uniform(key, generator, sample, item)))

    def noised(self, clean: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """The latents [images, channels, height, width] at these time steps [images]."""
        signal, amount = self._amounts(timesteps, clean)
        return signal * clean + amount * noise

    def target(self, clean: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        if self.objective == "flow":
            return noise - clean
        if self.objective == "epsilon":
            return noise
        signal, amount = self._amounts(timesteps, clean)
        return signal * noise - amount * clean

    def _amounts(self, timesteps: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the amounts of signal and of noise."""
        if self.objective == "flow":
            amount = timesteps / NUM_TIMESTEPS
            signal = 1 - amount
        else:
            betas = torch.linspace(1e-4, 0.02, NUM_TIMESTEPS, dtype=torch.float64, device=timesteps.device)
            kept = torch.cumprod(1 - betas, 0)[timesteps.long()]
            signal, amount = kept.sqrt(), (1 - kept).sqrt()
        return signal.to(like.dtype)[:, None, None, None], amount.to(like.dtype)[:, None, None, None]


class Connector(nn.Module):
    """Brings hidden states of the language model to the width of the generator's conditions: a norm and a projector.

    It also has the learned null condition, one row that stands for all conditions of an image, and the projection of
    the mean of an image's conditions for families with a pooled condition."""

    def __init__(
        self, incoming_size: int, size: int, pooled_size: int, projector: str, *, dtype: torch.dtype, seed: int | None
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(incoming_size)
        self.projector = PROJECTORS[projector](incoming_size, size)
        self.pooled = nn.Linear(size, pooled_size) if pooled_size else None
        self.null = nn.Parameter(torch.zeros(size))
        if seed is not None:
            initialize_projector(self, seed=seed)
        self.to(dtype)

    def forward(self, states: Tensor) -> Tensor:
        """[..., incoming size] -> [..., size]"""
        return self.projector(self.norm(states))

    def replaced(self, conditions: Tensor, is_null: bool) -> Tensor:
        """The null condition in place of all [conditions, size], if `is_null`. The conditions stay in the graph, with a
        gradient of zero, so that each item has a backward."""
        return torch.where(to_device(torch.tensor(is_null), conditions.device), self.null, conditions)

    def pool(self, conditions: Tensor) -> Tensor | None:
        """[..., conditions, size] -> [..., pooled size]; None: the family has no pooled condition."""
        return None if self.pooled is None else self.pooled(conditions.mean(-2))


def num_conditions(sample: Sample, reads: str, name: str) -> dict[int, int]:
    """For each item that the generator `name` makes, the number of the states of `reads` that condition it."""
    counts: dict[int, int] = {}
    for segment in sample.layouts[reads]:
        if segment.target == name:
            counts[segment.item] = counts.get(segment.item, 0) + segment.outputs
    return counts


class Item(NamedTuple):
    """An image of a microbatch."""

    sample: Sample
    place: int
    """Index of the sample in the microbatch."""
    segment: Segment
    num_conditions: int

    @property
    def form(self) -> tuple[tuple[int, ...], int]:
        """Images of one form are computed together."""
        return self.segment.grid, self.num_conditions


class GeneratorStage(StageBase):
    """Layers [first, last) of a generator. Takes over `model`: its other layers are dropped.

    Args:
        name: the module whose layouts are read.
        reads: the language model.
        model: of diffusers.
        workload: its shape, as `motet.shapes.diffusion_transformers` or `motet.shapes.diffusion` makes it.
        incoming_size: width of the language model's hidden states.
    """

    def __init__(
        self,
        name: str,
        reads: str,
        model: Any,
        connector: Connector,
        layers: LayerRange,
        *,
        workload: ModuleWorkload,
        loss: DiffusionLoss,
        incoming_size: int,
    ) -> None:
        super().__init__()
        self.name, self.reads, self.layers, self.loss = name, reads, layers, loss
        self._family, self._config = DIFFUSION_FAMILIES[workload.family], workload.config
        self._num_time_vectors = workload.num_time_vectors
        self._head_layer = workload.num_layers - 1
        self._num_layers = workload.num_layers
        self._incoming_size = incoming_size
        self.hidden_size, self.output_size = workload.hidden_size, workload.output_size
        self.is_last = layers[1] == workload.num_layers
        self.needs_features = self.holds(1) or self.is_last
        self.module, self.projector = model, connector if self.holds(0) else None
        if isinstance(self._family, WholeModel):
            if layers != (0, self._num_layers):
                raise UserError(f"plan: modules.{name}: a {workload.family} is one stage; give pp 1")
            self._parts = dict(self._numbered_parts(self._family.layer_parts(model)))
        else:
            blocks = [f"{path}.{i}" for path in self._family.blocks for i in range(len(model.get_submodule(path)))]
            self._block_layers = {path: layer for layer, path in enumerate(blocks, start=2)}
            self._drop_others(self._family)

    @property
    def running_blocks(self) -> dict[int, nn.Module]:
        """The stage's blocks, by their numbers in the whole model."""
        if isinstance(self._family, WholeModel):
            return self._family.recomputed(self.module)
        return {layer - 2: self.module.get_submodule(path) for path, layer in self._held_blocks.items()}

    @property
    def is_whole_model(self) -> bool:
        """Whether its model runs in one stage only (a U-Net)."""
        return isinstance(self._family, WholeModel)

    @property
    def model_class(self) -> str:
        """In diffusers."""
        return type(self.module).__name__

    @property
    def block_paths(self) -> dict[str, nn.Module]:
        """The blocks of a transformer that the stage holds, by their paths in it."""
        return {f"module.{path}": self.module.get_submodule(path) for path in self._held_blocks}

    @property
    def _held_blocks(self) -> dict[str, int]:
        return {path: layer for path, layer in self._block_layers.items() if self.holds(layer)}

    @staticmethod
    def _numbered_parts(parts: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, int]]:
        """The layer of each part of a model that is one stage."""
        for layer, paths in enumerate(parts, start=1):
            yield from ((path, layer) for path in paths)

    def holds(self, layer: int) -> bool:
        return self.layers[0] <= layer < self.layers[1]

    def _drop_others(self, family: DiffusionFamily) -> None:
        for path in self._block_layers.keys() - self._held_blocks.keys():
            self.module.set_submodule(path, nn.Identity())
        kept = {*family.blocks, family.position_part}
        for path, part in [*self.module.named_children(), *self.module.named_parameters(recurse=False)]:
            layer = 1 if path in family.embed_parts else self._head_layer
            if path not in kept and not self.holds(layer):
                setattr(self.module, path, nn.Identity() if isinstance(part, nn.Module) else None)

    def layers_of(self, local_name: str) -> tuple[int, ...]:
        where, _, path = local_name.partition(".")
        if where == "projector":
            return (0,)
        if isinstance(self._family, WholeModel):
            return (next(layer for part, layer in self._parts.items() if path.startswith(f"{part}.")),)
        part, _, rest = path.partition(".")
        if part in self._family.blocks:
            return (self._block_layers[f"{part}.{rest.partition('.')[0]}"],)
        return (1,) if part in self._family.embed_parts else (self._head_layer,)

    def incoming_size(self, source: str) -> int:
        return self._incoming_size

    # Shapes -------------------------------------------------------------------------------------------------------

    def input_shape(self, samples: Sequence[Sample]) -> tuple[int, int]:
        return self._boundary_shape(self.layers[0], samples)

    def output_shape(self, samples: Sequence[Sample]) -> tuple[int, int]:
        return self._boundary_shape(self.layers[1], samples)

    def _boundary_shape(self, border: int, samples: Sequence[Sample]) -> tuple[int, int]:
        width = max(self._config["condition_size"], self._config["pooled_size"]) if border == 1 else self.hidden_size
        return sum(self._num_rows(border, item) for item in self._items(samples)), width

    def _num_rows(self, border: int, item: Item) -> int:
        """Returns the number of rows of the input of layer `border`."""
        if border == 1:
            return item.num_conditions + bool(self._config["pooled_size"])
        return item.segment.num_tokens + item.num_conditions + self._num_time_vectors

    def _items(self, samples: Sequence[Sample]) -> list[Item]:
        items = []
        for place, sample in enumerate(samples):
            counts = num_conditions(sample, self.reads, self.name)
            items += [Item(sample, place, own, counts[own.item]) for own in sample.layouts[self.name]]
        return items

    # Computing ----------------------------------------------------------------------------------------------------

    def forward(self, inputs: StageInput) -> StageOutput:
        """The rows that the next stage reads; of the last stage, the sum of the images' losses."""
        items = self._items(inputs.samples)
        if self.holds(0):
            rows = self._connect(inputs.incoming[self.reads], items, inputs.draw_key)
        else:
            assert inputs.hidden is not None
            rows = list(inputs.hidden.split([self._num_rows(self.layers[0], item) for item in items]))
        if self.layers[1] == 1:
            return StageOutput(torch.cat(rows))
        latents = self._latents(inputs.features, items, inputs.draw_key) if self.needs_features else []
        by_form: dict[Any, list[int]] = {}
        for index, item in enumerate(items):
            by_form.setdefault(item.form, []).append(index)
        made: dict[int, Tensor] = {}
        total = rows[0].new_zeros(())
        for group in by_form.values():
            own = [items[index] for index in group]
            noising = self._noising(own, [latents[index] for index in group], inputs.draw_key) if latents else None
            computed = self._compute(torch.stack([rows[index] for index in group]), own[0], noising)
            if isinstance(computed, Tensor):
                assert noising is not None
                total = total + self._loss_sum(computed, own, noising)
            else:
                made |= dict(zip(group, torch.cat(computed, dim=1), strict=True))
        if self.is_last:
            return StageOutput(None, total)
        return StageOutput(torch.cat([made[index] for index in range(len(items))]))

    def _connect(self, states: Tensor, items: Sequence[Item], key: Key) -> list[Tensor]:
        """Each image's conditions, and the pooled condition padded to their width."""
        assert self.projector is not None
        connected = self.projector(states).split([item.num_conditions for item in items])
        rows = []
        for item, conditions in zip(items, connected, strict=True):
            drawn = (key, self.name, item.sample.id, item.segment.item)
            is_null = has_null_condition(*drawn, self.loss.null_condition)
            conditions = self.projector.replaced(conditions, is_null)
            pooled = self.projector.pool(conditions)
            if pooled is not None:
                width = max(conditions.shape[-1], pooled.shape[-1])
                own = [functional.pad(part, (0, width - part.shape[-1])) for part in (conditions, pooled[None])]
                conditions = torch.cat(own)
            rows.append(conditions)
        return rows

    def _latents(self, features: Sequence[Mapping[str, Tensor]], items: Sequence[Item], key: Key) -> list[Tensor]:
        """[channels, height, width] of each image. Those of an autoencoder are drawn."""
        means = self._by_item(features, items, "latents")
        if not any("deviations" in own for own in features):
            return means
        drawn = []
        for item, mean, deviation in zip(items, means, self._by_item(features, items, "deviations"), strict=True):
            noise = draw_latents(key, self.name, item.sample.id, item.segment.item, tuple(mean.shape))
            drawn.append(mean + deviation * torch.from_numpy(noise).to(mean))
        return drawn

    def _by_item(self, features: Sequence[Mapping[str, Tensor]], items: Sequence[Item], what: str) -> list[Tensor]:
        side, channels = self._config["place_side"], self._config["latent_channels"]
        shapes = [(channels, *(side * number for number in item.segment.grid)) for item in items]
        found: list[Tensor] = []
        for place, own in enumerate(features):
            mine = [shape for item, shape in zip(items, shapes, strict=True) if item.place == place]
            sizes = [torch.Size(shape).numel() for shape in mine]
            if own[what].numel() != sum(sizes):
                raise UserError(
                    f"features: {what} of sample {items[len(found)].sample.id!r} have {own['latents'].numel()} "
                    f"numbers, but {self.name}'s layout needs {sum(sizes)}"
                )
            found += [part.view(shape) for part, shape in zip(own[what].split(sizes), mine, strict=True)]
        return found

    def _noising(self, items: Sequence[Item], latents: Sequence[Tensor], key: Key) -> "Noising":
        clean = torch.stack(list(latents))
        keys = [(key, self.name, item.sample.id, item.segment.item) for item in items]
        noise = torch.stack([torch.from_numpy(draw_noise(*own, tuple(clean.shape[1:]))) for own in keys])
        timesteps = torch.tensor([self.loss.timestep(*own) for own in keys], dtype=torch.float32)
        return Noising(clean, to_device(noise, clean.device).to(clean), to_device(timesteps, clean.device))

    def _compute(self, rows: Tensor, item: Item, noising: "Noising | None") -> Tensor | Streams:
        """Runs the stage's layers behind the connector on images of one form: [images, channels, height, width], which
        is compared with the target, or the streams that the next stage reads.

        `rows`: [images, rows of each, width]."""
        family, grid = self._family, item.segment.grid
        if isinstance(family, WholeModel):
            assert noising is not None
            return family.predict(self.module, self._given(rows, item, noising))
        if self.holds(1):
            assert noising is not None
            streams = family.embed(self.module, self._given(rows, item, noising))
        else:
            sizes = [item.segment.num_tokens, item.num_conditions, self._num_time_vectors]
            streams = Streams(*rows.split(sizes, dim=1))
        blocks = self.running_blocks
        positions = family.positions(self.module, streams, grid) if blocks else None
        for block in blocks.values():
            streams = family.block(block, streams, grid, positions)
        return family.head(self.module, streams, grid) if self.is_last else streams

    def _given(self, rows: Tensor, item: Item, noising: "Noising") -> Given:
        """What the diffusion model is given, from the connector's rows."""
        conditions, pooled = rows[:, : item.num_conditions, : self._config["condition_size"]], None
        if self._config["pooled_size"]:
            pooled = rows[:, -1, : self._config["pooled_size"]]
        noised = self.loss.noised(*noising)
        return Given(noised, noising.timesteps, conditions, pooled, self._config["guidance"])

    def _loss_sum(self, predicted: Tensor, items: Sequence[Item], noising: "Noising") -> Tensor:
        """Sums the mean squared error of each image, times its places if the average is over places."""
        error = predicted.to(torch.promote_types(predicted.dtype, torch.float32)) - self.loss.target(*noising)
        means = error.square().mean((1, 2, 3))
        return means.sum() * (items[0].segment.num_tokens if self.loss.per == "place" else 1)


class Noising(NamedTuple):
    """Images of one size, the noise that they get, and when."""

    clean: Tensor
    """[images, channels, height, width]"""
    noise: Tensor
    timesteps: Tensor
    """[images], never less exact than float32."""
