"""Random draws of the training of generators: latents, noise, time steps, and the choice of null conditions.

Each is a function of a key (seed and step), the generator, the sample, the image in it and what is drawn, and of
nothing else: not of ranks, microbatches, their order or the dtype. So the loss is the same under every plan and after a
resume. Evaluation has one fixed key. numpy draws in float32, on the CPU; noise of 16 x 64 x 64 takes half a
millisecond.
"""

import hashlib

import numpy as np

Key = tuple[int, ...] | None
"""Seed and step of a training; None: evaluation."""


def draw_noise(key: Key, generator: str, sample: str, item: int, shape: tuple[int, ...]) -> np.ndarray:
    """Standard normal numbers in float32."""
    return _stream(key, generator, sample, item, "noise").standard_normal(shape, dtype=np.float32)


def draw_latents(key: Key, generator: str, sample: str, item: int, shape: tuple[int, ...]) -> np.ndarray:
    """Standard normal numbers in float32, by which latents of an autoencoder differ from their mean."""
    return _stream(key, generator, sample, item, "latents").standard_normal(shape, dtype=np.float32)


def draw_normal(key: Key, generator: str, sample: str, item: int) -> float:
    """A standard normal number, of which a time step is made."""
    return float(_stream(key, generator, sample, item, "time").standard_normal())


def draw_uniform(key: Key, generator: str, sample: str, item: int) -> float:
    """A number in [0, 1), of which a time step is made."""
    return float(_stream(key, generator, sample, item, "time").random())


def has_null_condition(key: Key, generator: str, sample: str, item: int, probability: float) -> bool:
    """Whether the image is trained without its own conditions; never in evaluation."""
    return key is not None and bool(_stream(key, generator, sample, item, "null").random() < probability)


def _stream(key: Key, generator: str, sample: str, item: int, what: str) -> np.random.Generator:
    digest = hashlib.blake2b(repr((key, generator, sample, item, what)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
