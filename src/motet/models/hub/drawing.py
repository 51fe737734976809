"""Draws what an exported model describes, by transformers and diffusers in one process.

The language model reads a prompt and its query tokens, and their last hidden states condition the diffusion model:
what `draw_<generator>` of the export's README does (a test compares), for many prompts with images and sounds at once.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from motet.errors import UserError, one_line
from motet.families.diffusion_models import diffusion_class
from motet.models.hub.export import read_manifest
from motet.models.hub.generation import BATCH_SIZE, Prompt, prompt_embeddings
from motet.models.hub.generators import GUIDANCE, NUM_STEPS
from motet.models.multimodal import MultimodalModule
from motet.models.stages.generator import Connector
from motet.plan import queries_of

CLASSES = ("SD3Transformer2DModel", "PixArtTransformer2DModel", "SanaTransformer2DModel")
"""Classes of diffusers whose forward takes latents, time steps and conditions alone."""


@dataclass(frozen=True)
class ExportedGenerator:
    """The parts of a generator, loaded by their own `from_pretrained`."""

    model: Any
    """A transformer of diffusers."""
    scheduler: Any
    connector: Connector
    queries: Tensor | None
    """[query tokens, width]; None: it reads the whole prompt."""
    placeholder_token_id: int
    autoencoder: Any | None


def load_generator(folder: str | Path, name: str) -> ExportedGenerator:
    """Raises `UserError` if the export has no such generator, or if a file is missing or damaged."""
    folder = Path(folder)
    entries = read_manifest(folder).get("generators", {})
    if name not in entries:
        raise UserError(f"{folder}: has no generator {name!r}; it has {', '.join(entries) or 'none'}")
    entry = entries[name]
    if entry["model_class"] not in CLASSES:
        raise UserError(
            f"{folder}: {name} is a {entry['model_class']}, which draws by the program of README.md there; here "
            f"{', '.join(CLASSES)} do"
        )
    try:
        described = json.loads((folder / f"{name}_projector" / "config.json").read_text())
        incoming, size, pooled = described["sizes"]
        connector = Connector(incoming, size, pooled, described["projector"], dtype=torch.float32, seed=None)
        weights = load_file(folder / f"{name}_projector" / "model.safetensors")
        connector.to(weights["null"].dtype).load_state_dict(weights)
        queries = None
        if entry["num_queries"]:
            queries = load_file(folder / queries_of(name) / "model.safetensors")["weight"]
        dtype = weights["null"].dtype
        model = diffusion_class(entry["model_class"]).from_pretrained(
            folder / name, torch_dtype=dtype, use_safetensors=True
        )
        autoencoder = None
        if (folder / f"{name}_autoencoder").is_dir():
            autoencoder = diffusion_class("AutoencoderKL").from_pretrained(
                folder / f"{name}_autoencoder", torch_dtype=dtype, use_safetensors=True
            )
        scheduler_class = diffusion_class(entry["scheduler_class"])
        scheduler = scheduler_class.from_pretrained(folder / f"{name}_scheduler")  # It has no weights.
    except (OSError, SafetensorError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder}: {name} cannot be loaded ({one_line(error)}); export again") from None
    return ExportedGenerator(model.eval(), scheduler, connector, queries, entry["placeholder_token_id"], autoencoder)


@torch.no_grad()
def draw(
    model: MultimodalModule,
    generator: ExportedGenerator,
    prompts: Sequence[Prompt],
    noise: Tensor,
    *,
    guidance: float = GUIDANCE,
    num_steps: int = NUM_STEPS,
) -> Tensor:
    """Images between -1 and 1, or spectrograms: [prompts, channels, height, width].

    Args:
        model: of the same export, in evaluation mode.
        prompts: up to where the image stands, without its placeholder.
        noise: standard normal numbers, [prompts, channels, height, width] of what the diffusion model makes.
        guidance: of classifier-free guidance; 1: the conditions alone; 0: the null condition alone.
    """
    conditions = _conditions(model, generator, prompts)
    drawn: dict[int, Tensor] = {}
    by_length: dict[int, list[int]] = {}
    for index, own in enumerate(conditions):
        by_length.setdefault(len(own), []).append(index)
    for alike in by_length.values():
        for first in range(0, len(alike), BATCH_SIZE):
            indices = alike[first : first + BATCH_SIZE]
            together = torch.stack([conditions[index] for index in indices])
            made = _sample(generator, together, noise[indices].to(together.dtype), guidance, num_steps)
            drawn |= dict(zip(indices, made, strict=True))
    return torch.stack([drawn[index] for index in range(len(prompts))])


def _conditions(model: MultimodalModule, generator: ExportedGenerator, prompts: Sequence[Prompt]) -> list[Tensor]:
    """[conditions, width of a condition] of each prompt."""
    language_model = model.language_model.module
    found: list[Tensor] = []
    for first in range(0, len(prompts), BATCH_SIZE):
        texts = []
        for embeddings in prompt_embeddings(model, prompts[first : first + BATCH_SIZE]):
            after = generator.queries
            if after is None:
                placeholder = torch.tensor([generator.placeholder_token_id], device=embeddings.device)
                after = language_model.get_input_embeddings()(placeholder)
            texts.append(torch.cat([embeddings, after.to(embeddings)]))
        # Padding stands behind what is read, so a causal model does not see it.
        states = language_model(inputs_embeds=pad_sequence(texts, batch_first=True), output_hidden_states=True)
        for own, text in zip(states.hidden_states[-1], texts, strict=True):
            rows = own[: len(text)]
            found.append(generator.connector(rows if generator.queries is None else rows[-len(generator.queries) :]))
    return found


def _sample(generator: ExportedGenerator, conditions: Tensor, noise: Tensor, guidance: float, num_steps: int) -> Tensor:
    """`conditions`: [images, conditions, width], `noise`: [images, channels, height, width]."""
    null = generator.connector.null.expand_as(conditions)
    # At 0 and at 1 one of the two predictions counts for nothing.
    halves = [conditions] if guidance == 1 else [null] if guidance == 0 else [conditions, null]
    read = torch.cat(halves)
    given: dict[str, Any] = {"encoder_hidden_states": read}
    pooled = generator.connector.pool(read)
    if pooled is not None:
        given["pooled_projections"] = pooled
    drawn = noise
    generator.scheduler.set_timesteps(num_steps)
    for time in generator.scheduler.timesteps:
        both = torch.cat([drawn] * len(halves))
        predicted = generator.model(both, timestep=time.expand(len(both)), **given).sample
        if len(halves) == 2:
            wanted, other = predicted.chunk(2)
            predicted = other + guidance * (wanted - other)
        drawn = generator.scheduler.step(predicted, time, drawn).prev_sample
    if generator.autoencoder is not None:
        config = generator.autoencoder.config
        drawn = generator.autoencoder.decode(drawn / config.scaling_factor + (config.shift_factor or 0)).sample
    return drawn.clamp(-1, 1)
