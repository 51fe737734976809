"""DistMM's load balancer (section 5.2): how many devices each tower gets, so that the slowest is as fast as possible.

A dynamic program over towers and devices: the best assignment of d devices to the first towers is a best assignment of
fewer devices to all but the last of them, and some to that one. What a tower does best with a number of devices (its
partition, its replicas, its microbatches) is decided before, under the memory of a device; infinite where nothing fits.
"""

from collections.abc import Sequence
from math import inf

import numpy as np

from motet.ragged_arrays import Floats


def balance(seconds: Sequence[Floats], num_devices: int) -> tuple[float, tuple[int, ...]]:
    """The time of the slowest, and the devices of each.

    `seconds[t][n]`: of tower t on exactly n devices, from n = 0 to `num_devices`; infinite where it cannot be. The time
    is infinite if there is no assignment; of equally fast ones, one of the fewest devices is returned."""
    best = np.full(num_devices + 1, inf)
    best[0] = 0.0
    chosen: list[np.ndarray] = []
    for of_tower in seconds:
        assert len(of_tower) == num_devices + 1
        following, devices = np.full(num_devices + 1, inf), np.zeros(num_devices + 1, dtype=np.int64)
        # A number of devices with which it is no faster than with fewer is never needed.
        fewer = np.concatenate([[inf], np.minimum.accumulate(of_tower)[:-1]])
        for n in np.flatnonzero(of_tower < fewer).tolist():
            slowest = np.maximum(best[: num_devices + 1 - n], of_tower[n])
            better = slowest < following[n:]
            following[n:][better] = slowest[better]
            devices[n:][better] = n
        best = following
        chosen.append(devices)
    used = int(best.argmin())
    result: list[int] = []
    left = used
    for devices in reversed(chosen):
        result.append(int(devices[left]))
        left -= result[-1]
    return float(best[used]), tuple(reversed(result))
