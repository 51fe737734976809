"""Profiles a run file's model: runs the profiler on its stages and its data in several processes, once for each way in
which ranks share a stage."""

import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from motet.config import RunConfig
from motet.costs.cost_model import CostTable, Sharing
from motet.costs.profiling.profiler import ProfiledModule, ProfiledStageMaker, ProfileOptions, profile
from motet.families.configured_graph import read_graph
from motet.models.stages.encoder import EncoderStage
from motet.models.stages.language_model import LanguageModelStage
from motet.models.stages.stage import Batch, StageModule
from motet.parallel.context.context_attention import ContextParallel
from motet.parallel.tensor.tensor_parallel import TensorParallel
from motet.plan import DECODER, LANGUAGE_MODEL, ContextOptions, LayerRange
from motet.planner.problem import Degrees
from motet.runtime.assembly import PARAMETER_DTYPES, build_stage, pick_device
from motet.runtime.launch import launch


def profile_in_processes(
    config: RunConfig,
    batch: Batch,
    degrees: Iterable[tuple[str, Degrees]],
    *,
    options: ProfileOptions | None = None,
    num_devices: int,
) -> CostTable:
    """Measures every layer by itself, and under the tensor parallelism of its module's degrees, and with their context
    parallelism and experts over ranks where these fit on the devices.

    Args:
        batch: where microbatches are drawn from.
        degrees: names of modules and degrees. A name may occur several times; of several contexts that share its tokens
            alike, which a cost table does not tell apart, the first is measured.
        options: without sharing; None: those of the run file.
        num_devices: number of devices; a process runs on each.
    """
    names = list(read_graph(config).names)
    modules_shared: dict[tuple[Sharing, ContextOptions], list[str]] = {(Sharing(), ContextOptions()): names}
    known = {(name, Sharing()) for name in names}
    for name, given in degrees:
        alone = Sharing(given.tp)
        groups = [(alone, ContextOptions())]
        sharing = Sharing.of(given.tp, given.cp, given.context, given.ep)
        if sharing != alone and sharing.num_ranks <= num_devices:
            groups.append((sharing, given.context if given.cp > 1 else ContextOptions()))
        for group in groups:
            if (name, group[0]) not in known:
                known.add((name, group[0]))
                modules_shared.setdefault(group, []).append(name)
    usual = options or ProfileOptions(
        microbatch_sizes=_sizes(config), parameter_dtype=PARAMETER_DTYPES[config.train.dtype]
    )
    first, *others = [
        launch(
            profile_worker,
            config,
            batch,
            tuple(names),
            replace(usual, sharing=sharing),
            context,
            num_processes=max(1, num_devices // sharing.num_ranks) * sharing.num_ranks,
            device=config.cluster.device,
        )
        for (sharing, context), names in sorted(modules_shared.items(), key=lambda item: item[0][0])
    ]
    return first.with_costs_of(others)


def profile_worker(
    config: RunConfig, batch: Batch, modules: tuple[str, ...], options: ProfileOptions, context: ContextOptions
) -> CostTable:
    """Collective over all processes, which are a multiple of those that share a stage. `context`: of context-parallel
    groups."""
    device = pick_device(config, int(os.environ["LOCAL_RANK"]))
    graph = read_graph(config)

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
        _stage_maker(_all_trainable(config), options.sharing, context, device),
        batch,
        options=options,
        device=device,
        on_progress=_show if dist.get_rank() == 0 else lambda text: None,
    )


def _stage_maker(
    config: RunConfig, sharing: Sharing, context: ContextOptions, device: torch.device
) -> ProfiledStageMaker:
    """Makes stages for groups of neighbouring ranks that share them. Collective. `config`: all trainable."""
    places = np.arange(dist.get_world_size()).reshape(-1, sharing.num_replicas, sharing.cp_size, sharing.tp_size)
    tp = _my_group(places.reshape(-1, sharing.tp_size))
    cp = _my_group(places.swapaxes(2, 3).reshape(-1, sharing.cp_size))
    if sharing.ep > 1:
        tp = replace(tp, experts=_my_group(places.swapaxes(1, 2).reshape(-1, sharing.num_replicas * sharing.tp_size)))

    def make_stage(name: str, layers: LayerRange) -> StageModule:
        stage = build_stage(config, name, layers, tp, device, recompute=None)
        if sharing.cp_size > 1:
            assert isinstance(stage, LanguageModelStage | EncoderStage)
            stage.enable_context_parallel(ContextParallel(cp.group, cp.rank, cp.size, context, tp.size))
        return stage

    return make_stage


def _my_group(groups: np.ndarray) -> TensorParallel:
    """This rank's group of `groups` [groups, ranks]."""
    if groups.shape[1] == 1:
        return TensorParallel(group=None, rank=0, size=1)
    made = {tuple(ranks): dist.new_group(ranks) for ranks in groups.tolist()}
    mine = next(ranks for ranks in made if dist.get_rank() in ranks)
    return TensorParallel(made[mine], mine.index(dist.get_rank()), len(mine))


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
