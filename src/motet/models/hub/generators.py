"""Exports a generator as folders that plain diffusers and torch load.

    image/                config.json, diffusion_pytorch_model.safetensors: for diffusers' `from_pretrained`
    image_scheduler/      scheduler_config.json: of the noise that it was trained with
    image_autoencoder/    the autoencoder of its latents, if it has one, as it was given
    image_projector/      config.json, model.safetensors: the connector and the null condition
    image_queries/        model.safetensors: the query tokens, if it has them

`sampling_code` is the part of the README that makes an image with them; a test runs it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from motet.config import AutoencoderConfig, GeneratorConfig, ModelConfig, SpectrogramConfig
from motet.errors import UserError
from motet.families.diffusion_models import diffusion_class
from motet.families.hf_config import read_generator, stored_folder
from motet.models.hub.code_generators import (
    CodesDescription,
    code_manifest_entry,
    code_sampling_code,
    describe_codes,
    save_code_decoder,
)
from motet.models.hub.weights import check_tensors, save_tensors, tensors_under, write_json
from motet.models.stages.generator import NUM_TIMESTEPS, Connector
from motet.plan import queries_of
from motet.shapes.diffusion_transformers import PACKED, own_values

GUIDANCE = 2.0
NUM_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class GeneratorDescription:
    """A generator without weights."""

    model_class: str
    values: Mapping[str, Any]
    """Values of its configuration."""
    objective: str
    projector: str
    sizes: tuple[int, int, int]
    """Widths of the hidden states that it reads, of its conditions, and of the pooled condition."""
    side: int
    """Height and width of its latents at their native size."""
    channels: int
    """Channels of its latents."""
    guidance: float | None
    """Guidance scale for models with guidance embeddings; None: the model has none."""
    num_queries: int | None
    placeholder_token_id: int
    spectrogram: SpectrogramConfig | None
    """How sounds are seen; None: it makes images."""
    autoencoder: AutoencoderConfig | None

    @property
    def scheduler_class(self) -> str:
        return "FlowMatchEulerDiscreteScheduler" if self.objective == "flow" else "DDIMScheduler"

    def scheduler(self) -> Any:
        """Makes the scheduler of diffusers for the noise of the training."""
        made = diffusion_class(self.scheduler_class)
        if self.objective == "flow":
            return made(num_train_timesteps=NUM_TIMESTEPS, shift=1.0)
        prediction = {"epsilon": "epsilon", "v": "v_prediction"}[self.objective]
        return made(
            num_train_timesteps=NUM_TIMESTEPS,
            beta_start=1e-4,
            beta_end=0.02,
            beta_schedule="linear",
            prediction_type=prediction,
            clip_sample=False,
            timestep_spacing="trailing",
        )


Description = GeneratorDescription | CodesDescription


def describe_generators(
    model: ModelConfig, width: int, placeholder_token_ids: Mapping[str, int]
) -> dict[str, Description]:
    """Describes a run file's generators. `width`: of the language model's hidden states."""
    return {
        name: (_described if part.codec is None else describe_codes)(name, part, width, placeholder_token_ids)
        for name, part in model.generators.items()
    }


def _described(
    name: str, part: GeneratorConfig, width: int, placeholder_ids: Mapping[str, int]
) -> GeneratorDescription:
    shape = read_generator(part, name, width)
    sizes = width, int(shape.config["condition_size"]), int(shape.config["pooled_size"])
    return GeneratorDescription(
        model_class=shape.family,
        values=own_values(shape.config),
        side=shape.config["native_side"],
        channels=shape.config["latent_channels"],
        guidance=shape.config["guidance"],
        objective=part.objective,
        projector=part.projector,
        sizes=sizes,
        num_queries=part.queries,
        placeholder_token_id=placeholder_ids[queries_of(name) if part.queries else name],
        spectrogram=part.spectrogram,
        autoencoder=part.autoencoder,
    )


def generator_parts(described: Mapping[str, Description]) -> set[str]:
    """Beginnings of the names of their tensors. Raises `UserError` for folders of one name."""
    parts = set()
    for name, own in described.items():
        parts |= {f"{name}.module", f"{name}.projector"}
        if own.num_queries:
            parts.add(f"{queries_of(name)}.module")
    return parts


def save_generator(folder: Path, name: str, described: Description, tensors: Mapping[str, Tensor]) -> None:
    """Raises `UserError` if the tensors are not those of the model."""
    if isinstance(described, CodesDescription):
        save_code_decoder(folder, name, described, tensors)
    else:
        _save_diffusion_model(folder, name, described, tensors)
    connector = dict(tensors_under(tensors, f"{name}.projector"))
    with torch.device("meta"):
        expected = Connector(*described.sizes, described.projector, dtype=torch.float32, seed=None)
    check_tensors(dict(expected.named_parameters()), connector, where=f"{name}.projector")
    (folder / f"{name}_projector").mkdir()
    save_tensors(folder / f"{name}_projector" / "model.safetensors", connector)
    write_json(
        folder / f"{name}_projector" / "config.json", {"projector": described.projector, "sizes": described.sizes}
    )
    if described.num_queries:
        (folder / queries_of(name)).mkdir()
        save_tensors(
            folder / queries_of(name) / "model.safetensors", dict(tensors_under(tensors, f"{queries_of(name)}.module"))
        )


def _save_diffusion_model(
    folder: Path, name: str, described: GeneratorDescription, tensors: Mapping[str, Tensor]
) -> None:
    own = dict(tensors_under(tensors, f"{name}.module"))
    model = diffusion_class(described.model_class).from_config(
        {**described.values, "_class_name": described.model_class}
    )
    dtypes = check_tensors(dict(model.named_parameters()), own, where=f"{name}.module")
    model.to(next(iter(dtypes.values()))).load_state_dict(own, strict=False)
    model.save_pretrained(folder / name)
    described.scheduler().save_pretrained(folder / f"{name}_scheduler")
    if described.autoencoder is not None:
        stored = diffusion_class("AutoencoderKL").from_pretrained(
            stored_folder(described.autoencoder), use_safetensors=True
        )
        stored.save_pretrained(folder / f"{name}_autoencoder")


def manifest_entry(described: Description) -> dict[str, Any]:
    if isinstance(described, CodesDescription):
        return code_manifest_entry(described)
    return {
        "model_class": described.model_class,
        "imported_from": "diffusers",
        "scheduler_class": described.scheduler_class,
        "projector": described.projector,
        "num_queries": described.num_queries,
        "placeholder_token_id": described.placeholder_token_id,
        "spectrogram": None if described.spectrogram is None else described.spectrogram.model_dump(),
    }


def sampling_code(folder: str, described: Description) -> str:
    """A program that makes one image with plain transformers, diffusers and torch, the function `draw_<name>`; or a
    sound, `say_<name>`."""
    name = re.sub(r"\W", "_", folder)
    loaded, conditions = _conditions(folder, name, described)
    if isinstance(described, CodesDescription):
        return f"import torch\n{loaded}\n{code_sampling_code(folder, described, conditions, GUIDANCE)}"
    given, step, made = _denoising(name, described)
    side, channels, spectrogram = described.side, described.channels, described.spectrogram
    height = side if spectrogram is None else spectrogram.num_mels
    channels_out = str(channels)
    meaning = "-1 is black" if spectrogram is None else "mel bands by frames, from -80 to 0 decibels of full scale"
    classes, opened, result = f"{described.model_class}, {described.scheduler_class}", "", "drawn.clamp(-1, 1)"
    if described.autoencoder is not None:
        classes = f"AutoencoderKL, {classes}"
        opened = f"""
{name}_autoencoder = AutoencoderKL.from_pretrained("{folder}_autoencoder", torch_dtype=language_model.dtype)"""
        scaled = f"drawn / {name}_autoencoder.config.scaling_factor + ({name}_autoencoder.config.shift_factor or 0)"
        result, channels_out = f"{name}_autoencoder.decode({scaled}).sample.clamp(-1, 1)", "channels"
    return f"""import torch
