"""The kernels compile for a GPU, on a machine without one: what the interpreter takes, the compiler may not."""

import json
import os
import subprocess
import sys

from checkout import ROOT


def test_for_hopper() -> None:
    sizes = ["--capabilities", "90", "--dtypes", "bf16", "--dims", "24", "--block", "32"]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.attention_kernel_resources", "--json", *sizes],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [each["kernel"] for each in found] == ["forward", "gradient of queries", "gradients of keys and values"]
    for each in found:
        assert each["fits"]
        assert each["stack_bytes"] == 0
        assert 0 < each["registers"] <= 255
