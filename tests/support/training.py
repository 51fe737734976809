"""Training runs of a vision, audio and language model that are small enough to be repeated under many plans."""

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_distributed
from safetensors import safe_open
from torch import Tensor

from motet.assignment.sample import Sample
from motet.config import RunConfig
from motet.data.loader import LoadedBatch, Loader
from motet.data.run_file import open_data
from motet.data.service.tickets import InProcess
from motet.data.tasks.dial_a_digit import handwriting
from motet.plan import Plan
from motet.planner.from_run_file import plan_for, planning_problem
from motet.runtime.training.worker import train_worker

handwriting()  # Here, and not in every process of every run: it imports scikit-learn.

Layout = Mapping[str, Mapping[str, Any]]
"""By module: tp, pp, dp and so on."""

WHOLE: Layout = {}
"""The encoders on one rank, the language model on another."""

VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 48,
    "patch_size": 16,
    "vision_use_head": False,
}
AUDIO = {
    "d_model": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "num_mel_bins": 16,
    "max_source_positions": 10,
    "dropout": 0.0,
}
LANGUAGE_MODEL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "tie_word_embeddings": True,
}


def run_config(output: Path, layout: Layout = WHOLE, **overrides: Any) -> RunConfig:
    """`overrides`: such as `train__steps=4`."""
    values: dict[str, Any] = {
        "model": {
            "encoders": {
                "vision": {"config": "SiglipVisionConfig", "values": VISION},
                "audio": {"config": "WhisperConfig", "values": AUDIO},
            },
            "language_model": {"config": "LlamaConfig", "values": LANGUAGE_MODEL},
        },
        "data": {
            "kind": "dial-a-digit",
            "num_train": 24,
            "num_held_out": 6,
            "max_digits": 2,
            "no_image": 0.3,
            "no_sound": 0.3,
            "workers": 0,  # The ranks of a test are daemons, which may have no children.
        },
        "parallel": {
            "planner": "explicit",
            "explicit": {name: dict(layout.get(name, {})) for name in ("vision", "audio", "language_model")},
            "placement": "colocated",
            "num_microbatches": 2,
        },
        "train": {"steps": 4, "global_batch_size": 4, "learning_rate": 1e-2, "output": str(output)},
    }
    values = deepcopy(values)
    for path, value in overrides.items():
        *sections, key = path.split("__")
        section = values
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = value
    return RunConfig.model_validate(values)


def plan_of(config: RunConfig) -> Plan:
    # The encoders share their ranks.
    sizes = {name: part.tp * part.cp * part.pp * part.dp for name, part in config.parallel.explicit.items()}
    num_devices = sizes["language_model"] + max(sizes["vision"], sizes["audio"])
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"num_devices": num_devices})})
    return plan_for(config, planning_problem(config, first_samples(config.train.global_batch_size)))


@cache
def first_samples(batch_size: int) -> tuple[Sample, ...]:
    """Of the training data."""
    return next(Loader(InProcess(open_data(run_config(Path())).train), batch_size, seed=0)).samples


def train(*configs: RunConfig, timeout: float = 60.0) -> list[dict[str, Any]]:
    """One run after the other in the same processes, so with as many ranks; what the worker returns of each."""
    plans = [plan_of(config) for config in configs]

    def work(rank: int) -> list[dict[str, Any]]:
        return [train_worker(config, plan) for config, plan in zip(configs, plans, strict=True)]

    return run_distributed(work, plans[0].num_ranks, timeout=timeout)[0]


def stored_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Everything that a checkpoint holds, by name."""
    tensors = {}
    for shard in checkpoint.glob("*.safetensors"):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                assert name not in tensors, f"{name} is stored twice"
                tensors[name] = file.get_tensor(name)
    return tensors


def ids_of_step(config: RunConfig, step: int) -> list[str]:
    loader = Loader(InProcess(open_data(config).train), config.train.global_batch_size, seed=0, batches_ahead=0)
    return [[sample.id for sample in next(loader).samples] for _ in range(step + 1)][step]


def spoil(monkeypatch: pytest.MonkeyPatch, sample_ids: list[str]) -> None:
    """The pixels of these samples become infinite."""
    original = LoadedBatch.features

    def features(batch: LoadedBatch, module: str, sample: int) -> dict[str, torch.Tensor]:
        values = original(batch, module, sample)
        if module == "vision" and batch.samples[sample].id in sample_ids:
            return {key: torch.full_like(value, torch.inf) for key, value in values.items()}
        return values

    monkeypatch.setattr(LoadedBatch, "features", features)
