"""Who prepares the samples, and how many of them, changes nothing of what training sees."""

import multiprocessing
from functools import cache

import pytest
from data_servers import data_config, in_client, sequence, serving, with_servers

NUM_BATCHES = 12
"""Over two ends of an epoch."""


@cache
def undisturbed() -> list[str]:
    """As this process prepares them itself, none ahead."""
    return sequence(data_config(workers=0, batches_ahead=0), NUM_BATCHES)["digests"]


@pytest.mark.parametrize(("workers", "ahead"), [(0, 1), (0, 3), (1, 2), (2, 1), (2, 4)])
def test_workers(workers: int, ahead: int) -> None:
    seen = sequence(data_config(workers=workers, batches_ahead=ahead), NUM_BATCHES)
    assert seen["digests"] == undisturbed()
    assert seen["failures"] == 0
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(("num_servers", "workers"), [(1, 0), (2, 1), (3, 0), (1, 2)])
def test_servers(num_servers: int, workers: int) -> None:
    config = data_config(workers=workers)
    with serving(config, num_servers) as servers:
        remote = with_servers(config, *(server.address for server in servers))
        seen = in_client(lambda: sequence(remote, NUM_BATCHES))
    assert seen["digests"] == undisturbed()
    assert seen["failures"] == 0


@pytest.mark.parametrize("begin", [3, 5, 7])
def test_resuming_in_mid_epoch(begin: int) -> None:
    assert sequence(data_config(workers=1), 3, begin=begin)["digests"] == undisturbed()[begin : begin + 3]
