"""Exports a multimodal model in the class that it was loaded from, with the same names and its processor."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from motet.config import PartConfig
from motet.families.classes import model_on_meta
from motet.families.discovery.composite import composite_class_of, find_parts, read_composite_config
from motet.families.hf_config import stored_folder
from motet.models.hub.export import MANIFEST, write_folder
from motet.models.hub.weights import RenamedTensors, check_part, save_part, write_json


def check_composite_export(part: PartConfig) -> None:
    """Raises `UserError`, before the model is trained, if its export would lack weights."""
    config = read_composite_config(part)
    check_part(composite_class_of(config), config, where="model", is_causal=True)


def export_composite(
    tensors: Mapping[str, Tensor],
    part: PartConfig,
    folder: str | Path,
    *,
    processor: Any = None,
) -> None:
    """Writes a folder that `from_pretrained` of the model's own class loads.

    Args:
        tensors: by name in the whole graph, such as `vision.projector.model.multi_modal_projector.linear_1.weight`.
        folder: replaced if it is an earlier export.
        processor: of transformers; None: none is written.

    Raises `UserError` if the tensors are not those of the model, or if the folder is in use for something else.
    """
    config = read_composite_config(part)
    model_class = composite_class_of(config)
    composite = find_parts(model_on_meta(model_class, config, torch.float32, "model"))
    # In checkpoints a name begins with the module and with `module` or `projector`.
    names = {full.split(".", 2)[2]: full for full in tensors if full.partition(".")[0] in composite.modules}

    def write(partial: Path) -> None:
        own = RenamedTensors(tensors, names)
        save_part(partial, model_class, config, own, where="model")
        if processor is not None:
            processor.save_pretrained(partial)
        if part.config is None and (stored_folder(part) / "generation_config.json").is_file():
            GenerationConfig.from_pretrained(stored_folder(part)).save_pretrained(partial)
        write_json(partial / MANIFEST, {"model": model_class.__name__, "parts": list(composite.modules)})

    write_folder(Path(folder), write, marker=MANIFEST)
