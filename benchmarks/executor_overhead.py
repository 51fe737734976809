"""Python time of the executor: processor time of each rank's main thread for an action, in a pair of processes.

Two stages of one multiplication of 2 x 4 numbers each, 1F1B over gloo, so that nearly all time is that of the runtime,
of torch's calls and of gloo's. `torch alone` makes the same calls of torch in a loop: what is beyond them is overhead.
Batches are new in every iteration and prepared beforehand, as the loader's threads do it. With `--baseline` another
checkout takes turns with this one, pair of processes after pair of processes.
"""

import argparse
import importlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).parents[1]
WIDTH, TOKENS = 4, 2


class Batch:
    """Samples of one form, all with the same tensors."""

    def __init__(self, num_samples: int, sample_class: Any, segment_class: Any) -> None:
        layouts, tokens = {"llm": (segment_class(TOKENS),)}, {"llm": TOKENS}
        self.samples = tuple(sample_class(f"s{i}", layouts, tokens) for i in range(num_samples))
        self._features = {"x": torch.ones(TOKENS, WIDTH)}

    def features(self, module: str, sample: int) -> dict[str, torch.Tensor]:
        return self._features


class TinyStage(nn.Module):
    """One multiplication. Written for the stages of this checkout and for those of older ones."""

    hidden_size = output_size = WIDTH

    def __init__(self, index: int, num_stages: int, output_class: Any) -> None:
        super().__init__()
        self.index, self.is_last, self._output_class = index, index == num_stages - 1, output_class
        self.needs_features = index == 0
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.5))

    def after_update(self) -> None:
        """No parameter has a limit."""

    def canonical_name(self, local: str) -> str:
        return f"{self.index}.{local}"

    def layers_of(self, local: str) -> tuple[int, ...]:
        return (self.index,)

    def input_shape(self, samples: Any) -> tuple[int, ...]:
        return (TOKENS, WIDTH)

    output_shape = input_shape

    def forward(self, first: Any, *others: Any) -> Any:
        if self._output_class is None:
            hidden, features = first, others[1]
        else:
            hidden, features = first.hidden, first.features
        x = (features[0]["x"] if hidden is None else hidden) * self.weight
        if self._output_class is None:
            return x.sum() if self.is_last else x
        return self._output_class(None, x.sum()) if self.is_last else self._output_class(x)


def _classes() -> tuple[Any, Any, Any]:
    """Sample, Segment and StageOutput; older checkouts have the first two elsewhere, and not the third."""
    try:
        names = importlib.import_module("motet.assignment.sample")
        output = importlib.import_module("motet.models.stages.stage").StageOutput
    except ImportError:
        names, output = importlib.import_module("motet.data.sample"), None
    return names.Sample, names.Segment, output


class _Instructions:
    """Counts the instructions that Python executes in a block, in this thread: the same number at every try."""

    def __init__(self) -> None:
        self.number = 0

    def __enter__(self) -> "_Instructions":
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: Any, event: str, argument: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._executed

    def _executed(self, frame: Any, event: str, argument: object) -> Any:
        self.number += event == "opcode"
        return self._executed


Measured = tuple[list[float], int]
"""Seconds of this rank's thread in each iteration, and instructions of Python in one more."""


def _measured(iterate: Callable[[], object], prepare: Callable[[], object], num_iterations: int) -> Measured:
    seconds = []
    for _ in range(num_iterations):
        prepare()
        dist.barrier()
        began = time.thread_time()
        iterate()
        seconds.append(time.thread_time() - began)
    prepare()
    with _Instructions() as instructions:
        iterate()
    return seconds, instructions.number


def of_motet(rank: int, num_microbatches: int, num_iterations: int) -> Measured:
    sys.modules["torchvision"] = None  # type: ignore[assignment]  # Older checkouts fail beside one that is for GPUs.
    from motet.plan import ModulePlan, Plan, Replica, Stage
    from motet.runtime.engine import Engine

    sample, segment, output = _classes()
    stages = tuple(Stage(layers=(i, i + 1), ranks=(i,), tp_size=1) for i in range(2))
    module = ModulePlan(
        kind="language_model",
        num_layers=2,
        replicas=(Replica(stages=stages),),
        trainable=((0, 2),),
        loss_weight=1.0,
    )
    plan = Plan(modules={"llm": module}, edges=(), num_microbatches=num_microbatches)
    engine: Any = Engine(
        plan, lambda name, module, stage, tp: TinyStage(stage.layers[0], 2, output), device=torch.device("cpu")
    )
    coming: list[Batch] = []

    def prepare() -> None:
        coming.append(Batch(num_microbatches, sample, segment))
        engine.prepare(coming[0].samples if output is None else coming[0])

    return _measured(lambda: engine.run(coming.pop(), seed=(0, 0)), prepare, num_iterations)


