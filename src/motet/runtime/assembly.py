"""From a run file to what runs on this rank: devices, dtypes, stages, the engine and the optimizer."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, cast

import torch
from torch import nn

from motet.attention.masks.rules import rule_of_family
from motet.config import DecoderConfig, EncoderConfig, PartConfig, RunConfig, TowerConfig
from motet.families.classes import Kind
from motet.families.configured_graph import read_graph
from motet.models.graph import ModalityModule
from motet.models.hub.clip import initial_loss, read_projection
from motet.models.materialize import layer_seed, materialize, read_part_config
from motet.models.stages.caption_decoder import CaptionDecoderStage
from motet.models.stages.contrastive import ContrastiveStage
from motet.models.stages.encoder import EncoderStage, num_encoder_layers
from motet.models.stages.language_model import LanguageModelStage
from motet.models.stages.stage import StageModule
from motet.parallel.tensor_parallel import TensorParallel, apply_tensor_parallel
from motet.plan import CONTRASTIVE, DECODER, LANGUAGE_MODEL, LayerRange, ModulePlan, Plan, Stage
from motet.planner.from_run_file import assignment_by_costs, iteration_costs
from motet.runtime.engine import Engine
from motet.runtime.local_model import LocalModel, StageMaker
from motet.runtime.training.optimizer import LearningRateSchedule, Optimizer, OptimizerConfig
from motet.schedule.batch_sync import pairs_of

PARAMETER_DTYPES = {"float32": torch.float32, "bfloat16": torch.float32, "float64": torch.float64}
"""By `train.dtype`. bfloat16 is autocast: parameters, gradients and what travels between stages stay in float32."""


def part_of(config: RunConfig, module: str) -> PartConfig:
    """The run file's section of a module, but for the contrastive loss, which is no transformers model."""
    if module in config.model.towers:
        return config.model.towers[module]
    if module == DECODER and config.model.decoder is not None:
        return config.model.decoder
    return config.model.causal_lm if module == LANGUAGE_MODEL else config.model.encoders[module]


def where_of(config: RunConfig, module: str) -> str:
    """The key of that section."""
    if module in config.model.towers:
        return f"model.towers.{module}"
    return f"model.{module}" if module in (LANGUAGE_MODEL, DECODER) else f"model.encoders.{module}"


