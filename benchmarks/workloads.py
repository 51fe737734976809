"""The models that the benchmarks train: a Llama stack, and SigLIP (and Whisper) + projector + Llama. Random weights and
inputs."""

from collections.abc import Sequence
from itertools import cycle, islice

import torch
from torch import Tensor

from motet.assignment.sample import Sample, Segment
from motet.config import RunConfig
from motet.families.encoders.token_counts import encoder_segment
from motet.models.materialize import read_part_config

IMAGE_TOKEN = 3
VOCABULARY = 512


def _llama(num_blocks: int, width: int, intermediate: int) -> dict[str, object]:
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": intermediate,
        "num_hidden_layers": num_blocks,
        "num_attention_heads": width // 32,
        "num_key_value_heads": width // 32,
    }
    return {"config": "LlamaConfig", "values": values}


def _train_section(num_samples: int) -> dict[str, object]:
    # A constant rate, no decay: any optimizer that is compared can be set to the same.
    return {
        "dtype": "float32",
        "global_batch_size": num_samples,
        "learning_rate": 1e-4,
        "lr_schedule": "constant",
        "weight_decay": 0.0,
        "clip_grad_norm": 0.0,
    }


def llama_config(*, num_blocks: int, width: int, num_samples: int, num_microbatches: int) -> RunConfig:
    """A Llama stack, everything trainable, and `num_samples` in an iteration."""
    return RunConfig.model_validate(
        {
            "model": {"language_model": _llama(num_blocks, width, 8 * width // 3)},
            "data": {"kind": "dial-a-digit"},
            "parallel": {"num_microbatches": num_microbatches},
            "train": _train_section(num_samples),
        }
    )


def language_model_config(
    config_class: str,
    values: dict[str, object],
    *,
    num_blocks: int,
    width: int,
    num_samples: int,
    num_microbatches: int,
) -> RunConfig:
    """As `llama_config`, for another family. `values`: what its configuration has beyond Llama's, or in their place."""
    dense = llama_config(
        num_blocks=num_blocks, width=width, num_samples=num_samples, num_microbatches=num_microbatches
    ).model_dump(exclude_unset=True)
    part = dense["model"]["language_model"]
    dense["model"]["language_model"] = {"config": config_class, "values": {**part["values"], **values}}
    return RunConfig.model_validate(dense)


def with_lora(config: RunConfig, *, rank: int) -> RunConfig:
    """The language model's adapters are trained in place of its own weights."""
    values = config.model_dump(exclude_unset=True)
    values["model"]["language_model"]["train"] = {"lora": {"rank": rank, "alpha": 2.0 * rank}}
    return RunConfig.model_validate(values)


def with_own_attention(config: RunConfig) -> RunConfig:
    """Samples of a microbatch are packed, and motet's own attention computes them."""
    values = config.model_dump(exclude_unset=True)
    values["parallel"] |= {"packing": True, "packed_attention": "motet"}
    return RunConfig.model_validate(values)


def vlm_config(
    *,
    num_vision_blocks: int,
    num_llm_blocks: int,
    width: int,
    num_samples: int,
    num_microbatches: int,
    trains: str,
    image_size: int = 128,
    llm_intermediate: int | None = None,
    num_audio_blocks: int = 0,
) -> RunConfig:
    """SigLIP with patches of 16 pixels, an MLP projector, Llama; a Whisper encoder beside SigLIP if it has blocks.

    Args:
        num_samples: of an iteration.
        trains: "projector" (encoder and language model are frozen) or "all".
        llm_intermediate: width of the language model's MLP; None: a block costs per token what the encoder's does.
    """
    vision = {
        "image_size": image_size,
        "patch_size": 16,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": num_vision_blocks,
        "num_attention_heads": width // 32,
        "vision_use_head": False,
    }
    audio = {
        "d_model": width,
        "encoder_ffn_dim": 4 * width,
        "encoder_layers": num_audio_blocks,
        "encoder_attention_heads": width // 32,
        "num_mel_bins": 16,
        "max_source_positions": 64,
    }
    train_all = trains == "all"
    both = {"projector": "mlp", "train": {"module": train_all, "projector": True}}
    encoders = {"vision": {"config": "SiglipVisionConfig", "values": vision, **both}}
    if num_audio_blocks:
        encoders["audio"] = {"config": "WhisperConfig", "values": audio, **both}
    return RunConfig.model_validate(
        {
            "model": {
                "encoders": encoders,
                "language_model": {
                    **_llama(num_llm_blocks, width, llm_intermediate or 8 * width // 3),
                    "train": {"module": train_all},
                },
            },
            "data": {"kind": "dial-a-digit"},
            "parallel": {"num_microbatches": num_microbatches},
            "train": _train_section(num_samples),
        }
    )


class SyntheticBatch:
    """Samples: one image if the model has a vision encoder, one clip if it has an audio encoder, then words, all with
    loss.

    Everything is drawn beforehand, so that reading it costs no computation.

    Args:
        num_text_tokens: of every sample, or of the samples in turn.
    """

    def __init__(self, config: RunConfig, *, num_samples: int, num_text_tokens: int | Sequence[int]) -> None:
        lengths = (num_text_tokens,) if isinstance(num_text_tokens, int) else tuple(num_text_tokens)
        lengths = tuple(islice(cycle(lengths), num_samples))
        layouts: dict[str, tuple[Segment, ...]] = {}
        sequence: list[Segment] = []
        self._shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, part in config.model.encoders.items():
            encoder = read_part_config(part, "encoder", where="model")
            if encoder.model_type == "whisper":
                frames = 2 * encoder.max_source_positions
                grid: tuple[int, ...] = (frames,)
                self._shapes[name] = "input_features", (1, encoder.num_mel_bins, frames)
            else:
                grid = (encoder.image_size // encoder.patch_size,) * 2
                self._shapes[name] = "pixel_values", (1, 3, encoder.image_size, encoder.image_size)
            layouts[name] = (encoder_segment(encoder, item=0, grid=grid),)
            sequence.append(Segment(layouts[name][0].outputs, name))
        num_entered = sum(segment.num_tokens for segment in sequence)
        # The first word predicts the second; with an image before it, it is itself predicted.
        unpredicted = 0 if num_entered else 1
        generator = torch.Generator().manual_seed(0)
        self.samples = tuple(
            Sample(
                f"s{i}",
                {**layouts, "language_model": (*sequence, Segment(length))},
                {"language_model": length - unpredicted},
            )
            for i, length in enumerate(lengths)
        )
        self._features = [self._draw(num_entered, length, generator) for length in lengths]

    def _draw(self, num_entered: int, num_text_tokens: int, generator: torch.Generator) -> dict[str, dict]:
        words = torch.randint(IMAGE_TOKEN + 1, VOCABULARY, (num_text_tokens,), generator=generator)
        input_ids = torch.cat([torch.full((num_entered,), IMAGE_TOKEN), words])
        labels = torch.cat([torch.full((num_entered,), -100), words])
        features = {"language_model": {"input_ids": input_ids, "labels": labels}}
        for name, (key, shape) in self._shapes.items():
            features[name] = {key: torch.randn(shape, generator=generator)}
        return features

    def features(self, module: str, sample: int) -> dict[str, Tensor]:
        return self._features[sample][module]
