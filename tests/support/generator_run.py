"""Run files of a tiny SigLIP, a tiny Llama and a tiny diffusion transformer, with conversations in which to draw."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from diffusers import AutoencoderKL
from PIL import Image
from transformers import (
    DacConfig,
    DacModel,
    MimiConfig,
    MimiModel,
    SiglipImageProcessor,
    WhisperFeatureExtractor,
)

from motet.config import RunConfig
from motet.data.chat import word_level_tokenizer
from motet.data.run_file import open_samples
from motet.plan import ModulePlan, Plan, Replica
from motet.planner.from_run_file import plan_for, planning_problem
from motet.shapes.diffusion_transformers import PACKED

WIDTH = 24
SD3 = {
    "config": "SD3Transformer2DModel",
    "values": {
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 1,
        "out_channels": 1,
        "num_layers": 3,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "joint_attention_dim": 20,
        "caption_projection_dim": 16,
        "pooled_projection_dim": 12,
        "pos_embed_max_size": 8,
    },
}
PIXART = {
    "config": "PixArtTransformer2DModel",
    "values": {
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 1,
        "out_channels": 1,
        "num_layers": 3,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "cross_attention_dim": 16,
        "caption_channels": 20,
    },
}
SANA = {
    "config": "SanaTransformer2DModel",
    "values": {
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 1,
        "out_channels": 1,
        "num_layers": 3,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "num_cross_attention_heads": 3,
        "cross_attention_head_dim": 4,
        "cross_attention_dim": 16,
        "caption_channels": 20,
    },
}
FLUX = {
    "config": "FluxTransformer2DModel",
    "values": {
        "in_channels": 4,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "joint_attention_dim": 20,
        "pooled_projection_dim": 12,
        "axes_dims_rope": [2, 2, 4],
    },
}
QWEN_IMAGE = {
    "config": "QwenImageTransformer2DModel",
    "values": {
        "in_channels": 4,
        "out_channels": 1,
        "num_layers": 3,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "joint_attention_dim": 20,
        "axes_dims_rope": [2, 2, 4],
    },
}
UNET = {
    "config": "UNet2DConditionModel",
    "values": {
        "sample_size": 8,
        "in_channels": 1,
        "out_channels": 1,
        "block_out_channels": [8, 16],
        "layers_per_block": 1,
        "cross_attention_dim": 20,
        "attention_head_dim": 2,
        "norm_num_groups": 4,
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    },
}
VISION = {
    "config": "SiglipVisionConfig",
    "values": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
        "vision_use_head": False,
    },
}
LANGUAGE_MODEL = {
    "config": "LlamaConfig",
    "values": {
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 48,
    },
}
AUDIO = {
    "config": "WhisperConfig",
    "values": {
        "d_model": 16,
        "encoder_ffn_dim": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "num_mel_bins": 16,
        "max_source_positions": 50,
    },
}
VOICE = {
    **PIXART,
    "spectrogram": {"sampling_rate": 4000, "window": 200, "hop": 100, "num_mels": 8},
    "queries": 2,
    "objective": "v",
    "null_condition": 0.2,
    "loss_weight": 0.5,
}
CODES = {
    "config": "GPT2Config",
    "values": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 160},
    "queries": 2,
    "null_condition": 0.2,
    "loss_weight": 0.5,
}
"""A generator of sounds as codes; `generator_run` adds the codec."""
KINDS = (
    ("draw 1", "Here is <generate> ."),
    ("see <image> and draw 2", "It is 3 and here is <generate> ."),
    ("what is <image> ?", "It is 4 ."),
    ("draw 5 and 6", "Here is <generate> and <generate> ."),
    ("what is 7 ?", "It is 8 ."),
)
"""Question and answer, with images to see and to draw."""
ONE_EACH = tuple(kind for kind in KINDS if kind[1].count("<generate>") < 2)
SOUNDING = (
    ("say 1", "Here is <generate_audio> ."),
    ("see <image> and hear <audio>", "It is <generate> and <generate_audio> ."),
    ("what is <audio> ?", "It is 4 ."),
    ("draw 5 and say 6 and 7", "<generate_audio> Here is <generate> and <generate_audio> ."),
    ("hear <audio> and draw 2", "here is <generate> ."),
)
"""Likewise, with sounds to hear and to make."""


def write_drawings(folder: Path, num_samples: int = 8, *, kinds: Sequence[tuple[str, str]] = KINDS) -> Path:
    """Samples with one item to make, with two, and with none; of two sizes."""
    random = np.random.default_rng(0)
    records, texts = [], []
    for i in range(num_samples):
        turns = kinds[i % len(kinds)]
        record: dict[str, Any] = {"id": f"s{i}"}
        for key, size in (("generate", (8, 8 + 4 * (i % 2))), ("image", (16, 16))):
            number = " ".join(turns).count(f"<{key}>")
            for k in range(number):
                pixels = random.integers(0, 255, (*size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{key}_{i}_{k}.png")
            if number:
                record[key] = [f"{key}_{i}_{k}.png" for k in range(number)]
        for key in ("generate_audio", "audio"):
            names = [f"{key}_{i}_{k}.wav" for k in range(" ".join(turns).count(f"<{key}>"))]
            for name in names:
                soundfile.write(folder / name, 0.1 * random.standard_normal(3000 + 1600 * (i % 2)), 16_000)
            if names:
                record[key] = names
        texts += turns
        record["conversations"] = [
            {"from": who, "value": text} for who, text in zip(("human", "gpt"), turns, strict=True)
        ]
        records.append(record)
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    tokenizer = word_level_tokenizer([re.sub("<[a-z_]+>", "", text) for text in texts])
    tokenizer.add_tokens(["<generate>", "<generate_audio>"], special_tokens=True)
    tokenizer.save_pretrained(folder / "tokenizer")
    processor = SiglipImageProcessor(size={"height": 16, "width": 16})
    processor.save_pretrained(folder / "vision")
    WhisperFeatureExtractor(feature_size=16, chunk_length=1).save_pretrained(folder / "audio")
    return folder / "data.jsonl"


def generator_run(
    folder: Path,
    generator: dict[str, Any] = SD3,
    *,
    parallel: dict[str, Any] | None = None,
    num_devices: int = 3,
    frozen: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    language_model: dict[str, Any] = LANGUAGE_MODEL,
    explicit: dict[str, Any] | None = None,
    kinds: Sequence[tuple[str, str]] = KINDS,
    held_out: bool = False,
    sounds: bool = False,
    latents: bool = False,
    codes: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The run file's content: encoder, language model and generator on a rank each, unless `explicit` says otherwise.

    Args:
        frozen: by module, its `train` section.
        kinds: of the samples.
        sounds: whether an encoder of sounds and a generator of sounds are there too.
        latents: whether images are learned as latents of an autoencoder.
        codes: if given, the generator of sounds makes codes of a tiny codec: its `model_type` under `codec`, and
            options of this generator.
        options: of the generator.
    """
    voice = VOICE
    if codes is not None:
        number = {"num_codebooks": 2}
        voice = {**CODES, **codes, "codec": {"path": write_codec(folder, codes.get("codec", "mimi")), **number}}
    if latents:
        options["autoencoder"] = write_autoencoder(folder)
        channels = {"in_channels": 2, "out_channels": 2}
        if generator["config"] in PACKED:
            channels = (
                {"in_channels": 8, "out_channels": 2} if "out_channels" in generator["values"] else {"in_channels": 8}
            )
        generator = {**generator, "values": {**generator["values"], **channels}}
    if not (folder / "data.jsonl").exists():
        write_drawings(folder, kinds=SOUNDING if sounds else kinds)
    frozen = frozen or {}
    names = ("vision", *(["audio"] if sounds else []), "language_model", "image", *(["voice"] if sounds else []))
    own = {name: {"train": frozen[name]} if name in frozen else {} for name in names}
    layout = {name: (explicit or {}).get(name, {}) for name in own}
    return {
        "model": {
            "encoders": {
                "vision": {**VISION, **own["vision"]},
                **({"audio": {**AUDIO, **own["audio"]}} if sounds else {}),
            },
            "language_model": {**language_model, **own["language_model"]},
            "generators": {
                "image": {**generator, "queries": 3, "null_condition": 0.3, **options, **own["image"]},
                **({"voice": {**voice, **own["voice"]}} if sounds else {}),
            },
        },
        "data": {
            "kind": "conversations",
            "files": [str(folder / "data.jsonl")],
            **({"eval_files": [str(folder / "data.jsonl")]} if held_out else {}),
            "image_folder": str(folder),
            "audio_folder": str(folder),
            "tokenizer": str(folder / "tokenizer"),
            "workers": 0,  # The ranks of a test are daemons, which may have no children.
            "processors": {name: str(folder / name) for name in names if name in ("vision", "audio")},
        },
        "cluster": {"num_devices": num_devices},
        "parallel": {"planner": "explicit", "num_microbatches": 2, "explicit": layout, **(parallel or {})},
        "train": {"global_batch_size": 8, "dtype": "float64", "steps": 2, **(train or {})},
    }


