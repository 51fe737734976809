"""Replicas that share parameters by rows, in several groups: whoever loses a share gets it from another group."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from distributed import run_distributed
from interrupted_training import (
    STEPS,
    all_at,
    at,
    before_each_step,
    die,
    failures,
    once_a_node_has_joined,
    undisturbed,
    wait_for_a_change,
)
from joining_nodes import one_that_joins
from ledger import applied_ids, recorded
from training import LANGUAGE_MODEL, run_config
from victims import check_replicas

from motet.api import read_problem
from motet.config import RunConfig
from motet.errors import UserError
from motet.plan import ContextOptions, ModulePlan, Plan, Replica, Stage
from motet.planner.from_run_file import plan_for
from motet.resilience.launch_nodes import train_on_nodes
from motet.resilience.membership import Change, Membership
from motet.resilience.recover import TrainingProcess
from motet.resilience.succession import Succession, check_survivable
from motet.runtime.training.trainer import Trainer
from motet.runtime.training.worker import train_worker

FORK = multiprocessing.get_context("fork")
LM = "language_model"
VISION_TRAIN = "model__encoders__vision__train"


def config_of(output: Path, *, num_nodes: int = 4, num_devices: int = 4, **settings: Any) -> RunConfig:
    """A replica on each device, by planner fsdp; no checkpoints, so nobody can go back to one."""
    settings = {"train__failures": {"tolerate": 1, "detect_s": 10, "restarts": 0}, **settings}
    return run_config(
        output, parallel__planner="fsdp", parallel__explicit={}, parallel__placement=None,
        parallel__num_microbatches=1, parallel__limits={"dp": (num_devices,)}, train__steps=STEPS,
        train__dtype="float64", cluster__num_devices=num_devices, cluster__num_nodes=num_nodes, **settings,
    )  # fmt: skip


def plan_of(config: RunConfig) -> Plan:
    return plan_for(config, read_problem(config))


@contextmanager
def checked(folder: Path) -> Iterator[None]:
    """After each recovery all holders of a share hold the same bits; no sample is lost or counted twice."""
    recovered = TrainingProcess._recovered

    def check(self: TrainingProcess, *args: Any) -> Trainer:
        trainer = recovered(self, *args)
        check_replicas(trainer)
        return trainer

    with recorded(folder), mock.patch.object(TrainingProcess, "_recovered", check):
        yield
    assert applied_ids(folder).keys() == set(range(1, STEPS + 1))


def test_lost_shares_are_copied_from_the_other_group(tmp_path: Path) -> None:
    """A rank of the first group is killed, and another node joins; then the second group is killed as a whole, of which
    the first one's state has been copied."""
    config = config_of(tmp_path / "run")
    plan, is_small = plan_of(config), FORK.Event()
    assert {(len(m.replicas), m.sharded_replicas) for m in plan.modules.values()} == {(4, 2)}
    kill_one, kill_group = at(2, 1, die), all_at(5, (0, 1), die)

    def lose_and_wait(trainer: Trainer) -> None:
        kill_one(trainer)
        if trainer.engine.model.mesh.world_size == 2 and trainer.finished_steps == 3:
            is_small.set()
            wait_for_a_change(trainer)
        kill_group(trainer)

    with checked(tmp_path), one_that_joins(config, plan, is_small.wait), before_each_step(lose_and_wait):
        result = train_on_nodes(config, plan, None, num_nodes=4, node_size=1)
    assert result["losses"] == pytest.approx(undisturbed(), rel=1e-12)
    lost, joined, *rest = failures(config)
    one = "1 whole pipeline of 2 replicas that share parameters"
    assert lost["done"] == f"went on with step 3: {one}; the plan has no use for node 0, waiting"
    assert joined["done"] == "went on with step 5: 2 whole pipelines of 2 replicas that share parameters"
    assert rest, "both are lost together, or one after the other"
    assert all(line["done"].startswith(f"went on with step 6: {one}") for line in rest)
    # Values and both moments in float64 of each parameter, each share once: node 0 waited meanwhile. Words are tied.
    workloads = [module.workload for module in read_problem(config).modules.values()]
    num_parameters = sum(layer.num_parameters for workload in workloads for layer in workload.layers)
    num_parameters -= LANGUAGE_MODEL["vocab_size"] * LANGUAGE_MODEL["hidden_size"]
    assert joined["moved_bytes"] == num_parameters * 3 * 8
    assert {line["moved_bytes"] for line in (lost, *rest)} == {0}


def unharmed(config: RunConfig, plan: Plan) -> list[float]:
    """The losses of the plan, without `train.failures`."""
    config = config.model_copy(update={"train": config.train.model_copy(update={"failures": None})})
    result: dict[str, Any] = run_distributed(lambda _: train_worker(config, plan), plan.num_ranks, timeout=200)[0]
    return list(result["losses"])


