"""Time from a kill to the next finished iteration: survivors that go on, against starting again from a checkpoint.

The demo's model without its generator on six processes: three nodes of two processes, each a pipeline. In every round
one process of a running training is killed (-9) and the time is taken until a step is finished that was not when it
died; then a node's agent is stopped (SIGSTOP), and the same is taken. Then, with all that is read still in the page
cache:

* spare: nodes and a spare have joined a process that listens; a process is killed, and the spare takes its place;
* with copies: the first three again with `train.failures.copy_every: 3`;
* one pipeline: the demo's own plan on two nodes of two processes, with copies; a process is killed, and a spare takes
  its node's place and state, from the memory of the neighbour;
* restart: the whole command is ended (-9) and run again with `train.resume: latest`, as a scheduler would;
* warm restart: a process of each pipeline is killed, so that `motet train` starts all nodes anew by itself, from the
  checkpoint, in processes that are forked with everything imported.

Work that a restart loses (the steps since the checkpoint) is not counted.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median

import yaml

from benchmarks.reporting import Report
from motet.resilience.health.trial_process import PROCESS_NAME

EXAMPLE = Path(__file__).parents[1] / "examples" / "demo.yaml"
NUM_NODES, NODE_SIZE = 3, 2
FAILURES: dict[str, object] = {"tolerate": 1}
WITH_COPIES = FAILURES | {"copy_every": 3}
LONGEST_WAIT_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seed", default="6")
    arguments = parser.parse_args()
    rng = Random(arguments.seed)
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for what, seconds in measure_round(Path(folder), rng).items():
                times[what].append(seconds)
                print(f"{what}: {seconds:.2f} s", file=sys.stderr, flush=True)
    write_report(times, arguments.seed)


def measure_round(folder: Path, rng: Random) -> dict[str, float]:
    run, times = measure_losses(folder, FAILURES, rng)
    times["warm restart"] = run.kill_and_wait(lambda: [processes[0] for processes in run.processes_of_agents()])
    run.wait_for_step(run.last_step() + 4)
    started = time.monotonic()
    run.end()
    last = run.last_step()
    again = Training(folder, failures=None, resume=True)
    # Steps since the checkpoint are done again; the first of them counts.
    again.wait_until(
        lambda: 0 < again.last_step() <= last + 1 and again.has_written(), "the first step after a restart"
    )
    times["restart"] = time.monotonic() - started
    again.end()
    times["spare"] = measure_spare(folder / "joined", FAILURES, rng)
    run, of_copies = measure_losses(folder / "copies", WITH_COPIES, rng)
    run.end()
    times |= {f"{what}, with copies": seconds for what, seconds in of_copies.items()}
    times["spare, with copies"] = measure_spare(folder / "joined, copies", WITH_COPIES, rng)
    times["spare, one pipeline, with copies"] = measure_spare(folder / "one pipeline", WITH_COPIES, rng, num_nodes=2)
    return times


def measure_losses(folder: Path, failures: dict[str, object], rng: Random) -> tuple["Training", dict[str, float]]:
    folder.mkdir(exist_ok=True)
    run = Training(folder, failures=failures)
    run.wait_for_step(6)
    times = {"survivors go on": run.kill_and_wait(lambda: [rng.choice(run.processes())])}
    run.wait_for_step(run.last_step() + 4)
    times["silent node"] = run.kill_and_wait(lambda: [rng.choice(run.agents())], signal.SIGSTOP)
    run.wait_for_step(run.last_step() + 4)
    return run, times


def measure_spare(folder: Path, failures: dict[str, object], rng: Random, num_nodes: int = NUM_NODES) -> float:
    """`num_nodes`: where it is not that of this benchmark, the plan is the demo's own."""
    folder.mkdir()
    run = Training(folder, failures=failures, address=f"127.0.0.1:{_free_port()}", num_nodes=num_nodes)
    run.wait_for_step(6)
    run.join()
    run.wait_until(lambda: bool(run.memberships()), "the spare")
    run.wait_for_step(run.last_step() + 4)
    seconds = run.kill_and_wait(lambda: [rng.choice(run.processes_of_joined(num_nodes))])
    run.end()
    return seconds


