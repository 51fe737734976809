"""The first global batch of a run, from which it is planned and profiled."""

from typing import TYPE_CHECKING

from motet.errors import UserError

if TYPE_CHECKING:
    from motet.config import RunConfig
    from motet.data.loader import LoadedBatch
    from motet.data.sample import Sample
    from motet.planner.problem import PlanningProblem


def read_batch(config: "RunConfig") -> "LoadedBatch":
    """With its tensors. Raises `UserError` naming the key or file that is wrong."""
    from motet.data.loader import Loader
    from motet.data.preprocessing.producer import InProcess
    from motet.data.run_file import open_data

    train = open_data(config).train
    _check_size(config, len(train))
    return next(Loader(InProcess(train), config.train.global_batch_size, seed=config.train.seed, batches_ahead=0))


def read_samples(config: "RunConfig", most: int | None = None) -> "tuple[Sample, ...]":
    """The metadata of the same batch, without torch; or of the first epoch's samples up to `most`."""
    from motet.data.loader import epoch_order
    from motet.data.run_file_samples import open_samples

    train = open_samples(config)
    _check_size(config, len(train))
    first = epoch_order(len(train), config.train.seed, epoch=0)[: most or config.train.global_batch_size]
    return tuple(train.sample(index) for index in first.tolist())


def read_problem(config: "RunConfig") -> "PlanningProblem":
    from motet.planner.from_run_file import planning_problem

    return planning_problem(config, read_samples(config))


def _check_size(config: "RunConfig", num_samples: int) -> None:
    size = config.train.global_batch_size
    if size > num_samples:
        raise UserError(f"train.global_batch_size: is {size}, but there are {num_samples} training samples; give fewer")
