"""Checks whether a device computes correctly and gives back what is written into its memory.

Whether there is enough memory for the node's ranks is a check of its own (`motet.resilience.health.free_memory`).
"""

import torch

from motet.errors import one_line

SIDE = 256
PROBE_BYTES = 64 * 2**20
"""Memory that is written and read back."""


def why_unfit(device: torch.device) -> str | None:
    """Returns in words what is wrong; None: nothing was found."""
    try:
        whole = torch.arange(SIDE * SIDE).reshape(SIDE, SIDE) % 7
        product = (whole.to(device, torch.float32) @ whole.to(device, torch.float32).T).cpu()
        if not torch.equal(product.to(torch.int64), whole @ whole.T):
            return f"{device} computes wrongly: a product of small whole numbers is not exact"
        memory = torch.full((PROBE_BYTES // 8,), 1, dtype=torch.int64, device=device)
        if int(memory.sum()) != PROBE_BYTES // 8:
            return f"{device} does not give back what was written into its memory"
    except (RuntimeError, MemoryError, AssertionError) as error:  # Without CUDA, torch asserts.
        return f"{device} fails: {one_line(error)[:200]}"
    return None
