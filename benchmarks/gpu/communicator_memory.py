"""Memory that the communicators of two ranks take of a device, beside what `motet plan` computes for them."""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.models import run_config
from motet.api import read_problem
from motet.config import RunConfig
from motet.costs.communication import communicator_bytes
from motet.plan import Plan
from motet.planner.from_run_file import plan_for
from motet.runtime.assembly import build_engine, pick_device
from motet.runtime.communication.agreement import gather_values
from motet.runtime.launch import launch
from motet.schedule.communicators import communicators


def _used_outside_of_torch(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def work(config: RunConfig, plan: Plan) -> dict[str, Any]:
    device = pick_device(config, dist.get_rank())
    dist.barrier()
    torch.zeros(1, device=device)
    before = _used_outside_of_torch(device)
    engine = build_engine(config, plan, device)
    opened = engine.open_communicators()
    used = gather_values(int, _used_outside_of_torch(device) - before)
    return {
        "opened": opened,
        "bytes": used,
        "computed_bytes": communicator_bytes(communicators(plan), plan.num_ranks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = run_config(Path(folder), args.device, tiny=True, dp=2)
        plan = plan_for(config, read_problem(config))
        print(json.dumps(launch(work, config, plan, num_processes=2, device=args.device)))


if __name__ == "__main__":
    main()
