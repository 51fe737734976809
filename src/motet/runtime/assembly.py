"""Builds what runs on this rank from a run file: devices, dtypes, stages, the engine and the optimizer."""

from datetime import timedelta
from typing import cast

import torch

from motet.config import CompositePartConfig, EncoderConfig, GeneratorConfig, RunConfig, TowerConfig
from motet.errors import UserError
from motet.families.configured_graph import read_graph
from motet.families.family_features import check_feature
from motet.models.from_run_file import build_node
from motet.models.graph import LanguageModelNode, ModuleNode
from motet.models.stages.codes import CodeStage
from motet.models.stages.generator import GeneratorStage
from motet.models.stages.language_model import LanguageModelStage
from motet.models.stages.stage import StageBase, StageModule
from motet.parallel.activations import HasBlocks, compile_blocks, treat_activations
from motet.parallel.adapters import add_adapters
from motet.parallel.float8_linears import ALIGNMENT, check_float8, num_float8_linears, use_float8_linears
from motet.parallel.fused_kernels import check_fused_kernels, use_fused_kernels
from motet.parallel.main_gradients import keep_main_gradients
from motet.parallel.tensor.diffusion_cuts import diffusion_cuts
from motet.parallel.tensor.tensor_parallel import TensorParallel, apply_tensor_parallel
from motet.plan import LayerRange, ModulePlan, Plan, Stage, queries_of
from motet.planner.from_run_file import assignment_by_costs, iteration_costs
from motet.recomputation import BLOCKS, of_module
from motet.runtime.communication.agreement import gather_values
from motet.runtime.engine import Engine
from motet.runtime.local_model import LocalModel, StageMaker
from motet.runtime.training.optimizer import LearningRateSchedule, Optimizer, OptimizerConfig
from motet.schedule.generators import SPLIT_BACKWARDS
from motet.shapes.module_shape import QUERY_TOKENS

PARAMETER_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
"""Dtypes of parameters, and of what stages send each other, by `train.dtype`. Of bfloat16 parameters, gradients add up
in float32, and the optimizer keeps float32 masters."""