class Training:
    """`motet train` as a user runs it, in an output folder. `address`: where nodes join; None: it starts them."""

    def __init__(
        self,
        folder: Path,
        *,
        failures: dict[str, object] | None,
        resume: bool = False,
        address: str | None = None,
        num_nodes: int = NUM_NODES,
    ) -> None:
        self._metrics, self._log = folder / "out" / "metrics.jsonl", folder / "out" / "failures.jsonl"
        self._started = time.time()
        values = yaml.safe_load(EXAMPLE.read_text())
        del values["model"]["generators"], values["data"]["drawings"]  # Generators do not go on after failures.
        replicas = {name: {"dp": NUM_NODES} for name in ("vision", "audio", "language_model")}
        values["cluster"] = {"num_devices": num_nodes * NODE_SIZE, "num_nodes": num_nodes if failures else 1}
        if num_nodes == NUM_NODES:
            values["parallel"] = {
                "planner": "explicit", "explicit": replicas, "placement": "colocated", "num_microbatches": 2,
            }  # fmt: skip
        values["data"]["num_train"] = 512
        values["train"] |= {
            "steps": 100_000,
            "global_batch_size": 12,
            "eval_every": 0,
            "checkpoint_every": 3,
            "output": str(folder / "out"),
            "failures": failures,
            "resume": "latest" if resume else None,
        }
        run_file = folder / ("again.yaml" if resume else "run.yaml")
        run_file.write_text(yaml.safe_dump(values))
        self._run_file, self._address = run_file, address
        self._output = (folder / "stderr").open("a")
        self._joined: list[subprocess.Popen[bytes]] = []
        self._process = self._start() if address is None else self._start("--listen", address)
        if address is not None:
            self.wait_until(lambda: "waiting for" in (folder / "stderr").read_text(), "the store")
            for _ in range(num_nodes):
                self.join()

    def _start(self, *options: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "motet.cli.main", "train", str(self._run_file), *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MOTET_RUN_SECRET": "a secret of this benchmark"}
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=self._output, env=environment)

    def join(self) -> None:
        assert self._address is not None
        self._joined.append(self._start("--join", self._address))

    def processes_of_joined(self, number: int) -> list[int]:
        """Of the first nodes."""
        return [process for node in self._joined[:number] for process in _children(node.pid)]

    def agents(self) -> list[int]:
        return [child for child in _children(self._process.pid) if _children(child)]

    def last_step(self) -> int:
        return max((line["step"] for line in _lines(self._metrics)), default=0)

    def has_written(self) -> bool:
        """Whether the metrics are this process's."""
        return self._metrics.exists() and self._metrics.stat().st_mtime > self._started + 0.5

    def processes_of_agents(self) -> list[list[int]]:
        return [workers for child in _children(self._process.pid) if (workers := _children(child))]

    def processes(self) -> list[int]:
        return [process for processes in self.processes_of_agents() for process in processes]

    def kill_and_wait(self, victims: Callable[[], list[int]], number: int = signal.SIGKILL) -> float:
        """Seconds until a step is finished under the next membership."""
        chosen = victims()
        failures, last, started = len(self.memberships()), self.last_step(), time.monotonic()
        killed_at = time.time()
        for victim in chosen:
            os.kill(victim, number)

        def is_over() -> bool:
            if len(chosen) == 1:
                lines = self.memberships()
                return len(lines) > failures and self.last_step() >= lines[-1]["step"]
            # Everything was started anew, so the metrics begin behind the checkpoint.
            return self._restarted_since(killed_at, last)

        self.wait_until(is_over, "the next step")
        return time.monotonic() - started

    def _restarted_since(self, killed_at: float, last: int) -> bool:
        told = (self._metrics.parents[1] / "stderr").read_text()
        return "going on from" in told and self._metrics.stat().st_mtime > killed_at and self._has_step_after(told)

    def _has_step_after(self, told: str) -> bool:
        """A step after the checkpoint from which the training went on last."""
        checkpoint = told.rpartition("going on from ")[2].partition("\n")[0].partition(",")[0]
        return self.last_step() > int(checkpoint.rpartition("step_")[2])

    def memberships(self) -> list[dict[str, int]]:
        """The lines of the failure log that tell of a recovery; others name slow ranks."""
        return [line for line in _lines(self._log) if "generation" in line]

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: self.last_step() >= step, f"step {step}")

    def wait_until(self, is_over: Callable[[], bool], what: str) -> None:
        ends_at = time.monotonic() + LONGEST_WAIT_S
        while not is_over():
            if time.monotonic() > ends_at or self._process.poll() is not None:
                told = (self._metrics.parents[1] / "stderr").read_text()
                self.end()
                raise SystemExit(f"{what} did not come; the training said:\n{told[-3000:]}")
            time.sleep(0.005)

    def end(self) -> None:
        for process in (*self._joined, self._process):
            process.kill()
            process.wait()
        self._output.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _lines(path: Path) -> list[dict[str, int]]:
    if not path.exists():
        return []
    complete = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in complete.splitlines()]


def _children(pid: int) -> list[int]:
    """Without those that only sum with nodes that come."""
    command = ["ps", "-o", "pid=,comm=", "--ppid", str(pid)]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return [int(number) for number, name in (line.split(maxsplit=1) for line in lines) if name != PROCESS_NAME]


def write_report(times: dict[str, list[float]], seed: str) -> None:
    report = Report("recovery", "From a kill to the next finished iteration")
    nodes = f"{NUM_NODES} nodes of {NODE_SIZE} processes"
    report.add(f"The demo's model without its generator, {nodes}, a pipeline each. Seed {seed}.")
    own = median(times["survivors go on"])
    rows = [
        (what, f"{median(each):.2f}", f"{min(each):.2f} - {max(each):.2f}", f"{median(each) / own:.1f}")
        for what, each in times.items()
    ]
    report.table(("what", "median [s]", "range [s]", "times as long as survivors"), rows)
    report.write()


if __name__ == "__main__":
    main()
