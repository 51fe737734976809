"""Distributions of work between an encoder and a language model for which it is known, for every batch size, how
probable each allocation of devices is: what a statistical rule can be judged by."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.stats import beta, binom

from motet.planner.entrain.profiling_size import proportional_allocation

Allocation = tuple[int, ...]


def _allocation(num_devices: int, encoder: float, backbone: float) -> Allocation:
    return proportional_allocation(num_devices, (encoder, backbone))


@dataclass(frozen=True)
class GammaWork:
    """Both modules' work per sample is gamma-distributed with one scale, so the encoder's share in n samples is
    Beta(n a, n b)."""

    a: float
    b: float
    num_devices: int

    def draw(self, rng: np.random.Generator, n: int) -> Allocation:
        share = rng.beta(n * self.a, n * self.b)
        return _allocation(self.num_devices, share, 1 - share)

    def probabilities(self, n: int) -> Mapping[Allocation, float]:
        # m devices for the encoder where its share is nearest to m / N; the ends are closed by the minimum of one.
        middle = (np.arange(1, self.num_devices - 1) + 0.5) / self.num_devices
        below = np.concatenate([[0.0], beta.cdf(middle, n * self.a, n * self.b), [1.0]])
        return {(m + 1, self.num_devices - m - 1): p for m, p in enumerate(np.diff(below))}


@dataclass(frozen=True)
class SomeWithImages:
    """A sample has an image with probability q; it then costs the encoder `image` and the language model `image_tokens`
    on top of 1. The number of images in n samples is binomial."""

    q: float
    image: float
    image_tokens: float
    num_devices: int

    def _of(self, n: int, num_images: int) -> Allocation:
        return _allocation(self.num_devices, num_images * self.image, n + num_images * self.image_tokens)

    def draw(self, rng: np.random.Generator, n: int) -> Allocation:
        return self._of(n, int(rng.binomial(n, self.q)))

    def probabilities(self, n: int) -> Mapping[Allocation, float]:
        result: dict[Allocation, float] = {}
        for count, p in enumerate(binom.pmf(np.arange(n + 1), n, self.q)):
            if p > 1e-12:
                key = self._of(n, count)
                result[key] = result.get(key, 0.0) + p
        return result


@dataclass(frozen=True)
class HugeSamples:
    """Heavy tails: a sample costs the language model 1 and the encoder (1 + 2^j) / 2, with probability `rarity` 2^-j
    for each j below `levels`, else 1/2. Ever larger samples are ever rarer, so that a batch of *any* size has about the
    same chance, twice `rarity`, to hold one that moves a device to the encoder. There are three devices; the
    distribution of a sum is a power of the generating function."""

    rarity: float
    levels: int

    @cached_property
    def weights(self) -> np.ndarray:
        """[levels + 1] probabilities; the last: no huge work."""
        weights = self.rarity * 0.5 ** np.arange(self.levels)
        return np.append(weights, 1 - weights.sum())

    def draw(self, rng: np.random.Generator, n: int) -> Allocation:
        counts = rng.multinomial(n, self.weights)[:-1]
        return _allocation(3, (n + float(counts @ 2.0 ** np.arange(self.levels))) / 2, n)

    def probabilities(self, n: int) -> Mapping[Allocation, float]:
        """Totals below n leave the encoder with one device. So whatever exceeds n may count as n; then no noticeable
        part of the distribution comes back around the end of the transform."""
        length = 16 * n
        pmf = np.zeros(length)
        pmf[0] = self.weights[-1]
        np.add.at(pmf, np.minimum(2 ** np.arange(self.levels), n), self.weights[:-1])
        few = float(np.fft.irfft(np.fft.rfft(pmf) ** n, length)[:n].sum())
        return {(1, 2): few, (2, 1): 1 - few}


Known = GammaWork | SomeWithImages | HugeSamples


def random_distributions(rng: np.random.Generator) -> Mapping[str, Callable[[], Known]]:
    """Families from which a campaign draws its cases."""

    def gamma() -> Known:
        a, b = np.exp(rng.uniform(np.log(0.02), np.log(5), 2))
        return GammaWork(float(a), float(b), int(rng.integers(2, 17)))

    def images() -> Known:
        q, image, tokens = rng.uniform(0.02, 0.98), np.exp(rng.uniform(-2, 3)), rng.uniform(0, 2)
        return SomeWithImages(float(q), float(image), float(tokens), int(rng.integers(2, 17)))

    def huge() -> Known:
        return HugeSamples(float(rng.uniform(0.02, 0.035)), int(rng.integers(10, 15)))

    return {"gamma": gamma, "some with images": images, "huge samples": huge}
