"""Latents of images by a frozen AutoencoderKL of diffusers, computed when samples are prepared.

The autoencoder says for each image a mean and a standard deviation of its latents; both are kept on disk under the hash
of the pixels and of the autoencoder's weights, so an image is encoded once for all epochs, runs and processes. What is
trained on is drawn by a key in the generator's stage (`motet.models.draws`), so it differs from step to step and is the
same under every plan.
"""

import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from motet.config import AutoencoderConfig
from motet.data.example import Example
from motet.data.generated import AUTOENCODER_DEFAULTS, GeneratedLayout, pixels_of
from motet.errors import UserError, one_line
from motet.families.diffusion_models import diffusion_class
from motet.families.hf_config import stored_folder
from motet.shapes.shape_card import cache_folder


def latent_features(layout: GeneratedLayout, example: Example) -> dict[str, Tensor]:
    """Means and standard deviations of the latents of an example's images, one after the other, in the units that the
    generator learns: float32 [sum of channels x height x width] each."""
    assert layout.autoencoder is not None
    means, deviations = [torch.zeros(0)], [torch.zeros(0)]
    for _, media in example.items((layout.modality,)):
        mean, deviation = _Autoencoder.of(layout.autoencoder, layout.name).encode(media.load())
        means.append(mean.flatten())
        deviations.append(deviation.flatten())
    return {"latents": torch.cat(means), "deviations": torch.cat(deviations)}


class _Autoencoder:
    """One of this process, loaded when the first image is encoded that no one has encoded before."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._model: Any = None

    @staticmethod
    def of(part: AutoencoderConfig, name: str) -> "_Autoencoder":
        return _opened(stored_folder(part), name)

    def encode(self, image: Any) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation: [latent channels, height, width]."""
        digest = hashlib.sha256(
            digest_of_weights(self._folder) + str(image.size).encode() + image.convert("RGB").tobytes()
        )
        path = cache_folder("latents") / f"{digest.hexdigest()[:40]}.npy"
        try:
            mean, deviation = np.load(path)
        except (OSError, ValueError, EOFError):
            mean, deviation = self._encoded(image)
            keep(path, np.stack([mean, deviation]))
        return torch.from_numpy(mean), torch.from_numpy(deviation)

    @torch.no_grad()
    def _encoded(self, image: Any) -> tuple[np.ndarray, np.ndarray]:
        if self._model is None:
            try:
                self._model = diffusion_class("AutoencoderKL").from_pretrained(self._folder, use_safetensors=True)
                self._model.float().eval()
            except (OSError, ValueError, RuntimeError) as error:
                why = one_line(error)
                raise UserError(f"{self._name}.autoencoder: {self._folder} cannot be loaded ({why})") from None
        values = {**AUTOENCODER_DEFAULTS, **self._model.config}
        pixels = torch.from_numpy(np.ascontiguousarray(pixels_of(image, values["in_channels"])))
        found = self._model.encode(pixels[None]).latent_dist
        scale = values["scaling_factor"]
        mean = (found.mean[0] - (values["shift_factor"] or 0.0)) * scale
        return mean.numpy(), (found.std[0] * scale).numpy()


@cache
def _opened(folder: Path, name: str) -> _Autoencoder:
    return _Autoencoder(folder, name)


@cache
def digest_of_weights(folder: Path) -> bytes:
    """Digest of the files of a model."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*")):
        if path.suffix in (".json", ".safetensors"):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.digest()


def keep(path: Path, values: np.ndarray) -> None:
    """Writes atomically, so that no process reads an incomplete file. Does nothing if the folder cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            np.save(file, values)
        os.replace(file.name, path)
    except OSError:
        return
