"""Preprocessing apart from training: how fast batches travel, and how long training waits for them.

1. Bytes a second on the loopback device, for batches of 10 MB that need no preparation, two of them on their way at a
   time, as `data.batches_ahead: 2` has it: Arrow Flight alone (`workers 0`), with worker processes behind it, worker
   processes without Flight, and a torch DataLoader's worker beside them. Goal: 1 GB/s.
2. The share of its time that training waits, with steps that sleep: data prepared in the training thread, by a worker
   process, and by a server. A step takes `--slack` times as long as preparing its batch, so whoever works beside the
   step keeps up. Goal: below 2%.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.reporting import Report
from motet.assignment.sample import Sample, Segment
from motet.config import RunConfig, load_run_config
from motet.data.loader import Loader
from motet.data.run_file import open_data
from motet.data.service.opening import agreed_digest, open_producers, open_server
from motet.data.service.tickets import TOKEN_VARIABLE, InProcess, Producer
from motet.data.service.workers import LocalProducer, Preparer, Workers

EXAMPLE = Path(__file__).parents[1] / "examples" / "demo.yaml"
SAMPLES_PER_BATCH = 4
BLOCK = 10
MB = 10**6


class Blobs:
    """Samples that need no preparation."""

    fingerprint = ""

    def __init__(self, num_bytes: int) -> None:
        self._values = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)

    def __len__(self) -> int:
        return 10**6

    def sample(self, index: int) -> Sample:
        return Sample(str(index), {"vision": (Segment(1),)})

    def features(self, index: int, module: str) -> dict[str, torch.Tensor]:
        return {"pixel_values": self._values}

    __getitem__ = sample


class Batches(torch.utils.data.Dataset[torch.Tensor]):
    """The same for a DataLoader: whole batches."""

    def __init__(self, num_bytes: int) -> None:
        self._values = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._values.clone()


@contextmanager
def serving(open_one: Callable[[], Any]) -> Iterator[str]:
    """The address of a server in a process of its own."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def serve() -> None:
        torch.set_num_threads(1)  # A pool of threads does not survive the fork: two threads might mend it at once.
        server = open_one()
        sender.send(server.address)
        server.serve_until_signalled()

    process = context.Process(target=serve)
    process.start()
    try:
        yield receiver.recv()
    finally:
        process.kill()
        process.join()