from diffusers import {classes}
{loaded}
{name} = {described.model_class}.from_pretrained("{folder}", torch_dtype=language_model.dtype){opened}
{name}_scheduler = {described.scheduler_class}.from_pretrained("{folder}_scheduler")

@torch.no_grad()
def draw_{name}(prompt, guidance={GUIDANCE}, steps={NUM_STEPS}, height={height}, width={side}):
{conditions}
    drawn = torch.randn(1, {channels}, height, width, dtype=states.dtype)
    {name}_scheduler.set_timesteps(steps){given}
    for time in {name}_scheduler.timesteps:
        {step}
        wanted, other = {made}
        drawn = {name}_scheduler.step(other + guidance * (wanted - other), time, drawn).prev_sample
    return {result}  # [1, {channels_out}, height, width]: {meaning}.
"""


def _conditions(folder: str, name: str, described: Description) -> tuple[str, str]:
    """Lines of the program: loading connector and query tokens, and making `conditions` of a `prompt`, with the null
    condition behind its own."""
    linears = ["linear"] if described.projector == "linear" else ["linear_1", "linear_2"]
    projected = f'{name}_layer("projector.{linears[0]}", states)'
    if len(linears) == 2:
        projected = f'{name}_layer("projector.{linears[1]}", F.gelu({projected}))'
    embedded = "language_model.get_input_embeddings()(ids)"
    rows, queries = "", ""
    if described.num_queries:
        embedded = f"torch.cat([{embedded}, {name}_queries])"
        rows = f", -len({name}_queries):"
        queries = f'{name}_queries = load_file("{queries_of(folder)}/model.safetensors")["weight"]'
    loaded = f"""import torch.nn.functional as F
