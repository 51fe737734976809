"""What the nodes of a run have to agree on."""

from pathlib import Path

import pytest
from interrupted_training import config_of

from motet.resilience.membership import RunRecord, as_json, first_difference


def test_comes_back_from_a_store(tmp_path: Path) -> None:
    run = RunRecord(config=as_json(config_of(tmp_path)), restarts=2)
    assert RunRecord.from_json(run.to_json()) == run
    assert first_difference(config_of(tmp_path), run) is None


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"train__steps": 7}, "train.steps: is 7 here and is 6 there"),
        ({"train__dtype": "float32"}, 'train.dtype: is "float32" here and is "float64" there'),
        ({"train__failures": {"tolerate": 2, "detect_s": 10}}, "train.failures.tolerate: is 2 here and is 1 there"),
        ({"train__resume": "latest"}, None),
        ({"data__workers": 2}, None),
        ({"data__servers": ["grpc://here:1"]}, None),
    ],
)
def test_names_the_key_that_differs(tmp_path: Path, overrides: dict[str, object], told: str | None) -> None:
    run = RunRecord(config=as_json(config_of(tmp_path)))
    assert first_difference(config_of(tmp_path, **overrides), run) == told


def test_names_what_only_one_has(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    there = as_json(config)
    there["train"]["future"] = 1
    del there["train"]["eps"]
    assert first_difference(config, RunRecord(config=there)) == "train.eps: is 1e-08 here and is not given there"
    there["train"]["eps"] = 1e-8
    assert first_difference(config, RunRecord(config=there)) == "train.future: is not given here and is 1 there"
