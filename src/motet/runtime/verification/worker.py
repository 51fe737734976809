"""The worker of `motet verify`: runs on every rank."""

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch

from motet.config import RunConfig
from motet.data.loader import Loader
from motet.data.run_file import open_data
from motet.data.service.tickets import InProcess
from motet.models.from_run_file import plain_nodes, remove_dropout
from motet.models.graph import ModuleNode
from motet.models.materialize import float64_throughout
from motet.plan import Plan
from motet.runtime.assembly import PARAMETER_DTYPES, build_engine, pick_device
from motet.runtime.verification.optimizer_steps import compare_steps
from motet.runtime.verification.verify import fill_adapters, verify_batch


def verify_worker(config: RunConfig, plan: Plan, steps: int = 0) -> dict[str, Any]:
    """One batch of the run's own data against plain transformers, and the weights after some steps of the optimizer;
    what `motet verify --json` prints, on rank 0."""
    torch.backends.cudnn.allow_tf32 = False  # Convolutions in float32 are to be just that.
    data = open_data(config)
    loader = Loader(InProcess(data.train), config.train.global_batch_size, seed=config.order_seed, batches_ahead=0)
    num_batches = max(1, steps, 2 * plan.run_ahead)
    batches = [_InDtype(next(loader), PARAMETER_DTYPES[config.train.dtype]) for _ in range(num_batches)]
    for batch in batches:
        _encode(config, batch)
    with float64_throughout() if config.train.dtype == "float64" else nullcontext():
        device = pick_device(config, int(os.environ.get("LOCAL_RANK", "0")))
        engine = build_engine(config, plan, device)
        for stage in engine.model.modules():
            remove_dropout(stage)
        fill_adapters(engine.model)

        def build_reference() -> Mapping[str, ModuleNode]:
            return plain_nodes(config, data.preparation.placeholder_ids)

        comparison = verify_batch(
            engine,
            batches[0],
            build_reference,
            dtype=config.train.dtype,
            contrastive_batch_size=config.train.contrastive_batch_size,
            before=batches[1] if plan.run_ahead else None,
        )
        stepped = compare_steps(engine, config, batches[:steps], build_reference) if steps else None
    if comparison is None:
        return {}
    values = comparison.to_json()
    if stepped is None:
        return values
    failures = [*comparison.failures, *stepped.failures]
    return {**values, **asdict(stepped), "failures": failures, "passed": not failures}


def _encode(config: RunConfig, batch: "_InDtype") -> None:
    """Makes latents of images and codes of sounds, in float32 as in a training: no autoencoder and no codec can be
    loaded where all is float64."""
    for name, part in config.model.generators.items():
        for index, sample in enumerate(batch.samples):
            if (part.autoencoder is not None or part.codec is not None) and sample.has(name):
                batch.features(name, index)


class _InDtype:
    """A batch whose pixels and sounds are of the model's dtype."""

    def __init__(self, batch: Any, dtype: torch.dtype) -> None:
        self._batch, self._dtype = batch, dtype
        self.samples = batch.samples

    def features(self, module: str, sample: int) -> dict[str, torch.Tensor]:
        values = self._batch.features(module, sample)
        return {key: v.to(self._dtype) if v.is_floating_point() else v for key, v in values.items()}
