"""Probes a model of several modalities: does a tiny one, over processes, equal its own forward in one process?

As in `motet.runtime.verification.family_probe`. The samples are one for each modality and one of text alone, so that
microbatches are padded and modalities missing in some.
"""

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from motet.assignment.sample import Sample, Segment
from motet.errors import UserError, one_line
from motet.families.capabilities import Capabilities, digest_of, read_capabilities, write_capabilities
from motet.families.discovery.composite import Composite, FeatureFunction, composite_class_of, find_parts
from motet.families.shape_reading.composite_shapes import composite_workload
from motet.families.tiny import perturb, tiny_config
from motet.families.tiny_media import tiny_medium
from motet.models.composite import CompositeNode
from motet.models.materialize import float64_throughout
from motet.plan import LANGUAGE_MODEL
from motet.runtime.verification.family_probe import Trial, announce_probe, found_out, run_trials

TRIALS: Mapping[str, Trial] = {
    "pipeline": Trial(num_microbatches=2),
    "tensor and pipeline": Trial(stages=((0, 1), (2, 3)), tp_size=2, num_microbatches=2),
}
"""Of the language model; encoders are on the first rank."""
KIND_OF_TOKEN = {"image": 1, "video": 2, "audio": 3}
"""Values of `mm_token_type_ids` that processors return; text is 0."""
LARGEST = 20_000_000
"""Parameters. Larger ones have sizes of which motet does not know that they may shrink."""


def composite_capabilities(
    config: PretrainedConfig, features: Sequence[str] = tuple(TRIALS), *, again: bool = False
) -> Capabilities:
    """Returns the capabilities of a multimodal model's family: stored ones, or those probed now and stored.

    `features`: of `TRIALS`, those that have to be known. Raises `UserError` as `probe_composite`, and under torchrun if
    one is not known."""
    tiny = tiny_config(config, media=True)
    digest = digest_of(tiny.to_dict())
    known = None if again else read_capabilities(digest)
    before = {} if known is None else known.reasons
    if known is None or not before.keys() >= set(features):
        announce_probe(config.model_type)
        found = probe_composite(tiny, {name: TRIALS[name] for name in features if name not in before})
        known = replace(found, reasons={**before, **found.reasons})
        write_capabilities(digest, known)
    return known


def probe_composite(tiny: PretrainedConfig, trials: Mapping[str, Trial] = TRIALS) -> Capabilities:
    """Runs every trial. Raises `UserError` if the model or an input of it cannot be made."""
    with float64_throughout():
        model_class = composite_class_of(tiny)
        try:
            with torch.device("meta"):
                described = find_parts(model_class(copy.deepcopy(tiny)))
                size = sum(p.numel() for p in model_class(copy.deepcopy(tiny)).parameters())
        except UserError:
            raise
        except Exception as error:  # Whatever a model raises that cannot be built so.
            reason = one_line(f"{type(error).__name__}: {error}")[:200]
            raise UserError(f"{tiny.model_type}: no tiny model of it can be built to probe it ({reason})") from None
        if size > LARGEST:
            raise UserError(f"{tiny.model_type}: no tiny model of it can be built to probe it ({size} parameters)")

        def build_nodes() -> Mapping[str, CompositeNode]:
            torch.manual_seed(0)
            model = model_class(copy.deepcopy(tiny))
            perturb(model)
            model.double().train()
            return {
                name: CompositeNode(
                    name=name,
                    loss_weight=1.0 if name == LANGUAGE_MODEL else 0.0,
                    model=model,
                    composite=described,
                    shape=composite_workload(model, described, name),
                )
                for name in described.modules
            }

        batch = _Batch(build_nodes()[LANGUAGE_MODEL].model, described)
        reasons = run_trials(trials, build_nodes, batch, described.edges)
    return found_out(tiny.model_type, model_class.__name__, reasons)


class _Batch:
    """One sample for each function but those of videos, with one medium, and one without."""

    def __init__(self, model: Any, composite: Composite) -> None:
        self._generator = torch.Generator().manual_seed(1)
        self._takes = set(inspect.signature(model.forward).parameters)
        self._features: list[dict[str, dict[str, Tensor]]] = []
        samples: list[Sample] = []
        functions = [
            (name, index, function)
            for name, module in composite.encoders.items()
            for index, function in enumerate(module.functions)
            if function.modality != "video"
        ]
        for i, entry in enumerate([functions[0], None, *functions[1:], functions[-1]]):
            samples.append(self._add(str(i), model, composite, entry))
        self.samples = tuple(samples)

    def features(self, module: str, sample: int) -> dict[str, Tensor]:
        return self._features[sample][module]

    def _add(
        self, key: str, model: Any, composite: Composite, entry: tuple[str, int, FeatureFunction] | None
    ) -> Sample:
        before, after = (self._words(4 + len(self._features) * 2) for _ in range(2))
        if entry is None:
            ids = torch.cat([before, after])
            self._features.append({LANGUAGE_MODEL: self._of_text(ids, None)})
            return Sample(key, {LANGUAGE_MODEL: (Segment(len(ids)),)}, {LANGUAGE_MODEL: len(ids) - 1})
        name, index, function = entry
        tensors, number = tiny_medium(model, function, self._generator)
        start = getattr(model.config, "vision_start_token_id", None)
        if function.modality != "audio" and isinstance(start, int):
            before = torch.cat([before, torch.tensor([start])])
        ids = torch.cat([before, torch.full((number,), function.token_id), after])
        of_encoder = dict(tensors) if function.name else {**tensors, "input_ids": ids}
        raw = {each.raw for each in composite.functions}
        others = {k: v for k, v in tensors.items() if k not in raw}
        self._features.append({name: of_encoder, LANGUAGE_MODEL: {**others, **self._of_text(ids, function)}})
        text = (Segment(len(before)), Segment(number, source=name, item=0), Segment(len(after)))
        medium = (Segment(max(number, 1), num_outputs=number, grid=(index,)),)
        return Sample(key, {name: medium, LANGUAGE_MODEL: text}, {LANGUAGE_MODEL: len(ids) - 1})

    def _words(self, number: int) -> Tensor:
        return torch.randint(5, 95, (number,), generator=self._generator)

    def _of_text(self, ids: Tensor, function: FeatureFunction | None) -> dict[str, Tensor]:
        made = {"input_ids": ids, "labels": ids}
        is_medium = torch.zeros_like(ids) if function is None else (ids == function.token_id).long()
        if "mm_token_type_ids" in self._takes:
            made["mm_token_type_ids"] = is_medium * (0 if function is None else KIND_OF_TOKEN[function.modality])
        if "token_type_ids" in self._takes:
            made["token_type_ids"] = is_medium
        return made
