"""Simulates a program on a virtual clock, by the rules by which the executor runs it on torch.distributed.

* Each rank follows its projection of the program. A compute action blocks all of its ranks until it ends; it begins
  when all of them have reached it and every message that it reads has arrived.
* Messages do not block: a rank posts its send or receive and continues. The transfer begins when both ends are posted;
  messages from one rank to another follow each other.
* Reductions do not block: one begins when its last participant has reached it; the reductions of a rank follow each
  other. After the last one comes the optimizer step and, if the optimizer state is sharded, the gather of new
  parameters.
* Optionally ranks share processor cores or messages share network cards (`motet.simulator.event_loop`), ranks are slow,
  or computations take random additional time (`motet.simulator.costs`).

Limits: communication costs no processor time.
"""

from math import inf

from motet.schedule.lower import Program
from motet.simulator.clock import run_in_order
from motet.simulator.costs import Costs, Disturbances, step_costs
from motet.simulator.event_loop import SharedCards, run_events
from motet.simulator.replica_folding import Folding
from motet.simulator.result import SimulationResult

__all__ = ["SimulationResult", "simulate"]


def simulate(
    program: Program,
    costs: Costs,
    *,
    num_cores: float | None = None,
    cards: SharedCards | None = None,
    disturbances: Disturbances | None = None,
    folding: Folding | None = None,
) -> SimulationResult:
    """Predicts the times and the memory of an iteration. Deterministic.

    `num_cores`: cores that all ranks share; None: each has its own. `cards`: network cards that messages share; None:
    links are independent. `folding`: pipelines that represent others (`motet.simulator.replica_folding`). Raises
    `ValueError` for a folding beside shared resources or disturbances, which make pipelines differ."""
    if folding is not None and (num_cores is not None or cards is not None or disturbances is not None):
        raise ValueError("ranks that share cores or cards, or are disturbed, are not alike: simulate without folding")
    seconds = step_costs(program, costs, disturbances)
    if num_cores is None and cards is None:
        times = run_in_order(program, seconds)
    else:
        times = run_events(program, seconds, inf if num_cores is None else num_cores, cards)
    return SimulationResult(program, costs, seconds, times, folding)
