"""Runs a program on a virtual clock, by the same rules as the executor runs it on torch.distributed.

* Each rank goes through its projection of the program. A compute action blocks its ranks, all of them together, until
  it ends; it begins when all of them have reached it and every message that it reads has arrived.
* Messages do not block: a rank posts its send or receive when it reaches it and goes on. The transfer begins when both
  ends are posted, and messages from one rank to another follow each other.
* Reductions do not block either: one begins when its last participant has reached it, and each rank's reductions follow
  each other. The iteration ends when all have ended; then comes what is fixed, the optimizer's step, and then, where
  the optimizer's state is sharded, its ranks gather the new parameters.
* Optionally ranks share processor cores, or messages network cards (`motet.simulator.event_loop`); ranks may be slow,
  and computations take random times longer (`motet.simulator.costs`).

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
    """Predicts when each rank does what.

    `num_cores`: that all ranks share; None: each has its own. `cards`: network cards that messages share; None: no link
    slows another one down. `folding`: which pipelines stand for others (`motet.simulator.replica_folding`). The same
    arguments give the same result. Raises `ValueError` if pipelines are folded that something makes different.
    """
    if folding is not None and (num_cores is not None or cards is not None or disturbances is not None):
        raise ValueError("ranks that share cores or cards, or are disturbed, are not alike: simulate without folding")
    seconds = step_costs(program, costs, disturbances)
    if num_cores is None and cards is None:
        times = run_in_order(program, seconds)
    else:
        times = run_events(program, seconds, inf if num_cores is None else num_cores, cards)
    return SimulationResult(program, costs, seconds, times, folding)
