"""motet: training of multimodal models on many devices.

The public names are loaded when first asked for, so that planning and simulating never import torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "CaptionDecoder": "motet.models.contrastive",
    "ContrastiveModule": "motet.models.contrastive",
    "ContrastiveParallelModule": "motet.runtime.api.contrastive",
    "EncoderModule": "motet.models.multimodal",
    "ModalityModule": "motet.models.multimodal",
    "MultimodalModule": "motet.models.multimodal",
    "MultimodalParallelModule": "motet.runtime.api.multimodal",
    "MultimodalParallelSpec": "motet.runtime.api.multimodal",
    "ParallelSpec": "motet.runtime.api.multimodal",
    "TowerSpec": "motet.runtime.api.contrastive",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'motet' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
