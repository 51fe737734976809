"""Programs under NCCL's rules (tests/support/nccl_rules.py): the rules themselves, then models against one process.

`make test` runs each schedule with one kind of layout, `make campaigns` with every kind.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle

import nccl_rules
import pytest
import torch
import torch.distributed as dist
from nccl_rules import run_under_nccl_rules
from one_process import check_together
from sampling import in_campaigns
from scenario import Scenario, ScenarioBatch
from test_contrastive import CASES, USUAL
from test_contrastive import check as check_contrastive
from test_verify_schedules import CHAIN, PLANS

from motet.config import RunConfig
from motet.runtime import engine as engine_module
from motet.runtime.assembly import build_optimizer
from motet.runtime.engine import Engine
from motet.schedule.generators import CONTRASTING, GENERATORS


def breaks(work: Callable[[int], object], world_size: int, monkeypatch: pytest.MonkeyPatch, *said: str) -> None:
    monkeypatch.setattr(nccl_rules, "PATIENCE_S", 2.0)
    with pytest.raises(AssertionError) as failure:
        run_under_nccl_rules(work, world_size)
    for part in said:
        assert part in str(failure.value)


def test_another_order_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int) -> None:
        sizes = (3, 4) if rank else (4, 3)
        works = [dist.all_reduce(torch.ones(size), async_op=True) for size in sizes]
        for each in works:
            each.wait()

    breaks(work, 2, monkeypatch, "'allreduce float32 x 3' on rank 1", "'allreduce float32 x 4' on rank 0")


def test_a_pair_has_one_order_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo pairs them by direction and tag."""

    def work(rank: int) -> None:
        post = [(dist.isend, 1 - rank), (dist.irecv, 1 - rank)]
        works = [operation(torch.ones(2), peer, tag=rank) for operation, peer in post]
        for each in works:
            each.wait()

    breaks(work, 2, monkeypatch, "'1>0 float32 x 2' on rank 1", "'0>1 float32 x 2' on rank 0")


def test_a_first_operation_waits_for_all_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a pair wait for each other at two communicators."""

    def work(rank: int) -> None:
        first, second = (dist.new_group([0, 1]) for _ in range(2))
        works = [
            dist.all_reduce(torch.ones(1), group=group, async_op=True)
            for group in ((second, first) if rank else (first, second))
        ]
        for each in works:
            each.wait()

    breaks(work, 2, monkeypatch, "its first operation waits on the host for rank")


def test_a_lost_peer_does_not_return_until_the_abort() -> None:
    def work(rank: int) -> str:
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1), group=group)
        if rank == 1:
            group.inner._get_backend(torch.device("cpu")).shutdown()
            return ""
        lost = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        assert lost is not None
        assert not lost.is_completed()
        group.abort()
        with pytest.raises(RuntimeError, match="was aborted during allreduce float32 x 1"):
            lost.wait()
        return "aborted"

    assert run_under_nccl_rules(work, 2) == ["aborted", ""]


def one_update(engine: Engine, config: RunConfig, batch: ScenarioBatch) -> None:
    """Under ZeRO-1."""
    sharded = config.model_copy(update={"parallel": config.parallel.model_copy(update={"zero1": True})})
    optimizer = build_optimizer(sharded, engine.model)
    engine.run(batch)
    optimizer.step(0)
    optimizer.exchange()


KINDS = {
    "tied": {"llm": "llama-tied"},
    "frozen": {"frozen": "all but projectors"},
    "two encoders, halves of the data": {"frozen": "nothing", "items": "half"},
    "context parallelism": {"cp": 2},
    "experts": {"llm": "mixtral", "tp": 2, "ep": 2},
    "fully sharded": {"fully_sharded": True, "dp": 2, "sharded_replicas": 2, "num_samples": 12},
    "ZeRO-1": {"dp": 2},
}
UNEQUAL = Scenario(units=(1, 2, 3), llm_pp=2, llm_cuts=(2,), num_microbatches=2, items="half")
"""Replicas of modules that are not as many as each other's."""
TIED = Scenario(llm="llama-tied", llm_pp=2, placement="colocated", items="half", num_microbatches=3)


def scenario_of(schedule: str, kind: str) -> Scenario:
    scenario = replace(PLANS.get(schedule, CHAIN), schedule=schedule, **KINDS[kind])
    # Every stage has experts.
    return replace(scenario, llm_cuts=(2, 3, 4)) if scenario.ep > 1 and scenario.llm_pp == 4 else scenario


SCHEDULES = [name for name in GENERATORS if name not in CONTRASTING]


def check(scenario: Scenario, *, updates: bool = False) -> None:
    before = one_update if updates else lambda engine, config, batch: None
    check_together([scenario], before=before, run=run_under_nccl_rules)


@pytest.mark.parametrize(
    "scenario",
    [
        TIED,
        replace(TIED, llm="llama", cp=2, cp_method="ring", num_microbatches=2, schedule="zero_bubble_h1"),
    ],
    ids=["tied", "ring"],
)
def test_gradients_equal_one_process(scenario: Scenario) -> None:
    check(scenario)


def test_without_opened_communicators_tied_stages_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_rules, "PATIENCE_S", 4.0)
    monkeypatch.setattr(engine_module, "open_communicators", lambda mesh, device, reducers: 0)
    with pytest.raises(AssertionError, match=r"waits (in vain|on the host) for"):
        check(TIED)


def test_each_schedule_with_one_kind() -> None:
    """All in the same processes."""
    kinds = cycle(["tied", "frozen", "two encoders, halves of the data"])
    scenarios = [scenario_of(schedule, kind) for schedule, kind in zip(SCHEDULES, kinds, strict=False)]
    scenarios.append(scenario_of("dip", "fully sharded"))
    check_together(scenarios, run=run_under_nccl_rules)


@pytest.mark.parametrize("kind", in_campaigns(KINDS))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(schedule: str, kind: str) -> None:
    check(scenario_of(schedule, kind), updates=kind == "ZeRO-1")


@pytest.mark.parametrize("schedule", in_campaigns(SCHEDULES))
def test_unequal_replicas(schedule: str) -> None:
    check(replace(UNEQUAL, schedule=schedule))


@pytest.mark.parametrize("name", ["tensor parallelism", *in_campaigns(sorted(set(USUAL) - {"tensor parallelism"}))])
def test_contrastive(name: str) -> None:
    check_contrastive(CASES[name], run=run_under_nccl_rules)


@pytest.mark.parametrize("schedule", in_campaigns(GENERATORS))
def test_contrastive_schedules(schedule: str) -> None:
    check_contrastive(replace(CASES["stages"], schedule=schedule), run=run_under_nccl_rules)
