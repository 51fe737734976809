"""Pipelines that do not look alike train one model: other cuts, other numbers of stages, other tensor-parallel sizes,
other numbers of microbatches."""

import os
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import pytest
from one_process import check, check_drawn
from sampling import in_campaigns
from scenario import FROZEN, Scenario

from motet.config import RunConfig
from motet.plan import Plan, Replica

NUM_DRAWS = int(os.environ.get("MOTET_UNLIKE_DRAWS", "12"))
SEED = os.environ.get("MOTET_UNLIKE_SEED", "5")


OF_ALL = ("llm", "vision", "audio", "frozen", "schedule", "packing", "fully_sharded")
"""What pipelines have in common."""


@dataclass(frozen=True)
class Unlike(Scenario):
    """The model, data and freezing of the scenario itself; a layout from each of its pipelines."""

    pipelines: tuple[Scenario, ...] = ()
    counts: tuple[int, ...] = ()
    """Microbatches of each."""

    @property
    def enough_samples(self) -> int:
        return max(4, sum(self.counts) + 1)

    def plan(self, config: RunConfig) -> Plan:
        plans = [pipeline.plan(config) for pipeline in self._alone]
        first_ranks = [sum(plan.num_ranks for plan in plans[:i]) for i in range(len(plans))]
        modules = {
            name: replace(
                module,
                trainable=self._trainable(name, module.num_layers),
                replicas=tuple(
                    _moved(plan.modules[name].replicas[0], first)
                    for plan, first in zip(plans, first_ranks, strict=True)
                ),
            )
            for name, module in plans[0].modules.items()
        }
        return replace(plans[0], modules=modules, replica_microbatches=self.counts)

    @property
    def _alone(self) -> list[Scenario]:
        return [
            replace(
                self.pipelines[i],
                **{name: getattr(self, name) for name in OF_ALL},
            )
            for i in range(len(self.pipelines))
        ]

    @property
    def num_ranks(self) -> int:
        return sum(pipeline.num_ranks for pipeline in self._alone)


def _moved(replica: Replica, first: int) -> Replica:
    return Replica(
        stages=tuple(replace(stage, ranks=tuple(first + rank for rank in stage.ranks)) for stage in replica.stages)
    )


def pipelines(*layouts: dict[str, object]) -> tuple[Scenario, ...]:
    return tuple(Scenario(**{"placement": "colocated", **layout}) for layout in layouts)  # type: ignore[arg-type]