def pick_device(config: RunConfig, local_rank: int) -> torch.device:
    """This process's device. Raises `ValueError` if there is none of the kind."""
    if config.cluster.device == "cpu":
        return torch.device("cpu")
    num_devices = torch.cuda.device_count()
    if local_rank >= num_devices:
        raise ValueError(
            f"cluster.device: process {local_rank} of this machine finds {num_devices} CUDA devices; "
            "start one process a device or set it to cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def build_module(config: RunConfig, name: str, layers: tuple[int, int] | None, dtype: torch.dtype) -> ModalityModule:
    """One module of the run file with weights in `layers` (None: all), its projector, and what is frozen in it."""
    part = part_of(config, name)
    kind = kind_of(part)
    model = materialize(part, kind, name=name, where=where_of(config, name), layers=layers, dtype=dtype)
    if isinstance(part, TowerConfig):
        return _tower(config, name, part, model, dtype)
    if isinstance(part, DecoderConfig):
        module = ModalityModule(model)
        _set_trainable(module.module, part.train.module)
        return module
    if not isinstance(part, EncoderConfig):
        module = ModalityModule(model)
        _set_trainable(module.module, config.model.causal_lm.train.module)
        return module
    module = ModalityModule(model, part.projector, feature_layer=part.feature_layer)
    llm = read_part_config(config.model.causal_lm, "language_model", where=where_of(config, LANGUAGE_MODEL))
    module.build_projector(llm.hidden_size, seed=_projector_seed(name, part, model))
    _set_trainable(module.module, part.train.module)
    if module.projector is not None:
        module.projector.to(dtype)
        _set_trainable(module.projector, part.train.projector)
    return module


def _projector_seed(name: str, part: PartConfig, encoder: nn.Module) -> int:
    """It is the encoder's last layer, and drawn as the others are: those of two modules are not alike."""
    return layer_seed(part.seed, name, num_encoder_layers(encoder, None))


def kind_of(part: PartConfig) -> Kind:
    if isinstance(part, DecoderConfig):
        return "decoder"
    return "encoder" if isinstance(part, EncoderConfig | TowerConfig) else "language_model"


def _tower(config: RunConfig, name: str, part: TowerConfig, model: Any, dtype: torch.dtype) -> ModalityModule:
    module = ModalityModule(model, part.projector)
    module.pooling = "first" if config.model.decoder is not None and config.model.decoder.reads == name else "alone"
    module.build_projector(read_graph(config).feature_size, seed=_projector_seed(name, part, model))
    _set_trainable(module.module, part.train.module)
    read_projection(part, model.config.model_type, module.projector, where=where_of(config, name))
    if module.projector is not None:
        module.projector.to(dtype)
        _set_trainable(module.projector, part.train.projector)
    return module


def build_loss(config: RunConfig, dtype: torch.dtype) -> ContrastiveStage:
    """The contrastive loss of the run file's towers."""
    given = config.model.contrastive
    loss = initial_loss(config.model).to(dtype)
    _set_trainable(loss, given.train)
    pairs = pairs_of(tuple(config.model.towers), given.anchor)
    return ContrastiveStage(loss, pairs, read_graph(config).feature_size)


def _set_trainable(part: nn.Module, trainable: bool) -> None:
    """A frozen part is in evaluation mode as well: no dropout."""
    part.requires_grad_(trainable).train(trainable)


def media_attention_of(config: RunConfig, family: str) -> str:
    """What the run file asks for, of a language model of the family."""
    given = config.model.media_attention
    return rule_of_family(family).media if given == "family" else given


def stage_maker(config: RunConfig, plan: Plan, device: torch.device) -> StageMaker:
    """Makes this rank's stages, with the weights of their layers only."""

    def make(name: str, module_plan: ModulePlan, stage: Stage, tp: TensorParallel) -> StageModule:
        owner = module_plan.data_module(name)
        recompute = name in plan.recompute or owner in plan.recompute
        return build_stage(config, owner, stage.layers, tp, device, recompute=recompute)

    return make


def build_stage(
    config: RunConfig, owner: str, layers: LayerRange, tp: TensorParallel, device: torch.device, *, recompute: bool
) -> StageModule:
    """A run of layers of the run file's module `owner`, cut for this rank's tensor-parallel group."""
    if owner == CONTRASTIVE and config.model.towers:
        return build_loss(config, PARAMETER_DTYPES[config.train.dtype]).to(device)
    module = build_module(config, owner, layers, PARAMETER_DTYPES[config.train.dtype])
    made: EncoderStage | LanguageModelStage | CaptionDecoderStage
    if owner == DECODER and config.model.towers:
        made = CaptionDecoderStage(owner, module.module, layers, recompute=recompute)
    elif owner == LANGUAGE_MODEL:
        made = LanguageModelStage(
            owner,
            module.module,
            layers,
            packing=config.parallel.packing,
            recompute=recompute,
            media_attention=media_attention_of(config, module.module.config.model_type),
        )
    else:
        made = EncoderStage(owner, module, layers, recompute=recompute)
    if tp.size > 1:
        idle = made.idle_blocks if isinstance(made, EncoderStage) else ()
        apply_tensor_parallel(made, module.module.config.model_type, tp, idle=idle)
    return cast(StageModule, made.to(device))


def autocast_for(config: RunConfig, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    if config.train.dtype != "bfloat16":
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)


def build_engine(config: RunConfig, plan: Plan, device: torch.device, *, num_spare_ranks: int = 0) -> Engine:
    """Collective. `num_spare_ranks`: processes, after those of the plan, that have no part in it.

    Batches are cut and actions ordered by the run file's costs, as where the plan is evaluated."""
    return Engine(
        plan,
        stage_maker(config, plan, device),
        device=device,
        boundary_dtype=PARAMETER_DTYPES[config.train.dtype],
        autocast=autocast_for(config, device),
        timeout=timedelta(seconds=config.train.step_timeout_s),
        assign=assignment_by_costs(config, plan),
        expect=iteration_costs(config, plan),
        num_spare_ranks=num_spare_ranks,
    )


def build_optimizer(config: RunConfig, model: LocalModel) -> Optimizer:
    """Where nodes may fail, who keeps which state under ZeRO-1 is decided later (`Optimizer.keep_alone`)."""
    zero1 = config.parallel.zero1 and config.train.failures is None
    assert not (zero1 and model.sharded), "run files and plans in which both shard the states are refused"
    train = config.train
    rates = {}
    for name in config.model.module_names:
        part = part_of(config, name)
        rates[f"{name}.module"] = part.learning_rate or train.learning_rate
        if isinstance(part, EncoderConfig | TowerConfig):
            rates[f"{name}.projector"] = part.projector_learning_rate or train.learning_rate
    rates[f"{CONTRASTIVE}.module"] = config.model.contrastive.learning_rate or train.learning_rate
    return Optimizer(
        model.parameters,
        OptimizerConfig(
            learning_rate=train.learning_rate,
            part_learning_rates=rates,
            weight_decay=train.weight_decay,
            betas=train.betas,
            eps=train.eps,
            zero1=zero1,
            is_exact=config.train.failures is not None,
        ),
        LearningRateSchedule(
            warmup_steps=train.warmup_steps,
            total_steps=train.steps,
            shape=train.lr_schedule,
            min_ratio=train.min_learning_rate_ratio,
        ),
    )
