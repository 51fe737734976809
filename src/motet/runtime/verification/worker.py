"""What every process runs for `motet verify`, inside the process group that the launcher made."""

import os
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import nn

from motet.config import RunConfig
from motet.data.loader import Loader
from motet.data.run_file import RunData, open_data
from motet.data.service.tickets import InProcess
from motet.families.classes import model_class_of
from motet.families.configured_graph import read_graph
from motet.models.graph import ModalityModule
from motet.models.materialize import default_dtype, float64_throughout, read_part_config
from motet.models.reference.plain_forward import plain_caption_loss, plain_contrastive_loss
from motet.models.stages.contrastive import ContrastiveLoss
from motet.models.stages.stage import Batch
from motet.plan import CONTRASTIVE, DECODER, LANGUAGE_MODEL, Plan
from motet.runtime.assembly import (
    PARAMETER_DTYPES,
    autocast_for,
    build_engine,
    media_attention_of,
    part_of,
    pick_device,
    where_of,
)
from motet.runtime.engine import Engine
from motet.runtime.verification.comparison import References
from motet.runtime.verification.verify import run_plainly, verify_against, verify_batch
from motet.schedule.batch_sync import pairs_of


def verify_worker(config: RunConfig, plan: Plan) -> dict[str, Any]:
    """One batch of the run's own data against plain transformers; what `motet verify --json` prints, on rank 0."""
    torch.backends.cudnn.allow_tf32 = False  # Convolutions in float32 are to be just that.
    with float64_throughout() if config.train.dtype == "float64" else nullcontext():
        engine, data = _prepare(config, plan)
        loader = Loader(InProcess(data.train), config.train.global_batch_size, seed=config.train.seed, batches_ahead=0)
        for stage in engine.model.modules():
            _without_dropout(stage)
        batch = _InDtype(next(loader), PARAMETER_DTYPES[config.train.dtype])
        if config.model.towers:
            comparison = verify_against(
                engine,
                batch,
                lambda weights: _contrastive_references(config, weights, batch),
                dtype=config.train.dtype,
            )
            return comparison.to_json() if comparison is not None else {}
        comparison = verify_batch(
            engine,
            batch,
            lambda: plainly_built(config),
            dtype=config.train.dtype,
            merge=config.model.merge,
            placeholder_token_ids=data.preparation.placeholder_ids,
            media_attention=_media_attention(config),
            autocast=autocast_for(config, engine.device),
        )
    return comparison.to_json() if comparison is not None else {}


def _media_attention(config: RunConfig) -> str:
    part = config.model.causal_lm
    return media_attention_of(
        config, read_part_config(part, "language_model", where=where_of(config, LANGUAGE_MODEL)).model_type
    )


def plainly_built(config: RunConfig) -> tuple[Mapping[str, ModalityModule], nn.Module]:
    """Encoders and language model of the run file by transformers' own constructors, on the CPU, without dropout."""
    dtype = PARAMETER_DTYPES[config.train.dtype]

    def build(name: str) -> Any:
        part = part_of(config, name)
        kind: Literal["encoder", "language_model"] = "encoder" if name in config.model.encoders else "language_model"
        hf_config = read_part_config(part, kind, where=where_of(config, name))
        with default_dtype(dtype):  # Some families compute constants when they are built.
            model = model_class_of(hf_config.model_type, kind)(hf_config)
        _without_dropout(model)
        return model

    language_model = build(LANGUAGE_MODEL).requires_grad_(config.model.causal_lm.train.module)
    hidden_size = language_model.get_input_embeddings().weight.shape[1]
    encoders = {}
    for name, part in config.model.encoders.items():
        encoder = build(name).requires_grad_(part.train.module)
        encoders[name] = ModalityModule(encoder, part.projector, feature_layer=part.feature_layer)
        encoders[name].build_projector(hidden_size)
        projector = encoders[name].projector
        if projector is not None:
            projector.to(dtype).requires_grad_(part.train.projector)
    return encoders, language_model


def _contrastive_references(config: RunConfig, weights: Mapping[str, torch.Tensor], batch: Batch) -> References:
    """Towers by transformers' own constructors, on the CPU, without dropout."""
    dtype, given = PARAMETER_DTYPES[config.train.dtype], config.model.contrastive
    width = read_graph(config).feature_size
    towers = {}
    for name, part in config.model.towers.items():
        hf_config = read_part_config(part, "encoder", where=where_of(config, name))
        with default_dtype(dtype):
            model = model_class_of(hf_config.model_type, "encoder")(hf_config)
        _without_dropout(model)
        towers[name] = ModalityModule(model.requires_grad_(part.train.module), part.projector)
        towers[name].build_projector(width)
        projector = towers[name].projector
        if projector is not None:
            projector.to(dtype).requires_grad_(part.train.projector)
    loss = ContrastiveLoss(given.loss, given.logit_scale, given.logit_bias).to(dtype).requires_grad_(given.train)
    modules: dict[str, nn.Module] = {**towers, CONTRASTIVE: nn.ModuleDict({"module": loss})}
    pairs = pairs_of(tuple(towers), given.anchor)
    size = config.train.contrastive_batch_size or config.train.global_batch_size
    decoder = _plain_decoder(config)
    if decoder is not None:
        modules[DECODER] = nn.ModuleDict({"module": decoder})

    def total(batch: Batch) -> torch.Tensor:
        contrast = plain_contrastive_loss(towers, loss, batch, pairs=pairs, batch_size=size)
        if config.model.decoder is None:
            return given.loss_weight * contrast
        reads = config.model.decoder.reads
        captions = plain_caption_loss(towers[reads], decoder, batch, reads=reads, name=DECODER)
        return given.loss_weight * contrast + config.model.decoder.loss_weight * captions

    return run_plainly(
        modules,
        weights,
        batch,
        total,
        dtype=config.train.dtype,
        autocast=autocast_for(config, torch.device("cpu")),
    )


def _plain_decoder(config: RunConfig) -> Any:
    part = config.model.decoder
    if part is None:
        return None
    hf_config = read_part_config(part, "decoder", where=where_of(config, DECODER))
    with default_dtype(PARAMETER_DTYPES[config.train.dtype]):
        model = model_class_of(hf_config.model_type, "decoder")(hf_config)
    _without_dropout(model)
    return model.requires_grad_(part.train.module)


class _InDtype:
    """A batch whose pixels and sounds are of the model's dtype."""

    def __init__(self, batch: Any, dtype: torch.dtype) -> None:
        self._batch, self._dtype = batch, dtype
        self.samples = batch.samples

    def features(self, module: str, sample: int) -> dict[str, torch.Tensor]:
        values = self._batch.features(module, sample)
        return {key: v.to(self._dtype) if v.is_floating_point() else v for key, v in values.items()}


def _without_dropout(model: nn.Module) -> None:
    """Random numbers differ between stages and one process; transformers keeps rates as modules and as attributes."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _prepare(config: RunConfig, plan: Plan) -> tuple[Engine, RunData]:
    device = pick_device(config, int(os.environ.get("LOCAL_RANK", "0")))
    data = open_data(config)
    return build_engine(config, plan, device), data
