"""What a process sets before it imports torch: environment variables, and how often garbage is collected. Also what
launchers say by environment variables."""

import atexit
import gc
import os

SHARES_CORES = "MOTET_SHARES_CORES"
"""The variable that is set where the user has not said how many threads torch takes."""


def is_first_process() -> bool:
    """Whether this process is rank 0, or none of several ranks; before any process group is there."""
    return os.environ.get("RANK", "0") == "0"


def set_environment() -> None:
    """Sets them where the user has not."""
    if "OMP_NUM_THREADS" not in os.environ:
        # Processes are forked, and must not inherit a pool of threads.
        os.environ |= {"OMP_NUM_THREADS": "1", SHARES_CORES: "1"}
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # torch prints a page of C++ frames for every lost connection; our own messages say what follows from it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def collect_rarely() -> None:
    """Lets Python look for garbage seldom, and not at its end. For processes that plan and start no ranks.

    torch and transformers make a million objects while they are imported, none of which is garbage. By default Python
    looks through them dozens of times, and again before it ends: a third of the time of a first plan."""
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)


def gives_threads() -> bool:
    """Whether the user has said by OMP_NUM_THREADS how many threads torch takes. One thread is not counted where
    `set_environment` or torchrun has set it."""
    threads = os.environ.get("OMP_NUM_THREADS")
    return threads is not None and not (threads == "1" and {SHARES_CORES, "TORCHELASTIC_RUN_ID"} & os.environ.keys())
