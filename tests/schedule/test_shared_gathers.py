"""Which fully sharded stages gather their parameters block by block."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from plans import language_model, module, replica, routes_of, samples

from motet.plan import Edge, ModulePlan, Plan
from motet.schedule.action import Compute, Kind
from motet.schedule.program import make_program
from motet.schedule.routes import Cell
from motet.schedule.shared_gathers import _can_run_together, _Sharing, gathered_by_block, gathers_by_block

ALL = {("llm", r, s) for r in (0, 1) for s in (0, 1)}


def shared(planned: ModulePlan) -> ModulePlan:
    return replace(planned, fully_sharded=True, sharded_replicas=2)


def plan(*, frozen: bool = False, schedule: str = "1f1b") -> Plan:
    """Two replicas of an encoder and of a language model of two stages, on ranks of their own."""
    llm = language_model(replica(0, 1), replica(2, 3), trainable=() if frozen else None)
    return Plan(
        modules={"vision": shared(module(replica(4), replica(5))), "llm": shared(llm)},
        edges=(Edge(source="vision", target="llm"),),
        num_microbatches=2,
        schedule=schedule,
    )


def found(given: Plan, lacking: dict[int, list[str]] | None = None, number: int = 4) -> frozenset[tuple[str, int, int]]:
    batch = samples(number, ["vision", "llm"], lacking)
    return gathered_by_block(make_program(given.schedule, routes_of(given, batch)))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble_h1"])
def test_replicas_that_run_alike_gather_by_block(schedule: str) -> None:
    assert found(plan(schedule=schedule)) == ALL


def test_images_in_one_replica_matter_where_gradients_depend_on_them() -> None:
    without = {2: ["vision"], 3: ["vision"]}
    assert found(plan(), without) == ALL
    # Under a frozen language model the other replica has no backward.
    assert found(plan(frozen=True)) == ALL
    assert not found(plan(frozen=True), without)
    assert not found(plan(frozen=True), {3: ["vision"]})


def test_images_matter_where_they_enter_a_later_layer() -> None:
    later = replace(plan(), edges=(Edge(source="vision", target="llm", layers=(1,)),))
    assert found(later) == ALL
    assert found(later, {3: ["vision"]}) == {("llm", 0, 0), ("llm", 1, 0)}


def test_unlike_numbers_of_microbatches_gather_once() -> None:
    alone = Plan(modules={"llm": plan().modules["llm"]}, edges=(), num_microbatches=2)
    assert found(alone) == ALL
    assert not found(replace(alone, replica_microbatches=(2, 3)), number=5)


def test_the_costs_ask_the_same() -> None:
    for lacking in ({}, {3: ["vision"]}):
        given = plan(frozen=True)
        routes = routes_of(given, samples(4, ["vision", "llm"], lacking))
        assert gathers_by_block(routes, "llm", 0) == (("llm", 0, 0) in found(given, lacking))
        assert not gathers_by_block(routes, "vision", 0)


def test_context_parallel_groups_always_gather_by_block() -> None:
    llm = replace(language_model(replica(0)), fully_sharded=True)
    alone = Plan(modules={"llm": llm}, edges=(), num_microbatches=1)
    assert gathered_by_block(make_program("1f1b", routes_of(alone))) == {("llm", 0, 0)}


@pytest.mark.parametrize(("second", "can"), [(("a", "b"), True), (("b", "a"), False)])
def test_actions_that_would_wait_in_a_circle_do_not_gather_together(second: tuple[str, str], can: bool) -> None:
    """Two ranks hold a replica of each of two modules, and run them in the same order, or in turned orders."""
    orders = [("a", "b"), second]
    steps = [[Compute(Kind.FORWARD, Cell(name, rank, 0, 0)) for name in order] for rank, order in enumerate(orders)]
    modules = {name: language_model(replica(0), replica(1)) for name in ("a", "b")}
    program = SimpleNamespace(
        projections=steps,
        participants=lambda step: (step.cell.replica,),
        dependencies=SimpleNamespace(routes=SimpleNamespace(plan=SimpleNamespace(modules=modules))),
    )
    sharings = [_Sharing(name, range(2), 0) for name in ("a", "b")]
    assert _can_run_together(program, sharings) is can  # type: ignore[arg-type]
