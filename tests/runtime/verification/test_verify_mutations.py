"""`motet verify` with a bug planted in the runtime: it must see every one, in every dtype that does not hide it.

Each bug is a patch of one function that leaves shapes, messages and collectives as they are: nothing crashes and
nothing hangs, only numbers are wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from one_process import check_together, verify
from sampling import in_campaigns
from scenario import Scenario
from split_backwards import split_at_random
from torch import Tensor

from motet.models.stages import causal as merge
from motet.models.stages import language_model as language_model_stage
from motet.parallel.context.packed_attention import PackedRow
from motet.parallel.tensor import sequence_parallel
from motet.runtime import local_model
from motet.runtime.communication import gradient_reduction as gradients
from motet.runtime.stage_runner import StageRunner
from motet.schedule import program

Patch = Callable[[pytest.MonkeyPatch], None]

CHAIN = Scenario(llm_pp=2, placement="colocated")
REPLICAS = Scenario(dp=2, placement="replicated", items="half")
GROUPS = Scenario(llm="qwen3", tp=2, placement="replicated")
SHARES = replace(GROUPS, sequence_parallel=True)
PACKED = Scenario(packing=True, placement="replicated")


@dataclass(frozen=True)
class Bug:
    name: str
    plant: Patch
    scenario: Scenario
    where: tuple[str, ...]
    """The modules whose gradients it spoils, at least."""
    seen_in_bfloat16: bool = True
    """Whether it is larger than what bfloat16 explains."""


BUGS: list[Bug] = []


def bug(scenario: Scenario, *where: str, seen_in_bfloat16: bool = True) -> Callable[[Patch], Patch]:
    def register(plant: Patch) -> Patch:
        name = plant.__name__.replace("_", " ")
        BUGS.append(Bug(name, plant, scenario, where, seen_in_bfloat16))
        return plant

    return register


def wrap(patch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Puts `change(original, *arguments)` in the place of `owner.name`."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs))


@bug(CHAIN, "vision", "audio")
def rows_of_a_route_in_the_wrong_order(patch: pytest.MonkeyPatch) -> None:
    def flipped(original: Any, self: StageRunner, leaves: Any, members: Any) -> dict[str, Tensor]:
        return {source: tokens.flip(0) for source, tokens in original(self, leaves, members).items()}

    wrap(patch, StageRunner, "_incoming", flipped)


@bug(CHAIN, "vision")
def samples_in_the_wrong_order_after_routing(patch: pytest.MonkeyPatch) -> None:
    """Only the samples that have an image, only where there are several."""

    def rotated(original: Any, samples: Any, module: str, source: str, sequences: Any) -> Tensor:
        places = original(samples, module, source, sequences)
        first = next((sample.num_outputs(source) for sample in samples if sample.has(source)), 0)
        return places.roll(first)

    wrap(patch, language_model_stage, "places_of_outputs", rotated)


@bug(CHAIN, "vision", "audio")
def gradients_of_one_microbatch_lost_on_the_way(patch: pytest.MonkeyPatch) -> None:
    def lossy(original: Any, self: StageRunner, cell: Any, gradients: Any) -> Any:
        returned = original(self, cell, gradients)
        return {
            route: torch.zeros_like(gradient)
            if cell.microbatch == 1 and route.source.module != cell.module
            else gradient
            for route, gradient in returned.items()
        }

    wrap(patch, StageRunner, "backward", lossy)


@bug(CHAIN, "vision", "audio")
def no_gradient_ever_reaches_the_encoders(patch: pytest.MonkeyPatch) -> None:
    def silent(original: Any, self: StageRunner, cell: Any, gradients: Any) -> Any:
        returned = original(self, cell, gradients)
        return {
            route: torch.zeros_like(gradient) if route.source.module != cell.module else gradient
            for route, gradient in returned.items()
        }

    wrap(patch, StageRunner, "backward", silent)


@bug(CHAIN, "language_model")
def gradients_cross_a_stage_boundary_twice_as_large(patch: pytest.MonkeyPatch) -> None:
    def doubled(original: Any, self: StageRunner, cell: Any, gradients: Any) -> Any:
        returned = original(self, cell, gradients)
        return {route: gradient * (1 + (route.source.module == cell.module)) for route, gradient in returned.items()}

    wrap(patch, StageRunner, "backward", doubled)


@bug(REPLICAS, "vision", "audio", "language_model")
def mean_over_replicas_instead_of_the_sum(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, gradients, "_local_sum", lambda original, copies: original(copies) / 2)


@bug(REPLICAS, "language_model")
def a_replica_without_images_skips_its_share_of_the_reduction(patch: pytest.MonkeyPatch) -> None:
    """In this scenario all images are on the first replica; the collective itself still takes place."""

    def skipping(original: Any, copies: Any) -> Tensor:
        return original(copies) * (dist.get_rank() == 0)

    wrap(patch, gradients, "_local_sum", skipping)


@bug(REPLICAS, "vision", "audio", "language_model")
def a_mean_of_means_over_microbatches(patch: pytest.MonkeyPatch) -> None:
    """Divides by the tokens of the microbatch, and then by the number of microbatches."""

    def per_microbatch(original: Any, self: StageRunner, cell: Any, inputs: Any, **kwargs: Any) -> None:
        if self._loss_weight:
            assignment = self._routes.assignment.microbatches[self.name]
            tokens = sum(self._batch.samples[i].num_loss_tokens[self.data_module] for i in self._routes.samples(cell))
            self._loss_scale = self._loss_weight / tokens / sum(map(len, assignment))
        original(self, cell, inputs, **kwargs)

    wrap(patch, StageRunner, "forward", per_microbatch)


@bug(CHAIN, "vision", "audio", "language_model")
def labels_shifted_by_one_too_many(patch: pytest.MonkeyPatch) -> None:
    def twice(original: Any, features: Any) -> Any:
        return original([{"labels": original([own])} for own in features])

    wrap(patch, language_model_stage, "labels_of", twice)


@bug(PACKED, "language_model")
def packed_samples_see_those_before_them(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, PackedRow, "__init__", lambda original, self, lengths, device: original(self, (sum(lengths),), device))


@bug(replace(PACKED, packed_attention="sdpa"), "language_model")
def positions_go_on_from_sample_to_sample(patch: pytest.MonkeyPatch) -> None:
    """Then transformers sees no samples in a row, and each looks at those before it."""
    patch.setattr(merge.SequenceLayout, "position_ids", lambda self: torch.arange(self.shape[1])[None])


@bug(GROUPS, "vision", "audio", "language_model")
def a_tensor_parallel_region_passes_on_partial_gradients(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, sequence_parallel, "copy_to_group", lambda original, x, tp: x)


@bug(GROUPS, "language_model")
def norms_of_heads_are_not_summed_over_the_group(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, local_model, "tp_reduce_gradients", lambda original, stage: None)


@bug(SHARES, "vision", "audio", "language_model")
def norms_of_shares_of_the_sequence_are_summed_on_one_rank_only(patch: pytest.MonkeyPatch) -> None:
    """Rank 0 is right. The other one holds another gradient of the same parameter, and would drift away."""

    def one_sided(original: Any, stage: Any) -> None:
        kept = [parameter.grad.clone() for parameter in stage.parameters() if parameter.grad is not None]
        original(stage)
        if dist.get_rank() == 1:
            for parameter, gradient in zip((p for p in stage.parameters() if p.grad is not None), kept, strict=True):
                parameter.grad.copy_(gradient)

    wrap(patch, local_model, "tp_reduce_gradients", one_sided)


@bug(CHAIN, "language_model")
def a_weight_half_is_lost(patch: pytest.MonkeyPatch) -> None:
    """Of one microbatch on one stage."""
    cut = {name: split_at_random(generator, name, share=1.0) for name, generator in program.GENERATORS.items()}
    patch.setattr(program, "GENERATORS", cut)

    def lossy(original: Any, self: StageRunner, cell: Any) -> Any:
        is_lost = (cell.module, cell.stage, cell.microbatch) == ("language_model", 1, 1)
        return () if is_lost else original(self, cell)

    wrap(patch, StageRunner, "backward_weight", lossy)


@bug(CHAIN, "language_model", seen_in_bfloat16=False)
def one_norm_in_a_thousandth_too_large(patch: pytest.MonkeyPatch) -> None:
    def scaled(original: Any, self: local_model.LocalModel) -> None:
        original(self)
        for p in self.parameters:
            if p.name.endswith("layers.3.post_attention_layernorm.weight"):
                p.parameter.grad.mul_(1.001)

    wrap(patch, local_model.LocalModel, "finish_gradients", scaled)


def outcome(scenario: Scenario) -> Any:
    return run_distributed(lambda rank: verify(scenario), scenario.num_ranks)[0]


USUAL = (
    "rows of a route in the wrong order",
    "a replica without images skips its share of the reduction",
    "packed samples see those before them",
    "positions go on from sample to sample",
    "norms of shares of the sequence are summed on one rank only",
    "a weight half is lost",
)
"""Bugs that `make test` plants: one of routes, reductions, packing, sequence parallelism and schedules."""


@pytest.mark.parametrize(
    "planted",
    [*(bug for bug in BUGS if bug.name in USUAL), *in_campaigns(bug for bug in BUGS if bug.name not in USUAL)],
    ids=lambda planted: planted.name,
)
def test_a_planted_bug_is_seen(planted: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.plant(monkeypatch)
    comparison = outcome(planted.scenario)
    assert not comparison.passed
    for module in planted.where:
        assert comparison.max_grad_rel_err_of_module[module] > comparison.tolerance, module


ROUNDED = [(bug, "bfloat16" if bug.seen_in_bfloat16 else "float32") for bug in BUGS]
ROUNDED = [ROUNDED[0], *in_campaigns(ROUNDED[1:])]


@pytest.mark.parametrize(("planted", "dtype"), ROUNDED, ids=lambda value: getattr(value, "name", value))
def test_a_planted_bug_is_larger_than_rounding(planted: Bug, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.plant(monkeypatch)
    assert not outcome(replace(planted.scenario, dtype=dtype)).passed


@pytest.mark.campaign
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_without_a_bug_they_pass(dtype: str) -> None:
    check_together([replace(scenario, dtype=dtype) for scenario in (CHAIN, REPLICAS, GROUPS, SHARES, PACKED)])