THREE_TWO_TWO = pipelines({"llm_pp": 2}, {"llm_pp": 1}, {"placement": "shared", "llm_cuts": (1,), "llm_pp": 2})
"""Stages in all: 3, 2 and 2, with other cuts."""
TWO_BESIDE_ONE = pipelines({"tp": 2, "placement": "shared"}, {"llm_pp": 1})
SHARED_BESIDE_WHOLE = pipelines({"cp": 2, "placement": "colocated"}, {"llm_pp": 2, "placement": "shared"})
CASES = {
    "3 + 2 + 2 stages": Unlike(pipelines=THREE_TWO_TWO, counts=(4, 3, 2)),
    "frozen encoders": Unlike(pipelines=THREE_TWO_TWO, counts=(4, 3, 2), frozen="all but projectors"),
    "frozen language model": Unlike(pipelines=THREE_TWO_TWO, counts=(1, 3, 2), frozen="all but encoders"),
    "no images and sounds": Unlike(pipelines=THREE_TWO_TWO, counts=(2, 1, 1), items="none"),
    "some without": Unlike(pipelines=THREE_TWO_TWO, counts=(2, 1, 1), items="half", packing=True),
    "tp 2 beside tp 1": Unlike(pipelines=TWO_BESIDE_ONE, counts=(3, 1)),
    "tp 2 beside tp 1, frozen": Unlike(pipelines=TWO_BESIDE_ONE, counts=(1, 2), frozen="all but language model"),
    "query and key norms": Unlike(pipelines=TWO_BESIDE_ONE, counts=(2, 1), llm="qwen3"),
    "sequence parallel": Unlike(
        pipelines=(replace(TWO_BESIDE_ONE[0], sequence_parallel=True), TWO_BESIDE_ONE[1]), counts=(2, 1)
    ),
    "tp 2, 1 and cp 2": Unlike(
        pipelines=pipelines({"tp": 2, "placement": "shared"}, {"llm_pp": 1}, {"cp": 2, "placement": "shared"}),
        counts=(2, 1, 2),
    ),
    "cp 2 beside cp 1": Unlike(pipelines=SHARED_BESIDE_WHOLE, counts=(2, 1)),
    "cp 2 beside cp 1, frozen": Unlike(
        pipelines=SHARED_BESIDE_WHOLE, counts=(1, 2), frozen="all but projectors", items="half"
    ),
    "cp 2 beside cp 1, no images and sounds": Unlike(pipelines=SHARED_BESIDE_WHOLE, counts=(2, 1), items="none"),
    "cp 2 with tp 2 beside cp 1": Unlike(
        pipelines=pipelines({"cp": 2, "tp": 2, "placement": "shared"}, {"llm_pp": 1, "placement": "shared"}),
        counts=(2, 1),
        llm="llama-tied",
        items="half",
    ),
    "cp 2, 1 in one pipeline beside cp 1 with tp 2": Unlike(
        pipelines=pipelines({"llm_pp": 2, "llm_cps": (2, 1), "placement": "shared"}, {"tp": 2, "placement": "shared"}),
        counts=(2, 1),
        items="half",
    ),
    "cp 1, 2 in one pipeline beside cp 3, frozen": Unlike(
        pipelines=pipelines({"llm_pp": 2, "llm_cps": (1, 2), "placement": "shared"}, {"cp": 3, "placement": "shared"}),
        counts=(1, 2),
        frozen="all but projectors",
    ),
    "cp 2, 1 of encoders in one pipeline beside cp 1 with tp 2": Unlike(
        pipelines=pipelines({"encoder_pp": 2, "encoder_cps": (2, 1)}, {"tp": 2, "placement": "shared"}),
        counts=(2, 1),
    ),
    "cp 2 of encoders beside cp 1, frozen": Unlike(
        pipelines=pipelines({"encoder_cp": 2}, {"encoder_pp": 2}),
        counts=(1, 2),
        frozen="all but projectors",
        items="half",
    ),
    "tp 2, 1 and shared parameters": Unlike(
        pipelines=pipelines({"tp": 2, "placement": "shared"}, {"llm_pp": 1}, {"cp": 2, "placement": "shared"}),
        counts=(2, 1, 2),
        fully_sharded=True,
    ),
    "zero bubble": Unlike(pipelines=TWO_BESIDE_ONE, counts=(2, 2), schedule="zero_bubble_h1"),
    "tied embeddings": Unlike(pipelines=TWO_BESIDE_ONE, counts=(2, 1), llm="llama-tied"),
}
USUAL = (
    "some without",
    "sequence parallel",
    "cp 2, 1 of encoders in one pipeline beside cp 1 with tp 2",
    "zero bubble",
)
"""Cases of `make test`; the others combine what these have."""


@pytest.mark.parametrize("name", [*USUAL, *in_campaigns(name for name in CASES if name not in USUAL)])
def test_pipelines_that_do_not_look_alike(name: str) -> None:
    check(CASES[name], tolerance=1e-5)


def draw(rng: Random) -> Unlike:
    number = rng.choice([2, 2, 3])
    drawn: list[dict[str, object]] = []
    for _ in range(number):
        shared = rng.random() < 0.5
        tp, cp = rng.choice([(1, 1), (1, 1), (2, 1), (1, 2), (2, 2)]) if shared else (1, rng.choice([1, 2]))
        layout: dict[str, object] = {"placement": "shared" if shared else "colocated", "tp": tp, "cp": cp}
        if not shared:
            layout |= rng.choice(
                [{}, {"encoder_cp": 2}, {"encoder_pp": 2, "encoder_cps": rng.choice([(1, 2), (2, 1)])}]
            )
        if tp * cp == 1 and rng.random() < 0.3:
            drawn.append({**layout, "llm_pp": 2, "llm_cps": rng.choice([(1, 2), (2, 1)])})
        else:
            drawn.append({**layout, "llm_pp": 1 if tp * cp > 1 else rng.choice([1, 2])})
    frozen = rng.choice(sorted(FROZEN))
    return Unlike(
        llm=rng.choice(["llama", "qwen3", "llama-tied"]),
        frozen=frozen,
        # A batch without images reaches nothing but the language model.
        items=rng.choice(["mixed", "half"] + ["none"] * ("language_model" not in FROZEN[frozen])),
        packing=rng.random() < 0.3,
        schedule=rng.choice(["1f1b", "gpipe", "zero_bubble_h1"]),
        pipelines=pipelines(*drawn),
        counts=tuple(rng.randint(1, 3) for _ in range(number)),
    )


@pytest.mark.campaign
def test_drawn_pipelines() -> None:
    print(f"MOTET_UNLIKE_SEED={SEED} MOTET_UNLIKE_DRAWS={NUM_DRAWS}")
    check_drawn(draw, partial(check, tolerance=1e-5), SEED, NUM_DRAWS)
