"""Every search of the benchmark can be run; what it takes is the benchmark's business."""

import pytest

from benchmarks import planners


@pytest.mark.parametrize("name", ["partition", "disttrain-112", "entrain"])
def test_searches_run(name):
    assert planners.SEARCHES[name].prepare()() is not None


def test_it_reports(tmp_path):
    text = planners.main(["partition", "--repetitions", "1", "--no-simulation"]).write(tmp_path).read_text()
    assert "| 512 layers into 64 stages |" in text
