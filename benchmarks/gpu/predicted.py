"""Profiles the stage on the device, then compares the predicted iteration with the measured one."""

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.gpu.models import run_config
from motet.api import profile, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        costs = Path(folder) / "costs.json"
        table = profile(run_config(Path(folder) / "output", args.device, tiny=args.tiny))
        costs.write_text(table.to_json())
        result = train(run_config(Path(folder) / "output", args.device, tiny=args.tiny, costs=costs))
    measured, predicted = (result[key]["iteration_time_s"] for key in ("measured", "predicted"))
    print(json.dumps({"measured_s": measured, "predicted_s": predicted, "ratio": predicted / measured}))


if __name__ == "__main__":
    main()
