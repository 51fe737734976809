"""Training under every way to cut a batch: the same losses, step after step, on other microbatches."""

from pathlib import Path

import pytest
from training import first_samples, plan_of, run_config, train

from motet.planner.from_run_file import assignment_by_costs


@pytest.mark.campaign
def test_the_loss_curve_is_that_of_the_batch_as_it_comes(tmp_path: Path) -> None:
    """50 steps with AdamW, in float64."""
    names = ("contiguous", "disttrain", "entrain")
    configs = [
        run_config(
            tmp_path / name,
            parallel__assignment=name,
            parallel__num_microbatches=3,
            parallel__schedule="eager_1f1b",
            train__steps=50,
            train__global_batch_size=6,
            train__dtype="float64",
        )
        for name in names
    ]
    cuts = [
        assignment_by_costs(config, plan)(plan, first_samples(6)) for config in configs for plan in [plan_of(config)]
    ]
    assert all(a != b for i, a in enumerate(cuts) for b in cuts[:i]), "nothing is compared"
    losses = {name: result["losses"] for name, result in zip(names, train(*configs, timeout=300), strict=True)}
    assert len(losses["contiguous"]) == 50
    assert losses["contiguous"][-1] < losses["contiguous"][0]
    for name in names[1:]:
        assert losses[name] == pytest.approx(losses["contiguous"], rel=1e-9)
