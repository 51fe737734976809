"""Four processes: the bytes of all messages of one iteration, measured and predicted, by layout.

"Whole" is the layout in float32 with the whole of a tensor from each rank of a tensor-parallel group, as before
messages went in shares: the same program with the functions that say so replaced.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.reporting import Report
from benchmarks.workloads import SyntheticBatch, llama_config, vlm_config
from motet.config import RunConfig
from motet.plan import Plan
from motet.planner.from_run_file import iteration_costs, plan_for, planning_problem
from motet.runtime.assembly import build_engine
from motet.runtime.communication.messages import Mailbox
from motet.runtime.launch import launch
from motet.schedule.routes import derive_routes

TEXT, VISION = "language_model", "vision"
LAYOUTS: Mapping[str, tuple[str, dict[str, dict[str, int]]]] = {
    "pp 4": ("float32", {TEXT: {"pp": 4}}),
    "pp 2 x tp 2": ("float32", {TEXT: {"pp": 2, "tp": 2}}),
    "pp 2 x tp 2, sequence parallel": ("float32", {TEXT: {"pp": 2, "tp": 2, "sequence_parallel": True}}),
    "pp 2 x cp 2": ("float32", {TEXT: {"pp": 2, "cp": 2}}),
    "pp 4, bfloat16": ("bfloat16", {TEXT: {"pp": 4}}),
    "pp 2 x tp 2, sequence parallel, bfloat16": ("bfloat16", {TEXT: {"pp": 2, "tp": 2, "sequence_parallel": True}}),
    "encoder tp 2, then tp 2": ("float32", {VISION: {"tp": 2}, TEXT: {"tp": 2}}),
    "encoder pp 2, then tp 2, bfloat16": ("bfloat16", {VISION: {"pp": 2}, TEXT: {"tp": 2}}),
}


@contextmanager
def whole_messages() -> Iterator[None]:
    """Every rank sends the whole of what its stage outputs."""
    with (
        patch("motet.runtime.stage_runner.row_shares", lambda *stages, **options: 1),
        patch("motet.runtime.local_model.keeps_row_shares", lambda *place: False),
    ):
        yield


def sent_bytes(config: RunConfig, plan: Plan, batch: SyntheticBatch) -> tuple[int, int]:
    """The bytes that all ranks send in one iteration, and those that costs predict of these messages. Collective."""
    engine = build_engine(config, plan, torch.device("cpu"))
    sent: dict[Any, int] = {}
    send = Mailbox.send

    def count(mailbox: Mailbox, message: Any, tensor: torch.Tensor, **options: Any) -> None:
        sent[message] = tensor.numel() * tensor.element_size()
        send(mailbox, message, tensor, **options)

    with patch.object(Mailbox, "send", count):
        engine.run(batch)
    routes = derive_routes(plan, engine.assignment(batch.samples), batch.samples)
    costs = iteration_costs(config, plan)(routes, batch.samples)
    totals = torch.tensor([sum(sent.values()), sum(map(costs.message_bytes, sent))])
    dist.all_reduce(totals)
    return int(totals[0]), int(totals[1])


def measure(runs: Mapping[str, tuple[RunConfig, RunConfig, Plan]], batches: Mapping[str, SyntheticBatch]) -> Any:
    """For each layout: bytes of whole messages, sent bytes, predicted bytes."""
    found = {}
    for name, (config, wide, plan) in runs.items():
        with whole_messages():
            whole, _ = sent_bytes(wide, plan, batches[name])
        found[name] = (whole, *sent_bytes(config, plan, batches[name]))
    return found


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6, help="decoder layers")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--samples", type=int, default=2, help="of one microbatch")
    parser.add_argument("--tokens", type=int, default=128, help="of one sample")
    parser.add_argument("--only", default="", help="layouts whose name begins so")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> Report:
    args = parse(arguments)
    num_samples = args.samples * args.microbatches
    sizes = {"width": args.width, "num_samples": num_samples, "num_microbatches": args.microbatches}
    runs: dict[str, tuple[RunConfig, RunConfig, Plan]] = {}
    batches: dict[str, SyntheticBatch] = {}
    for name, (dtype, degrees) in LAYOUTS.items():
        if not name.startswith(args.only):
            continue
        wide = llama_config(num_blocks=args.layers, **sizes)
        if VISION in degrees:
            wide = vlm_config(num_vision_blocks=4, num_llm_blocks=args.layers, trains="all", **sizes)
        values = wide.model_dump(exclude_unset=True)
        values["parallel"] |= {"planner": "explicit", "explicit": degrees}
        wide, config = (
            RunConfig.model_validate(
                {**values, "cluster": {"num_devices": 4}, "train": {**values["train"], "dtype": each}}
            )
            for each in ("float32", dtype)
        )
        batches[name] = SyntheticBatch(wide, num_samples=num_samples, num_text_tokens=args.tokens)
        plan = plan_for(config, planning_problem(config, batches[name].samples))
        runs[name] = (config, wide, plan)
    found = launch(measure, runs, batches, num_processes=4)

    report = Report("message-bytes", "Bytes of the messages of one iteration, four processes")
    report.add(
        f"Llama, {args.layers} decoder layers of width {args.width} (behind SigLIP with 4 where there is an encoder), "
        f"{args.microbatches} microbatches of {args.samples} x {args.tokens} tokens. Bytes of activations and "
        "gradients that all ranks send; collectives within groups are not among them. Whole: in float32, all of it "
        "from each rank of a tensor-parallel group."
    )
    report.table(
        ("layout", "whole", "sent", "predicted", "sent / whole"),
        [(name, *sizes, f"{sizes[1] / sizes[0]:.3f}") for name, sizes in found.items()],
    )
    report.goal("predicted bytes are those sent", all(sent == predicted for _, sent, predicted in found.values()))
    return report


if __name__ == "__main__":
    main().write()
