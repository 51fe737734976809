"""The worker of `motet verify`: runs on every rank, inside the process group that the launcher made."""

import os
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch

from motet.config import RunConfig
from motet.data.loader import Loader
from motet.data.run_file import RunData, open_data
from motet.data.service.tickets import InProcess
from motet.families.configured_graph import read_graph
from motet.models.from_run_file import plain_node, remove_dropout
from motet.models.graph import ModuleNode
from motet.models.materialize import float64_throughout
from motet.plan import Plan
from motet.runtime.assembly import PARAMETER_DTYPES, autocast_for, build_engine, pick_device
from motet.runtime.engine import Engine
from motet.runtime.verification.verify import verify_batch


def verify_worker(config: RunConfig, plan: Plan) -> dict[str, Any]:
    """One batch of the run's own data against plain transformers; what `motet verify --json` prints, on rank 0."""
    torch.backends.cudnn.allow_tf32 = False  # Convolutions in float32 are to be just that.
    with float64_throughout() if config.train.dtype == "float64" else nullcontext():
        engine, data = _prepare(config, plan)
        loader = Loader(InProcess(data.train), config.train.global_batch_size, seed=config.train.seed, batches_ahead=0)
        for stage in engine.model.modules():
            remove_dropout(stage)
        comparison = verify_batch(
            engine,
            _InDtype(next(loader), PARAMETER_DTYPES[config.train.dtype]),
            lambda: plain_nodes(config, data.preparation.placeholder_ids),
            dtype=config.train.dtype,
            contrastive_batch_size=config.train.contrastive_batch_size,
            autocast=autocast_for(config, torch.device("cpu")),
        )
    return comparison.to_json() if comparison is not None else {}


def plain_nodes(config: RunConfig, placeholder_token_ids: Mapping[str, int]) -> dict[str, ModuleNode]:
    """The modules of the run file by transformers' own constructors, on the CPU, without dropout."""
    dtype = PARAMETER_DTYPES[config.train.dtype]
    return {name: plain_node(config, name, dtype, placeholder_token_ids) for name in read_graph(config).modules}


class _InDtype:
    """A batch whose pixels and sounds are of the model's dtype."""

    def __init__(self, batch: Any, dtype: torch.dtype) -> None:
        self._batch, self._dtype = batch, dtype
        self.samples = batch.samples

    def features(self, module: str, sample: int) -> dict[str, torch.Tensor]:
        values = self._batch.features(module, sample)
        return {key: v.to(self._dtype) if v.is_floating_point() else v for key, v in values.items()}


def _prepare(config: RunConfig, plan: Plan) -> tuple[Engine, RunData]:
    device = pick_device(config, int(os.environ.get("LOCAL_RANK", "0")))
    data = open_data(config)
    return build_engine(config, plan, device), data
