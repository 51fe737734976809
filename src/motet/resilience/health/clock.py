"""Compares this machine's clock with the store's.

The clock stamps the lines of `failures.jsonl` and decides nothing: leases, silence and patience are measured by
monotonic clocks, and checkpoints are ordered by step. So a node with a wrong clock takes part, and that is reported.

The time that the question takes widens the interval in which the difference lies; a busy machine therefore raises no
false alarm.
"""

import time

from motet.resilience.store.store import Store

LARGEST_ERROR_S = 5.0
"""Largest difference that is not reported."""
RESOLUTION_S = 1.0
"""etcd answers in whole seconds."""


def clock_error(store: Store) -> str | None:
    """Describes how wrong this machine's clock is; None if it may be within `LARGEST_ERROR_S` of the store's."""
    before = time.time()
    there = store.time()
    ahead_s, behind_s = before - (there + RESOLUTION_S), there - time.time()
    if max(ahead_s, behind_s) <= LARGEST_ERROR_S:
        return None
    how = f"{ahead_s:.0f} s ahead of" if ahead_s > behind_s else f"{behind_s:.0f} s behind"
    return f"its clock is {how} the store's: the times that it writes into the failure log are wrong"