def pick_device(config: RunConfig, local_rank: int) -> torch.device:
    """This process's device. Raises `ValueError` if there is none of the kind."""
    if config.cluster.device == "cpu":
        return torch.device("cpu")
    kind = config.cluster.device
    found = torch.accelerator.current_accelerator(check_available=True)
    num_devices = torch.accelerator.device_count() if found is not None and found.type == kind else 0
    if local_rank >= num_devices:
        raise ValueError(
            f"cluster.device: process {local_rank} of this machine finds {num_devices} {kind} devices; "
            "start one process for each device, or set it to cpu"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(kind, local_rank)


def stage_maker(config: RunConfig, plan: Plan, device: torch.device) -> StageMaker:
    """Makes this rank's stages, with the weights of their layers only."""
    if config.train.compile != "nothing":
        check_compiled(config, plan)
    if config.train.kernels == "liger":
        check_kernels(config, plan, device)
    if config.train.linears == "float8":
        check_linears(config, plan, device)

    def make(name: str, module_plan: ModulePlan, stage: Stage, tp: TensorParallel) -> StageModule:
        owner = module_plan.data_module(name)
        if module_plan.kind == "generator" and (stage.cp_size > 1 or module_plan.sequence_parallel):
            raise UserError(
                f"plan: modules.{name}: is a generator, for which neither context nor sequence parallelism is "
                "supported; give cp_size 1 and sequence_parallel false"
            )
        recompute = of_module(plan.recompute, name) or of_module(plan.recompute, owner)
        return build_stage(config, owner, stage.layers, tp, device, recompute=recompute)

    return make


def check_compiled(config: RunConfig, plan: Plan) -> None:
    """Raises `UserError` for what compiled blocks have not been shown equal with."""
    if plan.schedule in SPLIT_BACKWARDS:
        raise UserError(
            f"train.compile: blocks cannot be compiled under {plan.schedule}, which splits their backward; use "
            "parallel.schedule 1f1b, or leave compile out"
        )
    if config.model.composite is not None:
        raise UserError("train.compile: is not supported for whole multimodal models; leave it out")
    if config.model.media_attention != "causal":
        raise UserError("train.compile: is not supported with model.media_attention; leave one of the two out")
    for name, module in plan.modules.items():
        if module.kind == "generator":
            raise UserError(f"train.compile: is not supported for generators, such as {name}; leave it out")
        stages = [stage for replica in module.replicas for stage in replica.stages]
        shared = {
            "tp": any(stage.tp_size > 1 for stage in stages),
            "cp": any(stage.cp_size > 1 for stage in stages),
            "ep": module.ep > 1,
            "fully_sharded": module.fully_sharded,
        }
        for key in (key for key, is_given in shared.items() if is_given):
            raise UserError(f"train.compile: is not supported with {key}, which {name} has; leave one of the two out")


def check_kernels(config: RunConfig, plan: Plan, device: torch.device) -> None:
    """Raises `UserError` for what fused kernels have not been shown equal with, and where they cannot run."""
    if config.train.dtype == "float64":
        raise UserError("train.kernels: liger computes in float32; give train.dtype float32 or bfloat16")
    if config.train.compile != "nothing":
        raise UserError("train.kernels: the compiler of train.compile fuses kernels itself; leave one of the two out")
    if config.model.composite is not None:
        raise UserError("train.kernels: liger is not supported for whole multimodal models; leave it out")
    for name, module in plan.modules.items():
        if module.kind == "generator":
            raise UserError(f"train.kernels: liger is not supported for generators, such as {name}; leave it out")
    check_fused_kernels(device, PARAMETER_DTYPES[config.train.dtype])


def check_linears(config: RunConfig, plan: Plan, device: torch.device) -> None:
    """Raises `UserError` for what linear layers in float8 have not been shown equal with, and where they cannot run."""
    if plan.schedule in SPLIT_BACKWARDS:
        raise UserError(
            f"train.linears: float8 cannot be combined with {plan.schedule}, which splits the backward of linear "
            "layers; use parallel.schedule 1f1b, or leave linears out"
        )
    if config.model.composite is not None:
        raise UserError("train.linears: float8 is not supported for whole multimodal models; leave it out")
    described = read_graph(config).modules
    for name, module in plan.modules.items():
        if module.kind not in ("encoder", "language_model"):
            raise UserError(
                f"train.linears: float8 is not supported for modules of the kind {module.kind}, such as {name}; leave "
                "it out"
            )
        own = described[module.data_module(name)]
        stages = [stage for replica in module.replicas for stage in replica.stages]
        refused = {
            "tp": any(stage.tp_size > 1 for stage in stages),
            "adapters (lora)": own.part.train.lora is not None,  # type: ignore[union-attr]
            "encoders of your own": getattr(own.part, "module", None) is not None,
            "mixtures of experts": any(layer.num_expert_weights for layer in own.workload.layers),
        }
        for what in (what for what, is_given in refused.items() if is_given):
            raise UserError(f"train.linears: float8 is not supported with {what}, which {name} has; leave one out")
    check_float8(device, PARAMETER_DTYPES[config.train.dtype])


def build_stage(
    config: RunConfig,
    owner: str,
    layers: LayerRange,
    tp: TensorParallel,
    device: torch.device,
    *,
    recompute: str | None,
) -> StageModule:
    """A run of layers of the run file's module `owner`, cut for this rank's tensor-parallel group."""
    node = build_node(config, owner, layers, PARAMETER_DTYPES[config.train.dtype])
    stage = make_stage(
        node,
        layers,
        tp,
        device,
        packing=config.parallel.packing,
        packed_attention=config.parallel.packed_attention,
        recompute=recompute,
        compile_backend=config.train.compile_backend if config.train.compile == "blocks" else None,
        fuses_kernels=config.train.kernels == "liger",
        uses_float8=config.train.linears == "float8",
    )
    keep_main_gradients(parameter for _, parameter in stage.named_parameters())
    return stage


def make_stage(
    node: ModuleNode,
    layers: LayerRange,
    tp: TensorParallel,
    device: torch.device,
    *,
    packing: bool,
    recompute: str | None,
    packed_attention: str = "auto",
    compile_backend: str | None = None,
    fuses_kernels: bool = False,
    uses_float8: bool = False,
) -> StageModule:
    """A run of a node's layers, cut for this rank's tensor-parallel group.

    `packed_attention`: as in run files. `recompute`: a kind of recomputation. `compile_backend`: with which blocks are
    compiled; None: they are not. `fuses_kernels`: norms, rotations and gated MLPs run by fused kernels. `uses_float8`:
    trained linears of blocks compute in float8."""
    trained_parts = node.trained_parts  # A stage takes the module over.
    stage = node.make_stage(layers, packing=packing)
    assert isinstance(stage, StageBase)
    stage.trained_parts = trained_parts
    if fuses_kernels:
        use_fused_kernels(stage)
    if packing and isinstance(stage, LanguageModelStage):
        stage.attend_by_sample(packed_attention)
    if tp.experts is not None:
        _check_experts(node, tp, tp.experts)
    if tp.size > 1 and isinstance(stage, GeneratorStage | CodeStage):
        if isinstance(stage, CodeStage) or node.workload().must_divide is None:
            raise UserError(
                f"parallel: {node.name}.tp_size: {stage.model_class} has no rules for tensor parallelism; use 1"
            )
        apply_tensor_parallel(stage, tp, cuts=diffusion_cuts(stage.block_paths))
    elif (tp.size > 1 or tp.experts is not None) and node.family is not None:
        if tp.size > 1 and getattr(stage, "exchanges_heads", False):
            raise UserError(
                f"parallel: stages of {node.name} read keys and values of stages before them, of which each "
                "tensor-parallel rank holds its own heads only; use tp 1 or one stage"
            )
        apply_tensor_parallel(stage, tp, idle=getattr(stage, "idle_blocks", ()))
    if node.adapters is not None:
        blocks, num_blocks = node.running_blocks
        add_adapters(stage, f"module.{blocks}", num_blocks, node.adapters)
    if uses_float8:
        use_float8_linears(cast(HasBlocks, stage).running_blocks.values(), device)
    if compile_backend is not None and hasattr(stage, "running_blocks"):
        compile_blocks(cast(HasBlocks, stage), compile_backend)
    if recompute not in (None, BLOCKS) and isinstance(stage, GeneratorStage) and stage.is_whole_model:
        raise UserError(
            f"parallel.recompute: {node.name}:{recompute} is not supported for a {stage.model_class}; give {node.name}"
        )
    if recompute is not None and hasattr(stage, "running_blocks"):
        treat_activations(cast(HasBlocks, stage), recompute)
    return cast(StageModule, stage.to(device))


def _check_experts(node: ModuleNode, tp: TensorParallel, group: TensorParallel) -> None:
    """Raises `UserError` unless the model has been shown equal with experts over such groups."""
    if not isinstance(node, LanguageModelNode):
        raise UserError(
            f"parallel: {node.name} is part of a composite, whose experts are not distributed over ranks; use ep 1"
        )
    config = node.parts["module"].config
    if tp.size > 1:
        check_feature(config, "experts", "use ep 1")
    if group.size > tp.size:
        check_feature(config, "expert_parallel", "use ep 1, or ep equal to tp")


def router_bias_update_rate(config: RunConfig) -> float:
    """Of the language model, where it is one of its own."""
    part = config.model.language_model
    return 0.0 if part is None else part.router_bias_update_rate


def build_engine(config: RunConfig, plan: Plan, device: torch.device, *, num_spare_ranks: int = 0) -> Engine:
    """Collective. `num_spare_ranks`: processes, after those of the plan, that have no part in it.

    Batches are cut and actions ordered by the run file's costs, as where the plan is evaluated."""
    engine = Engine(
        plan,
        stage_maker(config, plan, device),
        device=device,
        boundary_dtype=PARAMETER_DTYPES[config.train.dtype],
        timeout=timedelta(seconds=config.train.step_timeout_s),
        assign=assignment_by_costs(config, plan),
        expect=iteration_costs(config, plan),
        num_spare_ranks=num_spare_ranks,
        keeps_unreached=not config.train.update_unreached,
        router_bias_update_rate=router_bias_update_rate(config),
    )
    if config.train.linears == "float8" and not any(gather_values(int, num_float8_linears(engine.model.modules()))):
        raise UserError(
            "train.linears: float8 is for trained linear layers of blocks whose widths are multiples of "
            f"{ALIGNMENT}, and there is none; leave it out"
        )
    return engine


def part_learning_rates(config: RunConfig) -> dict[str, float]:
    """Peak learning rate of each part: `<module>.module`, `<module>.projector`."""
    rates, default = {}, config.train.learning_rate
    for name, module in read_graph(config).modules.items():
        part = module.part
        rates[f"{name}.module"] = part.learning_rate or default
        if isinstance(part, GeneratorConfig) and module.workload.family == QUERY_TOKENS:
            rates[f"{name}.module"] = part.queries_learning_rate or default
        if isinstance(part, EncoderConfig | TowerConfig | CompositePartConfig | GeneratorConfig):
            rates[f"{name}.projector"] = part.projector_learning_rate or default
    return rates


def _averages(config: RunConfig) -> dict[str, float]:
    """Decay of moving averages by part."""
    return {
        part: own.ema
        for name, own in config.model.generators.items()
        if own.ema is not None
        for part in (f"{name}.module", f"{name}.projector", f"{queries_of(name)}.module")
    }


def build_optimizer(config: RunConfig, model: LocalModel) -> Optimizer:
    """Makes the optimizer. With `train.failures`, ZeRO-1's owners are chosen later (`Optimizer.keep_alone`)."""
    zero1 = config.parallel.zero1 and config.train.failures is None
    assert not (zero1 and model.sharded), "run files and plans in which both shard the states are refused"
    train = config.train
    return Optimizer(
        model.parameters,
        OptimizerConfig(
            learning_rate=train.learning_rate,
            part_learning_rates=part_learning_rates(config),
            averages=_averages(config),
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
