"""Tables 2 and 3 from the printed stage times: winners, ranks, and the simulation behind them by hand."""

import pytest

from motet.planner.evaluate import evaluate
from motet.planner.layouts.layout import build_plan
from motet.planner.problem import Degrees
from papers import PAPERS, reproduce
from papers.cornstarch.problems import problem, problems
from papers.cornstarch.tables import LLM, LLM_STAGES, NUM_MICROBATCHES, _iteration_s, _table_2, _table_3


def value(table, what):
    (row,) = [row for row in table.rows if row.what.startswith(what)]
    return row.ours


def test_a_chain_of_equal_stages_by_hand():
    seconds = _iteration_s((("encoder", (100.0, 0.0)), (LLM, (40.0, 60.0))), (("encoder", 1), (LLM, 1)))
    # The first forward, then the second stage without a pause.
    assert seconds == pytest.approx((100 + NUM_MICROBATCHES * 100) / 1e3)


def test_table_3_with_the_stages_that_the_text_speaks_of():
    table = _table_3(equal_stages=True)
    assert value(table, "rows with the same winner, of 6") == 6
    assert value(table, "rank correlation of throughputs") > 0.8
    assert value(table, "rank correlation of ratios") > 0.7


def test_table_3_with_table_9s_stages_is_what_the_papers_readers_found():
    table = _table_3()
    for model, expected in (("VLM-L", 1.49), ("VLM-M", 1.54), ("ALM-L", 2.01)):
        assert value(table, model) == pytest.approx(expected, abs=0.006)


def test_table_2_where_the_language_model_reads_everything():
    low, high = (_table_2(llm) for llm in LLM_STAGES)
    assert value(high, "rows with the same winner, of 9") >= 8
    assert value(high, "rank correlation of throughputs") > 0.9
    assert value(low, "rows with the same winner, of 9") >= 6


@pytest.mark.parametrize("table", [_table_3(), _table_3(equal_stages=True), *map(_table_2, LLM_STAGES)])
def test_nothing_is_calibrated_and_ratios_are_of_printed_numbers(table):
    compared = [row for row in table.rows if row.published is not None]
    assert len(compared) in (6, 9)
    assert all(row.held_out and row.calibrated_on == "nothing" for row in table.rows)
    assert all(0.8 < row.published < 1.6 for row in compared)


def test_the_paper_is_listed_with_its_tables():
    assert "cornstarch" in PAPERS
    assert len(reproduce("cornstarch")) > 4


def test_problems_are_the_papers_models():
    assert len({name for name, _ in problems()}) == 3 * 15
    parameters = {
        "VALM-SL": ("vision", 1.0e9),
        "VALM-MS": ("audio", 1.4e9),
        "VLM-L": ("vision", 18e9),
        "ALM-M": ("audio", 7e9),
    }
    for model, (name, expected) in parameters.items():
        workload = problem(model).modules[name].workload
        assert sum(layer.num_parameters for layer in workload.layers) == pytest.approx(expected, rel=0.2)
    small = problem("VALM-SS")
    llm = small.modules["language_model"].workload
    assert sum(layer.num_parameters for layer in llm.layers) == pytest.approx(8e9, rel=0.05)
    degrees = {"vision": Degrees(tp=2), "audio": Degrees(tp=2), "language_model": Degrees(tp=2, pp=6)}
    assert evaluate(small, build_plan(small, degrees)).fits