def of_torch(rank: int, num_microbatches: int, num_iterations: int) -> Measured:
    """The same calls of torch, in a loop."""
    stage = nn.Linear(1, 1)
    stage.weight = nn.Parameter(torch.full((WIDTH,), 0.5))
    first = torch.ones(TOKENS, WIDTH)

    def iterate() -> None:
        sends, outputs = [], {}
        for m in range(num_microbatches + 1):
            if rank == 0 and m < num_microbatches:
                outputs[m] = first * stage.weight
                sends.append(dist.isend(outputs[m].detach(), 1, tag=m))
            here = m - 1 if rank == 0 else m
            if 0 <= here < num_microbatches:
                received = torch.empty(TOKENS, WIDTH)
                work = dist.irecv(received, 1 - rank, tag=here + (1000 if rank == 0 else 0))
                assert work is not None
                work.wait()
                if rank == 0:
                    torch.autograd.backward([outputs.pop(here)], [received])
                else:
                    loss = (received.requires_grad_() * stage.weight).sum()
                    torch.autograd.backward([loss], [torch.full_like(loss, 0.1)])
                    assert received.grad is not None
                    sends.append(dist.isend(received.grad, 0, tag=1000 + here))
        for send in sends:
            assert send is not None
            send.wait()
        totals = torch.zeros(4, dtype=torch.float64)
        dist.all_reduce(totals)
        totals.tolist()

    return _measured(iterate, lambda: None, num_iterations)


def worker(what: str, rank: int, port: int, num_microbatches: int, num_iterations: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    measure = of_torch if what == "torch" else of_motet
    seconds, instructions = measure(rank, num_microbatches, num_iterations)
    settled, num_actions = sorted(seconds[num_iterations // 4 :]), 4 * num_microbatches
    least, median = (1e6 * value / num_actions for value in (settled[0], statistics.median(settled)))
    print(json.dumps({"least": least, "median": median, "instructions": instructions / num_actions}))
    dist.monitored_barrier()  # As in `motet.runtime.launch`.
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run_pair(what: str, source: Path, port: int, num_microbatches: int, num_iterations: int) -> list[dict[str, float]]:
    """Both ranks' microseconds an action. `source`: the folder that has the package."""
    arguments = [str(value) for value in (port, num_microbatches, num_iterations)]
    environment = os.environ | {"PYTHONPATH": f"{source}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", what, str(rank), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    found = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{what}: a process failed")
    return [json.loads(out.strip().splitlines()[-1]) for out in found]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", type=Path, help="another checkout, to compare with")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--iterations", type=int, default=80, help="of each pair of processes")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.worker:
        what, *numbers = args.worker
        worker(what, *map(int, numbers))
        return
    from benchmarks.measuring import Spread
    from benchmarks.reporting import Report

    alternatives = {"torch alone": ("torch", ROOT / "src"), "motet": ("motet", ROOT / "src")}
    if args.baseline is not None:
        alternatives["baseline"] = ("motet", args.baseline.resolve() / "src")
    least: dict[str, list[float]] = {name: [] for name in alternatives}
    median: dict[str, list[float]] = {name: [] for name in alternatives}
    instructions: dict[str, float] = {}
    for _ in range(args.rounds):
        for name, (what, source) in alternatives.items():
            ranks = run_pair(what, source, _free_port(), args.microbatches, args.iterations)
            least[name].append(statistics.mean(rank["least"] for rank in ranks))
            median[name].append(statistics.mean(rank["median"] for rank in ranks))
            instructions[name] = statistics.mean(rank["instructions"] for rank in ranks)
    report = Report("executor-overhead", "Python time of the executor for an action")
    report.add(" ".join(str(__doc__).split()))
    report.add(
        f"{args.microbatches} microbatches, {args.rounds} rounds in which each alternative has a pair of processes of "
        f"its own for {args.iterations} iterations. Microseconds for an action, mean of the two ranks: of the fastest "
        "iteration of each pair and of its median one. Median (quartiles) over rounds. Instructions of Python are "
        "counted in one more iteration, and do not depend on what else the machine does."
    )
    overhead = {
        name: [value - floor for value, floor in zip(least[name], least["torch alone"], strict=True)] for name in least
    }
    rows = [
        [name, *(Spread.of(values[name]).text() for values in (least, median, overhead)), f"{instructions[name]:.0f}"]
        for name in alternatives
    ]
    report.table(["", "fastest iteration", "median iteration", "beyond torch alone", "instructions of Python"], rows)
    if args.baseline is not None:
        for what, values in (("in all", least), ("beyond torch alone", overhead)):
            ratio = Spread.of([a / b for a, b in zip(values["motet"], values["baseline"], strict=True)])
            report.goal(
                f"at most 0.6 of the baseline's time for an action {what}", ratio.median <= 0.6, ratio.text(1, 3)
            )
        share = instructions["motet"] / instructions["baseline"]
        report.goal("at most 0.6 of the baseline's instructions of Python", share <= 0.6, f"{share:.3f}")
    report.write()


if __name__ == "__main__":
    main()
