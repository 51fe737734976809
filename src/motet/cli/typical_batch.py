"""The first global batch of a run, from which it is planned and profiled."""

import sys
from typing import TYPE_CHECKING

from motet.errors import UserError

if TYPE_CHECKING:
    from motet.assignment.sample import Sample
    from motet.config import RunConfig
    from motet.data.loader import LoadedBatch
    from motet.data.preparation.sample_layout import SampleSource
    from motet.planner.problem import PlanningProblem

MANY_SAMPLES = 200_000


def read_batch(config: "RunConfig") -> "LoadedBatch":
    """With its tensors. Raises `UserError` naming the key or file that is wrong."""
    from motet.data.loader import Loader
    from motet.data.run_file.datasets import open_data
    from motet.data.service.producer import InProcess

    train = open_data(config).train
    _check_size(config, len(train))
    return next(Loader(InProcess(train), config.train.global_batch_size, seed=config.train.seed, batches_ahead=0))


def read_samples(config: "RunConfig", most: int | None = None) -> "tuple[Sample, ...]":
    """The metadata of the same batch, without torch; or of the first epoch's samples up to `most`. Of data servers, if
    there are any."""
    from motet.data.run_file.samples import open_samples

    if getattr(config.data, "servers", ()):
        return _samples_of_servers(config, most)
    train = open_samples(config)
    skips = getattr(config.data, "on_corrupt", "stop") == "skip"
    samples = [_sample(train, index, skips) for index in _first_indices(config, len(train), most)]
    return tuple(sample for sample in samples if sample is not None)


def read_problem(config: "RunConfig") -> "PlanningProblem":
    from motet.planner.from_run_file import planning_problem

    samples = read_samples(config)
    if len(samples) > MANY_SAMPLES:
        print(
            f"each plan that is tried is simulated with all {len(samples)} samples of a batch, which may take minutes",
            file=sys.stderr,
        )
    return planning_problem(config, samples)


def _first_indices(config: "RunConfig", num_samples: int, most: int | None) -> "list[int]":
    from motet.data.loader import epoch_order

    _check_size(config, num_samples)
    return epoch_order(num_samples, config.train.seed, epoch=0)[: most or config.train.global_batch_size].tolist()


def _sample(train: "SampleSource", index: int, skips: bool) -> "Sample | None":
    try:
        return train.sample(index)
    except UserError:
        if not skips:
            raise
        return None


def _samples_of_servers(config: "RunConfig", most: int | None) -> "tuple[Sample, ...]":
    """Asked for in another process: gRPC must not have begun in one that will fork the ranks."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(1, get_context("fork")) as process:
        return process.submit(_ask_servers, config, most).result()


def _ask_servers(config: "RunConfig", most: int | None) -> "tuple[Sample, ...]":
    from motet.assignment.sample import Sample
    from motet.data.service.opening import open_producers

    producer = open_producers(config).train
    prepared = producer.samples(_first_indices(config, len(producer), most))
    return tuple(sample for sample in prepared if isinstance(sample, Sample))


def _check_size(config: "RunConfig", num_samples: int) -> None:
    size = config.train.global_batch_size
    if size > num_samples:
        raise UserError(f"train.global_batch_size: is {size}, but there are {num_samples} training samples; give fewer")
