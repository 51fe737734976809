"""Cost tables: arithmetic, files, and what is wrong with files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from checkout import ROOT

from motet.costs.cost_model import (
    ZERO,
    CostTable,
    LayerCost,
    LinkCost,
    Load,
    ModuleCosts,
    Quadratic,
    Sharing,
    total,
)
from motet.errors import UserError
from motet.plan import ContextOptions

LAYER = LayerCost(
    forward=Quadratic(constant=1.0, per_token=2.0, per_pair=3.0),
    forward_without_graph=Quadratic(constant=1.0),
    input_gradient=Quadratic(per_token=5.0),
    weight_gradient=Quadratic(per_token=7.0),
    weight_gradient_alone=Quadratic(per_token=11.0),
)
OTHER = LayerCost(
    forward=ZERO, forward_without_graph=ZERO, input_gradient=ZERO, weight_gradient=ZERO, weight_gradient_alone=ZERO
)
TABLE = CostTable(
    modules={"m": {1: ModuleCosts(layers=(OTHER, LAYER, LAYER), stage_forward=Quadratic(constant=0.5))}},
    source="profiled",
    hardware="a machine",
    date="2026-01-02",
    message=LinkCost(latency_s=1e-5, bytes_per_s=1e9),
    optimizer_s_per_parameter=1e-9,
    notes={"ranks": 2},
)


def test_seconds_of_a_load():
    load = Load(tokens=10, pairs=100, sequences=1)
    assert LAYER.forward.seconds(load) == 1 + 20 + 300
    assert total([LAYER.forward, LAYER.input_gradient]).seconds(load) == 321 + 50
    assert LAYER.forward.times(2).seconds(load) == 642


@pytest.mark.parametrize(
    ("input_gradient", "weight_gradient", "expected"),
    [(True, True, 12), (True, False, 5), (False, True, 11), (False, False, 0)],
)
def test_backward_of_every_combination(input_gradient, weight_gradient, expected):
    cost = LAYER.passes(input_gradient=input_gradient, weight_gradient=weight_gradient).backward
    assert cost.seconds(Load(tokens=1)) == expected


def test_file_round_trip(tmp_path):
    path = tmp_path / "costs.json"
    TABLE.save(path)
    assert CostTable.load(path) == TABLE
    # Layers of equal cost stand in the file once.
    assert path.read_text().count('"per_pair"') == 1


def test_tables_of_several_measurements_are_one(tmp_path: Path) -> None:
    """With tensor parallelism, and with groups that share tokens or experts."""
    hybrid = Sharing.of(1, 4, ContextOptions(method="hybrid"), 1)
    experts = Sharing.of(2, 1, ContextOptions(method="hybrid"), 4)
    assert (hybrid.name, experts.name) == ("tp_size 1, cp_size 4, hybrid 2", "tp_size 2, ep 4")
    assert (hybrid.num_ranks, experts.num_ranks, Sharing(2, ep=2).num_ranks) == (4, 4, 2)
    costs = ModuleCosts(layers=(LAYER, OTHER))
    others = [
        replace(TABLE, modules={"m": {2: costs}}, notes={"m, tp_size 2": {}}),
        replace(TABLE, modules={}, groups={"m": {hybrid: costs}}),
        replace(TABLE, modules={}, groups={"m": {experts: costs}}),
    ]
    table = TABLE.with_costs_of(others)
    table.save(tmp_path / "costs.json")
    assert CostTable.load(tmp_path / "costs.json") == table
    assert set(table.modules["m"]) == {1, 2}
    assert set(table.notes) == {"ranks", "m, tp_size 2"}
    assert table.of_group("m", hybrid) == table.of_group("m", experts) == costs
    assert table.of_group("m", Sharing.of(1, 4, ContextOptions(method="ring"), 1)) is None
    assert table.of_groups("m", 1, 4) == [costs]
    assert table.of_groups("m", 1, 1) == []


def test_what_the_table_does_not_have():
    with pytest.raises(ValueError, match="there is no module 'n'; the table has m"):
        TABLE.of("n", 1)
    with pytest.raises(ValueError, match="m was not measured with tp_size 2, only 1"):
        TABLE.of("m", 2)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"modules": {}}', '{"modules": {"m": {"1": {}}}}'])
def test_broken_files(tmp_path, text):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"costs\.json is not a cost table"):
        CostTable.load(path)


def test_missing_file(tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.json: cannot be read"):
        CostTable.load(tmp_path / "nothing.json")


SAVED = ROOT / "tests" / "saved_files" / "0.1.0" / "costs" / "measured.json"


@pytest.mark.parametrize("value", [-1e-3, float("nan"), float("inf"), "x", None, {}, [0], True])
@pytest.mark.parametrize("place", ["a layer", "a stage", "the optimizer", "a link"])
def test_a_table_with_a_cost_that_is_none_is_refused(tmp_path: Path, place: str, value: object) -> None:
    table = json.loads(SAVED.read_text())
    module = next(iter(next(iter(table["modules"].values())).values()))
    terms = {
        "a layer": module["costs"][-1]["forward"],
        "a stage": module["stage_forward"],
        "the optimizer": table,
        "a link": table["message"],
    }[place]
    name = {"the optimizer": "optimizer_constant_s", "a link": "latency_s"}.get(place, "constant")
    terms[name] = value
    (tmp_path / "costs.json").write_text(json.dumps(table))
    with pytest.raises(UserError, match=f"is not a cost table .*{name}: is .*; give a number of at least 0"):
        CostTable.load(tmp_path / "costs.json")


def test_all_saved_tables_are_read() -> None:
    tables = [SAVED, *(ROOT / "benchmarks" / "reports").glob("costs-*.json")]
    assert len(tables) >= 4
    for path in tables:
        CostTable.load(path)
