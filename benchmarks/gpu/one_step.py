"""One iteration on one device: where the host waits for it, which share of the time it is idle, and its top kernels."""

import cProfile
import pstats
import re
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.models import run_config
from motet.api import read_problem
from motet.config import RunConfig
from motet.data.loader import Loader
from motet.data.run_file import open_data
from motet.data.service.tickets import InProcess
from motet.devices import synchronize
from motet.plan import Plan
from motet.planner.from_run_file import plan_for
from motet.runtime.assembly import build_engine, pick_device
from motet.runtime.launch import launch


def work(config: RunConfig, plan: Plan) -> dict[str, Any]:
    device = pick_device(config, 0)
    data = open_data(config)
    engine = build_engine(config, plan, device)
    loader = Loader(InProcess(data.train), config.train.global_batch_size, seed=0, batches_ahead=0)
    batches = [next(loader) for _ in range(6)]
    for batch in batches[:2]:
        engine.model.zero_gradients()
        engine.run(batch)
    sites: Counter[str] = Counter()
    if device.type == "cuda":
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            engine.run(batches[2])
            torch.cuda.set_sync_debug_mode("default")
        sites.update(
            f"{Path(w.filename).name}:{w.lineno}" for w in caught if re.search("called a synchronizing", str(w.message))
        )
    synchronize(device)
    began = time.perf_counter()
    for batch in batches[4:]:
        engine.run(batch)
    synchronize(device)
    step_s = (time.perf_counter() - began) / len(batches[4:])
    with cProfile.Profile() as on_host:
        engine.run(batches[4])
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as recorded:
        engine.run(batches[3])
        synchronize(device)
    on_device = torch.autograd.DeviceType.CUDA if device.type == "cuda" else torch.autograd.DeviceType.CPU
    spans = sorted((e.time_range.start, e.time_range.end) for e in recorded.events() if e.device_type == on_device)
    events = recorded.events()
    whole = max(e.time_range.end for e in events) - min(e.time_range.start for e in events)
    kernels: Counter[str] = Counter()
    for event in events:
        if event.device_type == on_device:
            kernels[event.name] += event.time_range.end - event.time_range.start
    num_kernels = sum(event.device_type == on_device for event in events)
    functions = sorted(
        pstats.Stats(on_host).get_stats_profile().func_profiles.items(), key=lambda item: -item[1].tottime
    )
    return {
        "step_s": step_s,
        "busy_s": _covered(spans) / 1e6,
        "num_kernels": num_kernels,
        "waits_of_the_host": sum(sites.values()),
        "waits_by_site": dict(sites.most_common()),
        "idle_share": 1 - _covered(spans) / whole,
        "top_kernels_us": {name[:120]: us for name, us in kernels.most_common(12)},
        "top_functions_s": {f"{name} ({Path(found.file_name).name})": found.tottime for name, found in functions[:12]},
    }


def _covered(spans: list[tuple[float, float]]) -> float:
    covered, end = 0.0, float("-inf")
    for start, stop in spans:
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered


def one_step(**options: Any) -> dict[str, Any]:
    """`options`: of `run_config`."""
    config = run_config(**options, packing=True)
    plan = plan_for(config, read_problem(config))
    found: dict[str, Any] = launch(work, config, plan, num_processes=1, device=options["device"])
    return found
