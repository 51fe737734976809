"""Where each rank's time goes, and what its idle time comes from (Optimus, Table 1 and Figure 2).

| cause | when |
|---|---|
| warm-up | before the rank's first action; all along, if it has none |
| cool-down | between the rank's last action and the last one of all ranks |
| imbalance | between its actions: waits for other stages, after the warm-up's forwards too (the paper's "other") |
| tensor parallelism | within its actions, while members of the group wait for each other's tensors |
| reduction | after the last action of all ranks, until all gradients are summed (the paper's reduce-scatter) |
| gather | after the optimizer's step, while new parameters are gathered (the paper's all-gather) |

What the other half of a reduction or a message hides behind computation is no idle time and not counted. The paper's
all-gather stands at the iteration's begin; from step to step that is the same. Limits: context parallelism counts as
tensor parallelism, and both are known only of cost models that tell them apart (`GroupCosts`).
"""

from dataclasses import asdict, dataclass

from motet.ragged_arrays import Floats


@dataclass(frozen=True, eq=False, kw_only=True)
class TimeShares:
    """Seconds of each rank; together they are the iteration's time."""

    compute: Floats
    optimizer: Floats
    warm_up: Floats
    cool_down: Floats
    imbalance: Floats
    tensor_parallel: Floats
    reduction: Floats
    gather: Floats

    def means_s(self) -> dict[str, float]:
        """Over all ranks."""
        return {name: float(seconds.mean()) if len(seconds) else 0.0 for name, seconds in asdict(self).items()}
