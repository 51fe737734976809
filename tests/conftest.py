"""Settings of all tests, and the marker `slow`, which tests get that tests/slow.txt lists.

One thread per process: a fork after a multi-threaded forward hangs, and machines that run tests are small.
"""

import atexit
import gc
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "MOTET_CACHE" not in os.environ:
    # Shape cards are made once for all processes of a test session.
    os.environ["MOTET_CACHE"] = tempfile.mkdtemp(prefix="motet-cards-")
    atexit.register(
        lambda owner, folder: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True),
        os.getpid(),
        os.environ["MOTET_CACHE"],
    )
if not Path("/dev/nvidiactl").exists():
    # Read when Triton is imported: without a GPU its kernels run in the interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import slow_tests
from hypothesis import HealthCheck, settings

import motet  # noqa: F401 (before tests import transformers: it makes torchvision's wheels importable without CUDA)

# What is imported while tests are collected is never garbage, and to search it again and again takes seconds.
gc.disable()

# Tests count operations, never seconds: machines may be loaded, and a slow draw is none that is wrong.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
# The same examples in every run: what fails fails again. `make campaigns` draws others.
settings.register_profile("motet", derandomize=True, database=None, max_examples=40, **PATIENT)
settings.register_profile("draws", max_examples=300, **PATIENT)
settings.load_profile("motet")

# Shells start jobs in the background with interrupts ignored; tests interrupt themselves and processes of theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What a forked process inherits is never collected in it: a store's server would wait there for a thread that is not.
os.register_at_fork(after_in_child=gc.freeze)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Reports the processor time of a test and of the processes that have ended: load does not change it."""
    before = _processor_seconds()
    yield
    item.user_properties.append((slow_tests.PROPERTY, f"{_processor_seconds() - before:.3f}"))


def _processor_seconds() -> float:
    """Of this process and of those that it has waited for."""
    multiprocessing.active_children()  # Waits for those that have ended, which would count for a later test.
    return sum(os.times()[:4])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks slow tests, and runs them first, so that several workers end together.

    Files with the longest tests go before others; the tests of a file stay together, as they share fixtures.
    """
    seconds = slow_tests.read()
    functions = {item: item.nodeid.partition("[")[0] for item in items}
    of_file: Counter[str] = Counter()
    # In one order in all workers: their sums of floats must be the same.
    for function in sorted(set(functions.values()) & seconds.keys()):
        of_file[function.partition("::")[0]] += seconds[function]
    for item, function in functions.items():
        if function in seconds:
            item.add_marker(pytest.mark.slow)
    slow = [item for item in items if functions[item] in seconds]
    slow.sort(key=lambda item: -of_file[functions[item].partition("::")[0]])
    items[:] = [*slow, *(item for item in items if functions[item] not in seconds)]
