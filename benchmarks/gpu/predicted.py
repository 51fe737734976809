"""Profiles the stage on the device, then compares the predicted iteration with the measured one."""

from pathlib import Path
from typing import Any

from benchmarks.gpu.models import run_config
from motet.api import profile, train


def predicted_and_measured(*, output: Path, **options: Any) -> dict[str, Any]:
    """`options`: of `run_config`."""
    output.mkdir(parents=True)
    costs = output / "costs.json"
    costs.write_text(profile(run_config(output / "run", **options)).to_json())
    result = train(run_config(output / "run", costs=costs, **options))
    measured, predicted = (result[key]["iteration_time_s"] for key in ("measured", "predicted"))
    return {"measured_s": measured, "predicted_s": predicted, "ratio": predicted / measured}
