"""Runs the commands of a folder's commands.json and writes what each prints: `python record.py 0.1.0`.

Only for the folder of the version that runs: what earlier versions printed stays as it is.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def record(folder: Path) -> None:
    os.chdir(folder)
    Path("printed").mkdir(exist_ok=True)
    for name, arguments in json.loads(Path("commands.json").read_text()).items():
        with tempfile.TemporaryDirectory() as output:
            own = ["--set", f"train.output={output}"] if arguments[0] == "train" else []
            command = [sys.executable, "-m", "motet", *arguments, "--json", *own]
            printed = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for key in UNWANTED:
            printed.pop(key, None)
        (Path("printed") / f"{name}.json").write_text(json.dumps(printed) + "\n")
        print(name, file=sys.stderr)


UNWANTED = ("planning_time_s", "measured", "predicted", "steps_per_s", "data", "checkpoint", "export")
"""What differs each time, or is long and stands elsewhere."""


if __name__ == "__main__":
    record(Path(sys.argv[1]))
