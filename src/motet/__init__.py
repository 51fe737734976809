"""motet: training of multimodal models on many devices.

Names are loaded when they are first used, so that planning and simulating never import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from motet.optional_packages import declare_operators_for_cpu, silence_torchao

if TYPE_CHECKING:
    from motet.api import Prediction as Prediction
    from motet.api import export_checkpoint as export_checkpoint
    from motet.api import make_plan as make_plan
    from motet.api import profile as profile
    from motet.api import simulate as simulate
    from motet.api import train as train
    from motet.api import verify as verify
    from motet.config import RunConfig as RunConfig
    from motet.config import load_run_config as load_run_config
    from motet.data.own_encoders import register_encoder as register_encoder
    from motet.errors import UserError as UserError
    from motet.models.contrastive import CaptionDecoder as CaptionDecoder
    from motet.models.contrastive import ContrastiveModule as ContrastiveModule
    from motet.models.graph import EncoderModule as EncoderModule
    from motet.models.graph import ModalityModule as ModalityModule
    from motet.models.multimodal import MultimodalModule as MultimodalModule
    from motet.plan import Plan as Plan
    from motet.runtime.parallel_module import ParallelModule as ParallelModule
    from motet.runtime.parallel_specs import ContrastiveParallelModule as ContrastiveParallelModule
    from motet.runtime.parallel_specs import MultimodalParallelModule as MultimodalParallelModule
    from motet.runtime.parallel_specs import MultimodalParallelSpec as MultimodalParallelSpec
    from motet.runtime.parallel_specs import ParallelSpec as ParallelSpec
    from motet.runtime.parallel_specs import TowerSpec as TowerSpec
    from motet.timeline import Timeline as Timeline

__version__ = "0.2.0"

declare_operators_for_cpu()
silence_torchao()

_MODULE_OF = {
    "CaptionDecoder": "motet.models.contrastive",
    "ContrastiveModule": "motet.models.contrastive",
    "ContrastiveParallelModule": "motet.runtime.parallel_specs",
    "EncoderModule": "motet.models.graph",
    "ModalityModule": "motet.models.graph",
    "MultimodalModule": "motet.models.multimodal",
    "MultimodalParallelModule": "motet.runtime.parallel_specs",
    "MultimodalParallelSpec": "motet.runtime.parallel_specs",
    "ParallelModule": "motet.runtime.parallel_module",
    "ParallelSpec": "motet.runtime.parallel_specs",
    "Plan": "motet.plan",
    "Prediction": "motet.api",
    "RunConfig": "motet.config",
    "Timeline": "motet.timeline",
    "TowerSpec": "motet.runtime.parallel_specs",
    "UserError": "motet.errors",
    "export_checkpoint": "motet.api",
    "load_run_config": "motet.config",
    "make_plan": "motet.api",
    "profile": "motet.api",
    "register_encoder": "motet.data.own_encoders",
    "simulate": "motet.api",
    "train": "motet.api",
    "verify": "motet.api",
}

__all__ = [*_MODULE_OF, "__version__"]


if not TYPE_CHECKING:  # Else a type checker would take any name.

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'motet' has no attribute {name!r}")
        return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
