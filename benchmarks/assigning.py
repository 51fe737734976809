"""Does it matter that training's own threads assign samples, while its step runs in another one?

Workers or data servers read, decode and tokenize. A batch's cut follows from the plan, which they need not know, so
training assigns by itself: a thread does it, some batches ahead, and competes with the step for Python's lock.

1. Processor time of that thread for one batch, by assignment: from the metadata as a worker process hands it over, to
   the microbatches and the places that a rank wants; beside the iteration's simulated time.
2. How much longer a loop of small tensor operations takes beside such a thread. It asks for the lock at each operation,
   as a step does; blocks with and without the thread take turns.
"""

import argparse
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch

from benchmarks.reporting import Report
from benchmarks.thesis_batches import NUM_REPLICAS, NUM_SAMPLES, Batch, planned, simulated
from motet.assignment.batch_assignment import BatchAssignment
from motet.balancing.policies import ASSIGNMENTS, assign

SIZES = ((NUM_SAMPLES, NUM_REPLICAS), (8192, 64))
WIDTH = 192


def work_of_thread(batch: Batch, assignment: str) -> Callable[[], BatchAssignment]:
    """Performs a loading thread's work for each batch, without its waits."""
    plan = replace(batch.apart, assignment=assignment)
    handed_over = pickle.dumps(list(batch.problem.samples))

    def work() -> BatchAssignment:
        samples = pickle.loads(handed_over)
        cut = assign(plan, samples, workloads=batch.workloads, table=batch.problem.table)
        sorted({i for microbatch in cut.microbatches["vision"][0] for i in microbatch})
        return cut

    return work


def processor_s(work: Callable[[], object], times: int) -> float:
    work()
    seconds = []
    for _ in range(times):
        begin = time.process_time()
        work()
        seconds.append(time.process_time() - begin)
    return median(seconds)


def step_s(num_operations: int) -> float:
    """Seconds of small tensor operations, one after the other."""
    x, weight = torch.ones(WIDTH, WIDTH), torch.eye(WIDTH)
    begin = time.perf_counter()
    for _ in range(num_operations):
        x = x @ weight
    return time.perf_counter() - begin


def beside(work: Callable[[], object], num_operations: int) -> float:
    """The same, while a thread does `work` once."""
    thread = threading.Thread(target=work)
    thread.start()
    seconds = step_s(num_operations)
    thread.join()
    return seconds


def main(arguments: list[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=9, help="of each measurement")
    parser.add_argument("--operations", type=int, default=6000, help="of a step")
    parser.add_argument("--only-small", action="store_true", help="512 samples alone")
    options = parser.parse_args(arguments)
    report = Report("assigning", "Assigning beside the step")
    assert __doc__ is not None
    report.add(__doc__)
    rows = []
    for num_samples, num_replicas in SIZES[: 1 if options.only_small else None]:
        batch = planned("3b", "SynthChartNet", 0, num_samples=num_samples, num_replicas=num_replicas)
        iteration_s, _, _ = simulated(batch, batch.apart, work_of_thread(batch, "entrain")(), 0)
        for name in ASSIGNMENTS:
            own_s = processor_s(work_of_thread(batch, name), options.times)
            rows.append((num_samples, num_replicas, name, f"{1e3 * own_s:.1f}", f"{own_s / iteration_s:.3%}"))
    columns = ("samples", "replicas", "assignment", "processor ms of the thread", "of the simulated iteration")
    report.table(columns, rows)
    small = planned("3b", "SynthChartNet", 0)
    work = work_of_thread(small, "entrain")
    step_s(options.operations)
    alone, together = [], []
    for _ in range(options.times):
        alone.append(step_s(options.operations))
        together.append(beside(work, options.operations))
    longer = [b - a for a, b in zip(alone, together, strict=True)]
    report.add(
        f"A step of {options.operations} products of {WIDTH} x {WIDTH} matrices takes {1e3 * median(alone):.0f} ms "
        f"alone, and {1e3 * median(longer):.1f} ms longer (median of {options.times}) beside a thread that assigns "
        f"{NUM_SAMPLES} samples by `entrain`, which takes {1e3 * processor_s(work, options.times):.1f} ms by itself."
    )
    return report


if __name__ == "__main__":
    main().write()
