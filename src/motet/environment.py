"""Environment variables: those that have to be set before torch is imported, and what launchers say by them."""

import os


def is_first_process() -> bool:
    """Whether this process is rank 0, or none of several ranks; before any process group is there."""
    return os.environ.get("RANK", "0") == "0"


def set_environment() -> None:
    """Sets them where the user has not."""
    # Processes are forked, and must not inherit a pool of threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # torch prints a page of C++ frames for every lost connection; our own messages say what follows from it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
