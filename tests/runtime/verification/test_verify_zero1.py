"""Unlike pipelines of which f + 1 keep each optimizer state: updates are plain AdamW's, gradients after them right.

Campaign: `MOTET_ZERO1_DRAWS`, `MOTET_ZERO1_SEED`, which are printed."""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from random import Random

import pytest
import torch
import torch.distributed as dist
from one_process import check, check_drawn
from sampling import in_campaigns
from scenario import ScenarioBatch
from test_verify_unlike import THREE_TWO_TWO, TWO_BESIDE_ONE, Unlike, pipelines
from test_verify_unlike import draw as draw_unlike

from motet.config import RunConfig
from motet.resilience.state_transfer import LocalState, agree_on_state_owners, parameter_groups, shard_optimizer
from motet.runtime.assembly import build_optimizer
from motet.runtime.engine import Engine
from motet.runtime.training.optimizer import Optimizer
from motet.runtime.verification.verify import collect_gradients, collect_weights

NUM_DRAWS = int(os.environ.get("MOTET_ZERO1_DRAWS", "12"))
SEED = os.environ.get("MOTET_ZERO1_SEED", "5")


@dataclass(frozen=True)
class Kept(Unlike):
    """Of each state, so many pipelines keep it."""

    number: int = 2


def check_updates(scenario: Kept) -> None:
    """Gradients as `motet verify` does, after two updates that are compared with plain ones."""
    check(scenario, tolerance=1e-5, before=partial(update_twice, scenario))


def update_twice(scenario: Kept, engine: Engine, config: RunConfig, batch: ScenarioBatch) -> None:
    """Collective."""
    optimizer = build_optimizer(config, engine.model)
    share(engine, optimizer, scenario.number)
    plain = PlainAdamW(engine, config.train.betas, config.train.eps, config.train.weight_decay)
    for step in range(2):
        engine.model.zero_gradients()
        engine.run(batch)
        gradients = collect_gradients(engine.model)
        optimizer.step(step)
        optimizer.exchange()
        plain.step(gradients, config.train.learning_rate * optimizer.factor(step))
    plain.compare(engine)
    check_keepers(engine, optimizer, min(scenario.number, len(scenario.pipelines)))


def share(engine: Engine, optimizer: Optimizer, number: int) -> None:
    """Collective: as a recovery does, where each rank is a node."""
    holding = LocalState(engine.model, optimizer)
    could_hold = gathered(holding.describe())
    groups = gathered(parameter_groups(holding))
    nothing: list[dict] = [{} for _ in could_hold]
    keepers = agree_on_state_owners(engine.plan, nothing, could_hold, groups, number=number, devices_per_node=1)
    shard_optimizer(holding, engine.executor, could_hold, keepers, devices_per_node=1)


def gathered(mine):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def check_keepers(engine: Engine, optimizer: Optimizer, number: int) -> None:
    """Collective: of every element of every state, so many ranks keep it, and each has a writer."""
    states = optimizer.states()
    trained = [p for p in engine.model.parameters if p.parameter.requires_grad and p.is_kept]
    num_elements, written = Counter(), Counter()
    for p in {p.name: p for p in trained}.values():
        if p.parameter in states:
            num_elements[p.name] += p.parameter.numel()
        written[p.name] += optimizer.writes_state(p)
    whole = {p.name: torch.Size(p.full_shape).numel() for p in trained}
    kept, writers, sizes = Counter(), Counter(), {}
    for elements, of_rank, of_names in gathered((num_elements, written, whole)):
        kept.update(elements)
        writers.update(of_rank)
        sizes |= of_names
    assert kept == {name: number * size for name, size in sizes.items()}
    assert writers == dict.fromkeys(sizes, 1)


class PlainAdamW:
    """On rank 0: torch's own, of whole parameters."""

    def __init__(self, engine: Engine, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        weights = collect_weights(engine.model)
        if weights is None:
            self._parameters: Mapping[str, torch.nn.Parameter] = {}
            return
        self._parameters = {name: torch.nn.Parameter(tensor.clone()) for name, (tensor, *_) in weights.items()}
        groups = [
            {"params": [p], "weight_decay": weight_decay if p.dim() > 1 else 0.0} for p in self._parameters.values()
        ]
        self._adamw = torch.optim.AdamW(groups, betas=betas, eps=eps, foreach=False)

    def step(self, gradients: Mapping[str, list[torch.Tensor]] | None, learning_rate: float) -> None:
        if gradients is None:
            return
        for name, parameter in self._parameters.items():
            parameter.grad = gradients[name][0] if gradients.get(name) else None
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()

    def compare(self, engine: Engine) -> None:
        weights = collect_weights(engine.model)
        for name, versions in (weights or {}).items():
            assert len(versions) == 1, f"ranks hold different {name}"
            torch.testing.assert_close(versions[0], self._parameters[name].detach(), rtol=1e-9, atol=1e-12, msg=name)


TWO_AND_ONE_AND_TWO = pipelines({"tp": 2, "placement": "shared"}, {"llm_pp": 1}, {"llm_pp": 2})
CASES = {
    "3 + 2 + 2 stages, frozen, some without": Kept(
        pipelines=THREE_TWO_TWO, counts=(2, 1, 1), frozen="all but projectors", items="half"
    ),
    "tp 2 beside tp 1, frozen, some without": Kept(
        pipelines=TWO_AND_ONE_AND_TWO, counts=(2, 1, 1), frozen="audio", items="half"
    ),
    "no images and sounds": Kept(pipelines=THREE_TWO_TWO, counts=(2, 1, 1), items="none"),
    "one keeper, tied embeddings": Kept(pipelines=TWO_AND_ONE_AND_TWO, counts=(2, 1, 1), llm="llama-tied", number=1),
    "more than there are": Kept(pipelines=TWO_BESIDE_ONE, counts=(1, 2), number=3),
    "cp 2": Kept(
        pipelines=pipelines({"tp": 2, "placement": "shared"}, {"llm_pp": 1}, {"cp": 2, "placement": "shared"}),
        counts=(2, 1, 2),
    ),
    "shared parameters": Kept(
        pipelines=pipelines({"tp": 2, "placement": "shared"}, {"llm_pp": 1}, {"cp": 2, "placement": "shared"}),
        counts=(2, 1, 2),
        fully_sharded=True,
    ),
}
USUAL = ("one keeper, tied embeddings", "shared parameters")


@pytest.mark.parametrize("name", [*USUAL, *in_campaigns(n for n in CASES if n not in USUAL)])
def test_updates_and_gradients_are_those_of_plain_torch(name: str) -> None:
    check_updates(CASES[name])


def draw(rng: Random) -> Kept:
    unlike = draw_unlike(rng)
    drawn = {field.name: getattr(unlike, field.name) for field in fields(unlike)}
    return Kept(**drawn, number=rng.choice([1, 1, 2, 2, 3]))


@pytest.mark.campaign
def test_drawn_ones() -> None:
    print(f"MOTET_ZERO1_SEED={SEED} MOTET_ZERO1_DRAWS={NUM_DRAWS}")
    check_drawn(draw, check_updates, SEED, NUM_DRAWS)
