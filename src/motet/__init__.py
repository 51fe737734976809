"""motet: training of multimodal models on many devices.

The public names are loaded when first asked for, so that planning and simulating never import torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "CaptionDecoder": "motet.models.contrastive",
    "ContrastiveModule": "motet.models.contrastive",
    "ContrastiveParallelModule": "motet.runtime.parallel_module",
    "EncoderModule": "motet.models.graph",
    "ModalityModule": "motet.models.graph",
    "MultimodalModule": "motet.models.multimodal",
    "MultimodalParallelModule": "motet.runtime.parallel_module",
    "MultimodalParallelSpec": "motet.runtime.parallel_module",
    "ParallelSpec": "motet.runtime.parallel_module",
    "TowerSpec": "motet.runtime.parallel_module",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'motet' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