from safetensors.torch import load_file

{name}_weights = load_file("{folder}_projector/model.safetensors")
{queries}
{name}_layer = lambda at, x: F.linear(x, {name}_weights[at + ".weight"], {name}_weights[at + ".bias"])
"""
    conditions = f"""\
    ids = tokenizer(prompt, return_tensors='pt').input_ids[0]
    states = language_model(inputs_embeds={embedded}[None], output_hidden_states=True).hidden_states[-1][0{rows}]
    states = F.layer_norm(states, states.shape[-1:], {name}_weights["norm.weight"], {name}_weights["norm.bias"])
    conditions = torch.stack([{projected}, {name}_weights["null"].expand(len(states), -1)])"""
    return loaded, conditions


def _denoising(name: str, described: GeneratorDescription) -> tuple[str, str, str]:
    """Lines of the program: what the model is told at every step, how a step calls it, and its prediction."""
    told = {"encoder_hidden_states": "conditions"}
    if described.sizes[2]:
        told["pooled_projections"] = f"{name}_layer('pooled', conditions.mean(1))"
    latents, timesteps, lines = "drawn.repeat(2, 1, 1, 1)", "time.expand(2)", ""
    if described.model_class in PACKED:
        lines = "\n    rows, columns = height // 2, width // 2"
        latents, timesteps = f"F.pixel_unshuffle({latents}, 2).flatten(2).transpose(1, 2)", f"{timesteps} / 1000"
    if described.model_class == "QwenImageTransformer2DModel":
        told["img_shapes"] = "[[(1, rows, columns)]] * 2"
    elif described.model_class in PACKED:
        lines += "\n    ids = torch.cartesian_prod(torch.arange(1), torch.arange(rows), torch.arange(columns))"
        told |= {"img_ids": "ids", "txt_ids": "torch.zeros(len(states), 3)"}
    if described.guidance is not None:
        told["guidance"] = f"torch.full((2,), {described.guidance})"
    lines += f"\n    given = dict({', '.join(f'{key}={value}' for key, value in told.items())})"
    step = f"made = {name}({latents}, timestep={timesteps}, **given).sample"
    if described.model_class not in PACKED:
        return lines, step, "made.split(1)"
    return lines, step, "F.pixel_shuffle(made.mT.unflatten(2, (rows, columns)), 2).split(1)"


def check_names(modules: Mapping[str, Any], generators: Mapping[str, Description]) -> None:
    """Raises `UserError` if two parts would have one folder."""
    for name in generators:
        for folder in (
            f"{name}_scheduler",
            f"{name}_projector",
            f"{name}_autoencoder",
            f"{name}_codec",
            queries_of(name),
        ):
            if folder in modules:
                raise UserError(f"export: {folder} is a folder of generator {name}; rename that module")
