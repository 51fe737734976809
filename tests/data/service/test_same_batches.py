"""Who prepares the samples, and how many of them, changes nothing of what training sees."""

import multiprocessing
from functools import cache

import pytest
from data_servers import batches, data_config, serving, training, with_servers

NUM_BATCHES = 12
"""Over two ends of an epoch."""


@cache
def undisturbed() -> list[str]:
    """As this process prepares them itself, none ahead."""
    return batches(data_config(workers=0, batches_ahead=0), NUM_BATCHES)


@pytest.mark.parametrize(("workers", "ahead"), [(0, 1), (0, 3), (1, 2), (2, 1), (2, 4)])
def test_workers(workers: int, ahead: int) -> None:
    others = set(multiprocessing.active_children())
    assert batches(data_config(workers=workers, batches_ahead=ahead), NUM_BATCHES) == undisturbed()
    assert set(multiprocessing.active_children()) <= others


@pytest.mark.parametrize(("num_servers", "workers"), [(1, 0), (2, 1), (3, 0), (1, 2)])
def test_servers(num_servers: int, workers: int) -> None:
    config = data_config(workers=workers)
    with serving(config, num_servers) as servers:
        remote = with_servers(config, *(server.address for server in servers))
        with training(remote) as client:
            assert client.next(NUM_BATCHES) == undisturbed()
            assert client.report()["failures"] == 0


@pytest.mark.parametrize("begin", [3, 5, 7])
def test_resuming_in_mid_epoch(begin: int) -> None:
    assert batches(data_config(workers=1), 3, begin=begin) == undisturbed()[begin : begin + 3]
