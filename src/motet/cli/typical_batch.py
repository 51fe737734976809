"""The first global batch of a run, from which it is planned and profiled.

Limits: laying samples out asks the processors of images and sounds, which load torch.
"""

from typing import TYPE_CHECKING

from motet.errors import UserError

if TYPE_CHECKING:
    from motet.config import RunConfig
    from motet.data.loader import LoadedBatch
    from motet.planner.problem import PlanningProblem


def read_batch(config: "RunConfig") -> "LoadedBatch":
    """Raises `UserError` naming the key or file that is wrong."""
    from motet.data.loader import Loader
    from motet.data.run_file import open_data

    train = open_data(config).train
    size = config.train.global_batch_size
    if size > len(train):
        raise UserError(f"train.global_batch_size: is {size}, but there are {len(train)} training samples; give fewer")
    return next(Loader(train, size, seed=config.train.seed, batches_ahead=0))


def read_problem(config: "RunConfig") -> "PlanningProblem":
    from motet.planner.from_run_file import planning_problem, read_workloads

    # What is wrong with the model is told before anything large is loaded.
    read_workloads(config)
    return planning_problem(config, read_batch(config).samples)
