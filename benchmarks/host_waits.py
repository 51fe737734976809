"""Counts where the host waits for an accelerator in a steady step, on a pretended one, by scenario and place.

A step is counted from its first forward to the end of the optimizer's update: the second iteration on a batch of two
microbatches. The loader is not part of it, and collectives are gloo's (`tests/support/pretend_accelerator.py`).
"""

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.reporting import Report
from motet.runtime.assembly import build_engine, build_optimizer

sys.path += [str(Path(__file__).parents[1] / "tests" / folder) for folder in ("", "support")]

from one_process import prepare
from pretend_accelerator import counted, on_accelerator
from scenario import Scenario, ScenarioBatch

Waits = Counter[tuple[str, str]]
"""Number by kind and place."""

SCENARIOS = {
    "padding": Scenario(placement="shared"),
    "packing": Scenario(placement="shared", packing=True),
    "half of the samples without images and sounds": Scenario(placement="shared", items="half"),
    "no images or sounds": Scenario(placement="shared", items="none"),
    "packing, images see themselves whole (`own_item`)": Scenario(
        placement="shared", media_attention="own_item", packing=True
    ),
    "Gemma 3, CLIP, Qwen2-Audio": Scenario(placement="shared", llm="gemma3", vision="clip", audio="qwen2_audio"),
    "Mistral, Pixtral, Whisper": Scenario(placement="shared", llm="mistral", vision="pixtral"),
    "Phi 3, DINOv2, Whisper": Scenario(placement="shared", llm="phi3", vision="dinov2"),
    "Qwen 3, Qwen2.5-VL, Qwen2-Audio, recomputed": Scenario(
        placement="shared", llm="qwen3", vision="qwen2_5_vl", audio="qwen2_audio", recompute=True
    ),
    "Llama 3.2 Vision (cross-attention)": Scenario(merge="cross_attention", llm="mllama", placement="shared"),
    "adapters (LoRA)": Scenario(placement="shared", lora=("language_model",)),
    "context parallelism of 2": Scenario(placement="shared", cp=2),
    "context parallelism of 2, ring": Scenario(placement="shared", cp=2, cp_method="ring"),
    "tensor and sequence parallelism of 2": Scenario(placement="shared", tp=2, sequence_parallel=True),
    "data parallelism of 2": Scenario(placement="shared", dp=2),
    "pipeline of 2 stages, zero-bubble": Scenario(placement="shared", llm_pp=2, schedule="zero_bubble_h1"),
    "mixture of experts (Mixtral)": Scenario(placement="shared", llm="mixtral-kernels"),
    "mixture of experts in a loop, as in float64": Scenario(placement="shared", llm="mixtral"),
    "experts over a tensor-parallel group of 2": Scenario(placement="shared", llm="mixtral-kernels", tp=2, ep=2),
    "experts over 2 replicas": Scenario(placement="shared", llm="mixtral-kernels", dp=2, ep=2),
}


def measure(rank: int, device: torch.device, names: Sequence[str]) -> dict[str, Waits]:
    """In every process: its waits in each scenario."""
    result = {}
    for name in names:
        scenario = replace(SCENARIOS[name], dtype="float32")
        config = scenario.config()
        engine: Any = build_engine(config, scenario.plan(config), device)
        optimizer = build_optimizer(config, engine.model)
        batch = ScenarioBatch(scenario, config)
        for number in range(2):
            engine.model.zero_gradients()
            with counted() as found:
                started = engine.start(batch, seed=(0, number))
                engine.model.clip_gradients(started.gradient_norm, 0.5)
                optimizer.step(number, started.is_finite)
            started.read()
        result[name] = found
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, help="names of scenarios")
    args = parser.parse_args()
    chosen = args.only or list(SCENARIOS)
    by_size: dict[int, list[str]] = defaultdict(list)
    for name in chosen:
        prepare(replace(SCENARIOS[name], dtype="float32"))
        by_size[SCENARIOS[name].num_ranks].append(name)
    worst: dict[str, Waits] = {}
    for num_ranks, names in by_size.items():
        of_ranks = on_accelerator(measure, num_ranks, names)
        for name in names:
            worst[name] = max((waits[name] for waits in of_ranks), key=Counter.total)
    report = Report("host-waits", "How often the host waits for an accelerator in a step")
    report.add(" ".join(str(__doc__).split()))
    report.add("By scenario, on the rank that waits most often:")
    report.table(("scenario", "waits"), [(name, worst[name].total()) for name in chosen])
    places: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for name in chosen:
        for where, number in worst[name].items():
            places[where][name] = number
    if places:
        report.add("By place:")
        report.table(
            ("kind", "place", "waits by scenario"),
            [
                (kind, f"`{place}`", ", ".join(f"{name}: {number}" for name, number in found.items()))
                for (kind, place), found in sorted(places.items(), key=lambda item: (-item[1].total(), item[0]))
            ],
        )
    report.write()


if __name__ == "__main__":
    main()
