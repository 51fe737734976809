"""Prints what the machine has: versions of the software, the devices and their links."""

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import shutil
import subprocess
from contextlib import suppress

import torch
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    args = parser.parse_args()
    found: dict[str, object] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    for package in ("transformers", "triton", "flash-attn", "torchao"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if args.device == "cuda":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None
        for number in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(number)
            found[f"gpu {number}"] = (
                f"{device.name}, {device.total_memory / 2**30:.0f} GiB, sm_{device.major}{device.minor}"
            )
        if tool := shutil.which("nvidia-smi"):
            links = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, check=False).stdout
            found["links"] = links
    print(json.dumps(found))


if __name__ == "__main__":
    main()
