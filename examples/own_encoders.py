"""Two encoders that motet does not have, as anyone would write them: of point clouds, and of raw sound."""

import motet
import numpy as np
import torch
from motet.data.example import Media
from torch import Tensor, nn


@motet.register_encoder(modality="points", example=(64, 3))
class PointNet(nn.Module):
    """Each run of 16 neighbouring points becomes a token: an MLP of every point, and the maximum over the points."""

    def __init__(self, width: int = 24, points_per_token: int = 16) -> None:
        super().__init__()
        self.points_per_token = points_per_token
        self.mlp = nn.Sequential(nn.Linear(3, width), nn.GELU(), nn.Linear(width, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, points: Tensor) -> Tensor:
        """[items, points, 3] -> [items, tokens, width]"""
        groups = self.mlp(points).unflatten(1, (-1, self.points_per_token))
        return self.norm(groups.amax(dim=2))


def first_half_second(sound: Media) -> np.ndarray:
    """4000 samples at 8 kHz, with silence behind shorter sounds."""
    wave, (num_samples, rate) = sound.load(), sound.size()
    wanted = np.arange(4000) / 8000
    return np.interp(wanted, np.arange(num_samples) / rate, wave, right=0.0).astype(np.float32)


@motet.register_encoder(modality="audio", example=(4000,), feature="waveform", prepare=first_half_second)
class SoundNet(nn.Module):
    """Convolutions over the waveform: 25 tokens for 4000 samples."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv1d(1, width, kernel_size=16, stride=16),
            nn.GroupNorm(1, width),
            nn.GELU(),
            nn.Conv1d(width, width, kernel_size=10, stride=10),
        )
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, waveform: Tensor) -> Tensor:
        """[items, samples] -> [items, tokens, width]"""
        return self.scale * self.convolutions(waveform[:, None]).mT
