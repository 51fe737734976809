"""The shapes of the parts of a model of several modalities, read from its modules on the meta device."""

from functools import lru_cache
from typing import Any

import torch
from torch import nn

from motet.config import PartConfig
from motet.families.classes import model_on_meta
from motet.families.discovery.composite import Composite, composite_class_of, find_parts, read_composite_config
from motet.parallel.tensor.tensor_cuts import tensor_cuts
from motet.shapes.module_shape import Attention, LayerShape, Linear, ModuleWorkload, Part, Rows

HEADS = ("num_attention_heads", "num_heads", "encoder_attention_heads")
WIDTHS = ("d_model", "embed_dim", "hidden_size")
"""Names under which configurations have the number of attention heads and an encoder's width."""


def read_composite(part: PartConfig) -> tuple[Composite, dict[str, ModuleWorkload]]:
    """The parts of the model and their shapes. Raises `UserError` if it has none that motet can tell apart."""
    return _read(part.model_dump_json())


@lru_cache(maxsize=8)
def _read(part_json: str) -> tuple[Composite, dict[str, ModuleWorkload]]:
    hf_config = read_composite_config(PartConfig.model_validate_json(part_json))
    model = model_on_meta(composite_class_of(hf_config), hf_config, torch.float32, "model")
    described = find_parts(model)
    return described, {name: composite_workload(model, described, name) for name in described.modules}


def composite_workload(model: Any, described: Composite, name: str) -> ModuleWorkload:
    """The shapes of a part's layers, read from its modules."""
    module = described.modules[name]
    text = model.config.get_text_config()
    width = int(text.hidden_size)
    if not module.functions:
        own_config, inner, kind = text, width, "language_model"
    else:
        own_config = model.get_encoder(modality=module.functions[0].modality).config
        inner, kind = int(next(getattr(own_config, key) for key in WIDTHS if hasattr(own_config, key))), "encoder"
    num_blocks = len(list(model.get_submodule(module.blocks).children()))
    attention = _attention(own_config, inner)
    layers = []
    for index, paths in enumerate(module.layers):
        part: Part = "block" if 1 <= index <= num_blocks else "embed" if index == 0 else "head"
        is_projector = bool(module.functions) and index == len(module.layers) - 1
        layers.append(
            _layer(
                model,
                paths,
                "projector" if is_projector else part,
                width if is_projector else inner,
                attention if part == "block" else None,
            )
        )
    # Processors make images of videos where a model has no function for videos; data tell which cannot.
    modalities = ["audio"] if name == "audio" else ["image", "video"]
    cuts = None if module.functions else tensor_cuts(model.get_submodule(described.text.base))
    must_divide = None if cuts is None or not cuts.must_divide else dict(cuts.must_divide)
    num_outputs = 1 + described.num_deep_features if described.is_deep(name) else 1
    return ModuleWorkload(
        kind=kind,  # type: ignore[arg-type]
        family=f"{model.config.model_type}.{name}",
        config={"model_type": f"{model.config.model_type}.{name}", "modalities": modalities},
        hidden_size=inner,
        output_size=width * num_outputs if module.functions else width,
        layers=tuple(layers),
        arrangement="separate" if module.functions else "padded",
        tied=((0, len(layers) - 1),) if not module.functions and described.is_tied else (),
        max_stages=1 if module.functions else None,
        shares_tokens=False,
        must_divide=must_divide,
    )


def _attention(config: Any, width: int) -> Attention:
    heads = int(next(getattr(config, key) for key in HEADS if hasattr(config, key)))
    head_dim = int(getattr(config, "head_dim", None) or width // heads)
    return Attention(heads, int(getattr(config, "num_key_value_heads", None) or heads), head_dim)


def _layer(model: nn.Module, paths: tuple[str, ...], part: Part, width: int, attention: Attention | None) -> LayerShape:
    linears: list[Linear] = []
    vocabulary = num_parameters = 0
    rows: Rows = "outputs" if part in ("projector", "head") else "tokens"
    for owner, _, name in (path.rpartition(".") for path in paths):
        found = getattr(model.get_submodule(owner), name)
        if isinstance(found, nn.Parameter):
            num_parameters += found.numel()
            continue
        num_parameters += sum(each.numel() for _, each in found.named_parameters(remove_duplicate=False))
        for module in found.modules():
            if isinstance(module, nn.Linear):
                linears.append(Linear(module.in_features, module.out_features, module.bias is not None, rows=rows))
            elif isinstance(module, nn.Embedding) and part == "embed" and module.embedding_dim == width:
                vocabulary += module.num_embeddings
    known = sum(linear.num_parameters for linear in linears) + vocabulary * width
    return LayerShape(
        part,
        width,
        tuple(linears),
        attention,
        other_parameters=num_parameters - known,
        vocabulary=vocabulary,
        saved_vectors=2 if part == "block" else 0,
        gated=part == "block" and len(linears) in (6, 7),
    )
