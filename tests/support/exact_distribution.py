"""The best distribution there is, by integer programming (Cornstarch equation 1, with the cap): small cases only."""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp


def smallest_largest_load(workloads: np.ndarray, num_ranks: int, *, capped: bool) -> float:
    """x[i, g] in {0, 1}: block i is on rank g; C: the largest load, minimized."""
    blocks = len(workloads)
    num_x = blocks * num_ranks
    on_one_rank = np.kron(np.eye(blocks), np.ones(num_ranks))
    of_rank = np.kron(np.ones(blocks), np.eye(num_ranks))
    load = np.kron(workloads, np.eye(num_ranks))
    constraints = [
        LinearConstraint(np.hstack([on_one_rank, np.zeros((blocks, 1))]), 1, 1),
        LinearConstraint(np.hstack([load, -np.ones((num_ranks, 1))]), -np.inf, 0),
    ]
    if capped:
        counts = np.hstack([of_rank, np.zeros((num_ranks, 1))])
        constraints.append(LinearConstraint(counts, blocks // num_ranks, -(-blocks // num_ranks)))
    objective = np.append(np.zeros(num_x), 1.0)
    bounds = Bounds(np.zeros(num_x + 1), np.append(np.ones(num_x), np.inf))
    result = milp(objective, constraints=constraints, bounds=bounds, integrality=np.append(np.ones(num_x), 0))
    assert result.success, result.message
    return float(result.fun)