def in_pairs(plan: Plan, *, tp_size: int = 1, cp_size: int = 1) -> Plan:
    """Each rank becomes two: of the language model in two stages, or with tensor or context parallelism; encoders are
    on the first."""
    modules = {}
    for name, module in plan.modules.items():
        replicas = []
        for r in range(len(module.replicas)):
            ranks, whole = (2 * r, 2 * r + 1), (0, module.num_layers)
            if name != LM:
                stages = [Stage(layers=whole, ranks=ranks[:1])]
            elif tp_size * cp_size > 1:
                stages = [Stage(layers=whole, ranks=ranks, tp_size=tp_size, cp_size=cp_size)]
            else:
                stages = [Stage(layers=(0, 2), ranks=ranks[:1]), Stage(layers=(2, whole[1]), ranks=ranks[1:])]
            replicas.append(Replica(stages=tuple(stages)))
        modules[name] = replace(module, replicas=tuple(replicas), context=ContextOptions(block_size=4))
    return replace(plan, modules=modules)


PAIRS: dict[str, dict[str, int]] = {
    "stages, frozen": {},
    "tensor parallel": {"tp_size": 2},
    "context parallel": {"cp_size": 2},
}


@pytest.mark.campaign
@pytest.mark.parametrize(
    "case",
    ["crosswise", "whole parameters", "whole encoders", "within nodes", *PAIRS],
)
def test_a_killed_rank_of_a_hybrid_plan(tmp_path: Path, case: str) -> None:
    """Of each group a node is lost; who is left makes a group. Within nodes, a whole group is."""
    settings = {VISION_TRAIN: {"module": False}} if case == "stages, frozen" else {}
    config = config_of(tmp_path / "run", num_nodes=2 if case == "within nodes" else 4, **settings)
    plan = plan_of(config)
    size = 2 if case == "within nodes" else 1
    if case == "whole parameters":
        plan = replace(plan, modules={n: replace(m, whole_parameters=True) for n, m in plan.modules.items()})
    if case == "whole encoders":
        whole = {n: replace(m, fully_sharded=False, sharded_replicas=1) for n, m in plan.modules.items() if n != LM}
        plan = replace(plan, modules={**plan.modules, **whole})
    if case in PAIRS:
        plan, size = in_pairs(plan, **PAIRS[case]), 2
    losses = unharmed(config, plan)
    # Nodes 0 and 3 hold unlike shares, so 1 and 2 together hold all.
    kill = at(2, 0, die) if case == "within nodes" else all_at(2, (0, plan.num_ranks - 1), die)
    with checked(tmp_path), before_each_step(kill):
        result = train_on_nodes(config, plan, None, num_nodes=plan.num_ranks // size, node_size=size)
    assert result["losses"] == pytest.approx(losses, rel=1e-12)
    assert result["world_size"] == plan.num_ranks // 2
    assert all(line["done"].startswith("went on with step 3") for line in failures(config))


@pytest.mark.campaign
def test_a_share_without_another_holder_comes_from_the_checkpoint(tmp_path: Path) -> None:
    failing = {"tolerate": 0, "detect_s": 10}
    config = config_of(tmp_path / "run", num_nodes=2, num_devices=2, train__failures=failing, train__checkpoint_every=1)
    plan = plan_of(config)
    assert {module.sharded_replicas for module in plan.modules.values()} == {2}
    check_survivable(config, plan)

    def kill(trainer: Trainer) -> None:
        if trainer.finished_steps == 3:
            trainer._checkpoints.finish()
        due(trainer)

    due = at(3, 1, die)
    with before_each_step(kill):
        result = train_on_nodes(config, plan, None, num_nodes=2, node_size=1)
    assert result["losses"] == pytest.approx(undisturbed()[-len(result["losses"]) :], rel=1e-12)
    assert 1 <= len(result["losses"]) <= STEPS - 2
    assert failures(config)[-1]["done"].startswith("all nodes were restarted from ")


@pytest.mark.campaign
def test_a_share_without_another_holder_comes_from_the_neighbours_memory(tmp_path: Path) -> None:
    failing = {"tolerate": 0, "detect_s": 10, "copy_every": 2, "restarts": 0}
    config = config_of(tmp_path, num_nodes=2, num_devices=2, train__failures=failing)
    plan, lose = plan_of(config), once_a_node_has_joined(tmp_path, at(5, 1, die))
    with before_each_step(lose), one_that_joins(config, plan, lambda: None):
        result = train_on_nodes(config, plan, None, num_nodes=2, node_size=1)
    assert result["losses"] == pytest.approx(undisturbed(), rel=1e-12)
    assert failures(config)[-1]["done"].endswith("any more: went back from step 5 to the copies in memory of step 4")


def test_plans_that_cannot_lose_a_share_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    two = plan_of(config)
    check_survivable(config, two)
    one = replace(two, modules={n: replace(m, sharded_replicas=4) for n, m in two.modules.items()})
    told = r"tolerate: is 1, but the plan has 1 pipeline of 4 replicas that share parameters .* give dp: 8 or fewer sh"
    with pytest.raises(UserError, match=told):
        check_survivable(config, one)
    none = config_of(tmp_path, train__failures={"tolerate": 0})
    with pytest.raises(UserError, match=r"all nodes back to the last checkpoint, but train\.checkpoint_every is 0"):
        check_survivable(none, one)
    check_survivable(config_of(tmp_path, train__failures={"tolerate": 0}, train__checkpoint_every=1), one)
    stopping = config_of(tmp_path, train__failures={"tolerate": 1, "stop_below_guarantee": True})
    with pytest.raises(UserError, match="stop_below_guarantee: is not supported where replicas share parameters"):
        check_survivable(stopping, two)
    replacing = {"tolerate": 1, "replace_stragglers_after_s": 60}
    with pytest.raises(UserError, match="replace_stragglers_after_s: is not supported where replicas on several nodes"):
        check_survivable(config_of(tmp_path, train__failures=replacing), two)
    check_survivable(config_of(tmp_path, num_nodes=2, train__failures=replacing), two)
    apart = config_of(tmp_path, num_nodes=1)
    with pytest.raises(UserError, match="node 0 belongs to groups 0 and 1 of 2 replicas that share parameters"):
        check_survivable(apart, two)


def hybrid_plan(num_groups: int, sharing: int, num_stages: int) -> Plan:
    """A model of one layer a stage, each on a rank of its own."""

    def replica(r: int) -> Replica:
        return Replica(stages=tuple(Stage(layers=(s, s + 1), ranks=(r * num_stages + s,)) for s in range(num_stages)))

    module = ModulePlan(
        kind="language_model",
        num_layers=num_stages,
        replicas=tuple(replica(r) for r in range(num_groups * sharing)),
        fully_sharded=True,
        sharded_replicas=sharing,
        loss_weight=1.0,
    )
    return Plan(modules={LM: module}, edges=(), num_microbatches=1)


Share = tuple[int, int]
"""Layer and place among those that share it."""


def shares_by_node(plan: Plan, nodes: tuple[int, ...], size: int) -> dict[int, set[Share]]:
    module = plan.modules[LM]
    held: dict[int, set[Share]] = {node: set() for node in nodes}
    for r, replica in enumerate(module.replicas):
        for s, stage in enumerate(replica.stages):
            for ranks in module.sharing_groups(r, s):
                for place, rank in enumerate(ranks):
                    held[nodes[rank // size]].add((stage.layers[0], place))
    return held


@pytest.mark.parametrize(
    ("num_groups", "sharing", "num_stages", "size"),
    [(2, 2, 1, 1), (3, 2, 1, 1), (2, 3, 1, 1), (2, 2, 2, 1), (2, 2, 2, 2), (3, 2, 1, 2), (4, 2, 1, 2), (2, 4, 1, 2)],
)
def test_whatever_is_lost_training_goes_on_if_each_share_is_left(
    num_groups: int, sharing: int, num_stages: int, size: int
) -> None:
    """For all sets of lost nodes there are as many groups as nodes suffice for, and whoever is left out holds nothing
    that nobody else does, or hands it over."""
    plan = hybrid_plan(num_groups, sharing, num_stages)
    nodes = tuple(range(plan.num_ranks // size))
    held, num_of_group = shares_by_node(plan, nodes, size), len(nodes) // num_groups
    everything = set().union(*held.values())
    first = Membership(generation=1, nodes=nodes, num_admitted=len(nodes), plan=plan.to_json())
    for number in range(1, len(nodes) + 1):
        for lost in combinations(nodes, number):
            changes = [Change("lost", node, "", 0.0) for node in lost]
            now = Succession(size, None, first_plan=plan.to_json())(first, changes)
            left = [node for node in nodes if node not in lost]
            if len(left) < num_of_group:
                assert not now.saves_checkpoint
                continue
            then = Plan.from_json(now.plan)
            assert len(then.modules[LM].replicas) == len(left) // num_of_group * sharing
            assert then.modules[LM].sharded_replicas == sharing
            assert then.num_ranks == len(now.nodes) * size
            needed = shares_by_node(then, now.nodes, size)
            assert set().union(*needed.values()) == everything
            there = set().union(*(held[node] for node in now.all_nodes))
            assert there == set().union(*(held[node] for node in left)), "a holder was left out"
