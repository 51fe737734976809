"""The picture of a run's data shows the numbers that `DataStats` holds."""

from pathlib import Path

import numpy as np
import pytest

from motet.plan import ModulePlan, Plan, Replica, Stage
from motet.planner.entrain.profiling_size import ProfilingSize
from motet.report.data_stats import AssignmentStats, DataStats, ModuleStats, RatioStats
from motet.report.pictures import plot_data_stats, save_data_stats


def stats() -> DataStats:
    stage = Stage(layers=(0, 2), ranks=(0,))
    module = ModulePlan(kind="language_model", num_layers=2, replicas=(Replica(stages=(stage,)),))
    plan = Plan(modules={"llm": module}, edges=(), num_microbatches=2, schedule="1f1b", assignment="random")
    tokens = {"vision": [0.0, 4, 0, 2], "llm": [5.0, 7, 1, 900]}
    ratio = RatioStats(0.5, np.ones(4), {1: np.array([0.0, 1.0]), 2: np.array([0.4, 0.6])})
    return DataStats(
        plan,
        global_batch_size=2,
        num_batches=1,
        modules={name: ModuleStats(*[np.array(t)] * 3, np.empty(0), np.empty(0)) for name, t in tokens.items()},
        ratios={"vision": ratio},
        profiling_size=ProfilingSize(4, (1, 1), 3, 9),
        why_no_profiling_size=None,
        assignments={"random": AssignmentStats(0.25, 0.4), "entrain": AssignmentStats(0.2, 0.1)},
    )


def test_what_is_drawn() -> None:
    tokens, ratios, idle = plot_data_stats(stats()).axes
    drawn = {str(line.get_label()): list(line.get_xdata()) for line in tokens.get_lines()}
    assert drawn == {"vision (50% of samples)": [2, 4], "llm (100% of samples)": [1, 5, 7, 900]}
    lines = {str(line.get_label()): line for line in ratios.get_lines()}
    assert list(lines["vision"].get_xdata()) == [1, 2]
    assert list(lines["vision"].get_ydata()) == pytest.approx([0.5, 0.5])
    assert set(lines["b_min"].get_xdata()) == {4}
    assert set(lines["global batch"].get_xdata()) == {2}
    assert [bar.get_width() for bar in idle.patches] == pytest.approx([40, 10])
    assert [label.get_text() for label in idle.texts] == ["250 ms", "200 ms"]


def test_the_picture_is_written(tmp_path: Path) -> None:
    save_data_stats(stats(), tmp_path / "stats.svg")
    assert "<svg" in (tmp_path / "stats.svg").read_text()
