"""The worker of `motet profile`: runs the profiler on the stages and the data of a run file, on every rank."""

import os
import sys
from typing import Any

import torch.distributed as dist

from motet.config import RunConfig
from motet.costs.cost_model import CostTable
from motet.costs.profiling.profiler import ProfiledModule, ProfileOptions, profile
from motet.families.configured_graph import read_graph
from motet.models.stages.stage import Batch, StageModule
from motet.parallel.tensor.tensor_parallel import TensorParallel
from motet.plan import DECODER, LANGUAGE_MODEL, LayerRange
from motet.runtime.assembly import PARAMETER_DTYPES, build_stage, pick_device


def profile_worker(config: RunConfig, batch: Batch, modules: tuple[str, ...], tp_size: int) -> CostTable:
    """Collective over all processes, which are a multiple of `tp_size`. `batch`: where microbatches are drawn from."""
    device = pick_device(config, int(os.environ["LOCAL_RANK"]))
    tp = _my_group(tp_size)
    graph = read_graph(config)

    def make_stage(name: str, layers: LayerRange, tp_size: int) -> StageModule:
        stage = build_stage(_all_trainable(config), name, layers, tp, device, recompute=None)
        return stage

    described = {}
    for name in modules:
        entering = [edge for edge in graph.edges if edge.target == name]
        described[name] = ProfiledModule(
            workload=graph.modules[name].workload,
            sources={edge.source: graph.modules[edge.source].workload.output_size for edge in entering},
            entry_layers=entering[0].layers if entering else (0,),
        )
    return profile(
        described,
        make_stage,
        batch,
        options=ProfileOptions(
            tp_sizes=(tp_size,),
            microbatch_sizes=_sizes(config),
            parameter_dtype=PARAMETER_DTYPES[config.train.dtype],
        ),
        device=device,
        on_progress=_show if dist.get_rank() == 0 else lambda text: None,
    )


def _my_group(tp_size: int) -> TensorParallel:
    """Neighbouring ranks form the groups."""
    rank = dist.get_rank()
    if tp_size == 1:
        return TensorParallel(group=None, rank=0, size=1)
    mine = None
    for first in range(0, dist.get_world_size(), tp_size):
        group = dist.new_group(list(range(first, first + tp_size)))
        mine = group if first <= rank < first + tp_size else mine
    return TensorParallel(group=mine, rank=rank % tp_size, size=tp_size)


def _all_trainable(config: RunConfig) -> RunConfig:
    """The profiler itself says what is frozen in each measurement. Modules with adapters keep them."""
    values = config.model_dump(exclude_unset=True)
    model = values["model"]

    def trained(part: dict[str, Any]) -> dict[str, Any]:
        lora = part.get("train", {}).get("lora")
        return {"lora": lora} if lora else {"module": True}

    for name in (LANGUAGE_MODEL, DECODER):
        if model.get(name):
            model[name]["train"] = trained(model[name])
    for kind in ("encoders", "towers", "generators"):
        for part in model.get(kind, {}).values():
            part["train"] = {**trained(part), "projector": True}
    return RunConfig.model_validate(values)


def _sizes(config: RunConfig) -> tuple[int, ...]:
    """Samples per microbatch: about as many as the run will have, fewer and more."""
    replicas = max((module.dp for module in config.parallel.explicit.values()), default=1)
    usual = max(1, round(config.train.global_batch_size / replicas / config.parallel.num_microbatches))
    return tuple(sorted({max(1, usual // 2), usual, 2 * usual}))


def _show(text: str) -> None:
    print(f"profiling {text}", file=sys.stderr, flush=True)