def in_process_of_its_own(work: Callable[[], Any]) -> Any:
    """gRPC must not have begun in a process that forks."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        torch.set_num_threads(1)  # As above.
        sender.send(work())

    process = context.Process(target=run)
    process.start()
    sender.close()  # If the process fails, this is the end of the pipe, and not a wait for good.
    result = receiver.recv()
    process.join()
    return result


def rates(fetch: Callable[[int], object], num_bytes: int, number: int, *, at_a_time: int = 2) -> list[float]:
    """Bytes a second, of blocks of `BLOCK` batches of which each has `num_bytes`."""
    found = []
    with ThreadPoolExecutor(at_a_time) as threads:
        list(threads.map(fetch, range(3)))
        for first in range(0, number, BLOCK):
            began = time.perf_counter()
            for _ in threads.map(fetch, range(first, first + BLOCK)):
                pass
            found.append(BLOCK * num_bytes / (time.perf_counter() - began))
    return found


def fetch_features(producer: Producer, i: int) -> object:
    first = SAMPLES_PER_BATCH * i
    return producer.features("vision", range(first, first + SAMPLES_PER_BATCH))


def open_blob_server(workers: int, num_bytes: int) -> Any:
    from motet.data.service.server import DataServer

    dataset = Blobs(num_bytes // SAMPLES_PER_BATCH)
    pool = Workers(Preparer({"train": dataset}), workers)
    token, sizes = os.environ[TOKEN_VARIABLE], {"train": len(dataset)}
    return DataServer(pool, {}, agreed_digest({}), sizes, {"vision"}, token, host="127.0.0.1", port=0)


def by_flight(workers: int, num_bytes: int, number: int) -> list[float]:
    def ask(address: str) -> list[float]:
        from motet.data.service.client import Connection, RemoteProducer, Servers

        connection = Connection(address, os.environ[TOKEN_VARIABLE], 60.0, None)
        producer = RemoteProducer(Servers([connection], agreed_digest({}), 60.0), "train", 10**6, "", may_skip=False)
        return rates(partial(fetch_features, producer), num_bytes, number)

    with serving(partial(open_blob_server, workers, num_bytes)) as address:
        return in_process_of_its_own(partial(ask, address))


def by_workers(workers: int, num_bytes: int, number: int) -> list[float]:
    pool = Workers(Preparer({"train": Blobs(num_bytes // SAMPLES_PER_BATCH)}), workers)
    found = rates(partial(fetch_features, LocalProducer(pool, "train", 10**6)), num_bytes, number)
    pool.close()
    return found


def by_data_loader(workers: int, num_bytes: int, number: int) -> list[float]:
    loader = iter(DataLoader(Batches(num_bytes), batch_size=None, num_workers=workers))
    return rates(lambda _: next(loader), num_bytes, number, at_a_time=1)


def add_speeds(report: Report, num_bytes: int, number: int) -> None:
    ways: list[tuple[str, Callable[[int, int], list[float]]]] = [
        ("Arrow Flight, workers 0", partial(by_flight, 0)),
        ("Arrow Flight, workers 1", partial(by_flight, 1)),
        ("worker processes alone, 1", partial(by_workers, 1)),
        ("torch DataLoader, 1 worker", partial(by_data_loader, 1)),
    ]
    rows = []
    for name, measure in ways:
        low, median, high = statistics.quantiles([rate / 1e9 for rate in measure(num_bytes, number)], n=4)
        rows.append((name, f"{median:.2f}", f"{low:.2f} .. {high:.2f}"))
    report.add(
        f"Batches of {num_bytes / MB:g} MB in {SAMPLES_PER_BATCH} samples, two on their way at a time; {number} of "
        f"each way, in blocks of {BLOCK}."
    )
    report.table(("way", "median GB/s", "quartiles"), rows)


def demo_config(batch_size: int) -> RunConfig:
    return load_run_config(EXAMPLE, [f"train.global_batch_size={batch_size}"])


def all_features(config: RunConfig, samples: tuple[Sample, ...]) -> dict[str, list[int]]:
    return {
        module: [place for place, sample in enumerate(samples) if sample.has(module)]
        for module in config.model.module_names
    }


def share_waited(config: RunConfig, producer: Producer, step_s: float, num_steps: int, ahead: int) -> float:
    """Share of the time of all steps but the first, which fills the pipeline."""
    loader = Loader(
        producer, config.train.global_batch_size, seed=0, wanted=partial(all_features, config), batches_ahead=ahead
    )
    waited = total = 0.0
    for step in range(num_steps + 1):
        began = time.perf_counter()
        next(loader).fetch_wanted()
        loaded = time.perf_counter()
        time.sleep(step_s)
        if step:
            waited += loaded - began
            total += time.perf_counter() - began
    loader.close()
    producer.close()
    return waited / total


def seconds_to_prepare(config: RunConfig) -> float:
    data = open_data(config).train
    loader = Loader(InProcess(data), config.train.global_batch_size, seed=1, batches_ahead=0)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        batch = next(loader)
        for module, places in all_features(config, batch.samples).items():
            for place in places:
                batch.features(module, place)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def add_waits(report: Report, batch_size: int, num_steps: int, slack: float) -> None:
    config = demo_config(batch_size)
    prepare_s = seconds_to_prepare(config)
    step_s = slack * prepare_s

    def served(address: str) -> float:
        remote = config.model_copy(update={"data": config.data.model_copy(update={"servers": (address,)})})
        return share_waited(remote, open_producers(remote).train, step_s, num_steps, 2)

    here = InProcess(open_data(config).train)
    shares = [("in the training thread, none ahead", share_waited(config, here, step_s, num_steps, 0))]
    worker = open_producers(config).train
    shares.append(("a worker process, 2 batches ahead", share_waited(config, worker, step_s, num_steps, 2)))
    with serving(partial(open_server, config, host="127.0.0.1", port=0, tls=None)) as address:
        shares.append(("a server, 2 batches ahead", in_process_of_its_own(partial(served, address))))
    report.add(
        f"Batches of {batch_size} samples of *dial a digit* with vision and audio take {1e3 * prepare_s:.0f} ms to "
        f"prepare; {num_steps} steps sleep {1e3 * step_s:.0f} ms each."
    )
    report.table(("prepared by", "waited"), [(name, f"{share:.1%}") for name, share in shares])


def main(argv: Sequence[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=10.0, help="of a batch (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=200, help="of each way (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="samples of a training step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--slack", type=float, default=2.0, help="default: %(default)s")
    arguments = parser.parse_args(argv)
    os.environ[TOKEN_VARIABLE] = "the-token-of-a-benchmark"
    torch.set_num_threads(1)
    report = Report("data-service", "Preprocessing apart from training: bytes a second, and waiting")
    add_speeds(report, int(arguments.megabytes * MB), arguments.batches)
    add_waits(report, arguments.batch_size, arguments.steps, arguments.slack)
    return report


if __name__ == "__main__":
    main().write()