def write_autoencoder(folder: Path) -> dict[str, str]:
    """A tiny AutoencoderKL of random weights, whose latents have half of an image's height and width."""
    torch.manual_seed(0)
    model = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        latent_channels=2,
        norm_num_groups=4,
        scaling_factor=0.7,
        shift_factor=0.1,
        mid_block_add_attention=False,
    )
    model.save_pretrained(folder / "autoencoder")
    return {"path": str(folder / "autoencoder")}


def generator_config(folder: Path, *args: Any, **options: Any) -> RunConfig:
    return RunConfig.model_validate_json(json.dumps(generator_run(folder, *args, **options)))


def write_codec(folder: Path, model_type: str) -> str:
    """A tiny audio codec of random weights, of sounds at 4 kHz."""
    torch.manual_seed(0)
    common = {"sampling_rate": 4000, "codebook_size": 16}
    if model_type == "mimi":
        config: Any = MimiConfig(
            **common,
            hidden_size=16,
            num_filters=4,
            upsampling_ratios=[5, 4],
            codebook_dim=8,
            vector_quantization_hidden_dimension=8,
            num_quantizers=3,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=16,
            sliding_window=8,
            upsample_groups=16,
        )
        codec: Any = MimiModel(config)
        # Codebooks of new models are all zeros, so every sound would have one code.
        for name, buffer in codec.named_buffers():
            if name.endswith("embed_sum"):
                buffer.normal_()
    else:
        codec = DacModel(
            DacConfig(
                **common,
                encoder_hidden_size=4,
                downsampling_ratios=[4, 4],
                decoder_hidden_size=16,
                n_codebooks=3,
                codebook_dim=4,
            )
        )
    codec.save_pretrained(folder / model_type)
    return str(folder / model_type)


def planned(folder: Path, case: dict[str, Any]) -> tuple[RunConfig, Plan]:
    """The run file and its plan. `case`: arguments of `generator_run`, and `ranks` that stand for others."""
    given = dict(case)
    ranks = given.pop("ranks", {})
    config = generator_config(folder, given.pop("generator", SD3), **given)
    source = open_samples(config)
    samples = [source.sample(index) for index in range(config.train.global_batch_size)]
    plan = plan_for(config, planning_problem(config, samples))
    return config, _on_ranks(plan, ranks)


def _on_ranks(plan: Plan, ranks: Mapping[int, int]) -> Plan:
    """The plan with some ranks' stages on other ranks."""

    def moved(module: ModulePlan) -> ModulePlan:
        replicas = [
            Replica(
                stages=tuple(
                    replace(stage, ranks=tuple(ranks.get(rank, rank) for rank in stage.ranks))
                    for stage in replica.stages
                )
            )
            for replica in module.replicas
        ]
        return replace(module, replicas=tuple(replicas))

    return replace(plan, modules={name: moved(module) for name, module in plan.modules.items()})
